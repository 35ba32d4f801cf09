//! Names that match nothing, and settings of adapters without an adapter, are errors.

use super::contains;
use super::unread_keys::{TRAIN, with_records};

#[test]
fn names_that_match_nothing_are_named_with_the_nearest() {
    let tiny = with_records();
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
    let tiny = with_records();
    let saved = format!("{TRAIN} --set adapter.modules_to_save=['lm_haed']");
    contains(&tiny, &saved, 1, "the model has no module that ends with `lm_haed`");
    let train = "train --heads 2 --data embedded --steps 1";
    contains(&tiny, &format!("{train} --strategy pakced"), 1, "did you mean `packed`?");
    contains(&tiny, &format!("{train} --epochs 18446744073709551615"), 1, "expected 1 to 1000000");
    contains(&tiny, &format!("{train} --workers 100000"), 1, "expected 0 to 256");
}

#[test]
fn an_adapters_settings_and_all_weights_exclude_each_other() {
    let tiny = with_records();
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
