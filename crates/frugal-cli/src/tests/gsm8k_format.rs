//! Questions with answers are GSM8K's problems where that is chosen.

use super::session::Session;

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
