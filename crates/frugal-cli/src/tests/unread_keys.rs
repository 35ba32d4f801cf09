//! Values that nothing reads are errors.

use super::{Tiny, contains};

pub(super) const TRAIN: &str = "finetune --model @model --data @my.jsonl --steps 1 --out @out";

/// A model's folder with 30 records and a text.
pub(super) fn with_records() -> Tiny {
    let tiny = Tiny::new();
    let rows = "{\"prompt\": \"one\", \"completion\": \" two three\"}\n".repeat(30);
    std::fs::write(tiny.path("my.jsonl"), rows).unwrap();
    std::fs::write(tiny.path("my.txt"), "a pear and an apple\n".repeat(20)).unwrap();
    tiny
}

#[test]
fn keys_without_a_reader_are_named_with_what_reads_them() {
    let tiny = with_records();
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
        ("--set optimizer.reduction=native", "several ranks"),
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
