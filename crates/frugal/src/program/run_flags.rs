//! The flags of a run as a person follows it, and where the values of its configuration come from.

use std::path::Path;
use std::sync::Arc;

use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command};
use frugal::Config;
use frugal::run_folder::RunRecord;
use frugal::run_folder::origins::{Origins, values};
use serde_json::Value;

use super::Common;
use super::flags::flags_of;
use super::settings::{DATA, SettingsArgs, put, put_some};

const RUN: &str = "Run";

#[derive(Args, Clone, Debug, Default)]
pub(crate) struct RunArgs {
    /// Set a value of the configuration by its key, such as optimizer.lr=1e-4; may be given several times. Overrides the file, and is
    /// overridden by flags
    #[arg(long, value_name = "KEY=VALUE", help_heading = RUN)]
    set: Vec<String>,
    /// Stop after N evaluations in a row that are no better than the best [default: make all steps]
    #[arg(long, value_name = "N", help_heading = RUN)]
    patience: Option<u64>,
    /// Skip the evaluation before the first step
    #[arg(long, help_heading = RUN)]
    no_baseline: bool,
    /// Number of validation rows whose answers before and after are shown at the end; 0 for none [default: 5]
    #[arg(long, value_name = "N", help_heading = RUN)]
    samples: Option<usize>,
    /// Share of the rows to hold out for validation where the data has no validation split: 1 row at least and 1,000 at most, none of
    /// fewer than 50; 0 for none [default: 0.02]
    #[arg(long, value_name = "SHARE", help_heading = DATA)]
    held_out: Option<f64>,
}

impl RunArgs {
    /// The configuration with the values that `--set` names.
    ///
    /// # Errors
    /// A key that is unknown, or a value that is not of its type.
    pub(crate) fn set(&self, config: Config) -> anyhow::Result<Config> {
        self.set.iter().try_fold(config, |config, assignment| {
            config.with(assignment).map_err(|error| anyhow::anyhow!("--set {error}"))
        })
    }

    /// Overrides the configuration's values by the flags that were given.
    pub(crate) fn apply(&self, config: &mut Config) {
        let training = &mut config.training;
        put_some(&mut training.patience, self.patience);
        put(&mut training.samples, self.samples);
        training.baseline &= !self.no_baseline;
        put(&mut config.data.held_out, self.held_out);
    }

    /// The keys that `--set` names.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &str> {
        self.set.iter().filter_map(|assignment| Some(assignment.split_once('=')?.0.trim()))
    }
}

/// The long names of the flags that the command line gives.
pub(crate) fn given(command: &Command, matches: &ArgMatches) -> Vec<String> {
    let mut names = Vec::new();
    let (mut command, mut matches) = (command, matches);
    loop {
        let is_given = |id: &str| matches.value_source(id) == Some(ValueSource::CommandLine);
        let arguments = command.get_arguments().filter(|argument| is_given(argument.get_id().as_str()));
        names.extend(arguments.filter_map(|argument| Some(format!("--{}", argument.get_long()?))));
        let next =
            matches.subcommand().and_then(|(name, inner)| Some((command.find_subcommand(name)?, inner)));
        match next {
            Some(next) => (command, matches) = next,
            None => return names,
        }
    }
}

/// Where the values of a configuration come from: the file, `--set`, or a flag; the other ones are defaults.
///
/// # Errors
/// A file that is no configuration.
pub(crate) fn origins(config: &Config, settings: &SettingsArgs, given: &[String]) -> anyhow::Result<Origins> {
    let SettingsArgs { config: file, run: set, .. } = settings;
    let mut origins = Origins::default();
    if let Some(path) = file {
        let table: toml::Table = std::fs::read_to_string(path)?.parse()?;
        let origin = format!("file {}", path.display());
        keys(&serde_json::to_value(table)?, "", &mut |key| origins.set(key, &origin));
    }
    set.keys().for_each(|key| origins.set(key, "--set"));
    for (key, _) in values(config)? {
        if let Some(flag) = flags_of(&key).find(|flag| given.iter().any(|one| one == flag)) {
            origins.set(&key, flag);
        }
    }
    Ok(origins)
}

/// Passes the keys of values.
fn keys(value: &Value, prefix: &str, each: &mut dyn FnMut(&str)) {
    match value {
        Value::Object(fields) => fields.iter().for_each(|(key, value)| {
            let key = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
            keys(value, &key, each);
        }),
        _ => each(prefix),
    }
}

/// Where the values of a resumed training come from: as before, but for those that `config.toml`, `--set` or a flag has changed since.
///
/// # Errors
/// A configuration that cannot be expressed.
pub(crate) fn origins_of_resume(
    config: &Config,
    record: Option<&RunRecord>,
    set: &RunArgs,
    given: &[String],
) -> anyhow::Result<Origins> {
    let before: Vec<(String, Value)> = match record {
        Some(record) => serde_json::from_value::<Config>(record.config.clone())
            .ok()
            .and_then(|config| values(&config).ok())
            .unwrap_or_default(),
        None => Vec::new(),
    };
    let mut origins = record.map(|record| record.origins.clone()).unwrap_or_default();
    for (key, value) in values(config)? {
        let is_new = !before.contains(&(key.clone(), value));
        if let Some(flag) = flags_of(&key).find(|flag| given.iter().any(|one| one == flag)) {
            origins.set(&key, flag);
        } else if set.keys().any(|one| one == key) {
            origins.set(&key, "--set");
        } else if is_new && record.is_some() {
            origins.set(&key, "config.toml, edited");
        }
    }
    Ok(origins)
}

/// The common flags of a training with the origins of its configuration, and the record that lies beside the file it was read from.
///
/// # Errors
/// Those of [`origins`].
pub(crate) fn with_origins(
    common: &Common,
    config: &Config,
    settings: &SettingsArgs,
) -> anyhow::Result<Common> {
    let origins = origins(config, settings, &common.given)?;
    let folder = settings.config.as_deref().and_then(Path::parent);
    // Another program's file of this name is none.
    let earlier = folder.and_then(|folder| RunRecord::read(folder).ok().flatten()).map(Arc::new);
    Ok(Common { origins, earlier, ..common.clone() })
}
