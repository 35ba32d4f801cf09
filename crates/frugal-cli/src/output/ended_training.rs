//! The end of a training as a person or `--json` sees it, when it ends or later.

use std::path::{Path, PathBuf};

use frugal::Config;
use frugal::config::{CONFIG_FILE, Task};
use frugal::lora::peft;
use frugal::loss_log::Losses;
use frugal::models::hugging_face::Folder;
use frugal::models::module::ParameterCount;
use frugal::run_folder::{LOSSES, Outcome, RECORD, RunRecord, State};
use serde_json::json;

use crate::common_flags::Common;
use crate::output::figures::counted;
use crate::output::print_line;
use crate::output::shell_command::more_steps;
use crate::output::shell_command::shell_word;
use crate::output::summary;
use frugal::run_folder::MODEL;

/// A training that ended.
pub(crate) struct Ended<'a> {
    pub(crate) counted: ParameterCount,
    pub(crate) step: u64,
    pub(crate) losses: Losses,
    /// Whether all steps had been done before: a resume of a finished training.
    pub(crate) was_finished: bool,
    pub(crate) outcome: Option<&'a Outcome>,
}

/// By how much more than before the training a validation loss is no chance.
const WORSE: f64 = 0.005;

/// Reports the result of a training, and where the adapter or model is.
pub(crate) fn report(common: &Common, out: Option<&Path>, ended: &Ended<'_>, result: Option<(&str, &Path)>) {
    let &Ended { counted: parameters, step, losses, was_finished, outcome } = ended;
    if common.json {
        let mut line = json!({
            "steps": step, "trainable": parameters.trainable, "parameters": parameters.total, "first_loss": losses.first,
            "last_loss": losses.last, "validation_loss": losses.validation,
        });
        if let Some([first, last]) = losses.rewards {
            (line["first_reward"], line["last_reward"]) = (json!(first), json!(last));
            line["validation_reward"] = json!(losses.validation.map(|loss| -loss));
        }
        if let Some((what, path)) = result {
            line[what] = json!(path);
        }
        for (name, value) in summary::fields(out, outcome) {
            line[name] = value;
        }
        return print_line(&json!({ "result": line }));
    }
    match out.filter(|_| was_finished) {
        Some(out) => common.note(&format!(
                "the training was finished before, after {}; to continue, raise `steps` or `epochs`: in {}, or by {}",
                counted(step, "step"),
                shell_word(&out.join(CONFIG_FILE).display().to_string()),
                more_steps(out)
            ),
        ),
        None => common.note(&summary::losses_text(step, losses)),
    }
    if let Losses { before: Some(before), validation: Some(after), rewards: None, .. } = losses
        && after > before * (1.0 + WORSE)
    {
        common.note("note: the validation loss is higher than before the training; give a lower --lr, fewer --epochs, or more data",
        );
    }
    if let Some((what, path)) = result {
        common.note(&format!("the {what} is in {}", path.display()));
    }
}

/// Reports a run that is finished, with its result written after the record says so: nothing is read or planned for it. False for any
/// other, as one that was killed before it wrote its result; that of a shorter run may be there then.
///
/// # Errors
/// A record that cannot be read.
pub(crate) fn report_finished(common: &Common, out: &Path, config: &Config) -> anyhow::Result<bool> {
    let Some(record) = RunRecord::read(out)? else { return Ok(false) };
    let Some(outcome) = record.outcome.as_ref().filter(|outcome| outcome.state == State::Finished) else {
        return Ok(false);
    };
    let length = serde_json::to_value(config)?["training"].take();
    let is_as_long = ["steps", "epochs"].iter().all(|key| length[key] == record.config["training"][key]);
    let (what, path, file): (_, PathBuf, _) = match (&config.adapter, config.task) {
        (Some(_), _) => ("adapter", out.to_owned(), peft::CONFIG_FILE),
        (None, _) => ("model", out.join(MODEL), "config.json"),
    };
    let written = |path: PathBuf| std::fs::metadata(path).and_then(|metadata| metadata.modified()).ok();
    let is_written = match (written(path.join(file)), written(out.join(RECORD))) {
        (Some(result), Some(record)) => result >= record,
        _ => false,
    };
    // The weights may have been removed since.
    let is_there = match config.adapter {
        Some(_) => path.join(peft::TENSORS_FILE).is_file(),
        None => Folder::open(&path).is_ok(),
    };
    let is_written = is_written && is_there;
    let has_none = config.task == Task::Train && config.model.name.is_none();
    if !is_as_long || !(is_written || has_none) {
        return Ok(false);
    }
    let counted = ParameterCount { trainable: record.trainable, total: record.parameters };
    let losses = Losses::read(&out.join(LOSSES))?;
    let ended = Ended { counted, step: outcome.step, losses, was_finished: true, outcome: Some(outcome) };
    report(common, Some(out), &ended, is_written.then_some((what, path.as_path())));
    Ok(true)
}
