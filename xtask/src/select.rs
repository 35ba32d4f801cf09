//! `--only`: selects experiments and comparisons by name.

use anyhow::Result;

/// Returns the entries that `only` names, or all if it names none; an unknown name is an error that lists the known ones.
pub(crate) fn select<'a, T>(
    what: &str,
    all: &'a [T],
    name: impl Fn(&T) -> &str,
    only: &[String],
) -> Result<Vec<&'a T>> {
    let known: Vec<&str> = all.iter().map(&name).collect();
    if let Some(unknown) = only.iter().find(|wanted| !known.contains(&wanted.as_str())) {
        let listed = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        anyhow::bail!("there is no {what} `{unknown}`; there are: {listed}");
    }
    Ok(all
        .iter()
        .filter(|entry| only.is_empty() || only.iter().any(|wanted| wanted == name(entry)))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_exist_are_taken() {
        let all = ["amp", "lora", "offload"];
        let select = |only: &[&str]| {
            let only: Vec<String> = only.iter().map(|&name| name.to_owned()).collect();
            select("experiment", &all, |name| name, &only)
                .map(|taken| taken.into_iter().copied().collect::<Vec<_>>())
        };
        assert_eq!(select(&[]).unwrap(), all);
        assert_eq!(select(&["offload", "amp"]).unwrap(), ["amp", "offload"]);
        let message = select(&["amp", "lorra"]).unwrap_err().to_string();
        assert_eq!(message, "there is no experiment `lorra`; there are: amp, lora, offload");
    }
}
