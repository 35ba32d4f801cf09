//! `frugal plan fit`

use accounting::fit::{Fit as Fitting, Limit, largest_batch, largest_model, longest_row};
use accounting::quantity::{bytes_text, count_text, grouped};
use accounting::{Decoder, Error};
use serde_json::{Value, json};

use super::Answer;
use super::step::{StepArgs, Ways, bytes, nothing_fits, training_ways};
use super::table::table;
use crate::common_flags::Common;

#[derive(clap::Args)]
pub(crate) struct Fit {
    #[command(flatten)]
    step: StepArgs,
}

/// A question and its answer.
struct Row {
    question: &'static str,
    name: &'static str,
    answer: Result<Largest, String>,
}

struct Largest {
    text: String,
    value: u64,
    peak: u64,
    host: u64,
    way: String,
    limit: Limit,
    details: Value,
}

impl Largest {
    fn new<T>(fit: &Fitting<T>, text: String, value: u64, details: Value) -> Self {
        let Fitting { candidate, limit, .. } = fit;
        let (peak, host) = (candidate.device_bytes(), candidate.host_bytes);
        Self { text, value, peak, host, way: candidate.name(), limit: *limit, details }
    }
}

impl Fit {
    pub(crate) fn answer(&self, common: &Common) -> anyhow::Result<Answer> {
        let (conditions, Ways { job, allowed, result, .. }) = training_ways(common, &self.step)?;
        let planned = &conditions.planned;
        let (model, budget) = (&planned.model, result.budget);
        // Of a row's tokens, the last is only predicted where the data say so.
        let unread = planned.work.sequence.saturating_sub(job.mean.work.sequence);
        let number = |fit: Fitting<u64>, more: u64| {
            let value = fit.largest + more;
            Largest::new(&fit, grouped(value.into()), value, Value::Null)
        };
        let rows = [
            Row {
                question: "largest batch, its rows at once",
                name: "largest_batch",
                answer: possible(largest_batch(&job, &allowed, budget).map(|fit| number(fit, 0)))?,
            },
            Row {
                question: "longest row",
                name: "longest_row",
                answer: possible(longest_row(&job, &allowed, budget).map(|fit| {
                    // The model takes no more tokens than positions.
                    let more = unread.min(model.context.saturating_sub(fit.largest));
                    number(fit, more)
                }))?,
            },
            Row {
                question: "largest model of the family",
                name: "largest_model_parameters",
                answer: possible(largest_model(&job, &allowed, budget).and_then(|fit| {
                    let value = fit.largest.parameters()?;
                    let details = json!({
                        "hidden": fit.largest.hidden,
                        "layers": fit.largest.layers,
                        "heads": fit.largest.heads,
                        "kv_heads": fit.largest.kv_heads,
                        "feed_forward": fit.largest.feed_forward,
                    });
                    Ok(Largest::new(&fit, describe(&fit.largest, value), value, details))
                }))?,
            },
        ];

        let cells: Vec<Vec<String>> = rows.iter().map(Row::cells).collect();
        let mut text =
            format!("{}, {} parameters\n", self.step.model.name(), grouped(model.parameters()?.into()));
        text += &format!("{}; {} for tensors", planned.work_text(), bytes_text(budget.device));
        text +=
            &budget.host.map_or_else(String::new, |host| format!(" and {} of the host", bytes_text(host)));
        text += "\n\n";
        text += &table(&["question", "answer", "peak", "host memory", "the next one", "plan"], &cells);
        text += "\nEach question varies one thing and keeps the others. The largest model keeps the vocabulary, the \
                 head size\nand the ratios of widths and depth.\n";

        let json: Vec<Value> = rows
            .iter()
            .map(|row| match &row.answer {
                Ok(largest) => json!({
                    "question": row.name,
                    "answer": largest.value,
                    "peak_bytes": largest.peak,
                    "host_bytes": largest.host,
                    "plan": largest.way,
                    "limit": limit_text(largest.limit),
                    "model": largest.details,
                }),
                Err(why) => json!({"question": row.name, "answer": null, "why": why}),
            })
            .collect();
        let nothing_fits = || nothing_fits(&self.step, &conditions, bytes(&result));
        let failure = rows.iter().all(|row| row.answer.is_err()).then(nothing_fits);
        Ok(Answer { text, json: Value::Array(json), failure })
    }
}

/// Takes "nothing fits" as an answer; any other error ends the command.
fn possible(answer: Result<Largest, Error>) -> Result<Result<Largest, String>, Error> {
    match answer {
        Ok(largest) => Ok(Ok(largest)),
        Err(Error::NothingFits { needed, .. }) => Ok(Err(format!("the smallest needs {needed}"))),
        Err(error) => Err(error),
    }
}

impl Row {
    fn cells(&self) -> Vec<String> {
        let question = self.question.to_owned();
        match &self.answer {
            Ok(Largest { text, peak, host, limit, way, .. }) => {
                let host = if *host == 0 { "–".to_owned() } else { bytes_text(*host) };
                vec![
                    question,
                    text.clone(),
                    bytes_text(*peak),
                    host,
                    limit_text(*limit).to_owned(),
                    way.clone(),
                ]
            }
            Err(why) => {
                let [none, blank, reason] = ["none", "–", why].map(str::to_owned);
                vec![question, none, blank.clone(), blank.clone(), reason, blank]
            }
        }
    }
}

fn limit_text(limit: Limit) -> &'static str {
    match limit {
        Limit::Memory => "does not fit",
        Limit::Positions => "too long for the model",
        Limit::Layers => "is not searched",
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
