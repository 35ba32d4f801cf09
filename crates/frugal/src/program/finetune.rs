//! `frugal finetune`.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use frugal::display::{Display, Efficiency};
use frugal::tasks::gsm8k::{Encoder, FewShot, Problem};
use lora::Adapters;
use models::module::parameter_count;
use report::cli::CommonArgs;
use serde_json::json;
use training::interrupt;
use training::masked_rows::MaskedRow;
use training::observer::Observer;
use training::schedule::Shape;
use training::trainer::Ended;

use crate::program::adapter::AdapterArgs;
use crate::program::encoding::EncodingArgs;
use crate::program::figures::{grouped, share};
use crate::program::fine_tune::{Checkpointing, FineTuning, Prepared, Tuned, fine_tune};
use crate::program::model::{ModelArgs, same_folder};
use crate::program::output::{Lines, print_line};
use crate::program::problems::ProblemArgs;
use frugal::loss_log::{Ends, LossLog, Losses};

/// How the learning rate falls after warm-up.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Falls {
    /// Not at all
    Constant,
    /// In a straight line, to 0 at the last step
    Linear,
    /// Along half a cosine, to 0 at the last step
    Cosine,
}

#[derive(Args)]
pub(crate) struct Finetune {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    problems: ProblemArgs,
    /// Where the adapter goes, with losses.jsonl and the checkpoints
    #[arg(long, value_name = "FOLDER")]
    out: PathBuf,
    #[command(flatten)]
    adapter: AdapterArgs,
    #[command(flatten)]
    encoding: EncodingArgs,
    /// Solved examples before each question that is learnt from
    #[arg(long, default_value_t = 0)]
    shots: usize,
    /// Learn from the first N problems
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    /// Put several problems into rows of TOKENS places, where none sees another, instead of padding each batch to its longest
    #[arg(long, value_name = "TOKENS", num_args = 0..=1, default_missing_value = "1024")]
    packing: Option<usize>,
    /// Rows of a batch
    #[arg(long, default_value_t = 4)]
    batch_size: usize,
    /// Batches of a step
    #[arg(long, default_value_t = 4)]
    accumulation: usize,
    /// How often each problem is learnt from
    #[arg(long, default_value_t = 1)]
    epochs: u64,
    /// Steps in all, instead of --epochs
    #[arg(long, conflicts_with = "epochs")]
    steps: Option<u64>,
    /// Learning rate
    #[arg(long, default_value_t = 2e-4)]
    lr: f64,
    /// How the learning rate falls after warm-up
    #[arg(long, value_enum, default_value = "cosine")]
    schedule: Falls,
    /// Share of the steps in which the learning rate rises
    #[arg(long, default_value_t = 0.03)]
    warmup: f64,
    /// Decoupled decay of the adapters' matrices
    #[arg(long, default_value_t = 0.0)]
    weight_decay: f64,
    /// Largest norm of the gradients
    #[arg(long, default_value_t = 1.0)]
    clip: f64,
    /// Run layers again in backward instead of keeping what it needs: less memory, more time
    #[arg(long)]
    recompute: bool,
    /// Steps between evaluations on the validation split; one is made at the end in any case
    #[arg(long, value_name = "STEPS")]
    evaluate_every: Option<u64>,
    /// Steps between checkpoints; one is written at the end, and on Ctrl-C, in any case
    #[arg(long, value_name = "STEPS")]
    checkpoint_every: Option<u64>,
    /// Checkpoints to keep
    #[arg(long, default_value_t = 2)]
    keep: usize,
    /// Go on from the newest checkpoint in --out, where there is one
    #[arg(long)]
    resume: bool,
}

/// Folder of the checkpoints within `--out`.
pub(crate) const CHECKPOINTS: &str = "checkpoints";
/// The loss log within `--out`.
const LOSSES: &str = "losses.jsonl";

pub(crate) fn run(common: &CommonArgs, arguments: &Finetune) -> anyhow::Result<()> {
    let device = runtime::device::select(&common.device)?;
    runtime::memory::track_cpu()?;
    runtime::random::seed(common.seed)?;
    // Everything that can be wrong without the weights is found before they are read.
    let folder = arguments.model.open()?;
    if same_folder(folder.path(), &arguments.out) {
        bail!("--out {} is the model's own folder; give another", arguments.out.display());
    }
    let config = arguments.adapter.config(&arguments.model.model);
    config.check()?;
    config.trainable_parameters(folder.config())?;
    let encoder = arguments.encoding.encoder(&folder)?;
    let (train, validation) = rows(arguments, &encoder)?;
    std::fs::create_dir_all(&arguments.out)
        .with_context(|| format!("{} cannot be made", arguments.out.display()))?;

    let mut model = arguments.model.load(&folder, device)?;
    let adapters = Adapters::install(&mut model, &config, common.seed)?;
    let model = Box::new(adapters.wrap(Box::new(model))?);
    let options = options(common, arguments, &encoder);
    let losses = Ends::default();
    let mut steps = 0;
    let observers = |prepared: &Prepared| -> anyhow::Result<Vec<Box<dyn Observer>>> {
        say(prepared);
        steps = prepared.steps();
        let log = LossLog::open(&arguments.out.join(LOSSES), arguments.resume)?;
        let display = Display::new(steps, device, Efficiency::default());
        let mut observers: Vec<Box<dyn Observer>> =
            vec![Box::new(display), Box::new(log), Box::new(losses.clone())];
        if common.json {
            observers.push(Box::new(Lines));
        }
        Ok(observers)
    };
    let tuned = fine_tune(model, train, validation, &options, observers, interrupt::on_signals()?)?;
    finish(common, arguments, &adapters, &tuned, steps, losses.get())
}

fn options(common: &CommonArgs, arguments: &Finetune, encoder: &Encoder) -> FineTuning {
    let context = encoder.options().context;
    FineTuning {
        epochs: arguments.epochs,
        steps: arguments.steps,
        batch: arguments.batch_size,
        accumulation: arguments.accumulation,
        packed: arguments.packing.map(|capacity| capacity.min(context)),
        pad: i64::from(encoder.options().end),
        lr: arguments.lr,
        shape: match arguments.schedule {
            Falls::Constant => Shape::Constant,
            Falls::Linear => Shape::Linear,
            Falls::Cosine => Shape::Cosine,
        },
        warmup: arguments.warmup,
        weight_decay: arguments.weight_decay,
        clip: Some(arguments.clip),
        recompute: arguments.recompute,
        evaluate_every: arguments.evaluate_every,
        checkpoints: Some(Checkpointing {
            folder: arguments.out.join(CHECKPOINTS),
            every: arguments.checkpoint_every,
            keep: arguments.keep,
            resume: arguments.resume,
        }),
        seed: common.seed,
        ..FineTuning::default()
    }
}

/// Rows to learn from, and those of the validation split.
fn rows(arguments: &Finetune, encoder: &Encoder) -> anyhow::Result<(Vec<MaskedRow>, Vec<MaskedRow>)> {
    let parts = arguments.problems.parts()?;
    let few_shot = arguments.problems.few_shot(&parts.train, arguments.shots)?;
    let limit = arguments.limit.unwrap_or(parts.train.len()).min(parts.train.len());
    let train = encoded(encoder, &parts.train[..limit], &few_shot, "training")?;
    let validation = encoded(encoder, &parts.validation, &few_shot, "validation")?;
    Ok((train, validation))
}

fn encoded(
    encoder: &Encoder,
    problems: &[Problem],
    few_shot: &FewShot,
    which: &str,
) -> anyhow::Result<Vec<MaskedRow>> {
    let rows = encoder
        .tokenize_all(problems, few_shot)
        .with_context(|| format!("the {which} rows (--skip-long leaves long ones out)"))?;
    if !rows.skipped.is_empty() {
        let (skipped, all) = (rows.skipped.len(), problems.len());
        note(&format!("{skipped} of {all} {which} problems are too long and left out"));
    }
    Ok(rows.rows.into_iter().map(MaskedRow::from).collect())
}

fn say(prepared: &Prepared) {
    let counted = prepared.parameters();
    let (tokens, padding) = prepared.rows().tokens_and_padding();
    note(&format!(
        "trains {} parameters; an epoch is {} tokens in {} batches{}; {} steps",
        share(counted.trainable, counted.total),
        grouped(tokens as u64),
        grouped(prepared.rows().batches_per_epoch()),
        if padding > 0 {
            format!(" with {} places of padding", grouped(padding as u64))
        } else {
            String::new()
        },
        grouped(prepared.steps()),
    ));
}

/// A line to the user, beside the result.
fn note(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// Writes the adapter, and says what came of the training.
fn finish(
    common: &CommonArgs,
    arguments: &Finetune,
    adapters: &Adapters,
    tuned: &Tuned,
    steps: u64,
    losses: Losses,
) -> anyhow::Result<()> {
    let out: &Path = &arguments.out;
    let step = tuned.step;
    if tuned.ended == Ended::Interrupted {
        match tuned.saved {
            Some(saved) if saved == step => {
                bail!("interrupted after step {step} of {steps}, which is saved; go on with --resume")
            }
            _ => bail!("interrupted after step {step} of {steps}; its checkpoint was not written"),
        }
    }
    adapters.save(out)?;
    let counted = parameter_count(tuned.model.as_ref());
    if common.json {
        print_line(&json!({ "result": {
            "adapter": out, "steps": step, "trainable": counted.trainable, "parameters": counted.total,
            "first_loss": losses.first, "last_loss": losses.last, "validation_loss": losses.validation,
        }}));
    } else {
        let of = |loss: Option<f64>| loss.map_or_else(|| "–".to_owned(), |loss| format!("{loss:.4}"));
        let (first, last, validation) = (of(losses.first), of(losses.last), of(losses.validation));
        note(&format!("{step} steps: loss {first} to {last}, on the validation split {validation}"));
        note(&format!("the adapter is in {}", out.display()));
    }
    Ok(())
}
