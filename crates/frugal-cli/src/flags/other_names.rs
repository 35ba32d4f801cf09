//! Names of flags in other programs, for errors about unknown flags.

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

/// Switches of other programs, with the flags and values of the same meaning.
const SWITCHES: [(&str, &str); 5] = [
    ("bf16", "--dtype bfloat16 for the weights, --precision bf16 for autocast"),
    ("fp16", "--dtype float16 for the weights, --precision fp16 for autocast"),
    ("fp32", "--dtype float32"),
    ("load-in-4bit", "--dtype nf4 with --method lora"),
    ("qlora", "--dtype nf4 with --method lora"),
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
    if !flag.starts_with("--") {
        let letter = flag.strip_prefix('-')?;
        let visible = command.get_arguments().filter(|argument| !argument.is_hide_set());
        let longs = visible.filter_map(clap::Arg::get_long).filter(|long| long.starts_with(letter));
        let longs: Vec<String> = longs.map(|long| format!("--{long}")).collect();
        return Some(match longs.is_empty() {
            true => format!("see `{path} --help`"),
            false => format!("`{path}` has {}", longs.join(", ")),
        });
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
    let has_dtype = own("dtype").is_some();
    if let Some((_, flags)) = SWITCHES.iter().find(|(switch, _)| has_dtype && *switch == name) {
        return Some(format!("`{path}` has {flags}"));
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
            (
                "finetune",
                "--bf16",
                Some("`frugal finetune` has --dtype bfloat16 for the weights, --precision bf16 for autocast"),
            ),
            ("plan", "--load-in-4bit", Some("`frugal plan` has --dtype nf4 with --method lora")),
            ("launch", "--bf16", None),
            ("merge", "-m", Some("`frugal merge` has --model, --max-shard-bytes")),
            ("merge", "-z", Some("see `frugal merge --help`")),
            ("chat", "--lr", None),
            ("finetune", "--frobnicate", None),
        ] {
            assert_eq!(remedy(&program, words.split(' '), flag).as_deref(), expected, "{words} {flag}");
        }
    }
}
