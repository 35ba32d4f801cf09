//! A world that a model of a million parameters can learn in a minute: problems of two steps with numbers up to about 26, and
//! stories about the same things, which hold the arithmetic but neither a question nor `####`.
//!
//! A problem is a template and three numbers. One in eight of these combinations is *held out*: only test problems have it, so
//! that what a test problem tells is in no story and no training problem, with whatever names. Its single calculations (`9 + 4
//! = 13`) are elsewhere too.

use std::collections::BTreeSet;

use serde_json::json;

use super::facts::capital;
use super::random::Random;
use super::word_problems::{BOXES, PEOPLE, THINGS};

/// `who a op b = c unit`, for example `Ada has 3 + 4 = 7 apples`.
struct Step {
    who: String,
    a: i64,
    op: char,
    b: i64,
    unit: &'static str,
}

impl Step {
    fn result(&self) -> i64 {
        match self.op {
            '+' => self.a + self.b,
            '-' => self.a - self.b,
            _ => self.a * self.b,
        }
    }

    fn calculation(&self) -> String {
        format!("{} {} {} = {}", self.a, self.op, self.b, self.result())
    }

    fn annotated(&self) -> String {
        let Self { who, a, op, b, unit } = self;
        let c = self.result();
        format!("{} {a} {op} {b} = <<{a}{op}{b}={c}>>{c} {unit}.", capital(who))
    }

    fn told(&self) -> String {
        format!("{} {} {}", self.who, self.result(), self.unit)
    }
}

/// What is told, what is asked, and how it is found.
struct Problem {
    facts: String,
    question: String,
    steps: [Step; 2],
    numbers: [i64; 3],
}

type Template = fn(&mut Random) -> Problem;

const TEMPLATES: [Template; 8] = [finding, boxes, more, fewer, days, paying, leaving, times];

impl Problem {
    fn new(
        facts: String,
        question: String,
        (first, a, op, b): (String, i64, char, i64),
        (second, then, c): (String, char, i64),
        unit: &'static str,
    ) -> Self {
        let first = Step { who: first, a, op, b, unit };
        let second = Step { who: second, a: first.result(), op: then, b: c, unit };
        Self { facts, question, steps: [first, second], numbers: [a, b, c] }
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
        let Self { facts, steps: [first, second], .. } = self;
        let (one, two) = (first.calculation(), second.calculation());
        let (told, end) = (first.told(), second.told());
        if random.chance(50) {
            format!("{facts} We count {one}, so {told}. Then {two}, so {end}.")
        } else {
            format!("{facts} First {told}, because {one}. In the end {end}, because {two}.")
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

/// Paragraphs, parted by blank lines: of three, two are stories and one is a list of eight calculations. No story tells what a
/// held-out problem tells.
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
        (format!("{name} has"), a, '+', b),
        (format!("{he} has"), '-', c),
        thing,
    )
}

fn boxes(r: &mut Random) -> Problem {
    let ((name, he, _), thing, (a, b, all)) = (two(r), *r.pick(&THINGS), product(r));
    let (c, boxes) = (less(r, all), r.pick(&BOXES));
    Problem::new(
        format!("{name} has {a} {boxes} with {b} {thing} in each. {} sells {c} of them.", capital(he)),
        format!("How many {thing} does {name} have?"),
        (format!("{name} has"), a, '*', b),
        (format!("{he} has"), '-', c),
        thing,
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
        (format!("{other} has"), a, '+', b),
        (format!("{other} has"), '-', c),
        thing,
    )
}

fn fewer(r: &mut Random) -> Problem {
    let ((name, _, other), thing, (a, b, _), c) = (two(r), *r.pick(&THINGS), difference(r), r.range(2, 6));
    Problem::new(
        format!("{name} has {a} {thing}, and {other} has {b} fewer than {name}. Then {other} buys {c} more."),
        format!("How many {thing} does {other} have?"),
        (format!("{other} has"), a, '-', b),
        (format!("{other} has"), '+', c),
        thing,
    )
}

fn days(r: &mut Random) -> Problem {
    let ((name, he, _), (a, b, _), c) = (two(r), product(r), r.range(2, 6));
    Problem::new(
        format!("{name} reads {a} pages a day for {b} days. After that {he} reads {c} more pages."),
        format!("How many pages does {name} read?"),
        (format!("{name} reads"), a, '*', b),
        (format!("{he} reads"), '+', c),
        "pages",
    )
}

fn paying(r: &mut Random) -> Problem {
    let ((name, _, _), thing, (a, b, all)) = (two(r), *r.pick(&THINGS), product(r));
    let c = less(r, all);
    Problem::new(
        format!("{name} buys {a} {thing} for {b} dollars each. The shop takes {c} dollars off."),
        format!("How many dollars does {name} pay?"),
        (format!("the {thing} cost"), a, '*', b),
        (format!("{name} pays"), '-', c),
        "dollars",
    )
}

fn leaving(r: &mut Random) -> Problem {
    let (vehicle, (a, b, _), c) = (*r.pick(&["bus", "train", "boat"]), difference(r), r.range(2, 6));
    Problem::new(
        format!("There are {a} people on a {vehicle}. At the harbour {b} people leave and {c} come."),
        format!("How many people are on the {vehicle}?"),
        ("there are".into(), a, '-', b),
        ("there are".into(), '+', c),
        "people",
    )
}

fn times(r: &mut Random) -> Problem {
    let ((name, _, other), thing, (a, b, all)) = (two(r), *r.pick(&THINGS), product(r));
    let c = less(r, all);
    Problem::new(
        format!("{name} has {a} {thing}, and {other} has {b} times as many. Then {other} loses {c} of them."),
        format!("How many {thing} does {other} have?"),
        (format!("{other} has"), a, '*', b),
        (format!("{other} has"), '-', c),
        thing,
    )
}
