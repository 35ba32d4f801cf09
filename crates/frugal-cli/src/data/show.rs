//! `frugal data show`: prints records as training rows, with the tokens that count in the loss highlighted.

use std::io::IsTerminal as _;
use std::ops::ControlFlow;

use anyhow::bail;
use clap::{Args, ValueEnum};
use frugal::dataloading::records::RecordFormat;
use frugal::rows::{Found, Marks, marked};
use frugal::training::masked_rows::MaskedRow;
use report::cli::without_controls;
use serde_json::json;

use super::{SourceArgs, learned};
use crate::common_flags::Common;
use crate::output::{print_coloured, print_line};

#[derive(Args)]
pub(super) struct Show {
    #[command(flatten)]
    source: SourceArgs,
    /// Number of records to show
    #[arg(long, short, value_name = "N", default_value_t = 3)]
    number: usize,
    /// Number of records to pass over first
    #[arg(long, value_name = "N", default_value_t = 0)]
    skip: usize,
    /// Highlight the tokens that count in the loss with colour, or with ⟦ and ⟧
    #[arg(long, value_enum, default_value_t)]
    color: Color,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Color {
    /// Coloured on a terminal, unless NO_COLOR is set
    #[default]
    Auto,
    Always,
    Never,
}

/// Prints the records after the first `--skip`.
///
/// # Errors
/// A source that cannot be opened or read; only invalid records.
pub(super) fn run(common: &Common, arguments: &Show) -> anyhow::Result<()> {
    let source = arguments.source.open(common)?;
    let is_coloured = match arguments.color {
        Color::Auto => {
            std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|set| set.is_empty())
        }
        Color::Always => true,
        Color::Never => false,
    };
    let marks = if is_coloured { Marks::COLOURS } else { Marks::BRACKETS };
    let (mut read, mut shown, mut invalid) = (0, 0, 0);
    source.each(&mut |place, encoded| {
        read += 1;
        if read <= arguments.skip {
            return Ok(ControlFlow::Continue(()));
        }
        if shown == arguments.number {
            return Ok(ControlFlow::Break(()));
        }
        shown += 1;
        let (rows, counts) = match encoded {
            Ok(encoded) => encoded,
            // An invalid record does not stop the command: the valid ones after it are shown.
            Err(error) => {
                invalid += 1;
                common.note(&format!("invalid: {error}"));
                return Ok(ControlFlow::Continue(()));
            }
        };
        if rows.is_empty() {
            // A valid record without rows: too long, or without a token in the loss.
            let why = if counts.skipped > 0 { "it is too long" } else { "nothing of it is learned" };
            common.note(&format!("{place}: left out: {why}"));
        }
        for row in &rows {
            let (tokenizer, rating) = (source.encoder.tokenizer(), rating(&source.found, row));
            if common.json {
                let mut line = json!({ "place": place, "input_ids": row.tokens, "labels": row.labels });
                if let Some(rating) = rating {
                    line["rating"] = json!(rating);
                }
                print_line(&line);
                continue;
            }
            let text = marked(row, tokenizer, marks)?;
            let (tokens, learned) = (row.tokens.len(), learned(row));
            // A file's name may contain escape sequences for the terminal.
            let place = place.to_string();
            let place = without_controls(&place);
            let rating = rating.map_or_else(String::new, |rating| format!("{rating}, "));
            print_coloured(&format!(
                "── {place}: {rating}{tokens} tokens, {learned} learned\n{}\n",
                text.trim_end_matches('\n')
            ));
        }
        Ok(ControlFlow::Continue(()))
    })?;
    if shown > 0 && invalid == shown {
        bail!("no record is shown, because all are invalid; `{}` lists why", source.check);
    }
    Ok(())
}

/// What a row is among preferences.
fn rating(found: &Found, row: &MaskedRow) -> Option<&'static str> {
    let Found::Records(detected) = found else { return None };
    let is_only = |only: RecordFormat| detected.formats.iter().all(|(format, _)| *format == only);
    match row.weight > 0.0 {
        true if is_only(RecordFormat::Preference) => Some("chosen"),
        false if is_only(RecordFormat::Preference) => Some("rejected"),
        true if is_only(RecordFormat::Rated) => Some("desirable"),
        false if is_only(RecordFormat::Rated) => Some("undesirable"),
        _ => None,
    }
}
