//! `frugal generate`.

use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::common_flags::Common;
use accounting::Decoder;
use accounting::decoder_flops::Workload;
use accounting::offload::sizes::{self, Choices};
use accounting::offload::{self as on_paper};
use accounting::quantity::bytes_text;
use anyhow::{Context, bail};
use clap::{ArgGroup, Args};
use dataloading::Tokenizer;
use dataloading::records::{self, FileKind, Record};
use frugal::companion_files::CompanionFiles;
use frugal::config::{Bytes, ExpertsConfig, OffloadConfig, OffloadTier};
use frugal::models::hugging_face::Folder;
use frugal::offload::{Offload, Tier};
use frugal::planning::{self, Budget, MachineRates, PeakMeter, WeightFormat};
use lora::peft::TENSORS_FILE;
use models::generation::{FinishReason, Generated, GenerationConfig, Generator};
use models::tensors_file::dtype_name;
use report::cli::Failure;
use serde_json::{Value, json};
use tch::{Device, Kind};

use super::output::{print_line, show};
use crate::flags::WITHOUT_OFFLOAD;
use crate::flags::model::{Found, ModelArgs, with_adapter};
use crate::flags::sampling::SamplingArgs;
use crate::flags::values::budget;
use crate::run::plan::{MEASURING, NOTHING_FITS, fitting};
use frugal::text_stream::TextStream;

#[derive(Args)]
#[command(group(ArgGroup::new("text").required(true).args(["prompt", "prompts"])))]
pub(crate) struct Generate {
    #[command(flatten)]
    model: ModelArgs,
    /// An adapter's folder [default: that of a training in --model]
    #[arg(long, value_name = "FOLDER")]
    adapter: Option<PathBuf>,
    /// Memory limit, such as 3GiB: of the process on a CPU, of tensors on a GPU. Layers that do not fit are offloaded
    #[arg(long, value_name = "BYTES", value_parser = budget)]
    budget: Option<Bytes>,
    /// Where offloaded layers are stored, so that the model may be larger than the device's memory [default with --budget: file]
    #[arg(long, value_name = "TIER")]
    offload: Option<OffloadTier>,
    /// Number of offloaded layers on the device at a time [default: 3, or what fits --budget]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=64))]
    ring: Option<u16>,
    /// Layers that are not offloaded: numbers from 0, separated by commas
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', conflicts_with = "budget")]
    resident: Vec<usize>,
    /// Stream the experts of a mixture from files through this much memory: those that tokens are given to are loaded
    #[arg(long, value_name = "BYTES", value_parser = budget, conflicts_with_all = ["offload", "budget", "ring", "resident"])]
    offload_experts: Option<Bytes>,
    /// Text to continue
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// A file of prompts, one per line (\n stands for a line break), or records with a field `prompt` (.jsonl, .json, .csv, .parquet),
    /// which are continued in one batch
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,
    /// Maximum number of new tokens per prompt
    #[arg(long, default_value_t = 256)]
    max_new_tokens: usize,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Text that ends the generation and is not part of it; may be given several times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
}

impl Generate {
    /// How layers are offloaded, by the flags and by what the budget leaves.
    fn offload(
        &self,
        (folder, adapter): (&Folder, Option<&Path>),
        device: Device,
        prompts: &[Vec<i64>],
    ) -> anyhow::Result<Option<OffloadConfig>> {
        if self.offload.is_none() && self.budget.is_none() {
            if self.ring.is_some() || !self.resident.is_empty() {
                bail!(WITHOUT_OFFLOAD);
            }
            return Ok(None);
        }
        let mut config = OffloadConfig {
            tier: self.offload.unwrap_or(OffloadTier::File),
            resident: self.resident.clone(),
            ..OffloadConfig::default()
        };
        if let Some(budget) = self.budget {
            let kind = self.model.dtype.map_or_else(|| folder.kind(), |dtype| Ok(dtype.kind()))?;
            self.plan((folder, adapter), (kind, device), prompts, budget, &mut config)?;
        }
        config.ring = self.ring.map_or(config.ring, usize::from);
        Ok(Some(config))
    }

    /// Chooses the resident layers and the ring by a budget.
    fn plan(
        &self,
        (folder, adapter): (&Folder, Option<&Path>),
        (kind, device): (Kind, Device),
        prompts: &[Vec<i64>],
        budget: Bytes,
        config: &mut OffloadConfig,
    ) -> anyhow::Result<()> {
        let format = WeightFormat::of(folder, kind)?;
        if !matches!(kind, Kind::Float | Kind::BFloat16) && !format.recipe().is_quantized() {
            bail!(
                "the weights are {}, and a budget is planned for float32, bfloat16, nf4 and gguf; give --dtype, or --offload without \
                 --budget",
                dtype_name(kind)
            );
        }
        // A budget that is too small is known before anything is measured.
        let free = || fitting(Budget::new(budget.0, device)?.free());
        free()?;
        let scratch = tempfile::tempdir()?;
        let tier = match config.tier {
            OffloadTier::Host => Tier::Host,
            OffloadTier::File => Tier::File(scratch.path().to_owned()),
        };
        let shape = folder.config();
        // One token of each row is what a step computes.
        let product = [prompts.len() as i64, shape.intermediate_size.min(4096), shape.hidden_size.min(4096)];
        // On a CPU measuring takes memory of the budget.
        let rates = match device == Device::Cpu && free()? < MEASURING {
            true => MachineRates::NOMINAL,
            false => MachineRates::measure(product, (kind, device), &tier)?,
        };
        runtime::memory::empty_cache(device)?;
        let longest =
            prompts.iter().map(Vec::len).max().unwrap_or(1).min(shape.max_position_embeddings as usize);
        let work = Workload { batch: prompts.len() as u64, sequence: longest.max(1) as u64 };
        let choices =
            Choices { recipe: format.recipe(), ..planning::choices((kind, device), &rates, work.sequence) };
        let costs =
            sizes::generation(&Decoder::from_config(shape)?, work, self.max_new_tokens as u64, &choices)?;
        let adapter = adapter.map_or(Ok(0), adapter_bytes)?;
        // Layers in the host's memory are in a CPU's budget too.
        let on_host = match (device, config.tier) {
            (Device::Cpu, OffloadTier::Host) => costs.layer_bytes()?,
            _ => 0,
        };
        let left = free()?.saturating_sub(on_host + adapter);
        let on_device = on_paper::AvailableMemory { device: left, host: None };
        let plan = match on_paper::plan(&costs, &rates.transfers, on_device) {
            Err(accounting::Error::NoOffloadFits { needed, .. }) => {
                let tensors = needed + on_host + adapter;
                let now = Budget::new(budget.0, device)?;
                let least = now.for_tensors(now.live + tensors) >> 20;
                let message = format!(
                    "nothing fits a budget of {budget}; with all layers offloaded it takes {least} MiB: give --budget {least}MiB"
                );
                return Err(Failure { status: NOTHING_FITS, message }.into());
            }
            plan => plan?,
        };
        config.ring = plan.ring().max(1);
        config.resident = plan.setup.resident;
        Ok(())
    }

    fn texts(&self) -> anyhow::Result<Vec<String>> {
        if let Some(prompt) = &self.prompt {
            return Ok(vec![prompt.clone()]);
        }
        let path = self.prompts.clone().unwrap_or_default();
        let texts: Vec<String> = match FileKind::from_path(&path) {
            FileKind::Text => {
                let file = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
                let lines = file.lines().filter(|line| !line.trim().is_empty());
                lines.map(|line| line.replace("\\n", "\n")).collect()
            }
            _ => records::read_all(&[&path])?
                .map(|record| prompt_of(&record?))
                .collect::<anyhow::Result<_>>()?,
        };
        if texts.is_empty() {
            bail!("{}: no prompt in it; write one on each line", path.display());
        }
        Ok(texts)
    }
}

/// The prompt of a record.
fn prompt_of(record: &Record) -> anyhow::Result<String> {
    match record.fields.get("prompt") {
        Some(Value::String(prompt)) => Ok(prompt.clone()),
        Some(_) => {
            bail!("{}: `prompt` is no text; a conversation is continued by `frugal chat`", record.location)
        }
        None => {
            let names: Vec<&str> = record.fields.keys().map(String::as_str).collect();
            bail!(
                "{}: no field `prompt`, which holds the text to continue; the fields here are {}. Lines of plain text are read from a \
                 file of another type, such as .txt",
                record.location,
                names.join(", ")
            )
        }
    }
}

pub(crate) fn run(common: &Common, arguments: &Generate) -> anyhow::Result<()> {
    let device = common.device()?;
    let texts = arguments.texts()?;
    let Found { folder, adapter, data } = arguments.model.find(common, arguments.adapter.as_deref())?;
    let companions = CompanionFiles::of(&folder, adapter.as_deref(), &data.unwrap_or_default())?;
    let tokenizer = companions.tokenizer()?;
    let prompts = texts.iter().map(|text| -> anyhow::Result<Vec<i64>> {
        let encoded = tokenizer.encode_with_begin(text)?;
        if encoded.is_empty() {
            bail!("--prompt is empty; give a text to continue");
        }
        Ok(encoded.into_iter().map(i64::from).collect())
    });
    let prompts: Vec<Vec<i64>> = prompts.collect::<anyhow::Result<_>>()?;
    runtime::memory::track_cpu()?;
    runtime::memory::set_block_cache(true)?;
    // Before the limit: measuring this machine needs memory of its own.
    let offload = arguments.offload((&folder, adapter.as_deref()), device, &prompts)?;
    let (meter, limit) = match arguments.budget {
        Some(budget) => (Some(PeakMeter::start(device)?), planning::enforce(device, budget.0)?),
        None => (None, None),
    };
    let kind = arguments.model.dtype.map(|dtype| dtype.kind());
    let mut experts = None;
    let (llama, offload) = match (offload, arguments.offload_experts) {
        (None, None) => (arguments.model.load(&folder, device)?, None),
        (None, Some(_)) if device != Device::Cpu => {
            bail!(
                "--offload-experts: experts are streamed on a CPU only; give --device cpu, or --offload host"
            )
        }
        (None, Some(cache)) => {
            let config = ExpertsConfig { cache, ..ExpertsConfig::default() };
            let (model, streamed) = config.options().open(&folder, kind)?;
            experts = Some(streamed);
            (model, None)
        }
        (Some(config), _) => {
            let (model, offload) = Offload::open(&folder, kind, &config.options(device))?;
            (model, Some(offload))
        }
    };
    let model = with_adapter(llama, adapter.as_deref())?;
    let options = GenerationConfig {
        max_new_tokens: arguments.max_new_tokens,
        sampling: arguments.sampling.get(common.seed()),
        end_tokens: companions.end_tokens().to_vec(),
        ..GenerationConfig::default()
    };
    let generator = Generator::new(model.as_ref(), &options)?;
    let mut rows =
        Rows::new(&tokenizer, &arguments.stop, texts.len(), arguments.prompt.is_some() && !common.json);
    let began = Instant::now();
    let generated =
        generator.generate(&prompts, &mut |row: usize, tokens: &[i64]| rows.token(row, tokens))?;
    let seconds = began.elapsed().as_secs_f64();
    let answers = rows.finish(&generated)?;
    print_answers(common, &texts, &prompts, &answers, &generated, !rows.streams);
    drop(limit);
    let held = match meter {
        Some(meter) => Some(meter.finish()?.counted(device)),
        None => None,
    };
    let count: usize = generated.iter().map(|row| row.tokens.len()).sum();
    let mut line =
        format!("{count} tokens in {seconds:.2} s, {:.1} tokens/s", count as f64 / seconds.max(1e-9));
    if let Some(offload) = &offload {
        let options = offload.options();
        line += &format!(
            "; {} of {} layers resident, ring of {}",
            options.resident.len(),
            offload.blocks(),
            options.ring
        );
    }
    if let Some(experts) = &experts {
        let counters = experts.counters();
        line += &format!(
            "; {} of {} experts in memory at a time, {} of {} uses loaded, {} read",
            experts.slots(),
            experts.experts(),
            counters.loads,
            counters.requested,
            bytes_text(counters.loaded)
        );
    }
    if let Some(held) = held {
        line += &format!(", {} held", bytes_text(held));
    }
    common.note(&line);
    if count == 0 {
        common
            .note("the model ended at once; one that was trained for conversations answers in `frugal chat`");
    }
    match (arguments.budget, held) {
        (Some(budget), Some(held)) if held > budget.0 => bail!(
            "{} were held, more than the budget of {budget}; give a larger --budget, or a smaller --ring",
            bytes_text(held)
        ),
        _ => Ok(()),
    }
}

/// Bytes of an adapter's tensors.
fn adapter_bytes(folder: &Path) -> anyhow::Result<u64> {
    let path = folder.join(TENSORS_FILE);
    Ok(path.metadata().with_context(|| path.display().to_string())?.len())
}

/// The generated texts. A single one is streamed to standard output.
struct Rows<'t> {
    streams: bool,
    rows: Vec<(TextStream<'t>, String)>,
    refused: Option<frugal::Error>,
}

impl<'t> Rows<'t> {
    fn new(tokenizer: &'t Tokenizer, stop: &[String], count: usize, streams: bool) -> Self {
        let rows = (0..count).map(|_| (TextStream::new(tokenizer, stop), String::new())).collect();
        Self { streams, rows, refused: None }
    }

    /// Takes a new token; true if the row ends.
    fn token(&mut self, row: usize, tokens: &[i64]) -> bool {
        let (stream, text) = &mut self.rows[row];
        match stream.push(tokens) {
            Ok(new) => {
                // A closed pipe ends the generation.
                let read = !self.streams || show(&new);
                text.push_str(&new);
                stream.stopped() || !read
            }
            Err(error) => {
                self.refused.get_or_insert(error);
                true
            }
        }
    }

    /// Returns the texts, with what the streams held back.
    fn finish(&mut self, generated: &[Generated]) -> anyhow::Result<Vec<String>> {
        if let Some(error) = self.refused.take() {
            return Err(error.into());
        }
        let mut texts = Vec::new();
        for ((stream, text), row) in self.rows.iter_mut().zip(generated) {
            let rest = stream.finish(&row.tokens)?;
            if self.streams {
                show(&rest);
                show("\n");
            }
            texts.push(format!("{text}{rest}"));
        }
        Ok(texts)
    }
}

/// Prints texts that were not streamed.
fn print_answers(
    common: &Common,
    prompts: &[String],
    prompt_tokens: &[Vec<i64>],
    texts: &[String],
    generated: &[Generated],
    whole: bool,
) {
    let rows = prompts.iter().zip(prompt_tokens).zip(texts).zip(generated);
    for (((prompt, prompt_tokens), text), row) in rows.filter(|_| whole) {
        let ended = match row.finish_reason {
            FinishReason::EndToken => "end token",
            FinishReason::Callback => "stop text",
            FinishReason::MaxNewTokens => "length",
            FinishReason::MaxSequence => "context",
        };
        if common.json {
            print_line(&json!({
                "prompt": prompt, "text": text, "tokens": row.tokens.len(), "ended": ended,
                "prompt_tokens": prompt_tokens,
            }));
        } else {
            show(&format!("{prompt}{text}\n\n"));
        }
    }
}
