//! `accounting lecture`

use accounting::lecture::{DeepLinearModel, LinearModel};
use accounting::quantity::{bytes_text, grouped, parse_count};
use report::{Environment, Record};
use serde_json::{Value, json};

use super::Output;
use super::table::{flops_json, rule, table};
use crate::accounting::sections;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Points of the linear model and of the DeepLinearModel
    #[arg(long, default_value = "8", value_name = "B", value_parser = parse_count, allow_negative_numbers = true)]
    batch: u64,
    /// Their width
    #[arg(long, default_value = "64", value_name = "D", value_parser = parse_count, allow_negative_numbers = true)]
    dim: u64,
    /// Outputs of the linear model
    #[arg(long, default_value = "64", value_name = "K", value_parser = parse_count, allow_negative_numbers = true)]
    outputs: u64,
    /// Layers of the DeepLinearModel
    #[arg(long, default_value = "2", value_name = "L", value_parser = parse_count, allow_negative_numbers = true)]
    layers: u64,
}

impl Args {
    pub(crate) fn run(&self, environment: &Environment) -> anyhow::Result<Output> {
        let records = sections::published(environment)?;
        let mut text = String::from("The lecture's and the assignment's figures, and ours\n\n");
        let figures = figures(&records);
        text += &table(
            &["figure", "published", "ours", "agree"],
            &figures
                .iter()
                .map(|(what, published, ours, agree)| {
                    let agree = if *agree { "yes" } else { "NO" };
                    vec![what.clone(), number(*published), number(*ours), agree.into()]
                })
                .collect::<Vec<_>>(),
        );

        let Self { batch, dim, outputs, layers } = *self;
        let linear = LinearModel { batch, dim, outputs };
        let (forward, backward) = (linear.forward_flops()?, linear.backward_flops(true)?);
        let without_input = linear.backward_flops(false)?;
        text += &format!("\nLinear model: x·w1·w2, B = {batch}, D = {dim}, K = {outputs}\n\n");
        text += &table(
            &["FLOPs", "formula", "value"],
            &[
                vec!["forward".into(), "2·B·N".into(), grouped(forward)],
                vec!["backward".into(), "4·B·N".into(), grouped(backward)],
                vec!["… if x needs no gradient".into(), "4·B·N - 2·B·D²".into(), grouped(without_input)],
            ],
        );

        let cruncher = DeepLinearModel { batch, dim, layers };
        let memory = cruncher.memory()?;
        let total = accounting::memory::total(&memory)?;
        text += &format!("\nCruncher: {layers} layers of [D, D] and one of [D, 1], fp32, AdaGrad\n\n");
        let mut rows: Vec<Vec<String>> = memory
            .iter()
            .zip(["4·(D²·L + D)", "4·B·D·L", "4·N", "4·N"])
            .map(|(item, formula)| vec![item.name.into(), formula.into(), bytes_text(item.bytes)])
            .collect();
        rows.push(rule());
        rows.push(vec!["memory".into(), String::new(), bytes_text(total)]);
        rows.push(vec!["FLOPs of a step".into(), "6·B·N".into(), grouped(cruncher.step_flops()?)]);
        text += &table(&["part", "formula", "value"], &rows);
        text += SLIPS;

        let figures: Vec<Value> = figures
            .into_iter()
            .map(|(what, published, ours, agree)| json!({"figure": what, "published": published, "ours": ours, "agree": agree}))
            .collect();
        let json = json!({
            "figures": figures,
            "linear_model": {
                "parameters": linear.parameters()?,
                "forward_flops": flops_json(forward),
                "backward_flops": flops_json(backward),
                "backward_flops_without_input": flops_json(without_input),
            },
            "cruncher": {
                "parameters": cruncher.parameters()?,
                "memory_bytes": total,
                "step_flops": flops_json(cruncher.step_flops()?),
            },
        });
        Ok(Output { text, json, records })
    }
}

const SLIPS: &str = "
Slips of the lecture
- 8 H100 for two weeks promise 9.575e21 FLOPs; its 4.788e21 are those of one week.
- H100's 1979 TFLOP/s are with sparsity; a dense product reaches at most 989.5.
- GPT-3's feed-forward matrix of 2304 MiB is 2.25 GiB or 2.42 GB, not 2.3 GB.
- The gradient of the linear model's output is elementwise; that of its input is a product, and only done if needed.
";

/// What, published, ours, agreement: from the three records of each figure.
fn figures(records: &[Record]) -> Vec<(String, f64, f64, bool)> {
    let value = |record: &Record| record.metric.value.unwrap_or(f64::NAN);
    records
        .chunks_exact(3)
        .map(|figure| {
            let what = figure[0].case.get("what").and_then(Value::as_str).unwrap_or_default();
            (what.to_owned(), value(&figure[0]), value(&figure[1]), value(&figure[2]) <= 1.0)
        })
        .collect()
}

fn number(value: f64) -> String {
    if value >= 1e15 {
        format!("{value:.4e}")
    } else if value.fract() == 0.0 {
        grouped(value as u128)
    } else {
        format!("{value:.3}")
    }
}
