//! `frugal runs ls`.

use std::path::{Path, PathBuf};

use accounting::quantity::bytes_text;
use clap::Args;
use serde_json::json;

use super::{DEPTH, Summary, find, loss_text, short_name};
use crate::common_flags::Common;
use crate::output::{print_line, print_text};
use crate::plan::table::table;

#[derive(Args)]
pub(super) struct Ls {
    /// Folders with trainings in or under them [default: .]
    #[arg(value_name = "FOLDER")]
    folders: Vec<PathBuf>,
}

const HEADINGS: [&str; 10] =
    ["run", "model", "method", "steps", "loss", "validation", "best", "peak", "time", "state"];

pub(super) fn run(common: &Common, arguments: &Ls) -> anyhow::Result<()> {
    let mut found = Vec::new();
    if arguments.folders.is_empty() {
        find(Path::new("."), DEPTH, &mut found)?;
    }
    for folder in &arguments.folders {
        find(folder, DEPTH, &mut found)?;
    }
    let mut runs = Vec::new();
    for folder in found {
        match Summary::read(&folder) {
            Ok(summary) => runs.push(summary),
            // One folder that is damaged does not hide the others.
            Err(error) => common.note(&format!("{error:#}")),
        }
    }
    runs.sort_by_key(|run| run.record.starts.first().map_or(0, |start| start.unix_time));
    if runs.is_empty() {
        common.note("no training here; give a folder that has the --out folders of trainings");
    }
    if common.json {
        runs.iter().for_each(print_json);
    } else if !runs.is_empty() {
        print_text(&table(&HEADINGS, &runs.iter().map(row).collect::<Vec<_>>()));
    }
    Ok(())
}

fn print_json(run: &Summary) {
    let Summary { folder, record, losses, state, .. } = run;
    print_line(&json!({
        "run": folder, "model": record.model, "method": record.method, "step": losses.step, "steps": record.steps,
        "first_loss": losses.first, "last_loss": losses.last, "validation_loss": losses.validation,
        "best_validation_loss": losses.best.map(|(loss, _)| loss), "best_step": losses.best.map(|(_, step)| step),
        "peak_bytes": record.outcome.as_ref().map(|outcome| outcome.peak_bytes), "seconds": losses.seconds, "state": state,
        "reason": record.outcome.as_ref().and_then(|outcome| outcome.reason.as_deref()),
    }));
}

fn row(run: &Summary) -> Vec<String> {
    let peak = run.record.outcome.as_ref().map(|outcome| outcome.peak_bytes).filter(|bytes| *bytes > 0);
    let folder = run.folder.strip_prefix(".").ok().filter(|path| !path.as_os_str().is_empty());
    vec![
        folder.unwrap_or(&run.folder).display().to_string(),
        short_name(&run.record.model).to_owned(),
        run.record.method.clone(),
        run.steps(),
        loss_text(run.losses.last),
        loss_text(run.losses.validation),
        run.losses.best.map_or_else(|| "–".to_owned(), |(loss, step)| format!("{loss:.4} at {step}")),
        peak.map_or_else(|| "–".to_owned(), bytes_text),
        run.time(),
        run.state_text(),
    ]
}
