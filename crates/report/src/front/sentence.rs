//! Sentences with values in braces.
//!
//! | written | becomes |
//! |---|---|
//! | `{x}` | the value: `1.25 GiB`, of a ratio `0.81`; of several groups their range |
//! | `{x:percent}` | how far a ratio is from 1: `28 % (26–31 %)`, with its interval |
//! | `{x:share}` | a ratio in percent: `81 %` |
//! | `{x:times}` | a ratio, or one divided by it where it is below 1: `4.3 times (4.2–4.4)` |
//! | `{x:change}` | the same in words: `28 % less (26–31 %)`, `as much (within 3 %)`, `undecided (0.9–1.2)` |
//! | `{x:within}` | how far from 1 its interval reaches: `within 3 %` |
//! | `{x:of}`, `{x:against}` | both sides of a ratio |
//! | `{x:most}` | the largest of several groups |
//! | `{x:billions}` | `40 billion` |
//! | `{x:groups}` | the number of groups |

use std::collections::BTreeMap;

use super::Builder;
use crate::estimate::{Certainty, Direction, Estimate};
use crate::filter::Filter;
use crate::spec::{Measure, Says};
use crate::unit;

impl Builder<'_> {
    /// The sentence that its value chooses; `None`, and a problem, where a value is missing.
    pub(super) fn says(
        &mut self,
        place: &str,
        says: &Says,
        values: &BTreeMap<String, Measure>,
    ) -> Option<String> {
        match self.sentence(says, values) {
            Ok(text) => Some(text),
            Err(why) => {
                self.problems.push(format!("{place}: {why}"));
                None
            }
        }
    }

    fn sentence(&self, says: &Says, values: &BTreeMap<String, Measure>) -> Result<String, String> {
        let text = match (&says.decides, &says.text) {
            (None, Some(text)) => text,
            (Some(decides), None) => {
                let measure = values.get(decides).ok_or_else(|| format!("no value is named `{decides}`"))?;
                let all = self.machines.values(measure).map_err(|why| format!("{decides}: {why}"))?;
                let directions: Vec<Direction> = all.iter().map(Estimate::direction).collect();
                let every = |direction| directions.iter().all(|one| *one == direction);
                let (word, text) = match () {
                    () if every(Direction::Less) => ("less", &says.less),
                    () if every(Direction::More) => ("more", &says.more),
                    () if every(Direction::Same) => ("same", &says.same),
                    () => ("unclear", &says.unclear),
                };
                text.as_ref().ok_or_else(|| format!("{decides} needs the sentence `{word}`"))?
            }
            _ => return Err("a sentence has either `text` or `decides`".into()),
        };
        self.fill(text, values)
    }

    /// A heading or caption with its values filled in.
    pub(super) fn words(&mut self, place: &str, text: &str, values: &BTreeMap<String, Measure>) -> String {
        self.fill(text, values).unwrap_or_else(|why| {
            self.problems.push(format!("{place}: {why}"));
            String::new()
        })
    }

    fn fill(&self, text: &str, values: &BTreeMap<String, Measure>) -> Result<String, String> {
        let (mut filled, mut rest) = (String::new(), text);
        while let Some((before, after)) = rest.split_once('{') {
            let (inside, after) = after.split_once('}').ok_or("a `{` has no `}`")?;
            let (name, format) = inside.split_once(':').unwrap_or((inside, ""));
            let measure = values.get(name).ok_or_else(|| format!("no value is named `{name}`"))?;
            let side = |of: Filter| Measure { of, against: None, ..measure.clone() };
            let measure = match format {
                "of" => side(measure.of.clone()),
                "against" => side(measure.baseline().ok_or_else(|| format!("`{name}` has no `against`"))?),
                _ => measure.clone(),
            };
            let all = self.machines.values(&measure).map_err(|why| format!("{name}: {why}"))?;
            filled += before;
            filled += &show(&all, format)?;
            rest = after;
        }
        Ok(filled + rest)
    }
}

/// A number with the digits that its size needs.
pub(super) fn ratio(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 0.095 || size == 0.0 => format!("{value:.2}"),
        size if size >= 0.001 => format!("{value:.3}"),
        _ => format!("{value:.0e}"),
    }
}

fn percent(value: f64) -> String {
    if value.abs() < 9.95 { format!("{value:.1}") } else { format!("{value:.0}") }
}

fn show(all: &[Estimate], format: &str) -> Result<String, String> {
    let range = |pick: &dyn Fn(f64) -> f64, write: &dyn Fn(f64) -> String, after: &str| {
        let values: Vec<f64> = all.iter().map(|one| pick(one.value)).collect();
        let least = write(values.iter().copied().fold(f64::INFINITY, f64::min));
        let most = write(values.iter().copied().fold(f64::NEG_INFINITY, f64::max));
        match (all, least == most) {
            ([one], _) => match one.certainty {
                Certainty::Interval(low, high) => {
                    let (a, b) = (write(pick(low).min(pick(high))), write(pick(low).max(pick(high))));
                    match a == least && b == least {
                        true => format!("{least}{after}"),
                        false => format!("{least}{after} ({a}–{b}{})", after.trim_end_matches(" times")),
                    }
                }
                Certainty::Single => format!("{least}{after} (one run)"),
                Certainty::Exact => format!("{least}{after}"),
            },
            (_, true) => format!("{least}{after}"),
            (_, false) => format!("{least} to {most}{after}"),
        }
    };
    let is_ratio = all.first().is_some_and(|one| one.unit == "ratio");
    let factor = |value: f64| if all.iter().all(|one| one.value >= 1.0) { value } else { 1.0 / value };
    let far = |value: f64| {
        if all.iter().all(|one| one.value >= 1.0) { 100.0 * (value - 1.0) } else { 100.0 * (1.0 - value) }
    };
    Ok(match format {
        "groups" => all.len().to_string(),
        "percent" => range(&far, &percent, "\u{a0}%"),
        "share" => range(&|value| 100.0 * value, &percent, "\u{a0}%"),
        "within" => within(all.first().ok_or("no value")?),
        "most" => {
            amounts(&[all.iter().max_by(|a, b| a.value.total_cmp(&b.value)).ok_or("no value")?.clone()])
        }
        "billions" => format!(
            "{} billion",
            unit::grouped(&format!("{:.0}", all.first().ok_or("no value")?.value / 1e9))
        ),
        "times" => range(
            &factor,
            &|value| if value < 2.0 { format!("{value:.2}") } else { format!("{value:.1}") },
            " times",
        ),
        "change" => change(all),
        "" | "of" | "against" if is_ratio && all.len() == 1 => ratio(all[0].value),
        "" | "of" | "against" => amounts(all),
        other => return Err(format!("`{other}` is no format")),
    })
}

fn change(all: &[Estimate]) -> String {
    let [one] = all else {
        let word = if all.iter().all(|one| one.value >= 1.0) { "more" } else { "less" };
        return show(all, "percent").map(|text| format!("{text} {word}")).unwrap_or_default();
    };
    let interval = match one.certainty {
        Certainty::Interval(low, high) => format!("{}–{}", ratio(low), ratio(high)),
        Certainty::Single => "one run".into(),
        Certainty::Exact => "exact".into(),
    };
    let text = show(all, "percent").unwrap_or_default();
    let (number, behind) = text.split_once("\u{a0}%").unwrap_or((&text, ""));
    match one.direction() {
        Direction::Less => format!("{number}\u{a0}% less{behind}"),
        Direction::More => format!("{number}\u{a0}% more{behind}"),
        Direction::Same => format!("as much ({})", within(one)),
        Direction::Unclear => format!("undecided ({} times, {interval})", ratio(one.value)),
    }
}

fn within(one: &Estimate) -> String {
    let (low, high) = match one.certainty {
        Certainty::Interval(low, high) => (low, high),
        _ => (one.value, one.value),
    };
    format!("within {}\u{a0}%", percent(100.0 * (high - 1.0).max(1.0 - low)))
}

fn amounts(all: &[Estimate]) -> String {
    let shown = |one: &Estimate| {
        if one.unit == "ratio" { ratio(one.value) } else { unit::human(one.value, &one.unit) }
    };
    let least = all.iter().min_by(|a, b| a.value.total_cmp(&b.value)).map(shown).unwrap_or_default();
    let most = all.iter().max_by(|a, b| a.value.total_cmp(&b.value)).map(shown).unwrap_or_default();
    match (least.split_once(' '), most.split_once(' ')) {
        _ if least == most => least,
        (Some((number, unit)), Some((_, same))) if unit == same => format!("{number} to {most}"),
        _ => format!("{least} to {most}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn estimate(value: f64, certainty: Certainty) -> Estimate {
        Estimate { value, unit: "ratio".into(), certainty, n: 3 }
    }

    #[test]
    fn the_words_follow_the_interval() {
        let wide = Certainty::Interval(0.9, 1.3);
        for (value, certainty, format, expected) in [
            (1.28, Certainty::Interval(1.26, 1.31), "change", "28 % more (26–31 %)"),
            (0.72, Certainty::Interval(0.69, 0.74), "change", "28 % less (26–31 %)"),
            (1.01, Certainty::Interval(0.99, 1.03), "change", "as much (within 3.0 %)"),
            (1.28, Certainty::Interval(1.279, 1.281), "percent", "28 %"),
            (1.1, wide, "change", "undecided (1.10 times, 0.90–1.30)"),
            (1.1, Certainty::Single, "change", "undecided (1.10 times, one run)"),
            (0.5, Certainty::Exact, "change", "50 % less"),
            (4.3, Certainty::Interval(4.2, 4.4), "times", "4.3 times (4.2–4.4)"),
            (0.25, Certainty::Exact, "times", "4.0 times"),
            (0.25, Certainty::Exact, "share", "25 %"),
        ] {
            assert_eq!(show(&[estimate(value, certainty)], format).unwrap().replace('\u{a0}', " "), expected);
        }
        let two = [estimate(1.26, wide), estimate(1.49, wide)];
        assert_eq!(show(&two, "change").unwrap().replace('\u{a0}', " "), "26 to 49 % more");
        assert_eq!(show(&two, "groups").unwrap(), "2");
        assert!(show(&two, "nope").is_err());
    }
}
