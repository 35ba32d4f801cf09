//! Values that nothing reads, and names that match nothing, are errors.

use super::session::Session;
use super::{Tiny, contains};

const TRAIN: &str = "finetune --model @model --data @my.jsonl --steps 1 --out @out";

fn tiny() -> Tiny {
    let tiny = Tiny::new();
    let rows = "{\"prompt\": \"one\", \"completion\": \" two three\"}\n".repeat(30);
    std::fs::write(tiny.path("my.jsonl"), rows).unwrap();
    std::fs::write(tiny.path("my.txt"), "a pear and an apple\n".repeat(20)).unwrap();
    tiny
}

#[test]
fn keys_without_a_reader_are_named_with_what_reads_them() {
    let tiny = tiny();
    std::fs::write(tiny.path("part.toml"), "[data]\nworkers = 3\n").unwrap();
    for (flags, words) in [
        (
            "--set data.strategy=base",
            "`data.strategy` is \"base\", which changes nothing here: `frugal train` reads it",
        ),
        ("--set data.workers=3", "`data.workers` is 3, which changes nothing here: `frugal train` reads it"),
        ("--config @part.toml", "`data.workers` is 3, which changes nothing here: `frugal train` reads it"),
        ("--set data.vocabulary=9", "`frugal train` reads it"),
        (
            "--set model.shape.width=9",
            "`model.shape.width` is 9, which changes nothing here: `frugal train` reads it",
        ),
        ("--set task=train", "`task` (train) is \"train\"; expected \"finetune\""),
        ("--set optimizer.replicas=2", "several ranks"),
        ("--set optimizer.zero_stage=2", "several ranks"),
        ("--set optimizer.frozen_weights=whole", "several ranks"),
        ("--shots 3", "`data.shots` (--shots) is 3, which changes nothing here: it is read for GSM8K"),
        ("--strip-annotations", "`data.strip_annotations` (--strip-annotations) is true"),
        ("--split-seed 3", "it is read for GSM8K"),
        ("--field body", "`data.field` (--field) is \"body\", which changes nothing here"),
        ("--set activations.every=3", "it is read with `activations.plan = \"every-k\"`"),
        ("--data @my.txt --mask all", "`data.mask` (--mask) is \"all\", which changes nothing here"),
        (
            "--held-out 0.1 --validation @my.jsonl",
            "`data.held_out` (--held-out) is 0.1, which changes nothing here",
        ),
        (
            "--held-out 0.2",
            "--held-out 0.2: of 30 rows none is held out for validation, which takes 50 rows at least",
        ),
        (
            "--evaluate-every 1",
            "--evaluate-every: of 30 rows none is held out for validation, which takes 50 rows",
        ),
    ] {
        let base =
            if flags.contains("--data") { TRAIN.replace("--data @my.jsonl ", "") } else { TRAIN.to_owned() };
        let words = words.replace(" (train)", "");
        contains(&tiny, &format!("{base} {flags}"), 1, &words);
    }
    let train = "train --heads 2 --steps 1";
    for (flags, words) in [
        (
            "--held-out 0.1",
            "`data.held_out` (--held-out) is 0.1, which changes nothing here: `frugal finetune` reads it",
        ),
        ("--set data.limit=3", "`data.limit` is 3, which changes nothing here: `frugal finetune` reads it"),
        (
            "--set data.mask=all",
            "`data.mask` is \"all\", which changes nothing here: `frugal finetune` reads it",
        ),
        ("--samples 3", "`training.samples` (--samples) is 3"),
        (
            "--layers 3",
            "`model.shape.layers` (--layers) is 3, which changes nothing here: it is read for --model gpt2",
        ),
        ("--strategy base", "`data.strategy` (--strategy) is \"base\", which changes nothing here"),
        ("--set method=full", "`method` applies to fine-tuning only"),
        ("--set task=finetune", "`frugal finetune` fine-tunes"),
    ] {
        contains(&tiny, &format!("{train} {flags}"), 1, words);
    }
    contains(&tiny, "eval --model @model --data @my.jsonl --shots 1", 1, "--shots applies to GSM8K only");
    assert!(!tiny.path("out").exists());
}

#[test]
fn names_that_match_nothing_are_named_with_the_nearest() {
    let tiny = tiny();
    for (flags, words) in [
        (
            "--targets q_proj,dwon_proj",
            "`target_modules` (--targets): `dwon_proj` matches none of the model's projections; did you mean `down_proj`?",
        ),
        (
            "--set adapter.exclude_modules=['k_prj']",
            "`exclude_modules`: `k_prj` matches none of the model's projections; did you mean `k_proj`?",
        ),
        (
            "--set adapter.rank_pattern={zzz=3}",
            "`rank_pattern`: `zzz` matches none of the adapted projections; they are `model.layers.0.self_attn.q_proj`",
        ),
        (
            "--set adapter.rank_pattern={up_proj=3}",
            "`rank_pattern`: `up_proj` matches none of the adapted projections",
        ),
        ("--set adapter.alpha_pattern={q_porj=3}", "did you mean `q_proj`?"),
        (
            "--set adapter.layers_to_transform=[1,9]",
            "`layers_to_transform`: `9` matches none of the model's layers; they are `0`, `1`",
        ),
        ("--set adapter.rank_pattern={q_proj=0}", "`rank_pattern` is 0; expected a rank of at least 1"),
        ("--init pisa", "(did you mean \"pissa\"?)"),
        ("--mlp imput-only", "did you mean `input-only`?"),
        ("--set adapter.bias=none_", "did you mean `none`?"),
        ("--set optimizer.rule=adamww", "did you mean `adamw`?"),
        ("--alpha -4", "`adapter.lora_alpha` (--alpha) is -4; expected a number above 0"),
        ("--alpha 0", "expected a number above 0"),
        (
            "--r 100000",
            "`r` (--r) is 100000, and `model.layers.0.self_attn.q_proj` is 16 by 16; expected a rank within",
        ),
        ("--r 9223372036854775807", "`r` (--r) is 9223372036854775807; expected a rank of at most 1048576"),
        (
            "--epochs 18446744073709551615",
            "`training.epochs` (--epochs) is 18446744073709551615; expected 1 to 1000000",
        ),
        (
            "--accumulation 4000000000",
            "`training.accumulation` (--accumulation) is 4000000000; expected 1 to 1048576",
        ),
        ("--batch-size 4000000000", "`training.batch` (--batch-size) is 4000000000; expected 1 to 1048576"),
    ] {
        contains(&tiny, &format!("{TRAIN} {flags}"), 1, words);
    }
    let tiny = self::tiny();
    let saved = format!("{TRAIN} --set adapter.modules_to_save=['lm_haed']");
    contains(&tiny, &saved, 1, "the model has no module that ends with `lm_haed`");
    let train = "train --heads 2 --data embedded --steps 1";
    contains(&tiny, &format!("{train} --strategy pakced"), 1, "did you mean `packed`?");
    contains(&tiny, &format!("{train} --epochs 18446744073709551615"), 1, "expected 1 to 1000000");
    contains(&tiny, &format!("{train} --workers 100000"), 1, "expected 0 to 256");
}

#[test]
fn an_adapters_settings_and_all_weights_exclude_each_other() {
    let tiny = tiny();
    std::fs::write(tiny.path("part.toml"), "[adapter]\nr = 4\n").unwrap();
    for flags in [
        "--method full --set adapter.r=4",
        "--method full --config @part.toml",
        "--set method=full --set adapter.r=3",
    ] {
        contains(
            &tiny,
            &format!("{TRAIN} {flags}"),
            1,
            "`adapter.r` (--r) and `method = \"full\"` (--method full) cannot be combined",
        );
    }
    contains(
        &tiny,
        &format!("{TRAIN} --set method=full --r 4"),
        1,
        "--method full trains all weights and has no adapter",
    );
    contains(&tiny, &format!("{TRAIN} --set method=loar"), 1, "did you mean `lora`?");
}

#[test]
fn questions_with_answers_are_gsm8k_only_where_that_is_chosen() {
    let tiny = Session::new();
    let finetune = "finetune --model model --steps 1 --samples 0 --held-out 0";
    let (_, said) = tiny.succeed(&format!("{finetune} --data problems/train.jsonl --out plain"));
    assert!(said.contains("(question and answer)") && !said.contains("GSM8K"), "{said}");
    assert!(!said.contains("validation loss") && said.contains("in 10 batches"), "{said}");
    let (_, said) =
        tiny.succeed(&format!("{finetune} --data problems/train.jsonl --format gsm8k --out chosen"));
    assert!(said.contains("(GSM8K: question and answer)") && said.contains("validation loss"), "{said}");
    let (_, folder) = tiny.succeed(&format!("{finetune} --data problems --out folder"));
    assert!(folder.contains("(GSM8K: question and answer)"), "{folder}");
    let [chosen, folder] =
        ["chosen", "folder"].map(|run| tiny.bytes(&format!("{run}/adapter_model.safetensors")));
    assert!(chosen == folder, "the same rows");
    // A heading is no result, and a folder of other records is none of problems.
    std::fs::create_dir(tiny.path("headings")).unwrap();
    let row = serde_json::json!({ "question": "What is it?", "answer": "#### Summary\nPlants." });
    for name in ["train.jsonl", "test.jsonl"] {
        std::fs::write(tiny.path(&format!("headings/{name}")), format!("{row}\n")).unwrap();
    }
    for data in ["headings", "headings/train.jsonl"] {
        let (_, said) = tiny.succeed(&format!("data check {data} --model model"));
        assert!(said.contains("(question and answer)"), "{said}");
    }
}

#[test]
fn the_device_is_chosen_and_said_first() {
    let tiny = Session::new();
    std::fs::write(tiny.path("my.jsonl"), "{\"text\": \"one two three\"}\n".repeat(4)).unwrap();
    let first = "device: cpu (no CUDA device is usable: ";
    for command in [
        "finetune --model model --data my.jsonl --steps 1 --out run",
        "train --heads 2 --width 16 --steps 1",
        "generate --model model --prompt a --max-new-tokens 2",
        "eval --model model --data my.jsonl",
        "resume run --set training.steps=2",
    ] {
        let (_, said) = tiny.succeed(command);
        // A run that is resumed keeps its device.
        assert_eq!(said.starts_with(first), !command.starts_with("resume"), "{command}: {said}");
    }
    let text = String::from_utf8(tiny.bytes("run/config.toml")).unwrap();
    assert!(text.contains("device = \"cpu\" # default\n"), "{text}");
    let (_, said) = tiny.succeed("generate --model model --prompt a --max-new-tokens 2 --device cpu");
    assert!(!said.contains("device"), "{said}");
}

#[test]
fn prompts_are_read_from_records() {
    let tiny = Session::new();
    std::fs::write(
        tiny.path("p.jsonl"),
        "{\"prompt\": \"Ann has\"}\n{\"prompt\": \"Two\\nlines\", \"id\": 3}\n",
    )
    .unwrap();
    std::fs::write(tiny.path("p.txt"), "Ann has\nTwo\\nlines\n").unwrap();
    let generate = "generate --model model --max-new-tokens 3 --json --prompts";
    let [records, text] = ["p.jsonl", "p.txt"].map(|file| tiny.succeed(&format!("{generate} {file}")).0);
    assert_eq!(records, text);
    std::fs::write(tiny.path("q.jsonl"), "{\"question\": \"Ann has\"}\n").unwrap();
    let said = tiny.fail(&format!("{generate} q.jsonl"));
    assert!(
        said.contains("line 1: no field `prompt`") && said.contains("the fields here are question"),
        "{said}"
    );
    std::fs::write(tiny.path("c.jsonl"), "{\"prompt\": [{\"role\": \"user\", \"content\": \"a\"}]}\n")
        .unwrap();
    assert!(tiny.fail(&format!("{generate} c.jsonl")).contains("`prompt` is no text"));
}
