//! Problems from files: what is read, and the words about what cannot be.

use crate::gsm8k_data;
use expect_test::{Expect, expect};
use frugal::tasks::gsm8k::{Annotations, Problem, records};

fn read(content: &[u8], annotations: Annotations) -> Result<Vec<Problem>, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("problems.jsonl");
    std::fs::write(&path, content).unwrap();
    let shown = format!("{}/", folder.path().display());
    records::read(&path, annotations).map_err(|error| error.to_string().replace(&shown, ""))
}

const GOOD: &str = r#"{"question": "How many?", "answer": "2*3 = <<2*3=6>>6\n#### 6", "source": "mine"}"#;

#[test]
fn problems_are_read_with_or_without_annotations() {
    let content = format!("\u{feff}{GOOD}\n\n   \n{GOOD}\r\n{GOOD}");
    let kept = read(content.as_bytes(), Annotations::Keep).unwrap();
    assert_eq!(kept.len(), 3);
    assert!(kept.iter().all(|problem| problem.answer == "2*3 = <<2*3=6>>6\n#### 6"));
    assert_eq!((kept[0].question.as_str(), kept[0].result().as_str()), ("How many?", "6"));
    let stripped = read(content.as_bytes(), Annotations::Strip).unwrap();
    assert!(stripped.iter().all(|problem| problem.answer == "2*3 = 6\n#### 6"));
    assert_eq!(kept[0].stripped(), stripped[0]);
    // What is no annotation stays.
    let odd = Problem::new("?", "a << b and c >> d <<>> <x> <<1\n#### 6").unwrap();
    assert_eq!(odd.stripped().answer, "a << b and c >> d <<>> <x> <<1\n#### 6");
}

/// The error of a file whose second line is `line`.
fn check(line: &str, expected: Expect) {
    expected.assert_eq(&read(format!("{GOOD}\n{line}\n{GOOD}\n").as_bytes(), Annotations::Keep).unwrap_err());
}

#[test]
fn a_bad_line_is_named() {
    check(
        r#"{"question": "How many?", "answer""#,
        expect![
            "problems.jsonl: line 2: not JSON (EOF while parsing an object, column 34); fix or remove the line"
        ],
    );
    check("[1, 2]", expect!["problems.jsonl: line 2: expected an object with `question` and `answer`"]);
    check(
        r#"{"question": "How many?", "label": 3}"#,
        expect!["problems.jsonl: line 2: no field 'answer'; the fields here are: question, label"],
    );
    check("{}", expect!["problems.jsonl: line 2: no field 'question'; the fields here are: none"]);
    check(
        r#####"{"question": 7, "answer": "#### 7"}"#####,
        expect!["problems.jsonl: line 2: field 'question' is not a string; fix or remove the line"],
    );
    check(
        r#####"{"question": "  ", "answer": "#### 7"}"#####,
        expect!["problems.jsonl: line 2: field 'question' is empty; fix or remove the line"],
    );
    check(
        r#"{"question": "How many?", "answer": "There are 6 of them in all, and that is the end of it."}"#,
        expect![[
            r#"problems.jsonl: line 2: the answer has no `#### NUMBER` (it ends with " them in all, and that is the end of it."); write the result in a last line, as `#### 42`; other questions and answers are read by --format question-answer"#
        ]],
    );
}

#[test]
fn files_that_are_none_are_refused() {
    let no_problem = "problems.jsonl: no problem in it; expected JSON lines with `question` and `answer`";
    for content in ["", "\n\n  \n"] {
        assert_eq!(read(content.as_bytes(), Annotations::Keep).unwrap_err(), no_problem);
    }
    expect!["problems.jsonl: line 2: byte 3 of the line is not UTF-8; convert the file to UTF-8"]
        .assert_eq(&read(&[GOOD.as_bytes(), b"\nabc\xff\n"].concat(), Annotations::Keep).unwrap_err());
    let long = vec![b' '; (16 << 20) + 2];
    expect!["problems.jsonl: line 1: longer than 16777216 bytes; is this a file of JSON lines?"]
        .assert_eq(&read(&long, Annotations::Keep).unwrap_err());
    let missing = records::read(&gsm8k_data::embedded("no-such.jsonl"), Annotations::Keep).unwrap_err();
    assert!(missing.to_string().contains("no-such.jsonl: No such file"), "{missing}");
}

#[test]
fn a_file_is_read_as_far_as_it_is_good_and_no_further() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("problems.jsonl");
    std::fs::write(&path, format!("{GOOD}\nbad\n{GOOD}\n")).unwrap();
    let read: Vec<bool> =
        records::Problems::open(&path, Annotations::Keep).unwrap().map(|problem| problem.is_ok()).collect();
    assert_eq!(read, [true, false]);
}

#[test]
fn real_files_have_their_known_numbers_of_problems_and_annotations() {
    for (file, count, annotated) in [("train.jsonl", 7473, 7378), ("test.jsonl", 1319, 1301)] {
        let Some(problems) = gsm8k_data::real(file) else { return };
        assert_eq!(problems.len(), count);
        assert_eq!(problems.iter().filter(|problem| problem.answer.contains("<<")).count(), annotated);
        assert!(problems.iter().all(|problem| !problem.stripped().answer.contains("<<")));
    }
}
