//! `frugal plan memory`

use accounting::bar;
use accounting::estimate::{Estimate, Part, estimate};
use accounting::memory::Item;
use accounting::quantity::{bytes_text, count_text, grouped};
use serde_json::{Map, Value, json};

use super::Answer;
use super::model_args::ModelArgs;
use super::step_args::{DeviceMemoryArgs, TrainingArgs, plan_text};
use super::table::{rule, table};

#[derive(clap::Args)]
pub(crate) struct Memory {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    training: TrainingArgs,
    #[command(flatten)]
    device: DeviceMemoryArgs,
    /// List the saved tensors too
    #[arg(long)]
    list: bool,
}

/// The letter of each part in the bar.
const LETTERS: [char; 8] = ['P', 'C', 'M', 'O', 'G', 'A', 'L', 'T'];
const BAR_WIDTH: usize = 80;

impl Memory {
    pub(crate) fn answer(&self) -> anyhow::Result<Answer> {
        let model = self.model.decoder()?;
        let plan = self.training.plan(&model)?;
        let estimate = estimate(&model, &plan)?;
        let available = self.device.bytes();

        let mut text = format!("{}, {} parameters", self.model.name(), grouped(estimate.parameters.into()));
        text += &format!(" ({})\n{}\n\n", count_text(estimate.parameters), plan_text(&plan));
        text += &moments(&estimate);
        text += &peak(&estimate, available);
        if self.list {
            text += &lists(&estimate, model.layers);
        }
        text += "\nNot counted: the CUDA context (about 0.5 GiB), a cuBLAS workspace, the allocator's \
                 fragmentation.\n";

        let mut json = json(&estimate);
        json["model"] = self.model.name().into();
        json["plan"] = plan_text(&plan).into();
        if let Some(available) = available {
            json["available_bytes"] = available.into();
            json["fits"] = (estimate.peak().total <= available).into();
        }
        Ok(Answer { text, json })
    }
}

fn moments(estimate: &Estimate) -> String {
    let peak = estimate.peak().moment;
    let heads: Vec<String> = estimate
        .moments
        .iter()
        .map(|budget| {
            let name = budget.moment.name().replace("'s backward", "");
            if budget.moment == peak { format!("{name} *") } else { name }
        })
        .collect();
    let mut header = vec!["part"];
    header.extend(heads.iter().map(String::as_str));
    let shown = |bytes: u64| if bytes == 0 { "–".into() } else { bytes_text(bytes) };
    let mut rows: Vec<Vec<String>> = Part::ALL
        .iter()
        .zip(LETTERS)
        .filter(|(part, _)| estimate.moments.iter().any(|budget| budget.bytes(**part) > 0))
        .map(|(part, letter)| {
            let cells = estimate.moments.iter().map(|budget| shown(budget.bytes(*part)));
            std::iter::once(format!("{letter} {}", part.name())).chain(cells).collect()
        })
        .collect();
    rows.push(rule());
    let totals = estimate.moments.iter().map(|budget| bytes_text(budget.total));
    rows.push(std::iter::once("  total".to_owned()).chain(totals).collect());
    table(&header, &rows)
}

fn peak(estimate: &Estimate, available: Option<u64>) -> String {
    let peak = estimate.peak();
    let parts: Vec<(char, u64)> = LETTERS.into_iter().zip(peak.parts).collect();
    let whole = available.unwrap_or(peak.total);
    let mut text =
        format!("\n{}\n* peak: {}", bar::stacked(&parts, whole, BAR_WIDTH), bytes_text(peak.total));
    text += &match available {
        None => format!(" at the {}\n", peak.moment.name()),
        Some(available) => {
            let share = 100.0 * peak.total as f64 / available.max(1) as f64;
            let verdict = if peak.total <= available { "fits" } else { "does NOT fit" };
            format!(" at the {}, {share:.1} % of {}: {verdict}\n", peak.moment.name(), bytes_text(available))
        }
    };
    text
}

fn lists(estimate: &Estimate, layers: u64) -> String {
    let rows = |items: &[Item]| -> Vec<Vec<String>> {
        items.iter().map(|item| vec![item.name.to_owned(), bytes_text(item.bytes)]).collect()
    };
    format!(
        "\n{}\n{}",
        table(&[&format!("kept by each of {layers} blocks"), "bytes"], &rows(&estimate.block)),
        table(&["kept outside the blocks", "bytes"], &rows(&estimate.outside_blocks))
    )
}

fn json(estimate: &Estimate) -> Value {
    let items = |items: &[Item]| -> Vec<Value> {
        items.iter().map(|item| json!({"name": item.name, "bytes": item.bytes})).collect()
    };
    let moments: Vec<Value> = estimate
        .moments
        .iter()
        .map(|budget| {
            let mut parts = Map::new();
            for part in Part::ALL {
                parts.insert(part.name().into(), budget.bytes(part).into());
            }
            json!({"moment": budget.moment.name(), "parts": parts, "total_bytes": budget.total})
        })
        .collect();
    json!({
        "model": "",
        "plan": "",
        "parameters": estimate.parameters,
        "peak_bytes": estimate.peak().total,
        "peak_moment": estimate.peak().moment.name(),
        "moments": moments,
        "kept_by_each_block": items(&estimate.block),
        "kept_outside_blocks": items(&estimate.outside_blocks),
    })
}
