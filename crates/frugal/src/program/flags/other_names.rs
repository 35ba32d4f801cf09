//! What other programs call a flag, for the error about one that a command does not have.

use clap::Command;

/// Names of other programs, and of other commands of this one, with the flag of the same meaning.
const NAMES: [(&str, &str); 32] = [
    ("base-model", "model"),
    ("dataset", "data"),
    ("dataset-name", "data"),
    ("eval-steps", "evaluate-every"),
    ("grad-accum", "accumulation"),
    ("gradient-accumulation", "accumulation"),
    ("gradient-accumulation-steps", "accumulation"),
    ("gradient-checkpointing", "activations"),
    ("learning-rate", "lr"),
    ("length", "max-length"),
    ("limit", "number"),
    ("logging-steps", "log-every"),
    ("lora-alpha", "alpha"),
    ("lora-dropout", "dropout"),
    ("lora-r", "r"),
    ("lora-rank", "r"),
    ("lr-scheduler-type", "schedule"),
    ("max-grad-norm", "clip"),
    ("max-length", "length"),
    ("max-seq-length", "length"),
    ("max-seq-length", "max-length"),
    ("model-name", "model"),
    ("model-name-or-path", "model"),
    ("num-epochs", "epochs"),
    ("number", "limit"),
    ("optim", "optimizer"),
    ("output-dir", "out"),
    ("per-device-train-batch-size", "batch-size"),
    ("save-steps", "checkpoint-every"),
    ("target-modules", "targets"),
    ("warmup-ratio", "warmup"),
    ("warmup-steps", "warmup"),
];

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
    let others = NAMES.iter().filter(|(other, _)| *other == name).map(|(_, own)| *own);
    if let Some(own) = std::iter::once(&*name).chain(others).find_map(own) {
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
