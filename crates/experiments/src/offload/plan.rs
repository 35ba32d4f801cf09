//! `offload plan`: what of a model fits a budget on this machine, and how long a step takes.

use std::path::{Path, PathBuf};

use accounting::offload::Plan;
use accounting::quantity::{bytes_text, grouped, parse_bytes};
use anyhow::bail;
use clap::Args;
use models::LlamaConfig;
use models::hugging_face::Folder;
use offload::Tier;
use report::cli::CommonArgs;
use runtime::device;
use serde_json::json;
use tch::Kind;

use super::budget::{self, Aim};
use super::folder::scratch;
use super::output::print;
use super::rates::{self, Measured};
use super::shape;

#[derive(Args)]
pub(crate) struct PlanArgs {
    /// A folder in Hugging Face's layout, a config.json, or one of qwen2.5-0.5b and qwen2.5-7b
    #[arg(long, value_name = "FOLDER_OR_SHAPE")]
    model: String,
    /// Bytes that may be held: of the process on a CPU, of tensors on a GPU; for example 10GiB
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    budget: u64,
    /// Tokens of a step, in one row
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(i64).range(1..))]
    tokens: i64,
    /// Train adapters of this rank on q, k, v and o; without this and --train a step is one forward
    #[arg(long, value_name = "R", value_parser = clap::value_parser!(u64).range(1..))]
    lora_rank: Option<u64>,
    /// Train all weights
    #[arg(long, conflicts_with = "lora_rank")]
    train: bool,
    /// Where the layers live: in the host's memory, or in files
    #[arg(long, value_enum, default_value_t)]
    tier: TierName,
    /// Where files lie while the link is measured [default: beside this program]
    #[arg(long, value_name = "FOLDER")]
    folder: Option<PathBuf>,
}

/// Where layers live.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum TierName {
    /// In the host's memory
    Host,
    /// In files
    #[default]
    File,
}

pub(crate) fn run(common: &CommonArgs, arguments: &PlanArgs) -> anyhow::Result<()> {
    let device = device::select(&common.device)?;
    runtime::memory::track_cpu()?;
    let (config, kind) = read(&arguments.model)?;
    if arguments.train && arguments.tier == TierName::File {
        bail!("--train trains all weights, and what is trained does not live in files; give --tier host");
    }
    let kind = if arguments.train { Kind::Float } else { kind };
    if arguments.tokens > config.max_position_embeddings {
        bail!(
            "--tokens {}: the model takes rows of {} at most",
            arguments.tokens,
            config.max_position_embeddings
        );
    }
    let scratch = scratch(arguments.folder.as_deref())?;
    let tier = match arguments.tier {
        TierName::Host => Tier::Host,
        TierName::File => Tier::File(scratch.path().to_owned()),
    };
    let measured = rates::measure(&config, (kind, device), arguments.tokens, &tier)?;
    let aim = match (arguments.lora_rank, arguments.train) {
        (Some(rank), _) => Aim::Lora(rank),
        (None, true) => Aim::Training,
        (None, false) => Aim::Inference,
    };
    let job = budget::job(&config, (kind, device), arguments.tokens, aim, measured.speed)?;
    runtime::memory::empty_cache(device)?;
    let for_tensors = budget::for_tensors(arguments.budget, device)?;
    let plan = budget::planned(&job, &measured, for_tensors)?;
    let whole = budget::model_bytes(&config, kind)?;
    if common.json { print(&json(&plan, &measured, whole)?) } else { print(&text(&plan, &measured, whole)) }
}

fn text(plan: &Plan, measured: &Measured, whole: u64) -> String {
    let Measured { speed, rates } = measured;
    let mut lines = vec![
        ("model".to_owned(), format!("{} ({})", grouped(whole.into()), bytes_text(whole))),
        ("measured: products".into(), format!("{:.3e} FLOP/s", speed.flops)),
        ("measured: memory".into(), format!("{:.3e} B/s", speed.bandwidth)),
        ("measured: link".into(), format!("{:.3e} B/s", rates.load)),
    ];
    lines.extend(plan.lines());
    let width = lines.iter().map(|(what, _)| what.chars().count()).max().unwrap_or(0);
    let lines: Vec<String> = lines.iter().map(|(what, value)| format!("{what:<width$}  {value}")).collect();
    format!("{}\n", lines.join("\n"))
}

fn json(plan: &Plan, measured: &Measured, whole: u64) -> anyhow::Result<String> {
    let device = plan.step.device.parts.iter();
    let value = json!({
        "model_bytes": whole,
        "flops": measured.speed.flops,
        "memory_rate": measured.speed.bandwidth,
        "link_rate": measured.rates.load,
        "resident_layers": plan.setup.resident,
        "layers": plan.layers,
        "ring_slots": plan.ring(),
        "peak_bytes": plan.step.device.total,
        "device": device.map(|part| json!({ "what": part.name, "bytes": part.bytes })).collect::<Vec<_>>(),
        "host_bytes": plan.step.host_bytes,
        "loaded_bytes": plan.step.load_bytes,
        "step_seconds": plan.step.seconds,
        "idle_seconds": plan.step.idle_seconds,
        "share_of_resident_speed": plan.share_of_resident_speed(),
    });
    Ok(format!("{}\n", serde_json::to_string(&value)?))
}

/// The configuration of a model that is named or lies here, and its dtype.
fn read(model: &str) -> anyhow::Result<(LlamaConfig, Kind)> {
    let path = Path::new(model);
    Ok(match model {
        "qwen2.5-0.5b" => (shape::small(24, 151_936, 32_768), Kind::BFloat16),
        "qwen2.5-7b" => (shape::large(28, 152_064, 32_768), Kind::BFloat16),
        _ if path.is_dir() => {
            let folder = Folder::open(path)?;
            (folder.config().clone(), folder.kind()?)
        }
        _ if path.is_file() => (LlamaConfig::read(path)?, Kind::BFloat16),
        _ => bail!(
            "no model `{model}`: expected a folder in Hugging Face's layout, a config.json, qwen2.5-0.5b or qwen2.5-7b"
        ),
    })
}
