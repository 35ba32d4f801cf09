//! Articles in WikiText's format, as long and as varied in length as WikiText-2's.

use std::collections::BTreeSet;

use super::facts::{Topic, capital, gather};
use super::grammar::{Section, Teller, parse};
use super::random::Random;
use super::world::World;

/// Words of WikiText-2's paragraphs (lines of valid.txt that are not headings): length in words at each share, in per cent.
/// A paragraph's length is drawn from it.
const PARAGRAPH_WORDS: [(i64, i64); 9] =
    [(0, 12), (10, 17), (25, 55), (50, 108), (75, 162), (90, 211), (95, 243), (99, 314), (100, 430)];

/// Articles until there are `bytes` of them. Titles differ from those in `taken`.
pub(super) fn corpus(world: &World, random: &Random, bytes: usize, taken: &mut BTreeSet<String>) -> String {
    let grammars = Topic::ALL.map(|topic| parse(topic.grammar()));
    let mut out = String::new();
    for number in 0.. {
        if out.len() >= bytes {
            break;
        }
        let kind = number as usize % grammars.len();
        let (title, mut teller) = gather(Topic::ALL[kind], world, random.fork(number), taken);
        article(&title, &grammars[kind], &mut teller, &mut out);
    }
    out
}

fn article(title: &str, sections: &[Section], teller: &mut Teller<'_>, out: &mut String) {
    heading(title, 1, out);
    for section in sections {
        teller.set(section.clock);
        let parts = section.openings.is_empty() && !section.list;
        // Not every article has every list, nor a heading over every part of it: one subject may continue
        // under the previous heading, so that headings are as rare as in WikiText-2.
        if section.list && teller.random.chance(88) {
            continue;
        }
        let headed = section.list || teller.random.chance(if section.level == 2 { 33 } else { 5 });
        if let Some(title) = section.title.filter(|_| headed) {
            heading(&teller.expand(title), if parts { 2 } else { section.level }, out);
        }
        if section.list {
            list(section, teller, out);
        } else if !parts {
            // Some subjects continue within the previous paragraph: the long tail of WikiText-2's paragraphs.
            if !headed
                && out.lines().next_back().is_some_and(|line| line.ends_with(". ") && line.len() < 1100)
                && teller.random.chance(60)
            {
                out.truncate(out.len() - 2);
            }
            paragraphs(section, teller, out);
        }
    }
}

fn heading(title: &str, level: usize, out: &mut String) {
    let marks = "= ".repeat(level);
    out.push_str(&format!(" \n {marks}{} {}\n \n", wikitext(title), marks));
}

fn list(section: &Section, teller: &mut Teller<'_>, out: &mut String) {
    for at in 0..teller.random.range(3, 7) as usize {
        let item = teller.expand(section.sentences[at % section.sentences.len()]);
        out.push_str(&format!(" {} \n", wikitext(&capital(&item))));
        // A fact occurs once, unless it has other names each time.
        if at + 1 == section.sentences.len() && !section.sentences[0].contains("[person]") {
            break;
        }
    }
}

fn paragraphs(section: &Section, teller: &mut Teller<'_>, out: &mut String) {
    let mut deck = section.sentences.clone();
    teller.random.shuffle(&mut deck);
    let mut templates = section.openings.iter().chain(&deck).peekable();
    while templates.peek().is_some() {
        // The section's end cuts paragraphs short, so they start out longer.
        let target = paragraph_words(&mut teller.random) * 7 / 4;
        let mut paragraph = String::new();
        let mut words: i64 = 0;
        while words + 9 < target {
            let Some(template) = templates.next() else { break };
            let sentence = wikitext(&capital(&teller.expand(template)));
            words += sentence.split(' ').count() as i64;
            paragraph.push(' ');
            paragraph.push_str(&sentence);
        }
        if words > 0 {
            out.push_str(&paragraph);
            out.push_str(" \n");
        }
    }
}

fn paragraph_words(random: &mut Random) -> i64 {
    let share = random.range(0, 99);
    let above = PARAGRAPH_WORDS.iter().position(|(at, _)| *at > share).unwrap_or(PARAGRAPH_WORDS.len() - 1);
    let ((low, from), (high, to)) = (PARAGRAPH_WORDS[above - 1], PARAGRAPH_WORDS[above]);
    from + (to - from) * (share - low) / (high - low)
}

/// Text as WikiText has it: words and marks separated by spaces, marks within numbers and words between `@`s.
fn wikitext(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut out = String::with_capacity(text.len() + text.len() / 8);
    for (at, c) in chars.iter().enumerate() {
        let neighbour =
            |at: Option<usize>, is: fn(&char) -> bool| at.and_then(|at| chars.get(at)).is_some_and(is);
        let between = |is: fn(&char) -> bool| neighbour(at.checked_sub(1), is) && neighbour(Some(at + 1), is);
        match c {
            ',' | '.' if between(char::is_ascii_digit) => out.push_str(&format!(" @{c}@ ")),
            '-' if between(|c| c.is_alphabetic()) => out.push_str(" @-@ "),
            '\'' if between(|c| c.is_alphabetic()) => out.push_str(" '"),
            ',' | '.' | ';' | ':' | '"' | '(' | ')' => out.push_str(&format!(" {c} ")),
            _ => out.push(*c),
        }
    }
    let mut words: Vec<&str> = out.split_whitespace().collect();
    for at in 1..words.len() {
        let vowel = words[at].starts_with(['a', 'e', 'i', 'o', 'u']) && !words[at].starts_with("uni");
        if vowel && matches!(words[at - 1], "a" | "A") {
            words[at - 1] = if words[at - 1] == "a" { "an" } else { "An" };
        }
    }
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_stand_as_in_wikitext() {
        for (text, expected) in [
            ("It has 4,300 people, 2.5 per cent.", "It has 4 @,@ 300 people , 2 @.@ 5 per cent ."),
            ("The red-backed owl's \"call\" (1901).", "The red @-@ backed owl 's \" call \" ( 1901 ) ."),
            ("1901 – 1910", "1901 – 1910"),
            ("A owl, a ape and a unit.", "An owl , an ape and a unit ."),
        ] {
            assert_eq!(wikitext(text), expected);
        }
    }
}
