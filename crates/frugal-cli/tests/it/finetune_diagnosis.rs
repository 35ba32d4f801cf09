//! `frugal finetune --diagnose`: the steps are traced, and the training goes on as without.

use crate::tiny_folder::{FINETUNE, Tiny, lines, losses};

#[test]
fn a_fine_tuning_is_diagnosed_and_goes_on_as_without() {
    let tiny = Tiny::new();
    for method in ["", "--method full"] {
        let train = format!("{FINETUNE} --steps 8 --samples 0 --json {method}")
            .replace("--r 4", if method.is_empty() { "--r 4" } else { "" });
        let (plain, _) = tiny.succeed(&format!("{train} --out plain"));
        let (out, _) = tiny.succeed(&format!("{train} --out diagnosed --diagnose --trace trace.json"));
        let diagnosed = lines(&out);
        assert_eq!(losses(&diagnosed), losses(&lines(&plain)));
        let found: Vec<_> = diagnosed.iter().filter(|line| line["diagnosis"].is_array()).collect();
        assert_eq!(found.len(), 1, "{out}");
        assert!(found[0]["step_seconds"].as_f64().is_some_and(|seconds| seconds > 0.0), "{out}");
        let trace: serde_json::Value = serde_json::from_slice(&tiny.bytes("trace.json")).unwrap();
        assert!(trace["traceEvents"].as_array().is_some_and(|events| !events.is_empty()));
        for name in ["plain", "diagnosed"] {
            std::fs::remove_dir_all(tiny.path(name)).unwrap();
        }
        std::fs::remove_file(tiny.path("trace.json")).unwrap();
    }
}
