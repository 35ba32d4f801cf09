//! Weights that are not finite: every command that computes with them ends with status 1 and names the tensor.

use models::hugging_face;
use models::module::parameters;
use serde_json::json;

use crate::tiny_folder::{FINETUNE, Tiny};

const BROKEN: &str = "layers.1.mlp.up_proj.weight";

/// Writes the model with one number that is not finite as `broken`.
fn break_model(tiny: &Tiny, number: f64) {
    let model = tiny.load("model");
    let (_, weight) = parameters(&model).into_iter().find(|(name, _)| name == BROKEN).unwrap();
    let _ = tch::no_grad(|| weight.shallow_clone().get(3).get(5).fill_(number));
    hugging_face::save(&model, &tiny.path("broken"), hugging_face::SHARD_BYTES).unwrap();
    for file in ["tokenizer.json", "generation_config.json"] {
        std::fs::copy(tiny.path("model").join(file), tiny.path("broken").join(file)).unwrap();
    }
}

/// The error of a command that fails because of the weight.
#[track_caller]
fn refused(tiny: &Tiny, arguments: &str) -> String {
    let output = tiny.run(arguments);
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{arguments}: {err}");
    assert!(err.contains(&format!("`{BROKEN}` has an infinity or a NaN")), "{arguments}: {err}");
    err
}

#[test]
fn commands_name_the_weight() {
    let tiny = Tiny::new();
    let rows: String = (0..8)
        .map(|n| format!("{}\n", json!({ "prompt": format!("{n}?"), "completion": "It is." })))
        .collect();
    std::fs::write(tiny.path("rows.jsonl"), &rows).unwrap();
    std::fs::write(tiny.path("lines.txt"), "One and two\n").unwrap();
    std::fs::write(tiny.path("plain.jinja"), "{% for m in messages %}{{ m.content }}\n{% endfor %}").unwrap();
    tiny.succeed(&format!("{FINETUNE} --steps 1 --samples 0 --out good"));
    for number in [f64::NAN, f64::INFINITY] {
        break_model(&tiny, number);
        // The weight is frozen, trained, or quantized; the last is refused when it is read.
        for method in ["--r 4", "--method full"] {
            let train = "finetune --model broken --data rows.jsonl --steps 3 --batch-size 4 --accumulation 1 --samples 0";
            let out = tiny.path("run");
            let _ = std::fs::remove_dir_all(&out);
            refused(&tiny, &format!("{train} {method} --out run"));
            let (shown, _) = tiny.succeed("runs show run");
            assert!(!shown.contains("finished"), "{shown}");
            let (listed, _) = tiny.succeed("runs ls run");
            assert!(listed.contains("failed") && !listed.contains("finished"), "{listed}");
            assert!(!out.join("adapter_model.safetensors").exists() && !out.join("model").exists());
        }
        refused(&tiny, "eval --model broken --data rows.jsonl");
        refused(&tiny, "generate --model broken --prompt Ann --max-new-tokens 4");
        refused(&tiny, "merge --model broken --adapter good --out merged");
        assert!(!tiny.path("merged").exists());
        std::fs::write(tiny.path("turns"), "Hello\n").unwrap();
        let mut chat = tiny.command("chat broken --chat-template plain.jinja --max-new-tokens 4");
        let output = chat.stdin(std::fs::File::open(tiny.path("turns")).unwrap()).output().unwrap();
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && err.contains(BROKEN), "{err}");
    }
}

/// A learning rate at which every weight overflows: the run does not end well, whatever it has on the disk.
#[test]
fn a_run_whose_last_loss_is_not_finite_has_failed() {
    let tiny = Tiny::new();
    let output =
        tiny.run(&format!("{FINETUNE} --steps 4 --samples 0 --warmup 0 --out run").replace("0.03", "1e30"));
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{err}");
    let (listed, _) = tiny.succeed("runs ls run");
    assert!(listed.contains("failed") && !listed.contains("finished"), "{listed}");
}
