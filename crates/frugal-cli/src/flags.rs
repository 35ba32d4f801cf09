//! The flags that belong to the keys of a configuration.

pub(crate) mod hub;
pub(crate) mod model;
pub(crate) mod no_effect;
pub(crate) mod origins;
pub(crate) mod other_names;
pub(crate) mod rows;
pub(crate) mod sampling;
pub(crate) mod table;
pub(crate) mod tokenizer;
pub(crate) mod unread;
pub(crate) mod values;

use std::path::Path;

use anyhow::bail;
use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};
use frugal::Config;
use frugal::config::{DataConfig, Given, Method, Task};
use frugal::lora::LoraConfig;
use runtime::collectives::Launch;
use serde_json::Value;
use table::{ADAPTERS, COMMON, Flag, OF_NO_STEP, PLAN, ROWS, rows};

use crate::output::shell_command::shell_word;

use values::Takes;

/// The flags of the table that the command line of a command gives, with their values.
#[derive(Clone, Debug, Default)]
pub(crate) struct Flags<const COMMAND: u8>(Vec<(&'static Flag, Value)>);

impl Flag {
    /// The name without its dashes, by which `clap` knows it.
    fn long(&self) -> &'static str {
        self.name.trim_start_matches('-')
    }

    fn argument(&'static self, command: u8) -> Arg {
        let aliases = self.aliases.iter().map(|alias| alias.trim_start_matches('-'));
        let argument = Arg::new(self.long()).long(self.long()).aliases(aliases).help(self.help);
        let argument = (self.relation)(self.takes.argument(argument));
        let argument = argument.hide(command == PLAN && OF_NO_STEP.contains(&self.key));
        // In other commands the flags stand under the heading of their group.
        match command & (ROWS | ADAPTERS) != 0 || self.section.is_empty() {
            true => argument,
            false => argument.help_heading(self.section),
        }
    }

    fn value(&self, matches: &ArgMatches) -> Option<Value> {
        let name = self.long();
        let all = || Some(matches.get_many::<Value>(name)?.cloned().collect());
        match self.takes {
            Takes::Nothing(value) => matches.get_flag(name).then(|| value.parse().ok()).flatten(),
            Takes::One { .. } | Takes::Path { .. } => matches.get_one(name).cloned(),
            Takes::Several { .. } => all().map(Value::Array),
            Takes::List { value, .. } => all().map(value),
        }
    }
}

impl<const COMMAND: u8> Args for Flags<COMMAND> {
    fn augment_args(command: Command) -> Command {
        command.args(rows_of(COMMAND).map(|flag| flag.argument(COMMAND)))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<const COMMAND: u8> FromArgMatches for Flags<COMMAND> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self(rows_of(COMMAND).filter_map(|flag| Some((flag, flag.value(matches)?))).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

fn rows_of(command: u8) -> impl Iterator<Item = &'static Flag> {
    rows().filter(move |flag| flag.commands & command != 0)
}

/// The error of QLoRA, which has no name of its own here.
pub(crate) const QLORA: &str = "a frozen base in four bits (QLoRA) is --method lora with --dtype nf4";

/// The error of flags about offloaded layers where no layer is offloaded.
pub(crate) const WITHOUT_OFFLOAD: &str =
    "--ring and --resident apply to offloaded layers only; give --offload host or --offload file";

impl<const COMMAND: u8> Flags<COMMAND> {
    /// The value of a flag, if it is given.
    pub(crate) fn value(&self, name: &str) -> Option<&Value> {
        self.0.iter().find(|(flag, _)| flag.name == name).map(|(_, value)| value)
    }

    /// The text of a flag, if it is given.
    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        self.value(name)?.as_str()
    }

    /// Whether one of these flags is given.
    pub(crate) fn has(&self, names: &[&str]) -> bool {
        self.0.iter().any(|(flag, _)| names.contains(&flag.name))
    }

    /// Whether a flag of an adapter is given.
    pub(crate) fn has_adapter(&self) -> bool {
        self.0.iter().any(|(flag, _)| flag.key.starts_with("adapter."))
    }

    /// The file of `--config`.
    pub(crate) fn file(&self) -> Option<&Path> {
        self.text("--config").map(Path::new)
    }

    /// The assignments of `--set`.
    fn assignments(&self) -> impl Iterator<Item = &str> {
        self.value("--set").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str)
    }

    /// The keys that `--set` names.
    pub(crate) fn assigned_keys(&self) -> impl Iterator<Item = &str> {
        self.assignments().filter_map(|assignment| Some(assignment.split_once('=')?.0.trim()))
    }

    /// The flags that override keys, with their values.
    fn overrides(&self) -> impl Iterator<Item = &(&'static Flag, Value)> {
        self.0.iter().filter(|(flag, _)| !flag.key.is_empty())
    }

    /// The flag that overrides a key, if one is given.
    pub(crate) fn flag_for(&self, key: &str) -> Option<&'static str> {
        self.overrides().find(|(flag, _)| flag.key == key).map(|(flag, _)| flag.name)
    }

    /// The values of the configuration file and of `--set`.
    ///
    /// # Errors
    /// A file that is no configuration; a key that is unknown.
    pub(crate) fn given(&self) -> anyhow::Result<Given> {
        let mut given = Given::default();
        if let Some(path) = self.file() {
            given.file(path)?;
        }
        for assignment in self.assignments() {
            given.assign(assignment).map_err(|error| anyhow::anyhow!("--set {error}"))?;
        }
        Ok(given)
    }

    /// Takes `--method`, and refuses it beside `--dora` or `--set adapter.use_dora` that says otherwise; over a file's value the flag wins.
    ///
    /// # Errors
    /// Flags that contradict each other; flags of an adapter where all weights are trained.
    pub(crate) fn give_method(&self, given: &mut Given) -> anyhow::Result<()> {
        if self.text("--method") == Some("qlora") {
            bail!(QLORA);
        }
        // A plan for inference trains nothing.
        if let Some(name) = self.text("--method").filter(|name| *name != "inference") {
            let other = match (name, given.assigned_dora()) {
                ("lora", _) if self.has(&["--dora"]) => Some("--dora"),
                ("lora", Some(true)) => Some("--set adapter.use_dora=true"),
                ("dora", Some(false)) => Some("--set adapter.use_dora=false"),
                _ => None,
            };
            if let Some(other) = other {
                bail!("--method {name} and {other} contradict each other; leave one of them out");
            }
            given.set("method", name.into(), "--method")?;
        }
        if given.config(Task::Finetune)?.adapter.is_none() && self.has_adapter() {
            bail!("--method full trains all weights and has no adapter; leave out the adapter's flags");
        }
        Ok(())
    }

    /// The flags as they are typed, but for some.
    pub(crate) fn typed(&self, without: &[&str]) -> Vec<String> {
        let text = |value: &Value| match value {
            Value::String(text) => text.clone(),
            Value::Array(values) => {
                let texts = values
                    .iter()
                    .map(|value| value.as_str().map_or_else(|| value.to_string(), str::to_owned));
                texts.collect::<Vec<_>>().join(",")
            }
            value => value.to_string(),
        };
        let typed = |(flag, value): &(&'static Flag, Value)| match (flag.takes, value) {
            (Takes::Nothing(_), _) => vec![flag.name.to_owned()],
            (Takes::Several { .. }, Value::Array(values)) => {
                values.iter().map(|value| format!("{} {}", flag.name, shell_word(&text(value)))).collect()
            }
            (_, value) => vec![format!("{} {}", flag.name, shell_word(&text(value)))],
        };
        self.0.iter().filter(|(flag, _)| !without.contains(&flag.name)).flat_map(typed).collect()
    }

    /// Overrides what is given by the flags.
    ///
    /// # Errors
    /// Flags of offloaded layers where none is, or of ranks where there are none.
    pub(crate) fn give(&self, given: &mut Given, task: Task) -> anyhow::Result<()> {
        for name in ["--zero-stage", "--replicas", "--sequence-parallel-size"] {
            if self.has(&[name]) && COMMAND & PLAN == 0 && Launch::from_environment()?.is_none() {
                bail!(
                    "{name} applies to training over several ranks only; start it with `frugal launch -n RANKS -- frugal …`"
                );
            }
        }
        if !self.has(&["--offload"]) && given.config(task)?.offload.is_none() {
            if self.has(&["--ring", "--resident"]) {
                bail!(WITHOUT_OFFLOAD);
            }
            if self.has(&["--offload-method"]) {
                bail!(
                    "--offload-method applies to offloaded layers only; give --offload host or --offload file"
                );
            }
        }
        // The two say the same thing: the flag that is given alone counts.
        match (self.has(&["--steps"]), self.has(&["--epochs"])) {
            (true, false) => given.forget("training.epochs"),
            (false, true) => given.forget("training.steps"),
            _ => {}
        }
        self.put(given)
    }

    fn put(&self, given: &mut Given) -> anyhow::Result<()> {
        self.overrides().try_for_each(|(flag, value)| Ok(given.set(flag.key, value.clone(), flag.name)?))
    }

    /// A configuration with what `--set` and the flags override.
    ///
    /// # Errors
    /// A key that is unknown, or a value that is not of its type.
    pub(crate) fn over(&self, config: &Config) -> anyhow::Result<Config> {
        let set = |config: Config, assignment: &str| {
            config.with(assignment).map_err(|error| anyhow::anyhow!("--set {error}"))
        };
        let config = self.assignments().try_fold(config.clone(), set)?;
        let put =
            |config: Config, (flag, value): &(&Flag, Value)| Ok(config.with_value(flag.key, value.clone())?);
        self.overrides().try_fold(config, put)
    }
}

impl Flags<COMMON> {
    /// Overrides what is given by the flags of the whole program.
    ///
    /// # Errors
    /// As [`Given::set`].
    pub(crate) fn give_common(&self, given: &mut Given) -> anyhow::Result<()> {
        self.put(given)
    }
}

impl Flags<ROWS> {
    /// How rows are made, with what the flags override.
    ///
    /// # Errors
    /// As [`Config::with_value`].
    pub(crate) fn data(&self, data: &DataConfig) -> anyhow::Result<DataConfig> {
        Ok(self.over(&Config { data: data.clone(), ..Config::default() })?.data)
    }
}

impl Flags<ADAPTERS> {
    /// The adapter of a fine-tuning of `base`, with what the flags override.
    ///
    /// # Errors
    /// As [`Config::with_value`].
    pub(crate) fn adapter(&self, base: &str) -> anyhow::Result<LoraConfig> {
        let adapter = self.over(&Config::defaults(Task::Finetune, Method::Lora))?.adapter.unwrap_or_default();
        Ok(LoraConfig { base_model_name_or_path: Some(base.to_owned()), ..adapter })
    }
}

/// The key of what is trained, and its flag, which is given before the others.
const METHOD: (&str, &str) = ("method", "--method");

/// The flags that set a key, its usual one first.
pub(crate) fn flags_of(key: &str) -> impl Iterator<Item = &'static str> {
    // A section that is there because of one of its keys is named by that key's flag.
    let key = if key == "offload" { "offload.tier" } else { key };
    let method = (key == METHOD.0).then_some(METHOD.1);
    // `plan` knows a training's flags by their names there, too.
    let named =
        move |by_plan| rows().filter(move |flag| flag.key == key && (flag.commands == PLAN) == by_plan);
    named(false).chain(named(true)).map(|flag| flag.name).chain(method)
}

/// The key that a flag of a training sets.
pub(crate) fn key_of(name: &str) -> Option<&'static str> {
    if name == METHOD.1 {
        return Some(METHOD.0);
    }
    rows().find(|flag| flag.name == name && !flag.key.is_empty()).map(|flag| flag.key)
}

/// The keys that a flag of trainings sets.
#[cfg(test)]
pub(crate) fn keys_of(name: &str) -> Vec<&'static str> {
    let keys = rows().filter(|flag| flag.name == name && !flag.key.is_empty()).map(|flag| flag.key);
    keys.chain((name == METHOD.1).then_some(METHOD.0)).collect()
}

/// Puts the flag behind each key that an error about a configuration names.
pub(crate) fn named(error: anyhow::Error) -> anyhow::Error {
    match error.downcast_ref() {
        Some(frugal::Error::Value { .. } | frugal::Error::Conflict { .. }) => {
            anyhow::Error::msg(with_flags(&error.to_string()))
        }
        // Errors about an adapter's configuration.
        Some(frugal::Error::Runtime(invalid)) if invalid.is_invalid_argument() => {
            anyhow::Error::msg(with_flags(&error.to_string()))
        }
        _ => error,
    }
}

fn with_flags(message: &str) -> String {
    let mut text = String::new();
    for (at, part) in message.split('`').enumerate() {
        // Every second part is between backticks.
        if at % 2 == 0 {
            text += part;
            continue;
        }
        text += &format!("`{part}`");
        let (key, value) = part.split_once(" = ").unwrap_or((part, ""));
        // Errors about an adapter name its keys without their section.
        if let Some(flag) = flags_of(key).chain(flags_of(&format!("adapter.{key}"))).next() {
            text += &format!(" ({})", format!("{flag} {}", value.trim_matches('"')).trim_end());
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_their_flags_behind_them() {
        assert_eq!(with_flags("`training.steps` is 0"), "`training.steps` (--steps) is 0");
        assert_eq!(with_flags("`lora_dropout` is 7"), "`lora_dropout` (--dropout) is 7");
        assert_eq!(
            with_flags("`offload.tier = \"file\"` and `model.freeze`; use `offload`"),
            "`offload.tier = \"file\"` (--offload file) and `model.freeze`; use `offload` (--offload)"
        );
    }
}
