//! Adapters and models that a fine-tuning makes, and what the other commands do with them.

use dataloading::Tokenizer;
use expect_test::expect;
use lora::peft::{CONFIG_FILE, TENSORS_FILE};
use lora::{Adapters, LoraConfig};
use models::generation::{GenerationConfig, generate};
use models::hugging_face::Folder;
use models::module::{Input, LanguageModel};
use models::tensors_file;
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use super::session::{Ended, Session};
use super::tiny_folder::{FINETUNE, lines};

fn logits(model: &dyn LanguageModel) -> Tensor {
    let tokens = Tensor::from_slice(&[3i64, 1, 4, 1, 5, 9, 2, 6, 5, 35]).view([2, 5]);
    tch::no_grad(|| model.logits(&Input::new(&tokens)).unwrap())
}

#[test]
fn answers_are_generated_and_graded() {
    let tiny = Session::new();
    tiny.succeed(&format!("{FINETUNE} --steps 2 --out adapter"));
    let eval = "eval --model model --data problems --batch-size 2 --max-new-tokens 8";
    let (out, _) = tiny.succeed(&format!(
        "{eval} --split official --shots 1 --limit 3 --adapter adapter --transcript said.jsonl --json"
    ));
    let figures = &lines(&out)[0];
    for grader in ["strict", "flexible", "openai"] {
        let of = &figures["graders"][grader];
        assert_eq!(of["of"], 3, "{figures}");
        assert!(of["low"].as_f64().unwrap() <= of["accuracy"].as_f64().unwrap(), "{figures}");
    }
    let said = lines(&String::from_utf8(tiny.bytes("said.jsonl")).unwrap());
    assert_eq!(said.len(), 3);
    assert!(said.iter().zip(0..).all(|(line, number)| line["number"] == number), "{said:?}");
    let new: u64 = said.iter().map(|line| line["new_tokens"].as_u64().unwrap()).sum();
    assert_eq!(figures["tokens"], new);

    let (out, _) = tiny.succeed(&format!("{eval} --shots 0 --dtype bf16"));
    assert!(out.starts_with("strict    0.0 % (95 % interval 0.0 to "), "{out}");
    assert!(out.contains("tokens/s"), "{out}");
}

#[test]
fn text_comes_as_the_library_generates_it() {
    let tiny = Session::new();
    let tokenizer = Tokenizer::from_file(&tiny.path("model/tokenizer.json")).unwrap();
    let prompt: Vec<i64> = tokenizer.encode("Ann has").unwrap().into_iter().map(i64::from).collect();
    let options = GenerationConfig { max_new_tokens: 12, end_tokens: vec![0], ..GenerationConfig::default() };
    let expected = generate(&tiny.load("model"), &[prompt], &options, &mut ()).unwrap();
    let ids: Vec<u32> = expected[0].tokens.iter().map(|token| *token as u32).collect();
    let expected = tokenizer.decode(&ids).unwrap();

    let one = |more: &[&str]| {
        let words = ["generate", "--model", "model", "--max-new-tokens", "12", "--prompt", "Ann has"];
        let Ended { status, out, err } = tiny.run_words(&[&words, more].concat());
        assert!(status == 0 && err.contains("tokens/s"), "{err}");
        out
    };
    assert_eq!(one(&[]), format!("{expected}\n"));
    assert_eq!(one(&["--offload", "host", "--ring", "1"]), format!("{expected}\n"));
    assert_eq!(one(&["--offload", "file", "--resident", "1"]), format!("{expected}\n"));
    let middle: String = expected.chars().skip(expected.chars().count() / 2).take(4).collect();
    let before = expected.split(&middle).next().unwrap();
    assert_eq!(one(&["--stop", &middle]), format!("{before}\n"));
    let drawn = one(&["--temperature", "2", "--top-k", "50", "--top-p", "0.9", "--seed", "5"]);
    assert_eq!(drawn, one(&["--temperature", "2", "--top-k", "50", "--top-p", "0.9", "--seed", "5"]));
    assert_ne!(drawn, one(&["--temperature", "2", "--top-k", "50", "--top-p", "0.9", "--seed", "6"]));

    std::fs::write(tiny.path("prompts.txt"), "Ann has\n\nBob\\nhas 5\n").unwrap();
    let (out, _) = tiny.succeed("generate --model model --prompts prompts.txt --max-new-tokens 12 --json");
    let rows = lines(&out);
    assert_eq!(rows.len(), 2);
    assert_eq!((&rows[0]["text"], &rows[1]["prompt"]), (&expected.into(), &"Bob\nhas 5".into()));
}

#[test]
fn a_merged_model_computes_what_its_adapter_does() {
    let tiny = Session::new();
    tiny.succeed(&format!("{FINETUNE} --steps 6 --out adapter"));
    tiny.succeed(&format!("{FINETUNE} --steps 6 --out head --targets v_proj,lm_head"));
    std::fs::write(tiny.path("model/merges.txt"), "as it is").unwrap();
    let base = logits(&tiny.load("model"));
    for adapter in ["adapter", "head"] {
        let merged = format!("merged-{adapter}");
        tiny.succeed(&format!("merge --model model --adapter {adapter} --out {merged}"));
        let mut model = tiny.load("model");
        Adapters::load(&mut model, &tiny.path(adapter)).unwrap();
        let (expected, found) = (logits(&model), logits(&tiny.load(&merged)));
        let apart = |other: &Tensor| (&found - other).abs().max().double_value(&[]);
        assert!(apart(&expected) < 1e-4 && apart(&base) > 0.05, "{} {}", apart(&expected), apart(&base));
        for file in ["tokenizer.json", "generation_config.json", "merges.txt"] {
            assert!(
                tiny.bytes(&format!("{merged}/{file}")) == tiny.bytes(&format!("model/{file}")),
                "{file}"
            );
        }
    }
    let tied = |name: &str| Folder::open(&tiny.path(name)).unwrap().config().tie_word_embeddings;
    assert!(tied("merged-adapter") && !tied("merged-head"), "an adapted head is one of its own");
    tiny.succeed("merge --model model --adapter adapter --out halved --dtype bf16 --max-shard-bytes 100000");
    let folder = Folder::open(&tiny.path("halved")).unwrap();
    assert_eq!(folder.kind().unwrap(), Kind::BFloat16);
    assert!(tiny.path("halved/model.safetensors.index.json").is_file());
}

#[test]
fn an_adapter_is_taken_out_of_a_checkpoint() {
    let tiny = Session::new();
    tiny.succeed(&format!("{FINETUNE} --steps 3 --out adapter --dora --targets q_proj,lm_head"));
    let base = tiny.path("model").canonicalize().unwrap();
    tiny.succeed(&format!("export --checkpoints adapter --base {} --out exported", base.display()));
    tiny.succeed("export --adapter adapter --out halved --dtype bf16 --base elsewhere");
    for file in [TENSORS_FILE, CONFIG_FILE] {
        let of = |out: &str| tiny.bytes(&format!("{out}/{file}"));
        assert!(of("exported") == of("adapter"), "{file}");
    }
    let halved = tensors_file::read(&tiny.path("halved").join(TENSORS_FILE), Device::Cpu).unwrap();
    assert!(halved.iter().all(|(_, x)| x.kind() == Kind::BFloat16));
    let config = LoraConfig::read(&tiny.path("halved").join(CONFIG_FILE)).unwrap();
    assert_eq!(config.base_model_name_or_path.as_deref(), Some("elsewhere"));
    Adapters::load(&mut tiny.load("model"), &tiny.path("halved")).unwrap();
}

#[test]
fn folders_are_described_by_their_headers() {
    let tiny = Session::new();
    tiny.succeed(&format!("{FINETUNE} --steps 1 --out adapter"));
    expect![[r#"
        model        Qwen2ForCausalLM
        parameters   69,520
        dtype        float32
        bytes        272 KiB
        layers       2
        hidden size  16
        heads        4 query, 2 key-value
        output head  tied to the embedding
        vocabulary   4,096
        context      200
        tokenizer    yes
        trainable    1,792 of 71,312 (2.51 %) with adapters of rank 8 on q_proj, k_proj, v_proj, o_proj
    "#]]
    .assert_eq(&tiny.succeed("info model").0);
    expect![[r#"
        training         fine-tuning with LoRA
        base             FOLDER/model
        data             FOLDER/problems
        state            finished after 1 of 1 steps
        loss             8.7009 to 8.7009
        validation loss  8.3754
        next             frugal generate --model adapter --prompt TEXT
        adapter          LoRA
        rank             4
        alpha            16
        dropout          0.05
        targets          q_proj, k_proj, v_proj, o_proj
        tensors          16
        parameters       896
        dtype            float32
        bytes            3.50 KiB
        trainable        896 of 70,416 (1.27 %)
    "#]]
    .assert_eq(
        &tiny
            .succeed("info adapter --model model")
            .0
            .replace(&tiny.path("").display().to_string(), "FOLDER/"),
    );
    let fields: Value = serde_json::from_str(&tiny.succeed("info model --json --r 4").0).unwrap();
    assert_eq!((&fields["parameters"], &fields["trainable"]), (&69520.into(), &896.into()));
}

#[test]
fn full_fine_tuning_of_rows_and_of_text_ends_in_a_model() {
    let tiny = Session::new();
    let rows =
        "{\"prompt\": \"Ann has\", \"completion\": \" 5 pears.\"}\n{\"text\": \"Bob has none.\"}\n".repeat(8);
    std::fs::write(tiny.path("rows.jsonl"), rows).unwrap();
    std::fs::write(tiny.path("plain.txt"), "Ann has 5 pears and Bob has none. ".repeat(40)).unwrap();
    let base = tiny.bytes("model/model.safetensors");
    for (data, out) in [("rows.jsonl", "rows"), ("plain.txt --max-length 40 --validation plain.txt", "plain")]
    {
        let (_, err) = tiny.succeed(&format!(
            "finetune --model model --data {data} --method full --out {out} --steps 6 --accumulation 1 --lr 0.01"
        ));
        assert!(err.contains("trains 69,520 of 69,520 (100.00 %) parameters"), "{err}");
        let losses = tiny.losses(out);
        assert!(losses[5].1 < losses[0].1, "{losses:?}");
        assert!(tiny.bytes(&format!("{out}/model/model.safetensors")) != base);
        tiny.succeed(&format!("generate --model {out}/model --prompt Ann --max-new-tokens 2"));
    }
    // The folder of a run is a model for every command; an adapter is none to fine-tune.
    let again = "--data rows.jsonl --steps 1 --accumulation 1";
    let (_, err) = tiny.succeed(&format!("finetune --model rows {again} --out adapter"));
    assert!(err.contains("rows: the last model (rows/model)\n"), "{err}");
    let config = String::from_utf8(tiny.bytes("adapter/config.toml")).unwrap();
    assert!(config.contains("/rows/model\" # --model"), "{config}");
    tiny.succeed("data check rows.jsonl --model rows");
    tiny.succeed("data check rows.jsonl --model adapter");
    let refused = tiny.run(&format!("finetune --model adapter {again} --out refused"));
    expect![[r#"
        error: adapter has an adapter, and a fine-tuning begins with a whole model; continue its training with `frugal resume adapter`, or merge it first: `frugal merge --model adapter --out merged`
    "#]]
    .assert_eq(&refused.err);
    // What an export of a run can be.
    let refused = tiny.run("export --model adapter --format nf4 --out quantized");
    expect![[r#"
        adapter: the last adapter (adapter)
        error: --format nf4 writes a whole model; merge the adapter first, `frugal merge --model adapter --out merged`, then export that: --model merged
    "#]]
    .assert_eq(&refused.err);
}

#[test]
fn techniques_compose_by_flags_and_a_resume_needs_the_folder_alone() {
    let tiny = Session::new();
    let train = "finetune --model model --data problems --method full --steps 4 --accumulation 2 --lr 0.01";
    tiny.succeed(&format!("{train} --out plain"));
    for (out, flags) in [
        ("kept", "--activations every-k"),
        ("offloaded", "--offload host --ring 1"),
        ("planned", "--activations plan --budget 2GiB"),
    ] {
        tiny.succeed(&format!("{train} --out {out} {flags}"));
        assert_eq!(tiny.losses(out), tiny.losses("plain"), "{flags}");
        let weights = |out: &str| tiny.bytes(&format!("{out}/model/model.safetensors"));
        assert!(weights(out) == weights("plain"), "{flags}");
    }
    tiny.succeed(&format!("{train} --out low --precision bf16 --loss plain"));
    let (low, plain) = (tiny.losses("low"), tiny.losses("plain"));
    assert!((low[3].1 - plain[3].1).abs() < 0.05 * plain[3].1, "{low:?} {plain:?}");

    // Two steps, then two more: more steps are the same training at a constant rate.
    let short = train.replace("--steps 4", "--steps 2");
    tiny.succeed(&format!("{short} --schedule constant --warmup 0 --out cut"));
    let text = String::from_utf8(tiny.bytes("cut/config.toml")).unwrap();
    std::fs::write(tiny.path("cut/config.toml"), text.replace("steps = 2", "steps = 4")).unwrap();
    tiny.succeed("resume cut");
    tiny.succeed(&format!("{train} --schedule constant --warmup 0 --out whole"));
    assert_eq!(tiny.losses("cut"), tiny.losses("whole"));
}

#[test]
fn a_flag_of_a_training_is_no_flag_of_a_resume() {
    let error = crate::parse(["frugal", "resume", "run", "--lr", "1e-3"]).err().unwrap();
    let expected =
        "error: --lr: a run that is resumed has its own; change it with --set optimizer.lr=VALUE\n";
    assert_eq!(error.to_string(), expected);
    let error = crate::parse(["frugal", "plan", "--model", "gpt2", "--budget", "200"]).err().unwrap();
    assert!(error.to_string().contains("this is 200 B; give a unit, as 200MiB or 200GiB"), "{error}");
}
