//! The output folder of a training: how far it is, and what to do next.

use std::path::Path;

use frugal::Config;
use frugal::config::{CONFIG_FILE, Task};
use frugal::loss_log::Losses;
use frugal::run_folder::{CHECKPOINTS, LOSSES, RunRecord, State};
use frugal::training::checkpoint;
use serde_json::json;

use super::Line;
use crate::output::shell_command::shell_word;
use frugal::run_folder::MODEL;

/// Whether a folder is the output of a training.
pub(super) fn is_output(folder: &Path) -> bool {
    folder.join(CONFIG_FILE).is_file()
}

pub(crate) fn lines(folder: &Path) -> anyhow::Result<Vec<Line>> {
    let config = Config::read(&folder.join(CONFIG_FILE))?;
    let checkpoints = folder.join(CHECKPOINTS);
    let newest = if checkpoints.is_dir() { checkpoint::newest_state(&checkpoints)? } else { None };
    let step = newest.as_ref().map_or(0, |(step, _)| *step);
    let steps = newest.and_then(|(_, state)| state["steps"].as_u64()).or(config.training.steps);
    let record = RunRecord::read(folder)?;
    let stopped = record.as_ref().is_some_and(|record| record.state(folder) == State::StoppedEarly);
    let finished = stopped || steps.is_some_and(|steps| step >= steps);
    let losses = Losses::read(&folder.join(LOSSES))?;

    let task = match (config.task, &config.adapter) {
        (Task::Train, _) => "training from scratch",
        (Task::Finetune, None) => "fine-tuning of all weights",
        (Task::Finetune, Some(adapter)) if adapter.use_dora => "fine-tuning with DoRA",
        (Task::Finetune, Some(_)) => "fine-tuning with LoRA",
    };
    let of = steps.map_or_else(String::new, |steps| format!(" of {steps}"));
    let state = match (step, finished) {
        (_, true) if stopped => format!("stopped early after {step}{of} steps"),
        (_, true) => format!("finished after {step}{of} steps"),
        (0, false) => "no checkpoint yet".to_owned(),
        (_, false) => format!("step {step}{of} is saved"),
    };
    let status = if finished { "finished" } else { "unfinished" };
    let base = config.model.name.clone().unwrap_or_else(|| {
        config.model.shape.as_ref().map_or("–".into(), |shape| shape.family.name().to_owned())
    });
    let shown = folder.display();
    let word = shell_word(&shown.to_string());
    let model = folder.join(MODEL);
    let next = match (finished, config.task) {
        (false, _) => format!("frugal resume {word}"),
        (true, Task::Finetune) if config.adapter.is_some() => {
            format!("frugal generate --model {word} --prompt TEXT")
        }
        (true, _) if model.is_dir() => format!("frugal generate --model {word} --prompt TEXT"),
        (true, _) => format!("raise training.steps in {shown}/{CONFIG_FILE}, then frugal resume {word}"),
    };
    let loss = |loss: Option<f64>| loss.map_or_else(|| "–".to_owned(), |loss| format!("{loss:.4}"));
    Ok(vec![
        ("training", task.to_owned(), json!(task)),
        ("base", base.clone(), json!(base)),
        ("data", config.data.described(), json!(config.data.described())),
        ("state", state, json!({ "status": status, "step": step, "steps": steps })),
        (
            "loss",
            format!("{} to {}", loss(losses.first), loss(losses.last)),
            json!({ "first": losses.first, "last": losses.last }),
        ),
        ("validation loss", loss(losses.validation), json!(losses.validation)),
        ("next", next.clone(), json!(next)),
    ])
}
