//! Candidates as text and as JSON.

use accounting::candidates::{Candidate, SearchResult};
use accounting::quantity::{bytes_text, grouped};
use frugal::planning::{self, Budget};
use serde_json::{Value, json};

use super::{Prediction, budget_text};
use crate::output::figures::{counted, duration};

/// The columns of a table of candidates.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Columns {
    /// Whether the times are those of this machine.
    pub(crate) is_timed: bool,
    /// Steps of an epoch, if an epoch ends.
    pub(crate) epoch: Option<f64>,
}

/// A line for each candidate, the one that takes the most first. `shown_bytes` returns the bytes that are shown for those of its tensors.
pub(crate) fn candidates_table(
    result: &SearchResult,
    columns: Columns,
    shown_bytes: &dyn Fn(u64) -> u64,
) -> String {
    let Columns { is_timed, epoch } = columns;
    let mut header = vec!["  plan".to_owned(), "peak".to_owned()];
    if is_timed {
        header.push("step".to_owned());
        header.extend(epoch.map(|_| "epoch".to_owned()));
    }
    let mut rows = vec![header];
    let mut notes = vec![String::new()];
    for (number, candidate) in result.candidates.iter().enumerate() {
        let is_chosen = result.chosen == Some(number);
        let mark = if is_chosen { "▸" } else { " " };
        let mut row =
            vec![format!("{mark} {}", candidate.name()), bytes_text(shown_bytes(candidate.peak.total))];
        if is_timed {
            row.push(duration(candidate.seconds));
            row.extend(epoch.map(|steps| duration(candidate.seconds * steps)));
        }
        rows.push(row);
        notes.push(match candidate.device_bytes().checked_sub(result.budget.device) {
            Some(excess) if excess > 0 => format!("does not fit: {} too much", bytes_text(excess)),
            _ if !result.fits(candidate) => "does not fit the host".to_owned(),
            _ if is_chosen => "chosen: the fastest that fits".to_owned(),
            _ => String::new(),
        });
    }
    let widths: Vec<usize> = (0..rows[0].len())
        .map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0))
        .collect();
    let line = |(row, note): (&Vec<String>, &String)| {
        let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, width))| {
            let space = " ".repeat(width - cell.chars().count());
            if column == 0 { format!("{cell}{space}") } else { format!("{space}{cell}") }
        });
        let text = cells.chain([note.clone()]).collect::<Vec<_>>().join("  ");
        text.trim_end().to_owned() + "\n"
    };
    rows.iter().zip(&notes).map(line).collect()
}

/// Candidates for programs. Bytes are those of tensors.
pub(crate) fn candidates_json(result: &SearchResult, columns: Columns) -> Vec<Value> {
    let variant = |candidate: &Candidate| {
        let parts = candidate.peak.parts.iter();
        json!({
            "variant": candidate.name(),
            "peak_bytes": candidate.peak.total,
            "host_bytes": candidate.host_bytes,
            "step_seconds": columns.is_timed.then_some(candidate.seconds),
            "epoch_seconds": columns.epoch.filter(|_| columns.is_timed).map(|steps| steps * candidate.seconds),
            "fits": result.fits(candidate),
            "rows_at_once": candidate.rows,
            "same_bits": candidate.keeps_bits(),
            "at_the_peak": candidate.peak.moment.to_string(),
            "parts": parts.map(|part| json!({ "what": part.name, "bytes": part.bytes })).collect::<Vec<_>>(),
        })
    };
    result.candidates.iter().map(variant).collect()
}

impl Prediction {
    /// Steps of an epoch, if an epoch ends.
    pub(super) fn steps_of_an_epoch(&self) -> Option<f64> {
        let batches = self.data.epoch? as f64;
        Some(batches / self.job.accumulation.max(1) as f64)
    }

    fn columns(&self) -> Columns {
        Columns { is_timed: self.is_timed, epoch: self.steps_of_an_epoch() }
    }

    /// The plan for people.
    pub(super) fn text(&self, budget: Budget) -> String {
        let held = |tensors: u64| budget.held_with(tensors);
        let of_each = if self.job.ranks.is_some() { " of each rank" } else { "" };
        let mut text = format!(
            "budget {}{of_each}; peaks include {} for the program and a reserve of {} %, at least {}, for short-lived allocations\n",
            budget_text(&budget),
            bytes_text(budget.program()),
            100.0 * planning::RESERVE,
            bytes_text(planning::LEAST_RESERVE)
        );
        text += &candidates_table(&self.result, self.columns(), &held);
        let Some(chosen) = self.result.chosen() else { return text };
        if let Some((number, batch)) = self.data.largest.get(chosen.batch) {
            let work = batch.work;
            text += &format!(
                "the peak is in the {}, batch {} ({} × {} positions): {}\n",
                chosen.peak.moment,
                grouped(u128::from(*number) + 1),
                work.batch,
                work.sequence,
                chosen.peak.summary(),
            );
        }
        let most_rows = self.data.evaluations.first().map(|(rows, _)| *rows);
        if let Some((rows, evaluation)) = self
            .evaluation
            .as_ref()
            .filter(|(rows, own)| own.total > chosen.peak.total || Some(*rows) != most_rows)
        {
            let fewer = match most_rows {
                Some(most) if *rows < most => format!(" with {} at a time", counted(*rows as u64, "row")),
                _ => String::new(),
            };
            text += &format!(
                "an evaluation{fewer} takes {} in the {}: {}\n",
                bytes_text(held(evaluation.total)),
                evaluation.moment,
                evaluation.summary()
            );
        }
        let seconds = |one: &Candidate| {
            if self.is_timed { format!(", {} a step", duration(one.seconds)) } else { String::new() }
        };
        let other = |one: &Candidate| format!("{}{}", one.name(), seconds(one));
        // What is advised has the margin of a least budget: what a process takes differs from run to run.
        let enough = |one: &Candidate| budget.for_tensors(one.device_bytes());
        for (name, one) in [("more memory", self.result.faster()), ("less memory", self.result.cheaper())] {
            let Some(one) = one else { continue };
            let flag = match (name == "less memory") == (enough(one) < budget.total) {
                true => format!("; --budget {}MiB takes it", enough(one) >> 20),
                false => String::new(),
            };
            text += &format!("{name}, {}: {}{flag}\n", bytes_text(held(one.peak.total)), other(one));
        }
        text
    }

    /// The plan for programs.
    pub(super) fn json(&self, budget: Budget) -> Value {
        let chosen = self.result.chosen();
        let batch = chosen.and_then(|chosen| self.data.largest.get(chosen.batch));
        json!({
            "budget_bytes": budget.total,
            "budget_is_default": budget.is_default,
            "tensor_bytes": budget.tensors(),
            "variants": candidates_json(&self.result, self.columns()),
            "chosen": chosen.map(Candidate::name),
            "peak_bytes": chosen.map(|chosen| chosen.peak.total),
            "largest_batch": batch.map(|(number, batch)| json!({
                "number": number + 1, "rows": batch.work.batch, "positions": batch.work.sequence,
                "labelled": batch.labelled,
            })),
            "evaluation_rows_at_once": self.evaluation.as_ref().map(|(rows, _)| rows),
            "evaluation_peak_bytes": self.evaluation.as_ref().map(|(_, own)| own.total),
            "with_more_memory": self.result.faster().map(Candidate::name),
            "with_less_memory": self.result.cheaper().map(Candidate::name),
        })
    }
}
