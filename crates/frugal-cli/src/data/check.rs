//! `frugal data check`.

use std::ops::ControlFlow;

use anyhow::bail;
use clap::Args;
use frugal::rows::{Counts, Found};
use serde_json::json;

use super::SourceArgs;
use super::findings::{Duplicates, OtherFormats, Repeats};
use crate::common_flags::Common;
use crate::output::figures::{counted, grouped};
use crate::output::{print_line, print_text};

#[derive(Args)]
pub(super) struct Check {
    #[command(flatten)]
    source: SourceArgs,
}

/// The note on a record without an answer.
const NOTHING: &str = "nothing of it is learned; it is left out";
/// The note on a record with an empty answer.
const EMPTY: &str = "an answer is empty; the model learns to end at once";

pub(super) fn run(common: &Common, arguments: &Check) -> anyhow::Result<()> {
    let source = arguments.source.open(common)?;
    let (mut all, mut wrong) = (Counts::default(), 0u64);
    let (mut repeats, mut duplicates) = (Repeats::default(), Duplicates::default());
    let report = |kind: &str, text: &str| {
        if common.json {
            print_line(&json!({ "kind": kind, "text": text }));
        } else {
            print_text(&format!("{text}\n"));
        }
    };
    source.each(&mut |place, encoded| {
        match encoded {
            Ok((rows, counts)) => {
                rows.iter().for_each(|row| duplicates.add(place, row));
                for (count, reason) in [(counts.without_label, NOTHING), (counts.empty_answers, EMPTY)] {
                    if count > 0 && repeats.is_new("note", place, reason) {
                        report("note", &format!("{place}: {reason}"));
                    }
                }
                all.add(&counts);
            }
            Err(error) => {
                wrong += 1;
                if repeats.is_new_error(&error) {
                    report("error", &error.to_string());
                }
            }
        }
        Ok(ControlFlow::Continue(()))
    })?;
    repeats.lines().iter().for_each(|(kind, line)| report(kind, line));
    all.notes.lines().iter().for_each(|line| report("note", &format!("note: {line}")));
    let others = match &source.found {
        Found::Records(detected) => OtherFormats::of(&source.files, detected, &source.data.field)?,
        Found::Text | Found::Gsm8k => OtherFormats::default(),
    };
    others.lines().iter().for_each(|line| report("warning", line));
    if let Some(line) = duplicates.line(all.rows) {
        report("warning", &line);
    }
    let records = all.records as u64 + wrong;
    if wrong > 0 {
        bail!("{} of {} are wrong", grouped(wrong), counted(records, "record"));
    }
    if all.rows == 0 {
        bail!("{} and no row to train on", counted(records, "record"));
    }
    let text = format!(
        "{}, {}, {}, {} of them learned",
        counted(records, "record"),
        counted(all.rows as u64, "row"),
        counted(all.tokens as u64, "token"),
        grouped(all.trained as u64)
    );
    if common.json {
        let mut result = serde_json::to_value(all)?;
        result["duplicates"] = json!(duplicates.count());
        print_line(&json!({ "result": result }));
    } else {
        print_text(&format!("{text}\n"));
    }
    Ok(())
}
