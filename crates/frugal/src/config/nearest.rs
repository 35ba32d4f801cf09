//! The known name that is nearest to an unknown one.

/// Replaces Rust's types in a message of `serde` about a value of another type.
pub(super) fn in_words(message: &str) -> String {
    const TYPES: [(&str, &str); 8] = [
        ("f64", "a number"),
        ("u64", "a whole number from 0"),
        ("usize", "a whole number from 0"),
        ("u32", "a whole number from 0"),
        ("u8", "a whole number from 0"),
        ("i64", "a whole number"),
        ("a boolean", "true or false"),
        ("a string", "a text"),
    ];
    let Some((before, expected)) = message.rsplit_once(", expected ") else { return message.to_owned() };
    match TYPES.iter().find(|(rust, _)| *rust == expected) {
        Some((_, words)) => {
            let found = before.split_once(": ").map_or(before, |(_, found)| found).replace("string ", "");
            format!("expected {words}, found {found}")
        }
        None => message.to_owned(),
    }
}

/// Returns the names that a message of `serde` about an unknown one lists.
pub(super) fn known_names(message: &str) -> Vec<&str> {
    message.split_once(", expected ").map_or_else(Vec::new, |(_, list)| between_backticks(list).collect())
}

/// Appends the nearest of the names that a message of `serde` lists, if one is near: `…; did you mean `steps`?`.
pub(super) fn with_suggestion(message: &str) -> String {
    let suggestion = message.split_once(", expected ").and_then(|(before, list)| {
        let unknown = between_backticks(before).next_back()?;
        before.starts_with("unknown ").then(|| nearest_name(unknown, between_backticks(list)))?
    });
    match suggestion {
        Some(name) => format!("{message}; did you mean `{name}`?"),
        None => message.to_owned(),
    }
}

fn between_backticks(text: &str) -> impl DoubleEndedIterator<Item = &str> {
    // Every second part.
    text.split('`')
        .enumerate()
        .filter(|(at, _)| at % 2 == 1)
        .map(|(_, part)| part)
        .collect::<Vec<_>>()
        .into_iter()
}

/// Returns the name that a typing mistake or two turn into `unknown`.
pub fn nearest_name<'a>(unknown: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let allowed = (unknown.chars().count() / 3).clamp(1, 3);
    let near = names.map(|name| (strsim::damerau_levenshtein(unknown, name), name));
    near.filter(|(distance, name)| *distance <= allowed && *distance < name.chars().count())
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::with_suggestion;

    #[test]
    fn near_names_are_suggested_and_far_ones_are_not() {
        let check = |unknown: &str, expected: &str| {
            let message = format!("unknown field `{unknown}`, expected one of `steps`, `epochs`, `lr`");
            assert_eq!(with_suggestion(&message), format!("{message}{expected}"));
        };
        check("step", "; did you mean `steps`?");
        check("setps", "; did you mean `steps`?");
        check("rl", "; did you mean `lr`?");
        check("epoch", "; did you mean `epochs`?");
        check("budget", "");
        check("x", "");
        assert_eq!(with_suggestion("missing field `scale`"), "missing field `scale`");
        assert_eq!(
            with_suggestion("unknown variant `kep`, expected `keep`"),
            "unknown variant `kep`, expected `keep`; did you mean `keep`?"
        );
    }
}
