//! A fine-tuning on sources that are mixed by weight, with weights of examples and noise of embeddings, as real processes: killed and resumed,
//! and over ranks.

use std::fmt::Write as _;

use serde_json::json;

use crate::tiny_folder::Tiny;

const TRAIN: &str = "finetune --json --model model --mixture a.jsonl=0.7 --mixture b.jsonl=0.3 --held-out 0 --batch-size 3 --accumulation 2 \
                     --method lora --dropout 0.1 --neftune-noise-alpha 5 --log-every 1 --steps 10 --checkpoint-every 2";

fn tiny() -> Tiny {
    let tiny = Tiny::new();
    for (name, rows) in [("a.jsonl", 7), ("b.jsonl", 31)] {
        let mut lines = String::new();
        for number in 0..rows {
            let record = json!({
                "prompt": format!("{name} {number} plus one is"), "completion": format!(" {}", number + 1), "weight": 0.5 + f64::from(number % 3),
            });
            writeln!(lines, "{record}").unwrap();
        }
        std::fs::write(tiny.path(name), lines).unwrap();
    }
    tiny
}

fn adapter(tiny: &Tiny, out: &str) -> Vec<u8> {
    tiny.bytes(&format!("{out}/adapter_model.safetensors"))
}

#[test]
fn a_run_that_was_killed_has_the_bits_of_one_that_was_not() {
    let tiny = tiny();
    for flags in ["", "--packing 48", "--activations recompute"] {
        let whole = format!("{TRAIN} {flags} --out whole");
        tiny.succeed(&whole);
        let run = format!("{TRAIN} {flags} --out killed --resume");
        tiny.kill_at_step(&run, 5);
        tiny.succeed(&run);
        assert!(adapter(&tiny, "whole") == adapter(&tiny, "killed"), "{flags}");
        assert_eq!(tiny.losses("whole"), tiny.losses("killed"), "{flags}");
        for out in ["whole", "killed"] {
            std::fs::remove_dir_all(tiny.path(out)).unwrap();
        }
    }
}

#[test]
fn ranks_have_the_same_rows_and_noise() {
    let tiny = tiny();
    for count in [1, 2] {
        tiny.succeed(&format!("launch -n {count} -- {TRAIN} --out out-{count}"));
    }
    assert!(adapter(&tiny, "out-1") == adapter(&tiny, "out-2"));
    assert_eq!(tiny.losses("out-1"), tiny.losses("out-2"));
}
