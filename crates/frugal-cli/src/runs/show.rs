//! `frugal runs show`: prints the state, losses, memory, data, commands and versions of one training.

use std::path::PathBuf;

use accounting::quantity::bytes_text;
use clap::Args;
use frugal::run_folder::{PAGE, State};
use serde_json::json;

use super::Summary;
use crate::common_flags::Common;
use crate::folder::best_weights::best_evaluation;
use crate::info::training;
use crate::output::figures::{counted, share};
use crate::output::print_fields;

#[derive(Args)]
pub(super) struct Show {
    /// The output folder of a training
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
}

pub(super) fn run(common: &Common, arguments: &Show) -> anyhow::Result<()> {
    let folder = &arguments.folder;
    let run = Summary::read(folder)?;
    let record = &run.record;
    let mut lines = training::lines(folder)?;
    // The next command is the last of these lines; it is printed after the lines that are added here.
    let next = lines.pop();
    lines.push(("time", run.time(), json!(run.losses.seconds)));
    if let Some(best) = best_evaluation(folder) {
        let text = format!(
            "validation loss {:.4} at step {}, in {}",
            best.loss,
            best.step,
            folder.join(frugal::run_folder::BEST).display()
        );
        lines.push(("best", text, json!(best)));
    }
    if record.parameters > 0 {
        lines.push((
            "trained parameters",
            share(record.trainable, record.parameters),
            json!(record.trainable),
        ));
    }
    if run.state == State::Failed {
        let reason = record.outcome.as_ref().and_then(|outcome| outcome.reason.as_deref());
        lines.push(("ended", run.state_text(), json!({ "state": run.state, "reason": reason })));
    }
    if let Some(outcome) = record.outcome.as_ref().filter(|outcome| outcome.peak_bytes > 0) {
        lines.push(("peak memory", bytes_text(outcome.peak_bytes), json!(outcome.peak_bytes)));
    }
    // The data: the number of rows, and each file with its digest.
    for (name, split) in [("training data", &record.train), ("validation data", &record.validation)] {
        let files = split.files.iter().map(|file| {
            let digest =
                file.sha256.as_deref().map_or_else(String::new, |digest| format!(" (SHA-256 {digest:.12}…)"));
            format!("{}{digest}", file.path.display())
        });
        let rows = (split.rows > 0).then(|| counted(split.rows as u64, "row"));
        let text: Vec<String> = rows.into_iter().chain(files).collect();
        if !text.is_empty() {
            lines.push((name, text.join(", "), serde_json::to_value(split)?));
        }
    }
    // A run record without starts has neither commands nor versions nor a page.
    if !record.starts.is_empty() {
        let commands: Vec<&str> = record.starts.iter().map(|start| start.command.as_str()).collect();
        lines.push(("started with", commands.join("; "), serde_json::to_value(&record.starts)?));
        let versions = format!("frugal {}, libtorch {}", record.frugal, record.torch);
        lines.push(("versions", versions, json!({ "frugal": record.frugal, "torch": record.torch })));
        lines.push(("page", folder.join(PAGE).display().to_string(), json!(folder.join(PAGE))));
    }
    lines.extend(next);
    print_fields(common.json, lines);
    Ok(())
}
