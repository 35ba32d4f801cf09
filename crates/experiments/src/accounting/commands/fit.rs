//! `accounting fit`

use accounting::fit::{Limit, largest_batch, largest_model, longest_sequence};
use accounting::quantity::{bytes_text, count_text, grouped};
use accounting::{Decoder, Error};
use report::{Case, Environment, Metric, Record};
use serde_json::{Value, json};

use super::Output;
use super::model_args::ModelArgs;
use super::plan_args::{DeviceMemoryArgs, PlanArgs};
use super::table::table;

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    plan: PlanArgs,
    #[command(flatten)]
    device: DeviceMemoryArgs,
}

/// A question, its answer for people, its bytes, what stops the next one, and the same for programs.
struct Answer {
    question: &'static str,
    metric: &'static str,
    found: Result<Found, String>,
}

struct Found {
    text: String,
    value: u64,
    peak: u64,
    limit: Limit,
    details: Value,
}

impl Args {
    pub(crate) fn run(&self, environment: &Environment) -> anyhow::Result<Output> {
        let model = self.model.decoder()?;
        let plan = self.plan.plan(&model)?;
        let Some(available) = self.device.bytes() else {
            anyhow::bail!(
                "how much has to fit is not given; give --memory, for example 24GiB, or --hardware"
            );
        };
        let number = |fit: accounting::fit::Fit<u64>| Found {
            text: grouped(fit.largest.into()),
            value: fit.largest,
            peak: fit.peak,
            limit: fit.limit,
            details: Value::Null,
        };
        let answers = [
            Answer {
                question: "largest batch",
                metric: "largest_batch",
                found: answer(largest_batch(&model, &plan, available).map(number))?,
            },
            Answer {
                question: "longest sequence",
                metric: "longest_sequence",
                found: answer(longest_sequence(&model, &plan, available).map(number))?,
            },
            Answer {
                question: "largest model of the family",
                metric: "largest_model_parameters",
                found: answer(largest_model(&model, &plan, available).and_then(|fit| {
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

        let rows: Vec<Vec<String>> = answers.iter().map(row).collect();
        let mut text = format!("{}, {} parameters\n", self.model.name(), grouped(model.parameters()?.into()));
        text += &format!("{}; {} available\n\n", plan.summary(), bytes_text(available));
        text += &table(&["question", "answer", "peak", "the next one"], &rows);
        text += "\nEach question varies one thing and keeps the others. The largest model keeps the vocabulary, the \
                 head size\nand the ratios of widths and depth.\n";

        let json: Vec<Value> = answers
            .iter()
            .map(|answer| match &answer.found {
                Ok(found) => json!({
                    "question": answer.metric,
                    "answer": found.value,
                    "peak_bytes": found.peak,
                    "limit": limit_text(found.limit),
                    "model": found.details,
                }),
                Err(why) => json!({"question": answer.metric, "answer": null, "why": why}),
            })
            .collect();
        let case = Case::new()
            .with("device", bytes_text(available))
            .with("model", self.model.name())
            .with("plan", plan.summary());
        let records = answers.iter().map(|answer| Record {
            experiment: "accounting-fit".into(),
            case: case.clone(),
            metric: match &answer.found {
                Ok(found) => Metric::exact(answer.metric, "count", found.value as f64),
                Err(why) => Metric::not_measured(answer.metric, "count", why),
            },
            environment: environment.clone(),
        });
        Ok(Output { text, json: Value::Array(json), records: records.collect() })
    }
}

/// "Nothing fits" is an answer here; any other error ends the command.
fn answer(found: Result<Found, Error>) -> Result<Result<Found, String>, Error> {
    match found {
        Ok(found) => Ok(Ok(found)),
        Err(Error::NothingFits { needed, .. }) => Ok(Err(format!("the smallest needs {needed}"))),
        Err(error) => Err(error),
    }
}

fn row(answer: &Answer) -> Vec<String> {
    let question = answer.question.to_owned();
    match &answer.found {
        Ok(found) => {
            vec![question, found.text.clone(), bytes_text(found.peak), limit_text(found.limit).to_owned()]
        }
        Err(why) => vec![question, "none".into(), "–".into(), why.clone()],
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
