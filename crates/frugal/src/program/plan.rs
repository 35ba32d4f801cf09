//! `frugal plan`: what fits a budget, where the peak is, and what a step costs. Reads no weights.

use std::path::Path;

use accounting::decoder_flops::Workload;
use accounting::lora::LowRank;
use accounting::memory::logits::Loss;
use accounting::memory::recipe::Recipe;
use accounting::model::Decoder;
use accounting::offload::{
    Budget, Job, Method, OptimizerPlace, Rates, Setup, Start, Step, plan, simulate, sizes,
};
use accounting::presets;
use accounting::quantity::{bytes_text, grouped};
use accounting::recompute::NormKernel;
use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use frugal::config::Bytes;
use frugal::download_bar;
use frugal::models::LlamaConfig;
use frugal::models::hub::{Hub, RepositoryKind};
use frugal::training::predicted;
use runtime::measure::physical;
use serde_json::{Value, json};
use tch::Kind;

use super::Common;
use super::model::HubArgs;
use super::output::{print_line, print_lines};
use super::settings::DtypeArg;

/// What a step does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Work {
    /// Trains low-rank adapters on q, k, v and o
    Lora,
    /// Trains all weights
    Full,
    /// Reads tokens
    Inference,
}

#[derive(Args)]
pub(crate) struct PlanArgs {
    /// A config.json, a folder that has one, a name on the hub, or a preset such as qwen2.5-7b
    #[arg(long, value_name = "NAME_OR_FILE")]
    model: String,
    #[command(flatten)]
    hub: HubArgs,
    /// Bytes that may be held on the device, such as 10GiB [default: what is free]
    #[arg(long, value_name = "BYTES")]
    budget: Option<Bytes>,
    /// What a step does
    #[arg(long, value_enum, default_value = "lora")]
    method: Work,
    /// Rank of the adapters
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..))]
    r: u64,
    /// Rows per batch
    #[arg(long, alias = "batch", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    batch_size: u64,
    /// Tokens of a row [default: 512, or the model's context if that is shorter]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    tokens: Option<u64>,
    /// Dtype of the weights: float32 or bfloat16 [default: bfloat16, and float32 where all weights are trained]
    #[arg(long, value_enum)]
    dtype: Option<DtypeArg>,
    /// Tokens whose logits exist at a time
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u64).range(1..))]
    loss_chunk: u64,
}

/// A way to run a step, and what it takes.
struct Variant {
    name: &'static str,
    flags: String,
    step: Step,
}

pub(crate) fn run(common: &Common, arguments: &PlanArgs) -> anyhow::Result<()> {
    let device = common.device()?;
    let model = decoder(&arguments.model, &arguments.hub)?;
    let tokens = arguments.tokens.unwrap_or_else(|| model.context.min(512));
    if tokens > model.context {
        bail!("--tokens {tokens}: the model takes rows of {} at most", model.context);
    }
    let kind = match (arguments.dtype.map(|dtype| dtype.get().kind()), arguments.method) {
        (None, Work::Full) => Kind::Float,
        (None, _) => Kind::BFloat16,
        (Some(kind @ (Kind::Float | Kind::BFloat16)), _) => kind,
        (Some(_), _) => bail!("--dtype: a plan is made for float32 and bfloat16"),
    };
    let budget = match arguments.budget {
        Some(budget) => budget.0,
        None => runtime::device::memory_info(device)?.free,
    };
    let compute = runtime::matmul::compute_kind(device, kind);
    let flops =
        physical::gemm_rate(device, compute, 512, 2048, 2048)?.rate().context("the rate of a product")?;
    let bandwidth = physical::copy_bandwidth(device)?.rate().context("the rate of a copy")?;
    let recipe = if kind == Kind::Float { Recipe::FP32 } else { Recipe::BF16 };
    let choices = sizes::Choices {
        flops,
        bandwidth,
        recipe,
        loss: Loss::LinearCrossEntropy { tokens: arguments.loss_chunk },
        norm: NormKernel::Output,
        ..sizes::Choices::default()
    };
    let work = Workload { batch: arguments.batch_size, sequence: tokens };
    let job = match arguments.method {
        Work::Lora => {
            let on_cpu = device == tch::Device::Cpu;
            let lora = LowRank { rank: arguments.r, on_cpu, ..LowRank::default() };
            sizes::adapters(&model, &lora, work, None, &choices)?
        }
        Work::Full => sizes::training(&model, work, &choices)?,
        Work::Inference => sizes::inference(&model, work, &choices)?,
    };
    // The host's memory is what layers are loaded from.
    let host = physical::copy_bandwidth(tch::Device::Cpu)?.rate().context("the rate of a copy")?;
    let rates = Rates::of_memory(host, host, bandwidth);
    let variants = variants(&job, &rates, budget)?;
    let chosen = variants
        .iter()
        .filter(|variant| variant.step.device.total <= budget)
        .min_by(|a, b| a.step.seconds.total_cmp(&b.step.seconds));
    let weights = recipe.parameters.bytes(model.parameters()?)?;
    if common.json {
        let of = |variant: &Variant| -> Value {
            json!({
                "variant": variant.name,
                "flags": variant.flags,
                "peak_bytes": variant.step.device.total,
                "host_bytes": variant.step.host_bytes,
                "step_seconds": variant.step.seconds,
                "fits": variant.step.device.total <= budget,
                "parts": variant.step.device.parts.iter().map(|part| json!({ "what": part.name, "bytes": part.bytes }))
                    .collect::<Vec<_>>(),
            })
        };
        print_line(&json!({
            "model_bytes": weights,
            "parameters": model.parameters()?,
            "budget": budget,
            "flops": flops,
            "memory_rate": bandwidth,
            "variants": variants.iter().map(of).collect::<Vec<_>>(),
            "chosen": chosen.map(|variant| variant.name),
        }));
        return Ok(());
    }
    let mut lines = vec![
        (
            "parameters".to_owned(),
            format!("{} ({})", grouped(model.parameters()?.into()), bytes_text(weights)),
        ),
        ("budget".into(), bytes_text(budget)),
        ("measured".into(), format!("{flops:.3e} FLOP/s of products, {bandwidth:.3e} B/s of memory")),
        (String::new(), String::new()),
    ];
    for variant in &variants {
        let total = variant.step.device.total;
        let fits = if total <= budget {
            "fits".to_owned()
        } else {
            format!("{} too much", bytes_text(total - budget))
        };
        let mark = if chosen.is_some_and(|chosen| chosen.name == variant.name) {
            "; the fastest that fits"
        } else {
            ""
        };
        lines.push((
            variant.name.to_owned(),
            format!("peak {}, {:.2} s a step, {fits}{mark}", bytes_text(total), variant.step.seconds),
        ));
    }
    if let Some(shown) = chosen.or(variants.last()) {
        lines.push((String::new(), String::new()));
        lines.push(("at the peak".into(), shown.step.device.moment.to_string()));
        lines.extend(
            shown.step.device.parts.iter().map(|part| (format!("  {}", part.name), bytes_text(part.bytes))),
        );
        lines.push(("flags".into(), shown.flags.clone()));
    }
    print_lines(lines.iter().map(|(name, text)| (name.as_str(), text.as_str())));
    match chosen {
        Some(_) => Ok(()),
        None => bail!(
            "nothing fits {}; take fewer or shorter rows, a lower rank, or a smaller model",
            bytes_text(budget)
        ),
    }
}

/// The ways to run a step, the fastest first.
fn variants(job: &Job, rates: &Rates, budget: u64) -> anyhow::Result<Vec<Variant>> {
    let of = |name, flags: &str, method, optimizer| -> anyhow::Result<Variant> {
        let setup = Setup { method, resident: Vec::new(), optimizer };
        Ok(Variant { name, flags: flags.to_owned(), step: simulate(job, rates, &setup, Start::Warm)? })
    };
    let device = OptimizerPlace::Device;
    let mut all = vec![
        of("all on the device", "", Method::Resident { recompute: false }, device)?,
        of(
            "activations recomputed",
            "--activations recompute",
            Method::Resident { recompute: true },
            device,
        )?,
    ];
    // Where nothing fits, a ring of one is the least that there is.
    let streamed = match plan(job, rates, Budget { device: budget, host: None }) {
        Ok(found) => {
            let resident: Vec<String> = found.setup.resident.iter().map(ToString::to_string).collect();
            let mut flags = format!("--offload host --ring {}", found.ring().max(1));
            if !resident.is_empty() {
                flags += &format!(" --resident {}", resident.join(","));
            }
            if found.optimizer == Some(OptimizerPlace::Host) {
                flags += " --optimizer-on host";
            }
            Variant { name: "layers offloaded", flags, step: found.step }
        }
        Err(_) => {
            let ring = Method::Overlap { ring: 1 };
            of("layers offloaded", "--offload host --ring 1", ring, OptimizerPlace::Host)?
        }
    };
    all.push(streamed);
    Ok(all)
}

/// A model on paper.
fn decoder(name: &str, hub: &HubArgs) -> anyhow::Result<Decoder> {
    let path = Path::new(name);
    if !path.exists()
        && let Ok(known) = presets::find(name)
    {
        return Ok(known);
    }
    let file = if path.is_dir() {
        path.join("config.json")
    } else if path.exists() {
        path.to_owned()
    } else {
        let hub_access = Hub { progress: Some(download_bar::terminal_bar()), ..Hub::from_env(hub.offline) };
        let files = ["config.json"];
        hub_access
            .fetch_files(RepositoryKind::Model, name, hub.revision.as_deref(), &files)?
            .join("config.json")
    };
    Ok(predicted::decoder(&LlamaConfig::read(&file)?)?)
}
