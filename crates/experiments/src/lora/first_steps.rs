//! `lora first-steps`: our half of `xtask/peers/first_steps.py`, the first steps of a fine-tuning with pretrained weights.
//!
//! With `--prepare` it writes what both halves begin with: the dequantized model in Hugging Face's layout, adapters with their first values,
//! and the tokens and labels of the rows. Without it, it trains from these files.

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use clap::Args;
use frugal::companion_files::CompanionFiles;
use frugal::config::{Config, DataConfig, Dtype};
use frugal::recipe::Recipe;
use frugal::tasks::gsm8k::{Annotations, EncodeConfig, Encoder, FewShot, PromptFormat, TooLong, records};
use lora::LoraConfig;
use models::hugging_face::{Folder, SHARD_BYTES, save};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tch::{Device, Kind};
use training::masked_rows::{Arrangement, Layout, MaskedBatches, MaskedRow};
use training::schedule::Shape;

use crate::installed::{self, GgufFolder};
use crate::training_recorder::TrainingRecorder;

#[derive(Args)]
pub(crate) struct FirstSteps {
    /// The files of both halves
    #[arg(long, value_name = "FOLDER")]
    folder: PathBuf,
    /// Write the files that both halves begin with
    #[arg(long)]
    prepare: bool,
    /// The model [default: Qwen2.5-Coder-0.5B-Instruct in the folder FRUGAL_MODELS]
    #[arg(long, value_name = "FILE", default_value = installed::ASSIGNMENT)]
    model: PathBuf,
    /// A folder with GSM8K's train.jsonl [default: the folder FRUGAL_GSM8K]
    #[arg(long, value_name = "FOLDER")]
    problems: Option<PathBuf>,
    /// Optimizer steps
    #[arg(long, default_value_t = 50)]
    steps: u64,
    /// Problems of a step
    #[arg(long, default_value_t = 4)]
    batch: usize,
    /// Learning rate, constant
    #[arg(long, default_value_t = 2e-4)]
    lr: f64,
}

/// The file of the rows.
const ROWS: &str = "rows.json";

#[derive(Serialize, Deserialize)]
struct Row {
    input_ids: Vec<i64>,
    /// −100 over the question.
    labels: Vec<i64>,
}

fn adapters() -> LoraConfig {
    LoraConfig {
        r: 8,
        lora_alpha: 16.0,
        target_modules: Some(["q_proj", "k_proj", "v_proj", "o_proj"].into()),
        ..LoraConfig::default()
    }
}

pub(crate) fn exchange(arguments: &FirstSteps) -> anyhow::Result<()> {
    if arguments.prepare { prepare(arguments) } else { train(arguments) }
}

fn prepare(arguments: &FirstSteps) -> anyhow::Result<()> {
    let file =
        installed::find(&arguments.model).ok_or_else(|| anyhow!(installed::missing(&arguments.model)))?;
    let problems = installed::gsm8k(arguments.problems.as_deref()).map_err(|missing| anyhow!(missing))?;
    // Its files exist as long as it does.
    let of_file = GgufFolder::new(&file)?;
    let folder = of_file.open()?;
    let base = folder.load(Some(Kind::BFloat16), Device::Cpu)?;
    save(&base, &arguments.folder.join("base"), SHARD_BYTES)?;

    let companions = CompanionFiles::of(&folder, None, &DataConfig::default())?;
    let end = companions.end_tokens().first().context("the model has no end token")?;
    let options = EncodeConfig {
        vocabulary: usize::try_from(folder.config().vocab_size)?,
        context: 1024,
        begin: None,
        end: u32::try_from(*end)?,
        too_long: TooLong::Skip,
    };
    let encoder = Encoder::new(companions.tokenizer()?, options)?;
    let mut problems = records::read(&problems.join("train.jsonl"), Annotations::Keep)?;
    problems.truncate(usize::try_from(arguments.steps)? * arguments.batch);
    let rows = encoder.tokenize_all(&problems, &FewShot::zero(PromptFormat::default()))?.rows;
    let rows: Vec<Row> =
        rows.into_iter().map(|row| Row { input_ids: row.input_ids, labels: row.labels }).collect();
    write(&arguments.folder.join(ROWS), &rows)?;

    let mut model = folder.load(Some(Kind::BFloat16), Device::Cpu)?;
    adapters().install(&mut model)?.save(&arguments.folder.join("adapter"))?;
    Ok(())
}

fn train(arguments: &FirstSteps) -> anyhow::Result<()> {
    let mut config = Config { adapter: Some(adapters()), ..Config::default() };
    config.model.dtype = Some(Dtype::Bfloat16);
    (config.training.batch, config.training.accumulation) = (arguments.batch, 1);
    (config.optimizer.lr, config.optimizer.warmup) = (arguments.lr, 0.0);
    config.optimizer.schedule = Shape::Constant;
    let text = std::fs::read_to_string(arguments.folder.join(ROWS))?;
    let rows: Vec<Row> = serde_json::from_str(&text)?;
    let rows = rows.into_iter().map(|row| MaskedRow::new(row.input_ids, row.labels)).collect();
    let layout =
        Layout { batch: arguments.batch, arrangement: Arrangement::PaddingFree, ..Layout::default() };
    let mut data = MaskedBatches::new(rows, layout, Device::Cpu)?;
    let mut prepared =
        Recipe::new(&config)?.open(&Folder::open(&arguments.folder.join("base"))?, Device::Cpu)?;
    prepared.plan_activations(&data.largest()?)?;
    let (mut trainer, handles) = prepared.trainer(arguments.steps)?;
    let recorder = TrainingRecorder::attach(&mut trainer, Device::Cpu)?;
    trainer.advance(arguments.steps, &mut data, None)?;
    let seen = recorder.seen();
    let losses: Vec<f64> = seen.steps.iter().map(|step| step.loss).collect();
    let seconds: Vec<f64> = seen.steps.iter().map(|step| step.timings.total).collect();
    drop(handles);
    write(
        &arguments.folder.join("ours.json"),
        &json!({ "losses": losses, "seconds": seconds, "tensor_peak": seen.peak_bytes() }),
    )
}

fn write(path: &Path, value: &impl Serialize) -> anyhow::Result<()> {
    std::fs::write(path, serde_json::to_string(value)?).with_context(|| format!("writing {}", path.display()))
}
