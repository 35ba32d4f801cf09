//! `accounting offload`

use accounting::decoder_flops::Workload;
use accounting::memory::recipe::Recipe;
use accounting::offload::sizes::{self, Choices};
use accounting::offload::{Budget, Card, Direction, Plan, Rates, card, plan};
use accounting::quantity::{count_text, grouped, parse_bytes, parse_count};
use accounting::{Decoder, Dtype};
use report::{Case, Environment, Record};
use serde_json::json;

use super::Output;
use super::model_args::ModelArgs;
use super::plan_args::LoraArgs;
use super::table::table;
use crate::accounting::sections::offload_metrics;

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Bytes of the device that may be used, for example 10GiB
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, allow_negative_numbers = true)]
    budget: u64,
    /// Bytes of the host that may be used [default: as many as are asked for]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, allow_negative_numbers = true)]
    host_budget: Option<u64>,
    /// Tokens of a step, in one sequence
    #[arg(long, value_name = "N", value_parser = parse_count, allow_negative_numbers = true, default_value = "2048")]
    tokens: u64,
    /// A common card: 3090, 4090, a100, h100 or h200
    #[arg(long, value_name = "NAME", value_parser = card, default_value = "4090")]
    card: Card,
    /// FLOP/s that the device reaches, instead of the card's
    #[arg(long, value_name = "FLOP/S", allow_negative_numbers = true)]
    flops: Option<f64>,
    /// Bytes per second of the link each way, for example 50GB [default: what the card's generation reaches]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, allow_negative_numbers = true)]
    link: Option<u64>,
    /// Bytes per second of the host's memory, by which its optimizer steps
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, allow_negative_numbers = true, default_value = "50GB")]
    host_bandwidth: u64,
    /// Number format of the weights: bf16 (what learns has fp32 master weights) or fp32
    #[arg(long, value_name = "NAME", default_value = "bf16")]
    dtype: Dtype,
    /// Train the whole model; without this and without adapters a step is one forward
    #[arg(long, conflicts_with = "lora_rank")]
    train: bool,
    #[command(flatten)]
    lora: LoraArgs,
}

impl Args {
    pub(crate) fn run(&self, environment: &Environment) -> anyhow::Result<Output> {
        let model = self.model.decoder()?;
        let link = self.link.map_or(self.card.link, |link| link as f64);
        let flops = self.flops.unwrap_or(self.card.flops);
        let rates = Rates::of_memory(link, self.host_bandwidth as f64, self.card.data_sheet()?.bandwidth);
        let bytes_per_parameter = self.dtype.storage_bits() as f64 / 8.0;
        let job = self.job(&model, flops)?;
        let found = plan(&job, &rates, Budget { device: self.budget, host: self.host_budget })?;

        let least = |resident: bool, direction| {
            let plan =
                Plan { resident_share: if resident { found.resident_share } else { 0.0 }, ..found.clone() };
            plan.least_tokens(flops, &rates, bytes_per_parameter, direction)
        };
        let mut conditions = Vec::new();
        for direction in self.directions() {
            conditions.push((direction, least(false, direction)?, least(true, direction)?));
        }
        let rows = conditions.iter().map(|(direction, none, plan)| {
            vec![direction.name().to_owned(), grouped((*none).into()), grouped((*plan).into())]
        });
        let text = format!(
            "{}, {} parameters ({}), {}\n{} at {flops:.3e} FLOP/s, link {link:.3e} B/s\n\n{found}\n\
             Tokens of a step at which loads hide behind compute:\n{}",
            self.model.name(),
            grouped(model.parameters()?.into()),
            count_text(model.parameters()?),
            self.step(),
            self.card.name,
            table(&["pass", "all streamed", "by this plan"], &rows.collect::<Vec<_>>()),
        );
        let metrics = offload_metrics(&found);
        let json = json!({
            "model": self.model.name(),
            "step": self.step(),
            "resident_layers": found.setup.resident,
            "figures": metrics.iter()
                .map(|metric| (metric.name.clone(), json!(metric.value)))
                .collect::<serde_json::Map<_, _>>(),
            "device": found.step.device.parts.iter()
                .map(|part| json!({"what": part.name, "bytes": part.bytes})).collect::<Vec<_>>(),
            "least_tokens": conditions.iter()
                .map(|(direction, none, plan)| json!({
                    "pass": direction.name(), "all_streamed": none, "by_this_plan": plan,
                }))
                .collect::<Vec<_>>(),
        });
        let case = Case::new()
            .with("model", self.model.name())
            .with("step", self.step())
            .with("card", self.card.name)
            .with("budget", self.budget);
        let records = metrics.into_iter().map(|metric| Record {
            experiment: "accounting-offload".into(),
            case: case.clone(),
            metric,
            environment: environment.clone(),
        });
        Ok(Output { text, json, records: records.collect() })
    }

    fn job(&self, model: &Decoder, flops: f64) -> anyhow::Result<accounting::offload::Job> {
        let recipe = match (self.dtype, self.train) {
            (Dtype::Bf16, true) => Recipe::BF16_MASTER,
            (Dtype::Bf16, false) => Recipe::BF16,
            (Dtype::Fp32, _) => Recipe::FP32,
            (other, _) => anyhow::bail!("weights in {other} are not modelled; give --dtype bf16 or fp32"),
        };
        anyhow::ensure!(flops > 0.0 && flops.is_finite(), "--flops is {flops}; give a rate above 0");
        let bandwidth = self.card.data_sheet()?.bandwidth;
        let choices = Choices { flops, bandwidth, recipe, ..Choices::default() };
        let work = Workload { batch: 1, sequence: self.tokens };
        Ok(match self.lora.low_rank() {
            Some(lora) => sizes::adapters(model, &lora, work, None, &choices)?,
            None if self.train => sizes::training(model, work, &choices)?,
            None => sizes::inference(model, work, &choices)?,
        })
    }

    fn directions(&self) -> Vec<Direction> {
        match (self.train, self.lora.low_rank()) {
            (true, _) => vec![Direction::Forward, Direction::Backward],
            (false, Some(_)) => vec![Direction::Forward, Direction::FrozenBackward],
            (false, None) => vec![Direction::Forward],
        }
    }

    /// The step in words.
    fn step(&self) -> String {
        let what = match (self.train, self.lora.low_rank()) {
            (true, _) => "training of all".to_owned(),
            (false, Some(lora)) => format!("training of adapters of rank {} on {}", lora.rank, lora.targets),
            (false, None) => "inference".to_owned(),
        };
        format!("{what}, {} tokens, {}", self.tokens, self.dtype)
    }
}
