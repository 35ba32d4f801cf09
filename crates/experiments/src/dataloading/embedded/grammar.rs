//! Articles from a grammar: which sections one has, and which sentences each may hold.
//!
//! A grammar is a text. `@ Title` starts a section, `@@ Title` one within it; the section `lead` has no heading. After the
//! `@`s, `#` marks a list of short lines, `+` continues the years of the previous section instead of starting anew, and
//! `=fact` from that fact. A line that starts with `>` opens its section; the others follow in a random order, each at
//! most once, so that an article does not contradict itself. In a sentence, `{a|b}` is one of the alternatives and `[name …]` a fact of the article, or
//! something fresh: see [`Teller::value`].

use std::collections::BTreeMap;

use super::random::Random;
use super::world::World;

/// A section of a grammar.
#[derive(Debug)]
pub(super) struct Section {
    /// `None` for the lead.
    pub(super) title: Option<&'static str>,
    pub(super) level: usize,
    pub(super) list: bool,
    pub(super) clock: Clock,
    pub(super) openings: Vec<&'static str>,
    pub(super) sentences: Vec<&'static str>,
}

/// Where the years of a section start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Clock {
    Start,
    GoesOn,
    Fact(&'static str),
}

pub(super) fn parse(grammar: &'static str) -> Vec<Section> {
    let mut sections: Vec<Section> = Vec::new();
    for line in grammar.lines().filter(|line| !line.is_empty()) {
        let depth = line.len() - line.trim_start_matches('@').len();
        if depth > 0 {
            let mut title = line[depth..].trim_start();
            let (mut list, mut clock) = (false, Clock::Start);
            if let Some(rest) = title.strip_prefix('#') {
                (list, title) = (true, rest.trim_start());
            }
            if let Some(rest) = title.strip_prefix('+') {
                (clock, title) = (Clock::GoesOn, rest);
            } else if let Some((fact, rest)) = title.strip_prefix('=').and_then(|rest| rest.split_once(' ')) {
                (clock, title) = (Clock::Fact(fact), rest);
            }
            let title = (title != "lead").then_some(title);
            let (openings, sentences) = (Vec::new(), Vec::new());
            sections.push(Section { title, level: depth + 1, list, clock, openings, sentences });
        } else if let Some(section) = sections.last_mut() {
            match line.strip_prefix("> ") {
                Some(opening) => section.openings.push(opening),
                None => section.sentences.push(line),
            }
        }
    }
    sections
}

const SMALL: [&str; 8] = ["two", "three", "four", "five", "six", "seven", "eight", "nine"];
const ORDINALS: [&str; 6] = ["second", "third", "fourth", "fifth", "sixth", "seventh"];

/// Facts of one article, and the year that it has reached.
#[derive(Debug)]
pub(super) struct Teller<'a> {
    pub(super) world: &'a World,
    pub(super) random: Random,
    pub(super) facts: BTreeMap<&'static str, String>,
    pub(super) year: i64,
    /// The last year of the article.
    pub(super) end: i64,
    /// Years that count as recent: from here to 2018.
    pub(super) recent: i64,
}

impl Teller<'_> {
    pub(super) fn set(&mut self, clock: Clock) {
        let fact = match clock {
            Clock::GoesOn => return,
            Clock::Start => "start",
            Clock::Fact(fact) => fact,
        };
        if let Some(year) = self.facts.get(fact).and_then(|year| year.parse().ok()) {
            self.year = year;
        }
    }

    /// A sentence, with alternatives chosen and values filled in.
    pub(super) fn expand(&mut self, template: &str) -> String {
        let mut out = String::new();
        let mut rest = template;
        while let Some(at) = rest.find(['{', '[']) {
            out.push_str(&rest[..at]);
            let alternatives = rest[at..].starts_with('{');
            let end =
                at + if alternatives { closing(&rest[at..]) } else { rest[at..].find(']').unwrap_or(0) };
            let inner = &rest[at + 1..end];
            if alternatives {
                let choices = split(inner);
                let choice = *self.random.pick(&choices);
                out.push_str(&self.expand(choice));
            } else {
                out.push_str(&self.value(inner));
            }
            rest = &rest[end + 1..];
        }
        out.push_str(rest);
        out
    }

    /// A fact; or `n A B` a number, `d A B` one with a decimal, `small` and `ordinal` as words, `day`, `year` the year at
    /// which the telling is, `next` a later one, `recent`, and another `place`, `person`, `woman` or `man` each time.
    fn value(&mut self, name: &str) -> String {
        let mut words = name.split(' ');
        let (key, mut argument) =
            (words.next().unwrap_or_default(), || words.next().and_then(|n| n.parse().ok()).unwrap_or(0));
        match key {
            "n" => {
                let (from, to) = (argument(), argument());
                number(round(self.random.range(from, to)))
            }
            "d" => {
                let (from, to) = (argument(), argument());
                format!("{}.{}", self.random.range(from, to), self.random.range(1, 9))
            }
            "small" => (*self.random.pick_ranked(&SMALL)).into(),
            "ordinal" => (*self.random.pick_ranked(&ORDINALS)).into(),
            "day" => self.random.range(1, 28).to_string(),
            "year" => self.year.to_string(),
            "next" => {
                let left = self.end - self.year;
                self.year += self.random.range(i64::from(left >= 8), (left / 10).max(1)).min(left);
                self.year.to_string()
            }
            "recent" => self.random.range(self.recent.min(2012), 2018).to_string(),
            "place" => {
                let own = self.facts.get("town").cloned();
                let mut other = self.random.pick_ranked(&self.world.places);
                while Some(other) == own.as_ref() {
                    other = self.random.pick_ranked(&self.world.places);
                }
                other.clone()
            }
            "woman" | "man" => loop {
                let (name, _, woman) = self.world.person(&mut self.random);
                if woman == (key == "woman") {
                    break name;
                }
            },
            "person" => self.world.person(&mut self.random).0,
            fact => self.facts.get(fact).unwrap_or_else(|| panic!("the grammar asks for '{fact}'")).clone(),
        }
    }
}

/// Rounds as people write figures: from a thousand up to the nearest ten or hundred.
fn round(number: i64) -> i64 {
    match number {
        ..=999 => number,
        1000..=2999 => number / 10 * 10,
        _ => number / 100 * 100,
    }
}

/// `4300` as `4,300`.
pub(super) fn number(number: i64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// The index of the brace that closes the one at the start of `text`.
fn closing(text: &str) -> usize {
    let mut depth = 0;
    text.find(|c| {
        depth += match c {
            '{' => 1,
            '}' => -1,
            _ => 0,
        };
        depth == 0
    })
    .unwrap_or(text.len() - 1)
}

/// The alternatives at the outermost level.
fn split(inner: &str) -> Vec<&str> {
    let (mut depth, mut start, mut parts) = (0, 0, Vec::new());
    for (at, c) in inner.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            '|' if depth == 0 => {
                parts.push(&inner[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&inner[start..]);
    parts
}
