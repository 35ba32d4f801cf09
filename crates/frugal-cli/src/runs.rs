//! `frugal runs`: the output folders of trainings, side by side.

mod diff;
mod ls;
mod show;

use std::path::{Path, PathBuf};

use crate::output::progress_bar::duration;
use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use frugal::Config;
use frugal::config::CONFIG_FILE;
use frugal::loss_log::Losses;
use frugal::run_folder::{BEST, CHECKPOINTS, LOSSES, RunRecord, State};
use frugal::training::checkpoint;

use crate::common_flags::Common;
use frugal::run_folder::MODEL;

#[derive(Args)]
pub(crate) struct Runs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List the training runs under folders
    Ls(ls::Ls),
    /// Describe one run
    Show(show::Show),
    /// Compare the settings, the data and the losses of two runs
    Diff(diff::Diff),
}

pub(crate) fn run(common: &Common, arguments: &Runs) -> anyhow::Result<()> {
    match &arguments.command {
        Command::Ls(arguments) => ls::run(common, arguments),
        Command::Show(arguments) => show::run(common, arguments),
        Command::Diff(arguments) => diff::run(common, arguments),
    }
}

/// The state of a training, read from its output folder.
struct Summary {
    folder: PathBuf,
    config: Config,
    record: RunRecord,
    losses: Losses,
    state: State,
}

impl Summary {
    /// Reads an output folder.
    ///
    /// # Errors
    /// A path that is not a folder.
    fn read(folder: &Path) -> anyhow::Result<Self> {
        if !folder.join(CONFIG_FILE).is_file() {
            let what = if folder.is_dir() { "no config.toml in it" } else { "no such folder" };
            bail!("{}: {what}; give the --out folder of a training", folder.display());
        }
        let config = Config::read(&folder.join(CONFIG_FILE))?;
        let losses = Losses::read(&folder.join(LOSSES))?;
        let (record, state) = match RunRecord::read(folder)? {
            Some(record) => {
                let state = record.state(folder);
                (record, state)
            }
            None => earlier(folder, &config, &losses)?,
        };
        Ok(Self { folder: folder.to_owned(), config, record, losses, state })
    }

    /// Completed steps of all steps.
    fn steps(&self) -> String {
        let done = match (&self.record.outcome, self.state) {
            (Some(outcome), State::Finished | State::StoppedEarly | State::Interrupted | State::Failed) => {
                outcome.step
            }
            _ => self.losses.step,
        };
        format!("{done}/{}", self.record.steps)
    }

    /// Its state; the reason of a failure, where that is recorded.
    fn state_text(&self) -> String {
        let outcome = self.record.outcome.as_ref().filter(|_| self.state == State::Failed);
        match outcome.and_then(|outcome| outcome.reason.as_deref()) {
            Some(reason) => format!("{}: {reason}", self.state.name()),
            None => self.state.name().to_owned(),
        }
    }

    fn time(&self) -> String {
        if self.losses.seconds > 0.0 { duration(self.losses.seconds) } else { "–".to_owned() }
    }
}

/// The record and the state of a folder that an earlier version wrote.
fn earlier(folder: &Path, config: &Config, losses: &Losses) -> anyhow::Result<(RunRecord, State)> {
    let checkpoints = folder.join(CHECKPOINTS);
    let newest = if checkpoints.is_dir() { checkpoint::newest_state(&checkpoints)? } else { None };
    let (step, steps) = match newest {
        Some((step, state)) => (step, state["steps"].as_u64()),
        None => (0, None),
    };
    let steps = steps.or(config.training.steps).unwrap_or(losses.step);
    let state = if step > 0 && step >= steps { State::Finished } else { State::Interrupted };
    let record = RunRecord {
        model: crate::folder::run_record::base(config),
        method: crate::folder::run_record::method(config).to_owned(),
        steps,
        ..RunRecord::default()
    };
    Ok((record, state))
}

/// How deep under a folder trainings are looked for.
const DEPTH: usize = 3;

/// Finds the output folders at and under a folder. What is within one is part of it.
///
/// # Errors
/// A folder that cannot be read.
fn find(folder: &Path, depth: usize, found: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    let config = folder.join(CONFIG_FILE);
    // Other programs have files of this name.
    if config.is_file() && Config::read(&config).is_ok() {
        found.push(folder.to_owned());
        return Ok(());
    }
    if depth == 0 {
        return Ok(());
    }
    if !folder.is_dir() {
        bail!(
            "{}: there is no such folder; give one that has the --out folders of trainings",
            folder.display()
        );
    }
    let entries = std::fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let mut inner: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    inner.sort();
    for path in inner {
        let is_hidden = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
        // A folder that may not be read has no training to show, and a link may lead back.
        if !is_hidden && path.is_dir() && !path.is_symlink() {
            let _ = find(&path, depth - 1, found);
        }
    }
    Ok(())
}

/// A loss as text.
fn loss_text(loss: Option<f64>) -> String {
    loss.map_or_else(|| "–".to_owned(), |loss| format!("{loss:.4}"))
}

/// The last part of a model's name or path, with the folder of the run before it where a run made the model.
fn short_name(model: &str) -> &str {
    let model = model.trim_end_matches('/');
    let last = model.rsplit('/').next().unwrap_or(model);
    let before = model.strip_suffix(last).unwrap_or_default().trim_end_matches('/');
    match before.rsplit('/').next() {
        Some(run) if [MODEL, BEST].contains(&last) => &model[before.len() - run.len()..],
        _ => last,
    }
}

#[cfg(test)]
mod tests {
    use super::short_name;

    #[test]
    fn a_model_of_a_run_is_shown_with_the_run() {
        let shown = ["Qwen/Qwen2.5-0.5B", "/a/b/", "x", "new/my full/model", "run/best/", "model", "/model"]
            .map(short_name);
        assert_eq!(shown, ["Qwen2.5-0.5B", "b", "x", "my full/model", "run/best", "model", "/model"]);
    }
}
