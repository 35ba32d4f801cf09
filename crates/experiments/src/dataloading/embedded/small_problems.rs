//! A world that a model of a million parameters can learn in a minute: problems of two steps with numbers up to about 26, and
//! stories about the same things, which hold the arithmetic but neither a question nor `####`.
//!
//! A problem is a template and three numbers. One in eight of these combinations is *held out*: only test problems have it, so
//! that the facts of a test problem are in no story and no training problem, under any names. Its single calculations (`9 + 4
//! = 13`) occur in other texts too.

use std::collections::BTreeSet;

use serde_json::json;

use super::facts::capital;
use super::random::Random;
use super::word_problems::{BOXES, PEOPLE, THINGS};

/// `a op b = c`.
#[derive(Clone, Copy)]
struct Step {
    a: i64,
    op: char,
    b: i64,
}

impl Step {
    fn result(self) -> i64 {
        match self.op {
            '+' => self.a + self.b,
            '-' => self.a - self.b,
            _ => self.a * self.b,
        }
    }

    fn calculation(self) -> String {
        format!("{} {} {} = {}", self.a, self.op, self.b, self.result())
    }

    fn annotated(self) -> String {
        let Self { a, op, b } = self;
        let c = self.result();
        format!("{a} {op} {b} = <<{a}{op}{b}={c}>>{c}")
    }
}

/// The facts, the question, the solution, and the end of the story.
struct Problem {
    facts: String,
    question: String,
    steps: [Step; 2],
    end: String,
    numbers: [i64; 3],
}

/// Sentences between the facts and the calculations, so that a reader has to look for the numbers.
const MEANWHILE: [&str; 5] = [
    " Let us count.",
    " It is a warm day.",
    " Nobody else is there.",
    " The sun shines over the harbour.",
    " All of them are glad.",
];

type Template = fn(&mut Random) -> Problem;

const TEMPLATES: [Template; 8] = [finding, boxes, more, fewer, days, paying, leaving, times];

impl Problem {
    /// `a op b` is what is found first, and `then c` with that the second. `who` and `unit` surround the result.
    fn new(
        facts: String,
        question: String,
        (a, op, b): (i64, char, i64),
        (then, c): (char, i64),
        (who, unit): (String, &str),
    ) -> Self {
        let first = Step { a, op, b };
        let second = Step { a: first.result(), op: then, b: c };
        let end = format!("{who} {} {unit}", second.result());
        Self { facts, question, steps: [first, second], end, numbers: [a, b, c] }
    }

    /// One of eight of the combinations of a template and its numbers.
    fn held_out(&self, template: usize) -> bool {
        let key = self.numbers.iter().fold(template as u64, |key, number| key * 64 + number.unsigned_abs());
        Random::new(0).fork(key).range(1, 8) == 1
    }

    fn draw(random: &mut Random, held_out: bool) -> Self {
        loop {
            let template = random.index(TEMPLATES.len());
            let problem = TEMPLATES[template](random);
            if problem.held_out(template) == held_out {
                return problem;
            }
        }
    }

    fn story(&self, random: &mut Random) -> String {
        let Self { facts, steps, end, .. } = self;
        let [one, two] = steps.map(Step::calculation);
        let meanwhile = if random.chance(70) { *random.pick(&MEANWHILE) } else { "" };
        match random.index(3) {
            0 => format!("{facts}{meanwhile} We count {one}. Then {two}. In the end {end}."),
            1 => format!("{facts}{meanwhile} First {one}, then {two}, so {end}."),
            _ => format!("{facts}{meanwhile}\n{one}\n{two}\nSo {end}."),
        }
    }
}

/// `count` problems as JSON lines, held out or not; no question is in `taken`, and all are put there.
pub(super) fn problems(
    random: &Random,
    count: usize,
    held_out: bool,
    taken: &mut BTreeSet<String>,
) -> String {
    let (mut out, mut made, mut number) = (String::new(), 0, 0);
    while made < count {
        let problem = Problem::draw(&mut random.fork(number), held_out);
        number += 1;
        let question = format!("{} {}", problem.facts, problem.question);
        if !taken.insert(question.clone()) {
            continue;
        }
        let [first, second] = &problem.steps;
        let answer = format!("{}\n{}\n#### {}", first.annotated(), second.annotated(), second.result());
        out.push_str(&json!({"question": question, "answer": answer}).to_string());
        out.push('\n');
        made += 1;
    }
    out
}

/// Paragraphs, separated by blank lines: of three, two are stories and one is a list of eight calculations. No story has the facts
/// of a held-out problem.
pub(super) fn stories(random: &Random, count: usize) -> String {
    let mut out = String::new();
    for number in 0..count {
        let mut random = random.fork(number as u64);
        if number % 3 < 2 {
            out += &Problem::draw(&mut random, false).story(&mut random);
            out.push('\n');
        } else {
            for _ in 0..8 {
                let problem = TEMPLATES[random.index(TEMPLATES.len())](&mut random);
                out += &random.pick(&problem.steps).calculation();
                out.push('\n');
            }
        }
        out.push('\n');
    }
    out
}

fn sum(r: &mut Random) -> (i64, i64, i64) {
    let (a, b) = (r.range(3, 12), r.range(2, 6));
    (a, b, a + b)
}

fn difference(r: &mut Random) -> (i64, i64, i64) {
    let (a, b) = (r.range(8, 20), r.range(2, 6));
    (a, b, a - b)
}

fn product(r: &mut Random) -> (i64, i64, i64) {
    loop {
        let (a, b) = (r.range(2, 6), r.range(2, 5));
        if a * b <= 20 {
            return (a, b, a * b);
        }
    }
}

/// From 2 to 6, and two less than `of`, so that several remain.
fn less(r: &mut Random, of: i64) -> i64 {
    r.range(2, 6.min(of - 2))
}

/// A name with its pronoun, and another name.
fn two(r: &mut Random) -> (&'static str, &'static str, &'static str) {
    let first = r.index(PEOPLE.len());
    let second = (first + r.range(1, PEOPLE.len() as i64 - 1) as usize) % PEOPLE.len();
    (PEOPLE[first].0, PEOPLE[first].1, PEOPLE[second].0)
}

fn finding(r: &mut Random) -> Problem {
    let ((name, he, other), thing, (a, b, all)) = (two(r), *r.pick(&THINGS), sum(r));
    let c = less(r, all);
    Problem::new(
        format!("{name} has {a} {thing}. {} finds {b} more and gives {c} to {other}.", capital(he)),
        format!("How many {thing} does {name} have?"),
        (a, '+', b),
        ('-', c),
        (format!("{he} has"), thing),
    )
}

fn boxes(r: &mut Random) -> Problem {
    let ((name, he, _), thing, (a, b, all)) = (two(r), *r.pick(&THINGS), product(r));
    let (c, boxes) = (less(r, all), r.pick(&BOXES));
    Problem::new(
        format!("{name} has {a} {boxes} with {b} {thing} in each. {} sells {c} of them.", capital(he)),
        format!("How many {thing} does {name} have?"),
        (a, '*', b),
        ('-', c),
        (format!("{he} has"), thing),
    )
}

fn more(r: &mut Random) -> Problem {
    let ((name, _, other), thing, (a, b, all)) = (two(r), *r.pick(&THINGS), sum(r));
    let c = less(r, all);
    Problem::new(
        format!(
            "{name} has {a} {thing}, and {other} has {b} more than {name}. Then {other} loses {c} of them."
        ),
        format!("How many {thing} does {other} have?"),
        (a, '+', b),
        ('-', c),
        (format!("{other} has"), thing),
    )
}

fn fewer(r: &mut Random) -> Problem {
    let ((name, _, other), thing, (a, b, _), c) = (two(r), *r.pick(&THINGS), difference(r), r.range(2, 6));
    Problem::new(
        format!("{name} has {a} {thing}, and {other} has {b} fewer than {name}. Then {other} buys {c} more."),
        format!("How many {thing} does {other} have?"),
        (a, '-', b),
        ('+', c),
        (format!("{other} has"), thing),
    )
}

fn days(r: &mut Random) -> Problem {
    let ((name, he, _), (a, b, _), c) = (two(r), product(r), r.range(2, 6));
    Problem::new(
        format!("{name} reads {a} pages a day for {b} days. After that {he} reads {c} more pages."),
        format!("How many pages does {name} read?"),
        (a, '*', b),
        ('+', c),
        (format!("{he} reads"), "pages"),
    )
}

fn paying(r: &mut Random) -> Problem {
    let ((name, _, _), thing, (a, b, all)) = (two(r), *r.pick(&THINGS), product(r));
    let c = less(r, all);
    Problem::new(
        format!("{name} buys {a} {thing} for {b} dollars each. The shop takes {c} dollars off."),
        format!("How many dollars does {name} pay?"),
        (a, '*', b),
        ('-', c),
        (format!("{name} pays"), "dollars"),
    )
}

fn leaving(r: &mut Random) -> Problem {
    let (vehicle, (a, b, _), c) = (*r.pick(&["bus", "train", "boat"]), difference(r), r.range(2, 6));
    Problem::new(
        format!("There are {a} people on a {vehicle}. At the harbour {b} people leave and {c} come."),
        format!("How many people are on the {vehicle}?"),
        (a, '-', b),
        ('+', c),
        ("there are".into(), "people"),
    )
}

fn times(r: &mut Random) -> Problem {
    let ((name, _, other), thing, (a, b, all)) = (two(r), *r.pick(&THINGS), product(r));
    let c = less(r, all);
    Problem::new(
        format!("{name} has {a} {thing}, and {other} has {b} times as many. Then {other} loses {c} of them."),
        format!("How many {thing} does {other} have?"),
        (a, '*', b),
        ('-', c),
        (format!("{other} has"), thing),
    )
}
