//! `frugal plan fit`

use accounting::fit::{Limit, largest_batch, largest_model, longest_sequence};
use accounting::quantity::{bytes_text, count_text, grouped};
use accounting::{Decoder, Error};
use serde_json::{Value, json};

use super::Answer;
use super::model_args::ModelArgs;
use super::step_args::{DeviceMemoryArgs, TrainingArgs, plan_text};
use super::table::table;

#[derive(clap::Args)]
pub(crate) struct Fit {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    training: TrainingArgs,
    #[command(flatten)]
    device: DeviceMemoryArgs,
}

/// A question and its answer.
struct Row {
    question: &'static str,
    name: &'static str,
    found: Result<Found, String>,
}

struct Found {
    text: String,
    value: u64,
    peak: u64,
    limit: Limit,
    details: Value,
}

impl Fit {
    pub(crate) fn answer(&self) -> anyhow::Result<Answer> {
        let model = self.model.decoder()?;
        let plan = self.training.plan(&model)?;
        let Some(available) = self.device.bytes() else {
            anyhow::bail!("there is no memory limit; give --budget, for example 24GiB, or --hardware");
        };
        let number = |fit: accounting::fit::Fit<u64>| Found {
            text: grouped(fit.largest.into()),
            value: fit.largest,
            peak: fit.peak,
            limit: fit.limit,
            details: Value::Null,
        };
        let rows = [
            Row {
                question: "largest batch",
                name: "largest_batch",
                found: possible(largest_batch(&model, &plan, available).map(number))?,
            },
            Row {
                question: "longest row",
                name: "longest_row",
                found: possible(longest_sequence(&model, &plan, available).map(number))?,
            },
            Row {
                question: "largest model of the family",
                name: "largest_model_parameters",
                found: possible(largest_model(&model, &plan, available).and_then(|fit| {
                    let value = fit.largest.parameters()?;
                    let text = describe(&fit.largest, value);
                    let details = json!({
                        "hidden": fit.largest.hidden,
                        "layers": fit.largest.layers,
                        "heads": fit.largest.heads,
                        "kv_heads": fit.largest.kv_heads,
                        "feed_forward": fit.largest.feed_forward,
                    });
                    Ok(Found { text, value, peak: fit.peak, limit: fit.limit, details })
                }))?,
            },
        ];

        let cells: Vec<Vec<String>> = rows.iter().map(Row::cells).collect();
        let mut text = format!("{}, {} parameters\n", self.model.name(), grouped(model.parameters()?.into()));
        text += &format!("{}; {} available\n\n", plan_text(&plan), bytes_text(available));
        text += &table(&["question", "answer", "peak", "the next one"], &cells);
        text += "\nEach question varies one thing and keeps the others. The largest model keeps the vocabulary, the \
                 head size\nand the ratios of widths and depth.\n";

        let json: Vec<Value> = rows
            .iter()
            .map(|row| match &row.found {
                Ok(found) => json!({
                    "question": row.name,
                    "answer": found.value,
                    "peak_bytes": found.peak,
                    "limit": limit_text(found.limit),
                    "model": found.details,
                }),
                Err(why) => json!({"question": row.name, "answer": null, "why": why}),
            })
            .collect();
        Ok(Answer { text, json: Value::Array(json) })
    }
}

/// Takes "nothing fits" as an answer; any other error ends the command.
fn possible(found: Result<Found, Error>) -> Result<Result<Found, String>, Error> {
    match found {
        Ok(found) => Ok(Ok(found)),
        Err(Error::NothingFits { needed, .. }) => Ok(Err(format!("the smallest needs {needed}"))),
        Err(error) => Err(error),
    }
}

impl Row {
    fn cells(&self) -> Vec<String> {
        let question = self.question.to_owned();
        match &self.found {
            Ok(found) => {
                vec![question, found.text.clone(), bytes_text(found.peak), limit_text(found.limit).to_owned()]
            }
            Err(why) => vec![question, "none".into(), "–".into(), why.clone()],
        }
    }
}

fn limit_text(limit: Limit) -> &'static str {
    match limit {
        Limit::Memory => "does not fit",
        Limit::Positions => "has no position vectors",
    }
}

fn describe(model: &Decoder, parameters: u64) -> String {
    format!(
        "{} ({} layers, hidden {}, {} heads)",
        count_text(parameters),
        model.layers,
        model.hidden,
        model.heads
    )
}
