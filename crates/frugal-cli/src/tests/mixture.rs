//! Weights of examples, and sources that are mixed by weight.

use expect_test::expect;
use serde_json::{Value, json};

use super::session::Session;
use super::{Tiny, contains, refused};

const TRAIN: &str = "finetune --model @model --held-out 0 --out @out --steps 1";

fn write(tiny: &Tiny, name: &str, records: &[Value]) {
    let lines: Vec<String> = records.iter().map(Value::to_string).collect();
    std::fs::write(tiny.path(name), lines.join("\n")).unwrap();
}

fn record(number: usize, weight: Value) -> Value {
    let answer = " one and".repeat(number);
    json!({ "prompt": format!("{number} and one is"), "completion": format!("{answer} {}", number + 1), "weight": weight })
}

#[test]
fn a_weight_is_a_number_of_records() {
    let tiny = Session::new();
    write(
        &tiny,
        "weighted.jsonl",
        &[record(1, json!(2)), record(2, json!(1.0)), record(3, json!("3")), record(4, json!(0))],
    );
    let one = json!(null);
    let repeated = [1, 1, 2, 3, 3, 3].map(|number| record(number, one.clone()));
    write(&tiny, "repeated.jsonl", &repeated);
    let train = |name: &str, rows: usize, flags: &str| {
        let run = format!(
            "finetune --model model --data {name}.jsonl --held-out 0 --out {name} --steps 1 --batch-size {rows} --accumulation 1 \
             --samples 0 {flags}"
        );
        let (_, said) = tiny.succeed(&run);
        let loss = tiny.losses(name)[0].1;
        std::fs::remove_dir_all(tiny.path(name)).unwrap();
        (loss, said)
    };
    for flags in ["", "--loss fused", "--loss plain", "--micro-batch-size 1"] {
        let ((weighted, said), (repeated, _)) = (train("weighted", 3, flags), train("repeated", 6, flags));
        assert!((weighted - repeated).abs() < 1e-5, "{flags}: {weighted} and {repeated}");
        assert!(
            said.contains("2 of 4 training rows have a `weight` other than 1, the factor of their loss"),
            "{said}"
        );
        assert!(said.contains("1 of 4 training rows have no text to learn and are left out"), "{said}");
    }
    let (stats, said) = tiny.succeed("data stats weighted.jsonl --model model");
    assert!(!said.contains("not read"), "{said}");
    assert!(stats.contains("with a weight other than 1  2\n"), "{stats}");
}

#[test]
fn a_weight_that_is_none_is_named_with_its_line() {
    let tiny = Tiny::new();
    write(&tiny, "wrong.jsonl", &[record(1, json!(1)), record(2, json!(-1))]);
    refused(
        &tiny,
        &format!("{TRAIN} --data @wrong.jsonl"),
        expect![[r#"
        error: wrong.jsonl: line 2: `weight` is -1, expected a number of 0 or more; it is the factor of the record's loss: correct it, or rename the field if it has another meaning; `frugal data check wrong.jsonl --model model` lists all wrong records
    "#]],
    );
}

#[test]
fn sources_are_mixed_by_weight() {
    let tiny = Session::new();
    write(&tiny, "a.jsonl", &[1, 2, 3].map(|number| record(number, json!(1))));
    write(&tiny, "b=c.jsonl", &[5; 9].map(|number| record(number, json!(1))));
    let (stats, _) = tiny.succeed("data stats a.jsonl=0.75 b=c.jsonl=0.25 --model model");
    expect![[r#"
        a.jsonl             75.0 % of the rows, 65.2 % of the tokens, 60.0 % of the learned tokens; its 3 rows 3.00 times an epoch
        b=c.jsonl           25.0 % of the rows, 34.8 % of the tokens, 40.0 % of the learned tokens; its 9 rows 0.33 times an epoch
        rows of an epoch    12
        tokens of an epoch  138
    "#]].assert_eq(&stats);
    let (stats, _) = tiny.succeed("data stats a.jsonl=3 b=c.jsonl=1 --model model --json");
    let stats: Value = serde_json::from_str(&stats).unwrap();
    assert_eq!(
        (&stats["a.jsonl"]["share_of_rows"], &stats["a.jsonl"]["epochs"]),
        (&json!(0.75), &json!(3.0))
    );
    let train = "finetune --model model --mixture a.jsonl=0.75 --mixture b=c.jsonl=0.25 --held-out 0 --batch-size 4 --accumulation 1 --samples 0";
    let (_, said) = tiny.succeed(&format!("{train} --out whole"));
    assert!(said.contains("data: a.jsonl (prompt and completion)"), "{said}");
    assert!(said.contains("data: b=c.jsonl (prompt and completion)"), "{said}");
    // An epoch has as many rows as the sources: 12, in batches of 4.
    assert_eq!(tiny.losses("whole").len(), 3);
    let config = String::from_utf8(tiny.bytes("whole/config.toml")).unwrap();
    assert!(
        config.contains("a.jsonl=0.75\", \"") && config.contains("b=c.jsonl=0.25\"] # --mixture"),
        "{config}"
    );
    let record: Value = serde_json::from_slice(&tiny.bytes("whole/run.json")).unwrap();
    assert!(record.to_string().contains("b=c.jsonl"), "{record}");
    let (info, _) = tiny.succeed("info whole");
    assert!(info.contains("b=c.jsonl=0.25"), "{info}");
    // Where its sources are the same wherever it goes on.
    tiny.succeed(&format!("{train} --out resumed --steps 2"));
    tiny.succeed("resume resumed --set training.steps=3");
    assert_eq!(tiny.losses("whole"), tiny.losses("resumed"));
    let (_, said) = tiny.succeed(&format!(
        "{} --out held --evaluate-every 1",
        train.replace("--held-out 0", "--validation a.jsonl")
    ));
    assert!(said.contains("validation loss"), "{said}");
}

#[test]
fn mixtures_without_an_order_are_refused() {
    let tiny = Tiny::new();
    write(&tiny, "a.jsonl", &[record(1, json!(1))]);
    write(&tiny, "pairs.jsonl", &[json!({ "prompt": "a", "chosen": "b", "rejected": "c" })]);
    contains(&tiny, &format!("{TRAIN} --data @a.jsonl --mixture @a.jsonl=1"), 1, "give one of them");
    contains(
        &tiny,
        &format!("{TRAIN} --mixture @a.jsonl"),
        1,
        "expected PATH=WEIGHT, such as code.jsonl=0.3",
    );
    contains(&tiny, &format!("{TRAIN} --mixture @a.jsonl=0"), 1, "a weight is 0; expected a number above 0");
    contains(&tiny, &format!("{TRAIN} --mixture @none.jsonl=1"), 1, "none.jsonl does not exist");
    contains(
        &tiny,
        &format!("{TRAIN} --mixture @a.jsonl=1 --mixture @pairs.jsonl=1"),
        1,
        "pairs of a `chosen` and a `rejected`",
    );
    contains(&tiny, &format!("{TRAIN} --mixture @problems=1"), 1, "GSM8K has prompts and splits of its own");
    contains(&tiny, "data show @a.jsonl @a.jsonl --model @model", 1, "give one at a time");
    contains(&tiny, "data stats @a.jsonl=1 @a.jsonl --model @model", 1, "expected PATH=WEIGHT");
    contains(&tiny, "train --set data.mixture=['a=1'] --out @out", 1, "data.mixture");
    contains(
        &tiny,
        &format!("{TRAIN} --data @a.jsonl --neftune-noise-alpha -1"),
        1,
        "expected 0 or more, such as 5",
    );
    let questions = "finetune --model @model --questions @problems/train.jsonl --objective grpo --grader number --out @out --steps 1";
    contains(
        &tiny,
        &format!("{questions} --neftune-noise-alpha 5"),
        1,
        "a reward is for the answer that the model gives without noise",
    );
}
