//! `frugal data check`.

use std::ops::ControlFlow;

use anyhow::bail;
use clap::Args;
use frugal::rows::Counts;
use serde_json::json;

use super::SourceArgs;
use crate::program::Common;
use crate::program::figures::{counted, grouped};
use crate::program::output::{print_line, print_text};

#[derive(Args)]
pub(super) struct Check {
    #[command(flatten)]
    source: SourceArgs,
}

pub(super) fn run(common: &Common, arguments: &Check) -> anyhow::Result<()> {
    let source = arguments.source.open(common)?;
    let (mut all, mut wrong) = (Counts::default(), 0u64);
    let tell = |error: bool, text: &str| {
        if common.json {
            print_line(&json!({ "kind": if error { "error" } else { "note" }, "text": text }));
        } else {
            print_text(&format!("{text}\n"));
        }
    };
    source.each(&mut |place, encoded| {
        match encoded {
            Ok((_, counts)) => {
                if counts.without_label > 0 {
                    tell(false, &format!("{place}: nothing of it is learned; it is left out"));
                }
                all.add(&counts);
            }
            Err(error) => {
                wrong += 1;
                tell(true, &error.to_string());
            }
        }
        Ok(ControlFlow::Continue(()))
    })?;
    let records = all.records as u64 + wrong;
    if wrong > 0 {
        bail!("{} of {} are wrong", grouped(wrong), counted(records, "record"));
    }
    if all.rows == 0 {
        bail!("{} and no row to learn from", counted(records, "record"));
    }
    let text = format!(
        "{}, {}, {} of which {} are learned",
        counted(records, "record"),
        counted(all.rows as u64, "row"),
        counted(all.tokens as u64, "token"),
        grouped(all.trained as u64)
    );
    if common.json {
        print_line(&json!({ "result": all }));
    } else {
        print_text(&format!("{text}\n"));
    }
    Ok(())
}
