//! `offload generate`: a text goes on, by a model whose layers are elsewhere.

use std::io::Write;
use std::time::Instant;

use accounting::quantity::{bytes_text, parse_bytes};
use anyhow::{anyhow, bail};
use clap::Args;
use models::generation::{FinishReason, GenerateOptions, Generator};
use models::hub::Hub;
use models::hugging_face::Folder;
use offload::{Method, Offload, Options, Tier};
use report::cli::CommonArgs;
use runtime::device;
use serde_json::json;
use tch::{Device, Kind};
use tokenizers::Tokenizer;

use super::budget::{self, Aim, Watch};
use super::folder::scratch;
use super::output::print;
use super::plan::TierName;
use super::rates;

/// Tokens of the product whose rate is measured.
const FEW: i64 = 16;

#[derive(Args)]
pub(crate) struct Generate {
    /// A folder in Hugging Face's layout, or a name on the hub, such as Qwen/Qwen2.5-7B
    #[arg(long, value_name = "NAME_OR_FOLDER")]
    model: String,
    /// Branch, tag or commit on the hub
    #[arg(long)]
    revision: Option<String>,
    /// Take what is in the hub's cache, and never use the network
    #[arg(long)]
    offline: bool,
    /// Bytes that may be held: of the process on a CPU, of tensors on a GPU; layers that fit stay on the device
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    budget: Option<u64>,
    /// Where the layers live: in the host's memory, or in the model's own files
    #[arg(long, value_enum, default_value_t)]
    tier: TierName,
    /// Slots of the ring that layers come through [default: 3, or what the budget leaves]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=64))]
    ring: Option<u16>,
    /// What the text begins with
    #[arg(long, value_name = "TEXT")]
    prompt: String,
    /// New tokens, at most
    #[arg(long, default_value_t = 64)]
    max_new_tokens: usize,
}

pub(crate) fn run(common: &CommonArgs, arguments: &Generate) -> anyhow::Result<()> {
    let device = device::select(&common.device)?;
    runtime::memory::track_cpu()?;
    let hub = Hub::from_env(arguments.offline);
    let folder = Folder::open(&hub.resolve(&arguments.model, arguments.revision.as_deref())?)?;
    let tokenizer = tokenizer(&folder)?;
    let encoded = tokenizer
        .encode_fast(arguments.prompt.as_str(), true)
        .map_err(|cause| anyhow!("the prompt: {cause}"))?;
    let prompt: Vec<i64> = encoded.get_ids().iter().map(|id| i64::from(*id)).collect();
    if prompt.is_empty() {
        bail!("--prompt is empty; give the text to begin with");
    }
    let options = options(arguments, &folder, prompt.len() as i64, device)?;
    let watch = Watch::start(device)?;
    let limit = arguments.budget.map(|bytes| budget::enforce(device, bytes)).transpose()?;
    let (model, offload) = Offload::open(&folder, None, &options)?;
    let generate = GenerateOptions {
        max_new_tokens: arguments.max_new_tokens,
        end_tokens: folder.end_tokens().to_vec(),
        ..GenerateOptions::default()
    };
    let mut stream = Stream { tokenizer: &tokenizer, shown: 0, silent: common.json, refused: None };
    if !common.json {
        print(&arguments.prompt)?;
    }
    let began = Instant::now();
    let generated = Generator::new(&model, &generate)?
        .generate(&[prompt], &mut |_: usize, tokens: &[i64]| stream.show(tokens, false))?;
    let seconds = began.elapsed().as_secs_f64();
    let row = generated.into_iter().next().ok_or_else(|| anyhow!("nothing was generated"))?;
    stream.show(&row.tokens, true);
    if let Some(error) = stream.refused.take() {
        return Err(error);
    }
    let text = decode(&tokenizer, &row.tokens)?;
    if common.json {
        let ended = match row.finish_reason {
            FinishReason::EndToken => "end token",
            FinishReason::Callback => "stopped by the reader",
            FinishReason::MaxNewTokens => "length",
            FinishReason::MaxSequence => "context",
        };
        let line =
            json!({ "prompt": arguments.prompt, "text": text, "tokens": row.tokens.len(), "ended": ended });
        print(&format!("{line}\n"))?;
    } else {
        print("\n")?;
    }
    drop(limit);
    let seen = watch.finish()?;
    let _ = writeln!(
        std::io::stderr().lock(),
        "{} tokens in {seconds:.2} s, {:.2} tokens/s; {} of {} layers resident, ring of {}, {} held",
        row.tokens.len(),
        row.tokens.len() as f64 / seconds.max(1e-9),
        offload.options().resident.len(),
        offload.blocks(),
        offload.options().ring,
        bytes_text(seen.counted(device)),
    );
    match arguments.budget {
        Some(budget) if seen.counted(device) > budget => bail!(
            "{} were held, more than the budget of {}; give a larger --budget, or a smaller --ring",
            bytes_text(seen.counted(device)),
            bytes_text(budget)
        ),
        _ => Ok(()),
    }
}

/// Which layers stay on the device, and how many slots there are for the others.
fn options(arguments: &Generate, folder: &Folder, prompt: i64, device: Device) -> anyhow::Result<Options> {
    let tier = match arguments.tier {
        TierName::Host => Tier::Host,
        // Nothing is written there: the layers are read from the model's own files.
        TierName::File => Tier::File(std::env::temp_dir()),
    };
    let ring = arguments.ring.map_or(3, usize::from);
    let options = Options { device, method: Method::Overlap, tier, ring, ..Options::default() };
    let Some(budget) = arguments.budget else { return Ok(options) };
    let (config, kind) = (folder.config(), folder.kind()?);
    if !matches!(kind, Kind::Float | Kind::BFloat16) {
        bail!("the weights are {kind:?}, which no plan is made for; leave --budget out, and give --ring");
    }
    let scratch = scratch(None)?;
    let measured_tier = match arguments.tier {
        TierName::Host => Tier::Host,
        TierName::File => Tier::File(scratch.path().to_owned()),
    };
    let measured =
        rates::measure(config, (kind, device), FEW.min(config.max_position_embeddings), &measured_tier)?;
    runtime::memory::empty_cache(device)?;
    let tokens = prompt.min(config.max_position_embeddings);
    let aim = Aim::Generation { new: arguments.max_new_tokens as u64 };
    let job = budget::job(config, (kind, device), tokens, aim, measured.speed)?;
    // Layers on the host are the same memory where that is the device.
    let on_host =
        if device == Device::Cpu && arguments.tier == TierName::Host { job.layer_bytes()? } else { 0 };
    let free = budget::for_tensors(budget, device)?.saturating_sub(on_host);
    let plan = budget::planned(&job, &measured, free)?;
    let ring = arguments.ring.map_or(plan.ring().max(1), usize::from);
    Ok(Options { ring, resident: plan.setup.resident, ..options })
}

fn tokenizer(folder: &Folder) -> anyhow::Result<Tokenizer> {
    let Some(path) = folder.tokenizer() else {
        bail!(
            "{}: tokenizer.json is missing; put there the one that came with the model",
            folder.path().display()
        );
    };
    Tokenizer::from_file(&path)
        .map_err(|cause| anyhow!("{}: not a tokenizer ({cause}); copy or download it again", path.display()))
}

fn decode(tokenizer: &Tokenizer, tokens: &[i64]) -> anyhow::Result<String> {
    let ids: Result<Vec<u32>, _> = tokens.iter().map(|token| u32::try_from(*token)).collect();
    let ids = ids.map_err(|_| anyhow!("a generated token is no id"))?;
    tokenizer.decode(&ids, true).map_err(|cause| anyhow!("tokenizer: {cause}"))
}

/// The text as it comes. What ends within a character is held back.
struct Stream<'t> {
    tokenizer: &'t Tokenizer,
    /// Bytes of the text that were shown.
    shown: usize,
    silent: bool,
    refused: Option<anyhow::Error>,
}

impl Stream<'_> {
    /// Shows what is new in the text of these tokens; true where nobody reads it.
    fn show(&mut self, tokens: &[i64], whole: bool) -> bool {
        if self.silent {
            return false;
        }
        let shown = decode(self.tokenizer, tokens).and_then(|text| {
            let certain = if whole { text.as_str() } else { text.trim_end_matches('\u{fffd}') };
            // A decoder may take back what it gave; what was shown stays.
            let new = certain.get(self.shown..).unwrap_or("");
            self.shown += new.len();
            print(new)
        });
        match shown {
            Ok(()) => false,
            Err(error) => {
                self.refused.get_or_insert(error);
                true
            }
        }
    }
}
