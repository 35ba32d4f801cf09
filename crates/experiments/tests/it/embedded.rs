//! The embedded data sets have the properties that their README promises.

use std::collections::BTreeSet;

use dataloading::embedded::{
    self, CORPUS_TRAIN, CORPUS_VALID, PROBLEMS_TEST, PROBLEMS_TRAIN, SMALL_PROBLEMS_TEST,
    SMALL_PROBLEMS_TRAIN, SMALL_STORIES,
};
use dataloading::length_statistics::LengthStatistics;
use dataloading::text::{Corpus, Format, heading_level};
use serde_json::Value;

fn read(name: &str) -> String {
    std::fs::read_to_string(embedded::folder().unwrap().join(name)).unwrap()
}

/// Words per line that is not empty, headings included, of WikiText-2's valid.txt (Merity et al. 2016, 2461 lines), and how
/// far the embedded corpus may be from them (its validation part has 312 lines, so its tail is a matter of few articles).
const WIKITEXT_2: [(f64, usize, usize); 7] = [
    (0.05, 5, 1),
    (0.25, 9, 3),
    (0.5, 75, 18),
    (0.75, 142, 20),
    (0.9, 199, 20),
    (0.95, 231, 30),
    (0.99, 304, 20),
];

#[test]
fn lines_are_as_long_as_wikitext_2s() {
    for name in [CORPUS_TRAIN, CORPUS_VALID] {
        let text = read(name);
        let lines = text.lines().filter(|line| !line.trim().is_empty());
        let statistics = LengthStatistics::new(lines.map(|line| line.split_whitespace().count())).unwrap();
        for (share, theirs, tolerance) in WIKITEXT_2 {
            let ours = statistics.quantile(share);
            eprintln!("{name}: {share} of the lines have {ours} words or fewer, of WikiText-2's {theirs}");
            assert!(ours.abs_diff(theirs) <= tolerance, "{name}: {share}: {ours}, WikiText-2 {theirs}");
        }
    }
}

#[test]
fn articles_are_whole_and_those_of_validation_are_others() {
    let folder = embedded::folder().unwrap();
    let articles = |name: &str| -> Vec<String> {
        let records = Corpus::new([folder.join(name)], Format::Articles).records().unwrap();
        records.map(|record| record.unwrap().text).collect()
    };
    let (train, valid) = (articles(CORPUS_TRAIN), articles(CORPUS_VALID));
    let title = |text: &String| text.lines().next().unwrap().to_owned();
    let titles: BTreeSet<String> = train.iter().chain(&valid).map(title).collect();
    assert_eq!(titles.len(), train.len() + valid.len());
    assert!(train.len() > 100 && valid.len() > 10, "{} and {}", train.len(), valid.len());
    for article in train.iter().chain(&valid) {
        assert_eq!(heading_level(&title(article)), Some(1), "{article}");
        assert!(!article.contains(['{', '}', '[', ']', '|']), "{article}");
    }
}

/// Checks one problem's steps and returns its question.
fn check_problem(line: &str) -> String {
    let problem: Value = serde_json::from_str(line).unwrap();
    let (question, answer) = (problem["question"].as_str().unwrap(), problem["answer"].as_str().unwrap());
    let (steps, last) = answer.rsplit_once("\n#### ").unwrap();
    assert!((2..=6).contains(&steps.lines().count()), "{answer}");
    let mut result = 0i64;
    for step in steps.lines() {
        let (inner, after) = step.split_once("<<").unwrap().1.split_once(">>").unwrap();
        let (expression, value) = inner.split_once('=').unwrap();
        let at = expression.find(['+', '-', '*', '/']).unwrap();
        let (a, b): (i64, i64) = (expression[..at].parse().unwrap(), expression[at + 1..].parse().unwrap());
        result = match &expression[at..=at] {
            "+" => a + b,
            "-" => a - b,
            "*" => a * b,
            _ => {
                assert_eq!(a % b, 0, "{line}");
                a / b
            }
        };
        assert_eq!(value.parse::<i64>().unwrap(), result, "{line}");
        assert!(after.starts_with(value) && result > 0, "{line}");
    }
    assert_eq!(last.parse::<i64>().unwrap(), result, "{line}");
    question.to_owned()
}

#[test]
fn every_step_of_every_problem_is_right_and_no_question_is_there_twice() {
    let (train, test) = (read(PROBLEMS_TRAIN), read(PROBLEMS_TEST));
    let questions: BTreeSet<String> = train.lines().chain(test.lines()).map(check_problem).collect();
    assert_eq!((train.lines().count(), test.lines().count(), questions.len()), (2000, 300, 2300));
}

/// The numbers that a text tells, and what remains when names, pronouns and things are taken for one: what makes two
/// problems the same but for their names.
fn told(text: &str) -> (Vec<i64>, String) {
    const SAME: [(&str, &[&str]); 3] = [
        (
            "NAME",
            &[
                "Ada", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Irene", "Jonas", "Laura",
                "Martin", "Nina", "Oscar", "Rosa", "Simon", "He", "She", "he", "she",
            ],
        ),
        (
            "THING",
            &[
                "apples",
                "pencils",
                "stickers",
                "marbles",
                "cookies",
                "postcards",
                "candles",
                "notebooks",
                "muffins",
                "buttons",
            ],
        ),
        ("PLACE", &["boxes", "bags", "baskets", "packs", "crates", "bus", "train", "boat"]),
    ];
    let mut numbers = Vec::new();
    let word = |word: &str| {
        let plain = word.trim_end_matches(['.', ',', '?']);
        if let Ok(number) = plain.parse() {
            numbers.push(number);
            return "NUMBER";
        }
        SAME.iter().find(|(_, words)| words.contains(&plain)).map_or("WORD", |(name, _)| name)
    };
    let shape: Vec<&str> = text.split(' ').map(word).collect();
    (numbers, shape.join(" "))
}

/// The end of a story after its facts.
const AFTER_THE_FACTS: [&str; 8] = [
    " We count ",
    " First ",
    "\n",
    " Let us count.",
    " It is a warm day.",
    " Nobody else is there.",
    " The sun shines over the harbour.",
    " All of them are glad.",
];

#[test]
fn small_problems_are_right_and_what_a_test_problem_tells_is_told_nowhere_else() {
    let (train, test, stories) = (read(SMALL_PROBLEMS_TRAIN), read(SMALL_PROBLEMS_TEST), read(SMALL_STORIES));
    let questions: BTreeSet<String> = train.lines().chain(test.lines()).map(check_problem).collect();
    assert_eq!((train.lines().count(), test.lines().count(), questions.len()), (1200, 200, 1400));

    // All of a question but the sentence that asks.
    let facts = |line: &str| {
        let question = check_problem(line);
        question[..question.rfind(". ").unwrap() + 1].to_owned()
    };
    let held_out: BTreeSet<_> = test.lines().map(|line| told(&facts(line))).collect();
    assert!(held_out.len() >= 100, "{} different combinations of a template and its numbers", held_out.len());
    let paragraphs: Vec<&str> =
        stories.split("\n\n").filter(|paragraph| !paragraph.trim().is_empty()).collect();
    let is_list = |paragraph: &&&str| paragraph.starts_with(|first: char| first.is_ascii_digit());
    assert_eq!((paragraphs.len(), paragraphs.iter().filter(is_list).count()), (4500, 1500));
    let told_in_stories = paragraphs.iter().filter(|paragraph| !is_list(paragraph)).map(|story| {
        let ends = AFTER_THE_FACTS.iter().filter_map(|after| story.find(after));
        story[..ends.min().unwrap()].to_owned()
    });
    let seen: BTreeSet<_> =
        train.lines().map(facts).chain(told_in_stories).map(|facts| told(&facts)).collect();
    assert!(seen.len() > 500 && seen.is_disjoint(&held_out));
}

#[test]
fn stories_have_right_calculations_and_neither_questions_nor_marks() {
    let stories = read(SMALL_STORIES);
    assert!(!stories.contains(['?', '#', '<']) && !stories.contains("Answer"));
    let mut calculations = 0;
    for sentence in stories.split(['\n', ',', '.']) {
        let Some((left, right)) = sentence.split_once(" = ") else { continue };
        let words: Vec<&str> = left.split(' ').collect();
        let [.., a, operation, b] = words[..] else { panic!("{sentence}") };
        let (a, b, c): (i64, i64, i64) = (a.parse().unwrap(), b.parse().unwrap(), right.parse().unwrap());
        let expected = match operation {
            "+" => a + b,
            "-" => a - b,
            "*" => a * b,
            other => panic!("{other} in {sentence}"),
        };
        assert!(c == expected && c >= 2, "{sentence}");
        calculations += 1;
    }
    assert_eq!(calculations, 3000 * 2 + 1500 * 8);
}
