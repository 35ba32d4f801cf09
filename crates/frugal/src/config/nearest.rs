//! The known name that is nearest to an unknown one.

/// Appends the nearest of the names that a message of `serde` lists, if one is near: `…; did you mean `steps`?`.
pub(super) fn with_suggestion(message: &str) -> String {
    let suggestion = message.split_once(", expected ").and_then(|(before, list)| {
        let unknown = between_backticks(before).next_back()?;
        before.starts_with("unknown ").then(|| nearest(unknown, between_backticks(list)))?
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
fn nearest<'a>(unknown: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
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
