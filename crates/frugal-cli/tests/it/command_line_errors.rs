//! What the program says where it cannot go on, as a process: one line on standard error, and the status. The table of what is refused
//! is in the program's own tests.

use crate::tiny_folder::Tiny;

#[test]
fn an_error_is_one_line_and_a_status() {
    let tiny = Tiny::new();
    let budget = "finetune --model model --data problems --out out --budget 1KiB --quiet";
    for (arguments, status, expected) in [
        (
            "finetune --model model --data problems --out out --lr",
            2,
            "error: a value is required for '--lr <LR>'",
        ),
        (
            "finetune --model model --data problems --out out --packing 10 --device cpu",
            1,
            "data: problems/train.jsonl (GSM8K: question and answer)\n\
             error: training rows: row 0 has 41 positions, but packed rows have 10; ",
        ),
        (budget, 3, "error: nothing fits a budget of 1.00 KiB; the least is "),
        (
            "train --data nothing.txt --device cpu",
            1,
            "error: --data nothing.txt: there is no such file or folder; expected ",
        ),
        (
            "generate --model model --prompt a --budget 1MiB --device cpu",
            3,
            "error: a budget of 1.00 MiB is below the ",
        ),
        (
            "export --format peft --adapter problems --out x --type f16",
            1,
            "error: --format peft has no --type\n",
        ),
        (
            "eval --model model --data problems/test.jsonl --split official --device cpu",
            1,
            "error: problems/test.jsonl: a file has no official test set; give the folder with test.jsonl\n",
        ),
    ] {
        let output = tiny.run(arguments);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(status), "{arguments}: {said}");
        assert!(said.starts_with(expected), "{arguments}: {said}");
        assert!(output.stdout.is_empty() && !tiny.path("out").exists(), "{arguments}");
    }
}

#[test]
fn results_for_programs_come_without_notes() {
    let tiny = Tiny::new();
    std::fs::write(tiny.path("rows.jsonl"), "{\"text\": \"\"}\n{\"text\": \"a pear\"}\n").unwrap();
    let (_, said) =
        tiny.succeed("finetune --model model --data rows.jsonl --out rows --steps 1 --device cpu");
    assert!(
        said.starts_with("data: rows.jsonl (text)\n")
            && said.contains("\n1 of 2 training rows have no text to learn and are left out\n"),
        "{said}"
    );
    let (out, said) = tiny.succeed("merge --model model --adapter rows --out merged --json");
    assert_eq!((out.as_str(), said.as_str()), ("{\"result\":{\"model\":\"merged\"}}\n", ""));
    let (out, said) = tiny.succeed("export --adapter rows --out exported --json");
    assert_eq!(
        (out.as_str(), said.as_str()),
        ("{\"result\":{\"adapter\":\"exported\",\"tensors\":16}}\n", "")
    );
    let (_, said) = tiny.succeed("export --adapter rows --out exported --overwrite --quiet");
    assert_eq!(said, "");
    let (_, err) = tiny.succeed(
        "eval --model model --data problems --shots 1 --max-new-tokens 190 --skip-long --limit 1 --json",
    );
    assert_eq!(err, "");
}
