//! `training train`: one training, with checkpoints.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use models::module::{LanguageModel, trainable};
use models::{Gpt2, Gpt2Config, Gpt2Like, Gpt2LikeConfig};
use report::cli::CommonArgs;
use serde_json::json;
use tch::{Device, Kind};
use training::batches::Synthetic;
use training::checkpoint::Checkpoints;
use training::display::{Display, Efficiency};
use training::evaluation::Evaluation;
use training::observer::{Observer, StepRecord};
use training::optimizer::{AdamW, Group, Optimizer};
use training::schedule::Shape;
use training::trainer::{Ended, FailedCheckpoint, Options};
use training::{Schedule, Trainer, interrupt};

/// Which model.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Model {
    /// The assignment's: one post-norm decoder layer
    Gpt2Like,
    /// GPT-2: pre-norm, of any depth
    Gpt2,
}

/// Which data.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Data {
    /// A made-up language
    Synthetic,
}

#[derive(Args)]
pub(crate) struct Train {
    /// Which model
    #[arg(long, value_enum, default_value = "gpt2-like")]
    model: Model,
    /// Width of the model
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(i64).range(1..))]
    width: i64,
    /// Attention heads
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(i64).range(1..))]
    heads: i64,
    /// Layers (gpt2)
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(i64).range(1..))]
    layers: i64,
    /// Number of tokens that the model knows
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(i64).range(1..))]
    vocabulary: i64,
    /// Probability that an activation is dropped
    #[arg(long, default_value_t = 0.1)]
    dropout: f64,
    /// Which data
    #[arg(long, value_enum, default_value = "synthetic")]
    data: Data,
    /// Rows of a batch
    #[arg(long, default_value_t = 8)]
    batch: usize,
    /// Tokens of a row
    #[arg(long, default_value_t = 32)]
    length: usize,
    /// Steps of the whole training
    #[arg(long, default_value_t = 100)]
    steps: u64,
    /// Micro-batches of a step
    #[arg(long, default_value_t = 1)]
    accumulation: usize,
    /// Learning rate
    #[arg(long, default_value_t = 1e-3)]
    lr: f64,
    /// Weight decay of matrices
    #[arg(long, default_value_t = 0.1)]
    weight_decay: f64,
    /// Steps of warm-up
    #[arg(long, default_value_t = 0)]
    warmup: u64,
    /// Largest norm of the gradients
    #[arg(long)]
    clip: Option<f64>,
    /// Write checkpoints into FOLDER
    #[arg(long, value_name = "FOLDER")]
    checkpoint_dir: Option<PathBuf>,
    /// Steps between checkpoints
    #[arg(long, requires = "checkpoint_dir")]
    checkpoint_every: Option<u64>,
    /// Checkpoints to keep
    #[arg(long, default_value_t = 3)]
    keep: usize,
    /// Go on from the newest checkpoint, where there is one
    #[arg(long, requires = "checkpoint_dir")]
    resume: bool,
    /// Go on training when a checkpoint cannot be written
    #[arg(long)]
    ignore_failed_checkpoints: bool,
    /// Append a JSON line for each step to FILE: step, loss, and the loss's bits
    #[arg(long, value_name = "FILE")]
    log_losses: Option<PathBuf>,
    /// Steps between reading losses from the device
    #[arg(long, default_value_t = 10)]
    read_every: u64,
    /// Steps between evaluations
    #[arg(long)]
    evaluate_every: Option<u64>,
}

pub(crate) fn run(common: &CommonArgs, arguments: &Train) -> anyhow::Result<()> {
    let device = runtime::device::select(&common.device)?;
    runtime::memory::track_cpu()?;
    runtime::random::seed(common.seed)?;
    let model = model(arguments, device)?;
    let groups = Group::by_dimension(trainable(model.as_ref()), arguments.lr, arguments.weight_decay);
    let optimizer = Optimizer::new(AdamW::default(), groups)?;
    let options = Options {
        steps: arguments.steps,
        accumulation: arguments.accumulation,
        clip: arguments.clip,
        read_every: arguments.read_every,
        evaluate_every: arguments.evaluate_every,
        checkpoint_every: arguments.checkpoint_every,
        failed_checkpoint: match arguments.ignore_failed_checkpoints {
            true => FailedCheckpoint::GoOn,
            false => FailedCheckpoint::Stop,
        },
        ..Options::default()
    };
    let mut trainer = Trainer::new(model, optimizer, options)?;
    trainer.schedule =
        Schedule { shape: Shape::Constant, warmup: arguments.warmup, steps: arguments.steps, floor: 0.0 };
    trainer.stop = interrupt::on_signals()?;
    let Data::Synthetic = arguments.data;
    let mut train = synthetic(common.seed, arguments, device, None);
    let mut validation = synthetic(common.seed.wrapping_add(1), arguments, device, Some(4));

    trainer.observers.push(Box::new(Display::new(arguments.steps, device, Efficiency::default())));
    trainer.observers.push(Box::new(Log { json: common.json }));
    if let Some(path) = &arguments.log_losses {
        trainer.observers.push(Box::new(LossLog::append(path)?));
    }
    if let Some(folder) = &arguments.checkpoint_dir {
        let checkpoints = Checkpoints::open(folder, arguments.keep)?;
        if !arguments.resume && !checkpoints.steps()?.is_empty() {
            let folder = folder.display();
            bail!(
                "{folder} holds checkpoints of an earlier run; go on from them with --resume, or give an empty folder"
            );
        }
        trainer.checkpoints = Some(checkpoints);
    }
    if arguments.resume {
        trainer.resume(&mut train)?;
    }
    match trainer.run(&mut train, Some(&mut validation))? {
        Ended::Done | Ended::OutOfData => Ok(()),
        Ended::Interrupted if trainer.checkpoints.is_some() => {
            bail!("interrupted after step {}, which is saved; go on with --resume", trainer.step())
        }
        Ended::Interrupted => {
            bail!("interrupted after step {}; nothing is saved without --checkpoint-dir", trainer.step())
        }
    }
}

fn model(arguments: &Train, device: Device) -> anyhow::Result<Box<dyn LanguageModel>> {
    let &Train { width, heads, layers, vocabulary, dropout, .. } = arguments;
    let length = i64::try_from(arguments.length)?;
    let options = (Kind::Float, device);
    Ok(match arguments.model {
        Model::Gpt2Like => {
            let config = Gpt2LikeConfig {
                vocab_size: vocabulary,
                embedding_dim: width,
                hidden_dim: width,
                num_heads: heads,
                ff_dim: 2 * width,
                max_length: length,
                dropout,
                ..Gpt2LikeConfig::default()
            };
            Box::new(Gpt2Like::new(&config, options)?)
        }
        Model::Gpt2 => {
            let config = Gpt2Config {
                vocabulary,
                max_sequence: length,
                hidden: width,
                heads,
                layers,
                dropout,
                ..Gpt2Config::small()
            };
            Box::new(Gpt2::new(&config, options)?)
        }
    })
}

fn synthetic(seed: u64, arguments: &Train, device: Device, batches: Option<u64>) -> Synthetic {
    let &Train { vocabulary, batch, length, .. } = arguments;
    Synthetic { seed, vocabulary, rows: batch, length, noise: 3, batches, device, position: 0 }
}

/// Evaluations and steps on standard output, where a program reads it; warnings on standard error.
struct Log {
    json: bool,
}

impl Log {
    #[allow(clippy::print_stdout, reason = "the result of a program goes to standard output")]
    fn line(&self, line: &serde_json::Value) {
        if self.json {
            // Nobody reading is no reason to stop training.
            let _ = writeln!(std::io::stdout().lock(), "{line}");
        }
    }
}

impl Observer for Log {
    fn on_step(&mut self, record: &StepRecord) -> training::Result<()> {
        self.line(&json!({ "step": record }));
        Ok(())
    }

    fn on_evaluation(&mut self, evaluation: &Evaluation) -> training::Result<()> {
        self.line(&json!({ "evaluation": evaluation }));
        Ok(())
    }

    fn on_checkpoint(&mut self, step: u64, path: &Path) -> training::Result<()> {
        self.line(&json!({ "checkpoint": path, "at": step }));
        Ok(())
    }

    fn on_warning(&mut self, warning: &str) -> training::Result<()> {
        eprintln!("warning: {warning}");
        Ok(())
    }
}

/// One JSON line for each step.
struct LossLog {
    path: PathBuf,
    file: File,
}

impl LossLog {
    fn append(path: &Path) -> anyhow::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path);
        let file = file.with_context(|| format!("cannot open the loss log {}", path.display()))?;
        Ok(Self { path: path.to_owned(), file })
    }
}

impl Observer for LossLog {
    fn on_step(&mut self, record: &StepRecord) -> training::Result<()> {
        let bits = format!("{:016x}", record.loss.to_bits());
        let line = format!("{}\n", json!({ "step": record.step, "loss": record.loss, "bits": bits }));
        self.file
            .write_all(line.as_bytes())
            .map_err(|cause| training::Error::Io { path: self.path.clone(), cause })
    }
}
