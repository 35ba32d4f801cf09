//! `frugal eval` on the output folder of a training: its rows' loss, and answers to questions.

use crate::tiny_folder::{self, Tiny};
use serde_json::{Value, json};

/// The loss that `eval` measures is that of the training's last evaluation, to the bit; the answers are graded row by row.
#[test]
fn a_trained_model_is_measured_on_rows_and_questions() {
    let tiny = Tiny::new();
    let lines = |range: std::ops::Range<u32>| -> String {
        let line = |n| json!({ "prompt": format!("What is {n}?"), "completion": format!("It is {n}.") });
        range.map(|n| format!("{}\n", line(n))).collect()
    };
    std::fs::write(tiny.path("train.jsonl"), lines(0..24)).unwrap();
    std::fs::write(tiny.path("valid.jsonl"), lines(24..37)).unwrap();
    let train = "finetune --model model --data train.jsonl --validation valid.jsonl --method full --lr 0.01 --steps 6 --batch-size 4 \
                 --accumulation 1 --samples 0 --evaluate-every 6 --mask all";
    tiny.succeed(&format!("{train} --out run"));
    let losses = std::fs::read_to_string(tiny.path("run/losses.jsonl")).unwrap();
    let last = losses
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .rfind(|line| !line["validation_loss"].is_null());
    let expected = last.unwrap()["validation_loss"].as_f64().unwrap();

    let (out, err) = tiny.succeed("eval --model run --data valid.jsonl --json");
    assert!(err.contains("run: the best model, of step 6 with validation loss "), "{err}");
    let measured: Value = serde_json::from_str(&out).unwrap();
    let loss = measured["loss"].as_f64().unwrap();
    assert!((loss - expected).abs() < 1e-6, "{loss} {expected}");
    assert!((measured["perplexity"].as_f64().unwrap() - loss.exp()).abs() < 1e-3 * loss.exp());
    assert_eq!(measured["rows"], 13);
    // A flag overrides how the training made its rows.
    let (out, _) = tiny.succeed("eval --model run --data valid.jsonl --mask answers --json");
    let answers: Value = serde_json::from_str(&out).unwrap();
    assert!(answers["tokens"].as_u64() < measured["tokens"].as_u64(), "{answers} {measured}");

    let questions: String = (0..5)
        .map(|n| format!("{}\n", json!({ "question": format!("What is {n}?"), "answer": "." })))
        .collect();
    std::fs::write(tiny.path("qa.jsonl"), questions).unwrap();
    let (out, _) = tiny.succeed(
        "eval --model run --questions qa.jsonl --grader regex --max-new-tokens 8 --batch-size 2 --limit 3 --out graded.jsonl --json",
    );
    let told: Value = serde_json::from_str(&out).unwrap();
    let graded = std::fs::read_to_string(tiny.path("graded.jsonl")).unwrap();
    let graded = tiny_folder::lines(&graded);
    assert_eq!((graded.len(), &told["questions"]), (3, &json!(3)));
    for row in &graded {
        // The pattern is one character of any kind but a line break.
        let has_any = row["output"].as_str().unwrap().chars().any(|c| c != '\n');
        assert_eq!(row["right"], has_any, "{row}");
    }
    let right = graded.iter().filter(|row| row["right"] == true).count();
    assert_eq!(told["right"], right);
}
