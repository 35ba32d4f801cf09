//! Alternatives of a pattern that match nothing.
//!
//! In `.*(q_proj|vv_proj)` the second alternative adapts nothing, and the pattern as a whole matches. Each alternative is put in place of its
//! group, and the one that it is within in place of each group around it: if the pattern then matches no name, the alternative is without
//! effect.

use std::ops::Range;

use models::DecoderConfig;

use crate::config::{LoraConfig, Names};
use crate::error::Result;
use crate::matches::nearest;
use crate::targets::{EMBEDDING, compile, is_all_linear, projections};

/// An alternative of `target_modules` that matches none of a model's projections.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnmatchedAlternative {
    /// The alternative.
    pub alternative: String,
    /// The last part of the projection with the nearest name, if one is near.
    pub nearest: Option<String>,
}

impl LoraConfig {
    /// Returns the alternatives of the pattern in `target_modules`, at its top level and in its groups, with which it matches no projection
    /// of the model; none for a list of names.
    ///
    /// # Errors
    /// An invalid regular expression.
    pub fn unmatched_alternatives(&self, model: &DecoderConfig) -> Result<Vec<UnmatchedAlternative>> {
        let Some(Names::Pattern(pattern)) = &self.target_modules else { return Ok(Vec::new()) };
        if is_all_linear(pattern) {
            return Ok(Vec::new());
        }
        compile(pattern, &format!("^(?:{pattern})$"))?;
        let names: Vec<String> =
            projections(model).into_iter().map(|(name, _)| name).chain([EMBEDDING.to_owned()]).collect();
        let mut unmatched: Vec<Range<usize>> = Vec::new();
        let groups = groups(pattern);
        for group in groups.iter().filter(|group| group.alternatives.len() > 1) {
            if unmatched.iter().any(|outer| contains(outer, &group.content)) {
                continue;
            }
            for one in &group.alternatives {
                let alone = alone(pattern, &groups, group, one);
                // A part of a pattern that is no pattern by itself is ignored.
                let is_without = compile(&alone, &format!("^(?:{alone})$"))
                    .is_ok_and(|alone| !names.iter().any(|name| alone.is_match(name)));
                if is_without {
                    unmatched.push(one.clone());
                }
            }
        }
        let last_parts = || names.iter().filter_map(|name| name.rsplit('.').next());
        Ok(unmatched
            .into_iter()
            .map(|range| {
                let alternative = pattern[range].to_owned();
                let nearest = nearest(&alternative, last_parts()).map(str::to_owned);
                UnmatchedAlternative { alternative, nearest }
            })
            .collect())
    }
}

/// A group of a pattern, or the pattern as a whole: its content and the alternatives in it.
struct Group {
    content: Range<usize>,
    alternatives: Vec<Range<usize>>,
}

fn contains(outer: &Range<usize>, inner: &Range<usize>) -> bool {
    outer.start <= inner.start && inner.end <= outer.end
}

/// Returns the pattern with this alternative of a group and no other, also not of the groups around it.
fn alone(pattern: &str, groups: &[Group], group: &Group, one: &Range<usize>) -> String {
    let (mut before, mut after, mut rest) = (String::new(), String::new(), 0..pattern.len());
    for outer in groups.iter().filter(|outer| contains(&outer.content, &group.content)) {
        before += &pattern[rest.start..outer.content.start];
        after = pattern[outer.content.end..rest.end].to_owned() + &after;
        rest = match outer.content == group.content {
            true => one.clone(),
            false => {
                let chosen =
                    outer.alternatives.iter().find(|alternative| contains(alternative, &group.content));
                chosen.unwrap_or(&outer.content).clone()
            }
        };
    }
    before + &pattern[rest] + &after
}

/// Returns the pattern and its groups, the outer ones before those within them. The pattern is valid.
fn groups(pattern: &str) -> Vec<Group> {
    let group =
        |start: usize| Group { content: start..start, alternatives: std::iter::once(start..start).collect() };
    let mut groups = vec![group(0)];
    let (mut open, mut classes) = (vec![0], 0_usize);
    let mut characters = pattern.char_indices().peekable();
    while let Some((at, character)) = characters.next() {
        let innermost = &mut groups[*open.last().unwrap_or(&0)];
        match character {
            '\\' => drop(characters.next()),
            '[' => {
                classes += 1;
                // A bracket that begins a class is one of its characters.
                characters.next_if(|(_, next)| *next == '^');
                characters.next_if(|(_, next)| *next == ']');
            }
            ']' => classes = classes.saturating_sub(1),
            _ if classes > 0 => {}
            '|' => {
                end(innermost, at);
                innermost.alternatives.push(at + 1..at + 1);
            }
            '(' => {
                // Before it a look around, a name or flags: `(?!`, `(?<=`, `(?P<name>`, `(?:`, `(?i:`; `(?i)` has no content.
                if characters.next_if(|(_, next)| *next == '?').is_some() {
                    let has_angle = characters.next_if(|(_, next)| *next == '<').is_some();
                    let is_short = |next: char| "=!".contains(next) || (!has_angle && ":>".contains(next));
                    if characters.next_if(|(_, next)| is_short(*next)).is_none() {
                        while characters.next_if(|(_, next)| !":>)".contains(*next)).is_some() {}
                        characters.next_if(|(_, next)| *next != ')');
                    }
                }
                let start = characters.peek().map_or(pattern.len(), |(at, _)| *at);
                open.push(groups.len());
                groups.push(group(start));
            }
            ')' => {
                end(innermost, at);
                open.pop();
            }
            _ => {}
        }
    }
    end(&mut groups[0], pattern.len());
    groups
}

/// Ends the last alternative of a group, and with it the content so far.
fn end(group: &mut Group, at: usize) {
    group.content.end = at;
    if let Some(last) = group.alternatives.last_mut() {
        last.end = at;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alternatives_without_effect_are_named() {
        let model = DecoderConfig { num_key_value_heads: 2, ..DecoderConfig::llama(100, 16, 40, 2, 4) };
        let unmatched = |pattern: &str| -> Vec<String> {
            let target_modules = Some(Names::Pattern(pattern.to_owned()));
            let config = LoraConfig { target_modules, ..LoraConfig::default() };
            let unmatched = config.unmatched_alternatives(&model).unwrap();
            unmatched
                .into_iter()
                .map(|one| format!("{}>{}", one.alternative, one.nearest.unwrap_or_default()))
                .collect()
        };
        let none: [&str; 0] = [];
        for (pattern, expected) in [
            (r".*(q_proj|vv_proj)", &["vv_proj>v_proj"][..]),
            (r".*q_proj|.*\.dwon_proj", &[r".*\.dwon_proj>"]),
            (r"model\.layers\.(0|7)\.(self_attn|mlp)\.(?:q_proj|(?P<m>up_proj|x))", &["7>", "x>"]),
            // What is within an alternative without effect is not named again.
            (r".*(q_proj|(a|b))", &["(a|b)>"]),
            (r".*[(|]?(q|v)_proj", &none),
            (r".*\(?\|?(q|v)_proj", &none),
            (r"(?i).*(Q_PROJ|V_PROJ)", &none),
            (r"(?i:.*(Q_PROJ|W_PROJ))", &["W_PROJ>"]),
            (r".*[^]|]_proj", &none),
            (r".*\.(x|y)?(q|v)_proj", &none),
            (r".*_proj", &none),
            (r"(?=(model\.layers\.1\.|x)).*(q_proj|zz)", &["x>", "zz>"]),
            (r".*(?!x|y)(?<w>q_proj|zz)", &["zz>"]),
            ("all-linear", &none),
        ] {
            assert_eq!(unmatched(pattern), expected, "{pattern}");
        }
    }
}
