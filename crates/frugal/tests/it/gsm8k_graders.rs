//! The three graders: every gold answer is right, and near-misses get the verdicts of the original Python.

use crate::gsm8k_data;
use expect_test::expect;
use frugal::tasks::gsm8k::{Accuracy, Grader, Problem};

const GOLD_18: &str = "She has 9 * 2 = $<<9*2=18>>18.\n#### 18";

/// Name, what a model said, the gold answer, and the verdicts (R right, w wrong) of `Grader::ALL` in its order. The verdicts
/// are those of Python's `re` over lm-evaluation-harness's patterns (`gsm8k` version 3, `exact_match`) and of OpenAI's grader.
#[rustfmt::skip]
const SAID: &[(&str, &str, &str, &str)] = &[
    ("plain", "#### 18", GOLD_18, "RRR"),
    ("trailing dot", "#### 18.", GOLD_18, "RRw"),
    ("dot and newline", "#### 18.\n", GOLD_18, "RRw"),
    ("two dots", "#### 18..", GOLD_18, "www"),
    ("dollar", "#### $18", GOLD_18, "wRw"),
    ("dollar after", "#### 18$", GOLD_18, "RRR"),
    ("comma gold, none said", "#### 1000", "#### 1,000", "RRR"),
    ("comma both", "#### 1,000", "#### 1,000", "RRR"),
    ("comma said", "#### 1,000", "#### 1000", "RRR"),
    ("odd comma", "#### 10,00", "#### 1000", "RRR"),
    ("dot for a comma", "#### 1.000", "#### 1000", "www"),
    ("decimal zero", "#### 18.0", GOLD_18, "www"),
    ("1.0 for 1", "#### 1.0", "#### 1", "www"),
    ("negative", "#### -5", "#### -5", "RRR"),
    ("unicode minus", "#### \u{2212}5", "#### -5", "www"),
    ("minus and space", "#### - 5", "#### -5", "www"),
    ("sign lost", "#### 5", "#### -5", "www"),
    ("plus", "#### +5", "#### 5", "wRw"),
    ("run on", "#### 18\n\nQuestion: Tom has 3 apples and 4 pears. How many?\nAnswer: 3 + 4 = 7\n#### 7", GOLD_18, "RwR"),
    ("run on without a mark", "#### 18\n\nQuestion: Tom has 3 apples.", GOLD_18, "RwR"),
    ("two marks, first right", "#### 18\n#### 19", GOLD_18, "RwR"),
    ("two marks, second right", "#### 19\n#### 18", GOLD_18, "wRw"),
    ("no space", "####18", GOLD_18, "wRw"),
    ("two spaces", "####  18", GOLD_18, "wRw"),
    ("newline after the mark", "####\n18", GOLD_18, "wRw"),
    ("tab", "####\t18", GOLD_18, "wRw"),
    ("three marks", "### 18", GOLD_18, "wRw"),
    ("five marks", "##### 18", GOLD_18, "RRR"),
    ("no mark", "The answer is 18.", GOLD_18, "wRw"),
    ("no mark, words after", "She earns 18 dollars on each of 7 days", GOLD_18, "www"),
    ("percent", "#### 18%", GOLD_18, "RRR"),
    ("unit", "#### 18 eggs", GOLD_18, "RRR"),
    ("digit grouping space", "#### 1 000", "#### 1,000", "www"),
    ("bold", "#### **18**", GOLD_18, "wRw"),
    ("boxed", "\\boxed{18}", GOLD_18, "wRw"),
    ("latex dollars", "The answer is $18$.", GOLD_18, "wRw"),
    ("words", "#### eighteen", GOLD_18, "www"),
    ("fullwidth digits", "#### \u{ff11}\u{ff18}", GOLD_18, "www"),
    ("arabic digits", "#### \u{661}\u{668}", GOLD_18, "www"),
    ("empty", "", GOLD_18, "www"),
    ("white space", " \n ", GOLD_18, "www"),
    ("mark only", "#### ", GOLD_18, "www"),
    ("mark and dot", "#### .", GOLD_18, "www"),
    ("mark and comma", "#### ,", GOLD_18, "www"),
    ("range", "#### 17-18", GOLD_18, "www"),
    ("fraction", "#### 36/2", GOLD_18, "www"),
    ("leading zero", "#### 018", GOLD_18, "www"),
    ("exponent", "#### 1.8e1", GOLD_18, "www"),
    ("full sentence end", "#### 18. Done", GOLD_18, "RRw"),
    ("trailing newline", "#### 18\n", GOLD_18, "RRR"),
    ("carriage return", "#### 18\r\n", GOLD_18, "RRR"),
    ("invalid said", "[invalid]", GOLD_18, "www"),
    ("dots at the end", "18 ...", GOLD_18, "www"),
    ("question mark", "Is it 18?", GOLD_18, "wRw"),
    ("step only", "9 * 2 = <<9*2=18>>18", GOLD_18, "wRw"),
    ("only dollars", "$$", GOLD_18, "www"),
    ("dash digits", "is -18", GOLD_18, "www"),
    ("hyphenated", "-18-", GOLD_18, "www"),
    ("date", "in 2018", GOLD_18, "www"),
    ("comma after", "#### 18,", GOLD_18, "RRR"),
    ("comma in list", "it is 17,18", GOLD_18, "www"),
];

fn verdicts(text: &str, answer: &str) -> String {
    let letter = |grader: Grader| if grader.right(text, answer) { 'R' } else { 'w' };
    Grader::ALL.into_iter().map(letter).collect()
}

#[test]
fn near_misses_are_graded_as_the_originals_do() {
    for (name, text, answer, expected) in SAID {
        assert_eq!(verdicts(text, answer), *expected, "{name}: {text:?} against {answer:?}");
    }
    for verdict in ["RRR", "RRw", "RwR", "wRw", "www"] {
        assert!(SAID.iter().any(|case| case.3 == verdict), "no case has {verdict}");
    }
}

#[test]
fn graders_take_what_they_say() {
    let extracted = |text: &str| Grader::ALL.map(|grader| grader.extract(text));
    let some = |text: &str| Some(text.to_owned());
    assert_eq!(extracted("#### 1,000.50\n#### 7"), [some("1,000.50"), some("7"), some("1000.50")]);
    assert_eq!(extracted("it is $1,200."), [None, some("$1,200."), None]);
    assert_eq!(extracted("nothing"), [None, None, None]);
}

#[test]
fn every_real_gold_answer_is_right_for_every_grader() {
    for file in ["train.jsonl", "test.jsonl"] {
        let Some(problems) = gsm8k_data::real(file) else { return };
        let mut accuracies = [Accuracy::default(); 3];
        for problem in &problems {
            for (grader, accuracy) in Grader::ALL.into_iter().zip(&mut accuracies) {
                accuracy.add(grader.right(&problem.answer, &problem.answer));
                accuracy.add(grader.right(&problem.stripped().answer, &problem.answer));
            }
        }
        for accuracy in accuracies {
            assert_eq!((accuracy.right, accuracy.of), (2 * problems.len(), 2 * problems.len()), "{file}");
        }
    }
}

#[test]
fn another_problems_answer_is_right_only_where_the_numbers_are_equal() {
    let Some(problems) = gsm8k_data::real("test.jsonl") else { return };
    for pair in problems.windows(2) {
        let equal = pair[0].result() == pair[1].result();
        for grader in Grader::ALL {
            assert_eq!(
                grader.right(&pair[0].answer, &pair[1].answer),
                equal,
                "{grader}: {:?}",
                pair[0].answer
            );
        }
    }
}

#[test]
fn an_answer_without_a_number_is_no_problem() {
    let error = |answer: &str| Problem::new("How many?", answer).unwrap_err().to_string();
    expect![[
        r#"the answer has no `#### NUMBER` (it ends with "So there are 12 of them."); write the result in a last line, as `#### 42`; other questions and answers are read by --format question-answer"#
    ]]
    .assert_eq(&error("So there are 12 of them."));
    assert!(error("####12").contains("####12"));
    assert!(error("").contains("\"\""));
    assert!(!Grader::OpenAi.right("nothing", "nothing"));
}

#[test]
fn accuracies_have_wilsons_interval() {
    // Newcombe 1998, table I, method 3 (score): 81/263, 15/148, 0/20, 1/29.
    for (right, of, low, high) in
        [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)]
    {
        let found = Accuracy { right, of }.interval();
        assert!((found.0 - low).abs() < 5e-5 && (found.1 - high).abs() < 5e-5, "{right}/{of}: {found:?}");
        let opposite = Accuracy { right: of - right, of }.interval();
        assert!((opposite.0 + found.1 - 1.0).abs() < 1e-12 && (opposite.1 + found.0 - 1.0).abs() < 1e-12);
    }
    assert_eq!(Accuracy::default().interval(), (0.0, 1.0));
    assert_eq!(Accuracy::default().share(), 0.0);
    expect!["41.6 % (95 % interval 39.0 to 44.3 %, 549 of 1319)"]
        .assert_eq(&Accuracy { right: 549, of: 1319 }.to_string());
}
