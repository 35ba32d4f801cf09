//! What other programs call a flag, for the error about one that a command does not have.

use clap::Command;

use crate::flags::table::rows;

/// Names in other commands of this program, and of flags that override no key, with the flag of the same meaning.
const NAMES: [(&str, &str); 5] = [
    ("length", "max-length"),
    ("limit", "number"),
    ("max-length", "length"),
    ("number", "limit"),
    ("output-dir", "out"),
];

/// The flags that have this other name.
fn flags_named(name: &str) -> impl Iterator<Item = &str> {
    let of_table = rows().filter(move |flag| {
        let mut names = flag.aliases.iter().chain(flag.others);
        names.any(|other| other.trim_start_matches('-') == name)
    });
    let of_table = of_table.map(|flag| flag.name.trim_start_matches('-'));
    of_table.chain(NAMES.iter().filter(move |(other, _)| *other == name).map(|(_, flag)| *flag))
}

/// Returns the remedy for a flag that the command of a command line does not have; `None` if it knows nothing of that meaning.
pub(crate) fn remedy<'w>(
    program: &Command,
    words: impl IntoIterator<Item = &'w str>,
    flag: &str,
) -> Option<String> {
    let (mut command, mut path) = (program, program.get_name().to_owned());
    for word in words {
        if let Some(inner) = command.find_subcommand(word) {
            (command, path) = (inner, format!("{path} {}", inner.get_name()));
        }
    }
    let name = flag.split('=').next()?.strip_prefix("--")?.replace('_', "-");
    let own = |name: &str| {
        let mut all = command.get_arguments().chain(program.get_arguments());
        let is_it = |argument: &&clap::Arg| {
            argument.get_long() == Some(name)
                || argument.get_all_aliases().is_some_and(|aliases| aliases.contains(&name))
        };
        all.find(is_it)?.get_long().map(str::to_owned)
    };
    if let Some(own) = std::iter::once(&*name).chain(flags_named(&name)).find_map(own) {
        return Some(format!("`{path}` calls it `--{own}`"));
    }
    let words = name.to_uppercase();
    let positional = command.get_positionals().find_map(|argument| {
        let value = argument.get_value_names()?.first()?;
        value.split('_').any(|word| word == words).then_some(value)
    });
    positional.map(|value| format!("`{path}` takes it without a flag: `{path} {value}`"))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::remedy;

    #[test]
    fn flags_of_other_programs_have_their_own_beside_them() {
        let program = crate::Cli::command();
        for (words, flag, expected) in [
            ("finetune", "--lora_r", Some("`frugal finetune` calls it `--r`")),
            ("plan", "--gradient-accumulation-steps", Some("`frugal plan` calls it `--accumulation`")),
            ("--quiet data show x", "--limit", Some("`frugal data show` calls it `--number`")),
            ("chat", "--model", Some("`frugal chat` takes it without a flag: `frugal chat FOLDER_OR_MODEL`")),
            ("chat x", "--max_new_tokens=3", Some("`frugal chat` calls it `--max-new-tokens`")),
            (
                "data stats",
                "--data",
                Some("`frugal data stats` takes it without a flag: `frugal data stats DATA`"),
            ),
            ("chat", "--lr", None),
            ("finetune", "--frobnicate", None),
        ] {
            assert_eq!(remedy(&program, words.split(' '), flag).as_deref(), expected, "{words} {flag}");
        }
    }
}
