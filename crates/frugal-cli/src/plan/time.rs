//! `frugal plan time`

use accounting::hardware::{self, Hardware};
use accounting::memory::optimizer::Optimizer;
use accounting::memory::recipe::Recipe;
use accounting::quantity::{bytes_text, count_text, parse_count};
use accounting::training_time::{Run, SECONDS_PER_DAY, naive_largest_model, peak_of, six_n_d, utilization};
use accounting::{Dtype, presets};
use anyhow::Context;
use serde_json::json;

use super::Answer;
use super::step_args::known_hardware;
use super::table::{flops_json, flops_text, table};

#[derive(clap::Args)]
pub(crate) struct Time {
    /// Parameters: a number (70B) or a known model (llama-3-8b)
    #[arg(long, value_name = "N|NAME", value_parser = parameters, allow_negative_numbers = true)]
    parameters: u64,
    /// Tokens of the whole training, for example 15T
    #[arg(long, value_name = "N", value_parser = parse_count, allow_negative_numbers = true)]
    tokens: u64,
    #[arg(long, value_name = "NAME", value_parser = hardware::find, default_value = "h100", help = known_hardware("A known device"))]
    hardware: Hardware,
    /// Number format of the matrix products: bf16, fp16 or fp32
    #[arg(long, value_name = "NAME", default_value = "bf16")]
    dtype: Dtype,
    /// Dense FLOP/s of a device, instead of those of --hardware
    #[arg(long, value_name = "FLOP/S", allow_negative_numbers = true)]
    peak: Option<f64>,
    /// Data-parallel ranks, a device each
    #[arg(long, alias = "devices", value_name = "N", value_parser = parse_count, allow_negative_numbers = true, default_value = "1")]
    ranks: u64,
    /// Model FLOPs utilization, above 0 and at most 1
    #[arg(long, value_name = "FRACTION", allow_negative_numbers = true, default_value_t = 0.5)]
    mfu: f64,
    /// Measured seconds for these tokens: prints the utilization instead of the time
    #[arg(long, value_name = "S", allow_negative_numbers = true, conflicts_with = "mfu")]
    seconds: Option<f64>,
}

impl Time {
    pub(crate) fn answer(&self) -> anyhow::Result<Answer> {
        let flops = six_n_d(self.parameters, self.tokens)?;
        let peak = match self.peak {
            Some(peak) => peak,
            None => peak_of(&self.hardware, self.dtype).with_context(|| {
                let known = [Dtype::Bf16, Dtype::Fp16, Dtype::Fp32].into_iter();
                let known = known.filter(|dtype| peak_of(&self.hardware, *dtype).is_some());
                let known: Vec<&str> = known.map(Dtype::name).collect();
                format!(
                    "no rate of {} is known for {}; give --dtype {}, or --peak",
                    self.hardware.name,
                    self.dtype,
                    known.join(" or ")
                )
            })?,
        };
        let device = if self.peak.is_some() { "the given rate" } else { self.hardware.title };
        let (mfu, seconds) = match self.seconds {
            Some(seconds) => (utilization(flops, seconds, peak, self.ranks)?, seconds),
            None => {
                let run = Run { flops, peak, utilization: self.mfu, devices: self.ranks };
                (self.mfu, run.seconds()?)
            }
        };
        let days = seconds / SECONDS_PER_DAY;
        let bytes = Recipe::FP32.bytes_per_parameter(Optimizer::AdamW);
        let naive = naive_largest_model(self.ranks, self.hardware.memory, bytes)?;

        let row = |name: &str, value: String| vec![name.to_owned(), value];
        let mut rows = vec![
            row("parameters", count_text(self.parameters)),
            row("tokens", count_text(self.tokens)),
            row("training FLOPs, 6·N·D", flops_text(flops)),
            row("devices", format!("{} × {device}", self.ranks)),
            row("dense FLOP/s of a device", format!("{peak:.4e}")),
            row("MFU", format!("{mfu:.3}")),
            row("time", time_text(seconds)),
        ];
        if self.peak.is_none() {
            rows.push(row(
                "largest model by AdamW's 16 B alone",
                format!("{} in {} × {}", count_text(naive), self.ranks, bytes_text(self.hardware.memory)),
            ));
        }
        let mut text = table(&["quantity", "value"], &rows);
        if mfu > 1.0 {
            text += "\nAn MFU above 1 is impossible: the rate is too low (another dtype?), or the FLOPs or seconds \
                     are wrong.\n";
        }
        if let Some(note) = memory_note(self.parameters, naive).filter(|_| self.peak.is_none()) {
            text += &note;
        }
        let json = json!({
            "parameters": self.parameters,
            "tokens": self.tokens,
            "flops": flops_json(flops),
            "devices": self.ranks,
            "peak_flops_per_second": peak,
            "mfu": mfu,
            "seconds": seconds,
            "days": days,
            "naive_largest_model": naive,
        });
        Ok(Answer::new(text, json))
    }
}

fn memory_note(parameters: u64, naive: u64) -> Option<String> {
    (parameters > naive).then(|| {
        "\nThe model states alone do not fit these devices with AdamW in fp32 (see `frugal plan memory`).\n".into()
    })
}

fn time_text(seconds: f64) -> String {
    let days = seconds / SECONDS_PER_DAY;
    if days >= 1.0 {
        format!("{days:.2} days")
    } else if seconds >= 3600.0 {
        format!("{:.2} hours", seconds / 3600.0)
    } else {
        format!("{seconds:.3} s")
    }
}

/// A number, or the parameters of a known model.
fn parameters(text: &str) -> Result<u64, accounting::Error> {
    if text.starts_with(|c: char| c.is_ascii_digit() || c == '-' || c == '.') {
        parse_count(text)
    } else {
        presets::find(text)?.parameters()
    }
}
