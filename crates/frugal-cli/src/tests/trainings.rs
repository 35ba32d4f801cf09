//! Trainings from scratch, and what their folders say.

use gguf::ReadOptions;
use models::hugging_face::Folder;
use serde_json::Value;
use tch::Device;

use super::session::Session;
use super::tiny_folder::{lines, losses};

fn train(tiny: &Session, arguments: &str) -> Vec<f64> {
    losses(&lines(&tiny.succeed(&format!("train --json --heads 2 {arguments}")).0))
}

#[test]
fn techniques_keep_the_losses() {
    let tiny = Session::new();
    let common = "--model gpt2 --width 16 --steps 3 --batch-size 4 --accumulation 2 --clip 1";
    let plain = train(&tiny, common);
    assert_eq!(plain.len(), 3);
    for flags in ["--activations recompute --recompute-what elementwise", "--offload host --ring 1"] {
        assert_eq!(train(&tiny, &format!("{common} {flags}")), plain, "{flags}");
    }
}

#[test]
fn the_folder_of_a_training_says_how_far_it_is() {
    let tiny = Session::new();
    tiny.succeed("train --width 16 --heads 2 --steps 3 --out scratch");
    let (out, _) = tiny.succeed("info scratch");
    assert!(out.contains("finished after 3 of 3 steps"), "{out}");
    let record = tiny.bytes("scratch/run.json");
    let (_, err) = tiny.succeed("resume scratch");
    assert_eq!(tiny.bytes("scratch/run.json"), record, "what was measured stays");
    assert!(
        err.contains("the training was finished before, after 3 steps; to continue, raise `steps` or `epochs`: in scratch/config.toml, or by `frugal resume scratch --set training.steps=N`"),
        "{err}"
    );

    let finetune = "finetune --model model --data problems --r 4 --batch-size 4 --accumulation 1 --steps 4";
    tiny.succeed(&format!("{finetune} --checkpoint-every 2 --out run"));
    std::fs::remove_dir_all(tiny.path("run/checkpoints/step-000000000004")).unwrap();
    std::fs::remove_file(tiny.path("run/adapter_config.json")).unwrap();
    let (out, _) = tiny.succeed("info run --json");
    let told = &lines(&out)[0];
    assert_eq!(told["state"], serde_json::json!({ "status": "unfinished", "step": 2, "steps": 4 }));
    assert!(told["loss"]["last"].is_number() && told["next"] == "frugal resume run", "{told}");
    let (_, err) = tiny.succeed("resume run");
    assert!(err.contains("resumes after step 2 of 4\n"), "{err}");
    let log = String::from_utf8(tiny.bytes("run/losses.jsonl")).unwrap();
    let first = losses(&lines(&log))[0];
    let first = format!("4 steps, training loss {first:.4} to");
    assert!(err.contains(&first), "the first loss is that of the first step: {err}");
    let (out, _) = tiny.succeed("info run");
    assert!(out.contains("finished after 4 of 4 steps") && out.contains("rank"), "{out}");
    assert!(out.contains("frugal generate --model run --prompt TEXT"), "{out}");
}

#[test]
fn a_finished_run_is_said_to_be_finished_before_anything_is_read() {
    let tiny = Session::new();
    std::fs::copy(tiny.path("problems/train.jsonl"), tiny.path("my.jsonl")).unwrap();
    let finetune =
        "finetune --device cpu --model model --data my.jsonl --r 4 --batch-size 2 --steps 2 --out run";
    tiny.succeed(finetune);
    let ended = tiny.run(finetune);
    let expected = "error: run holds a finished run; give another --out, or train it further: `frugal resume run --set training.steps=N`\n";
    assert_eq!((ended.status, &*ended.err), (1, expected));
    // A plan for it would not fit, and its data are gone.
    std::fs::rename(tiny.path("my.jsonl"), tiny.path("moved.jsonl")).unwrap();
    let (out, said) = tiny.succeed("resume run --budget 1GiB");
    assert!(
        out.is_empty() && said.starts_with("the training was finished before, after 2 steps; "),
        "{said}"
    );
    assert_eq!(said.lines().count(), 2, "{said}");
    let (out, _) = tiny.succeed("resume run --json");
    let told = &lines(&out)[0]["result"];
    assert_eq!((&told["steps"], &told["adapter"]), (&2.into(), &"run".into()));
    assert!(told["trainable"].as_u64().unwrap() > 0 && told["last_loss"].is_number(), "{told}");

    // A result from before the record is that of a shorter run: the process was killed before it wrote its own.
    let adapter = std::fs::File::options().write(true).open(tiny.path("run/adapter_config.json")).unwrap();
    let record = std::fs::metadata(tiny.path("run/run.json")).unwrap().modified().unwrap();
    adapter.set_modified(record - std::time::Duration::from_secs(1)).unwrap();
    std::fs::rename(tiny.path("moved.jsonl"), tiny.path("my.jsonl")).unwrap();
    let (_, said) = tiny.succeed("resume run");
    assert!(said.contains("resumes after step 2 of 2") && said.contains("was finished before"), "{said}");
    let (_, said) = tiny.succeed("resume run");
    assert_eq!(said.lines().count(), 2, "it is written now: {said}");
    std::fs::rename(tiny.path("my.jsonl"), tiny.path("moved.jsonl")).unwrap();

    let error = tiny.fail("resume run --set training.steps=4");
    assert!(error.contains("the run's training data are missing: "), "{error}");
    assert!(
        error.contains("/my.jsonl; put them back, or name their new place: --set data.source=PATH"),
        "{error}"
    );
    tiny.succeed("resume run --set training.steps=4 --set data.source=moved.jsonl");
    let mut data = String::from_utf8(tiny.bytes("moved.jsonl")).unwrap();
    data = data.replacen('a', "b", 1);
    std::fs::write(tiny.path("moved.jsonl"), data).unwrap();
    let ended = tiny.run("resume run --set training.steps=6");
    assert!(
        ended.err.contains("note: the training data have changed since") && ended.err.contains("moved.jsonl"),
        "{}",
        ended.err
    );
    // Checkpoints are no model.
    let error = tiny.fail("export --model run/checkpoints --out adapter");
    assert!(error.contains("`frugal export --checkpoints run --out ADAPTER`"), "{error}");
    tiny.succeed("export --checkpoints run --out adapter");
}

/// A result that was deleted is written again from the last checkpoint.
#[test]
fn a_resume_of_a_finished_run_restores_its_result() {
    let tiny = Session::new();
    for (flags, file) in
        [("--r 4", "run/adapter_model.safetensors"), ("--method full", "whole/model/model.safetensors")]
    {
        let out = file.split('/').next().unwrap();
        tiny.succeed(&format!(
            "finetune --model model --data problems --limit 8 --batch-size 4 --accumulation 1 --steps 2 {flags} --out {out} --samples 0"
        ));
        let weights = tiny.bytes(file);
        std::fs::remove_file(tiny.path(file)).unwrap();
        let (_, said) = tiny.succeed(&format!("resume {out}"));
        assert!(said.contains("the training was finished before"), "{said}");
        assert!(weights == tiny.bytes(file), "{file}");
    }
}

#[test]
fn a_dry_run_shows_the_plan_for_the_data() {
    let tiny = Session::new();
    std::fs::copy(tiny.path("problems/train.jsonl"), tiny.path("my.jsonl")).unwrap();
    let (out, said) =
        tiny.succeed("finetune --model model --data my.jsonl --batch-size 2 --steps 2 --dry-run");
    assert!(out.is_empty() && said.contains("chosen: the fastest that fits"), "{said}");
    assert!(!said.contains("trains "), "{said}");
    // From scratch, with a plan and with a model that no plan covers.
    let from_scratch = "train --data embedded --length 32 --batch-size 2 --steps 2 --dry-run";
    let (out, said) = tiny.succeed(&format!("{from_scratch} --model model/config.json"));
    assert!(out.is_empty() && said.contains("chosen: the fastest that fits"), "{said}");
    let (_, said) = tiny.succeed(&format!("{from_scratch} --model gpt2-like"));
    assert!(said.contains("the memory of a step is not predicted for"), "{said}");
    let error = tiny.fail("plan --model model --data my.jsonl");
    assert!(error.contains("`frugal finetune --model model --data my.jsonl --dry-run`"), "{error}");
}

/// The bytes are those of the tensors that are loaded, in seven types of blocks.
#[test]
fn a_training_over_the_blocks_of_a_file_is_planned() {
    let tiny = Session::new();
    let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/fixtures/gguf_merge/base.gguf");
    std::fs::copy(fixture, tiny.path("model.gguf")).unwrap();
    let (_, said) = tiny.succeed(
        "finetune --model model.gguf --dtype gguf --data problems --steps 2 --accumulation 1 --out run --dry-run",
    );
    assert!(said.contains("▸ keep all") && said.contains("  recompute all"), "{said}");
    let rates = "--flops 1e11 --link 10GB --host-bandwidth 10GB";
    let plan = |flags: &str| {
        let (out, _) = tiny.succeed(&format!("plan --budget 1GiB --length 64 {rates} --json {flags}"));
        lines(&out)[0].clone()
    };
    let folder = gguf::folder::make(&tiny.path("model.gguf"), ReadOptions::default(), &tiny.path("of-file"));
    let folder = Folder::open(&folder.unwrap()).unwrap();
    let model = folder.load(Some(kernels::quantized::blocks::KIND), Device::Cpu).unwrap();
    let mut tensors = models::module::tensors(&model);
    tensors.retain(|named| named.name != "lm_head.weight");
    let bytes: usize =
        tensors.iter().map(|named| named.tensor.numel() * named.tensor.kind().elt_size_in_bytes()).sum();
    assert_eq!(plan("--model model.gguf --dtype gguf")["model_bytes"], bytes);
    assert!(plan("--model model.gguf")["model_bytes"].as_u64().unwrap() > 2 * bytes as u64);
    for (flags, expected) in [
        (
            "--model model --dtype gguf",
            "--dtype gguf keeps the blocks of a file; give a GGUF file as --model",
        ),
        ("--model model.gguf --dtype gguf --method full", "quantized weights cannot be trained"),
        ("--model model.gguf --dtype gguf --hardware h100", "blocks are multiplied on a CPU only"),
    ] {
        let error = tiny.fail(&format!("plan --length 64 {flags}"));
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_plan_for_a_folder_takes_a_dtype_that_plans_are_made_for() {
    let tiny = Session::new();
    let rates = "--flops 1e11 --link 10GB --host-bandwidth 10GB";
    let bytes = |flags: &str| {
        let (out, _) = tiny.succeed(&format!("plan --budget 1GiB --length 64 {rates} --json {flags}"));
        lines(&out)[0]["model_bytes"].as_u64().unwrap()
    };
    let whole = bytes("--model model");
    tiny.succeed("export --model model --format nf4 --out four_bits");
    assert!(bytes("--model four_bits") < whole / 2);
    assert_eq!(bytes("--model four_bits --method full"), whole);
    // Half precision, and several dtypes.
    let rewritten = |name: &str, dtype: fn(usize) -> &'static str| {
        let folder = tiny.path(name);
        std::fs::create_dir(&folder).unwrap();
        std::fs::copy(tiny.path("model/config.json"), folder.join("config.json")).unwrap();
        let weights = tiny.bytes("model/model.safetensors");
        let length = u64::from_le_bytes(weights[..8].try_into().unwrap()) as usize;
        let mut header: Value = serde_json::from_slice(&weights[8..8 + length]).unwrap();
        let tensors = header.as_object_mut().unwrap().iter_mut().filter(|(name, _)| *name != "__metadata__");
        let mut end = 0;
        for (number, (_, tensor)) in tensors.enumerate() {
            let count: u64 =
                tensor["shape"].as_array().unwrap().iter().map(|size| size.as_u64().unwrap()).product();
            let begin = end;
            end += count * if dtype(number) == "F32" { 4 } else { 2 };
            tensor["dtype"] = dtype(number).into();
            tensor["data_offsets"] = serde_json::json!([begin, end]);
        }
        let header = header.to_string();
        let zeros = vec![0; end as usize];
        let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &zeros].concat();
        std::fs::write(folder.join("model.safetensors"), file).unwrap();
    };
    rewritten("half", |_| "F16");
    rewritten("mixed", |number| if number == 0 { "F32" } else { "BF16" });
    for name in ["half", "mixed"] {
        assert_eq!(bytes(&format!("--model {name}")), whole / 2, "{name}: bfloat16 is the default");
    }
}

#[test]
fn a_config_json_is_trained_into_a_model() {
    let tiny = Session::new();
    let text = String::from_utf8(tiny.bytes("model/config.json")).unwrap();
    std::fs::write(tiny.path("shape.json"), text).unwrap();
    tiny.succeed("train --model shape.json --data embedded --steps 2 --out scratch");
    tiny.succeed("info scratch/model");
}

/// A model that a training from scratch has made is a base for all others.
#[test]
fn a_model_from_scratch_is_fine_tuned_resumed_merged_and_offloaded() {
    let tiny = Session::new();
    let mut shape: serde_json::Value = serde_json::from_slice(&tiny.bytes("model/config.json")).unwrap();
    shape["vocab_size"] = 4096.into();
    std::fs::write(tiny.path("shape.json"), shape.to_string()).unwrap();
    let rows = r#"{"prompt": "The river", "completion": " is long."}
        {"prompt": "A town", "completion": " is small."}"#;
    std::fs::write(tiny.path("my.jsonl"), rows).unwrap();
    for command in [
        "train --model shape.json --data embedded --steps 2 --out scratch",
        "finetune --model scratch/model --data my.jsonl --out run --steps 2 --precision bf16 --activations recompute",
        "resume run",
        "generate --model scratch/model --adapter run --prompt Once --max-new-tokens 4",
        "merge --model scratch/model --adapter run --out merged",
        "generate --model merged --offload file --prompt Once --max-new-tokens 4",
        "finetune --model scratch/model --data my.jsonl --out host --steps 2 --offload host --optimizer-on host",
        "finetune --model scratch/model --data my.jsonl --out full --method full --steps 2 --mlp input-only",
    ] {
        tiny.succeed(command);
    }
}

#[test]
fn a_plan_says_what_fits_without_weights() {
    let tiny = Session::new();
    // Rates that are given are not measured.
    let rates = "--flops 1e11 --link 10GB --host-bandwidth 10GB";
    let (out, _) =
        tiny.succeed(&format!("plan --model qwen2.5-0.5b --budget 3GiB --length 128 {rates} --json"));
    let told = &lines(&out)[0];
    assert!(told["chosen"].is_string() && told["variants"].as_array().unwrap().len() >= 4, "{told}");
    let (out, _) =
        tiny.succeed("plan --model model/config.json --budget 1GiB --length 64 --hardware rtx4090");
    assert!(out.contains("the fastest that fits"), "{out}");
}

#[test]
fn every_optimizer_and_schedule_trains_as_it_is_called() {
    let tiny = Session::new();
    let rates_of =
        |lines: &[Value]| lines.iter().filter_map(|line| line["learning_rate"].as_f64()).collect::<Vec<_>>();
    let mut seen = Vec::new();
    for optimizer in [
        "sgd",
        "momentum",
        "nesterov",
        "adagrad",
        "rmsprop",
        "adam",
        "adamw",
        "lion",
        "muon",
        "adafactor",
        "adamw8bit",
    ] {
        let arguments = format!("--width 64 --steps 4 --lr 0.01 --optimizer {optimizer}");
        let lines = lines(&tiny.succeed(&format!("train --json --heads 2 {arguments}")).0);
        assert_eq!(rates_of(&lines), [0.01; 4], "{optimizer}");
        let losses = losses(&lines);
        assert_eq!(losses.len(), 4, "{optimizer}");
        assert!(!seen.contains(&losses), "{optimizer} is that of another name");
        seen.push(losses);
    }
    let close = |schedule: &str, expected: [f64; 4]| {
        let have = rates_of(&lines(
            &tiny.succeed(&format!("train --json --heads 2 --width 16 --steps 4 --lr 0.1 {schedule}")).0,
        ));
        assert_eq!(have.len(), 4);
        for (have, want) in have.iter().zip(expected) {
            assert!((have - want).abs() < 1e-12, "{schedule}: {have} {want}");
        }
    };
    close("--warmup 1", [0.05, 0.1, 0.1, 0.1]);
    close("--schedule linear", [0.1, 0.075, 0.05, 0.025]);
    close("--schedule cosine --warmup 2", [0.1 / 3.0, 0.2 / 3.0, 0.1, 0.05]);
}
