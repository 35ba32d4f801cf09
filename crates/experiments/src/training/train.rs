//! `training train`: one training, with checkpoints.

mod data;
mod diagnosis;
mod log;

use std::path::PathBuf;

use anyhow::bail;
use clap::{Args, ValueEnum};
use frugal::display::{Display, Efficiency};
use models::module::{LanguageModel, trainable};
use models::{Gpt2, Gpt2Config, Gpt2Like, Gpt2LikeConfig};
use report::Case;
use report::cli::CommonArgs;
use serde_json::json;
use tch::{Device, Kind};
use training::checkpoint::Checkpoints;
use training::optimizer::{
    AdaGrad, Adam, AdamW, DeviceOptimizer, Group, Momentum, Nesterov, RmsProp, Rule, Sgd,
};
use training::probe::Probe;
use training::schedule::Shape;
use training::trainer::{Ended, FailedCheckpoint, Options};
use training::{Batches, Schedule, Trainer, interrupt};

use data::DataArgs;
use log::{Log, LossLog, StepRecords};

/// Which model.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Model {
    /// The assignment's: one post-norm decoder layer
    Gpt2Like,
    /// GPT-2: pre-norm, of any depth
    Gpt2,
}

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

/// Which optimizer, each with its usual coefficients.
#[derive(Clone, Copy, Debug, ValueEnum)]
#[value(rename_all = "lower")]
enum Rules {
    Sgd,
    Momentum,
    Nesterov,
    AdaGrad,
    RmsProp,
    Adam,
    AdamW,
}

impl Rules {
    fn rule(self) -> Box<dyn Rule> {
        match self {
            Self::Sgd => Box::new(Sgd),
            Self::Momentum => Box::new(Momentum::default()),
            Self::Nesterov => Box::new(Nesterov::default()),
            Self::AdaGrad => Box::new(AdaGrad::default()),
            Self::RmsProp => Box::new(RmsProp::default()),
            Self::Adam => Box::new(Adam::default()),
            Self::AdamW => Box::new(AdamW::default()),
        }
    }
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
    /// Probability that an activation is dropped. Attention weights are too, which keeps attention from its fused kernels
    #[arg(long, default_value_t = 0.0)]
    dropout: f64,
    #[command(flatten)]
    data: DataArgs,
    /// Micro-batches of a step
    #[arg(long, default_value_t = 1)]
    accumulation: usize,
    /// Which optimizer
    #[arg(long, value_enum, default_value = "adamw")]
    optimizer: Rules,
    /// Learning rate
    #[arg(long, default_value_t = 1e-3)]
    lr: f64,
    /// How the learning rate falls after warm-up
    #[arg(long, value_enum, default_value = "constant")]
    schedule: Falls,
    /// Weight decay of matrices: decoupled for adamw, an L2 penalty for the others
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
    /// Trace three steps after the first three, and say where their time goes and what is slow
    #[arg(long)]
    diagnose: bool,
    /// Keep that trace in FILE, for ui.perfetto.dev
    #[arg(long, value_name = "FILE", requires = "diagnose")]
    trace: Option<PathBuf>,
}

pub(crate) fn run(common: &CommonArgs, arguments: &Train) -> anyhow::Result<()> {
    let device = runtime::device::select(&common.device)?;
    runtime::memory::track_cpu()?;
    runtime::random::seed(common.seed)?;
    let data = arguments.data.open(common.seed, arguments.accumulation, device)?;
    if arguments.evaluate_every.is_some() && data.validation.is_none() {
        bail!("--evaluate-every, and nothing to measure on; give a --validation PATH");
    }
    let (mut train, mut validation) = (data.train, data.validation);
    let model = model(arguments, data.vocabulary, device)?;
    let groups = Group::by_dimension(trainable(model.as_ref()), arguments.lr, arguments.weight_decay);
    let optimizer = DeviceOptimizer::boxed(arguments.optimizer.rule(), groups)?;
    let options = Options {
        steps: data.steps,
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
    let mut trainer = Trainer::new(model, Box::new(optimizer), options)?;
    let shape = match arguments.schedule {
        Falls::Constant => Shape::Constant,
        Falls::Linear => Shape::Linear,
        Falls::Cosine => Shape::Cosine,
    };
    trainer.schedule = Schedule { shape, warmup: arguments.warmup, steps: data.steps, floor: 0.0 };
    trainer.schedule.check()?;
    trainer.stop = interrupt::on_signals()?;
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
    observe(common, device, &mut trainer, train.as_mut())?;
    if let Some(path) = &arguments.log_losses {
        trainer.observers.push(Box::new(LossLog::append(path)?));
    }
    if let (Some(path), Some(writer)) = (&common.records, common.open_records()?) {
        let environment = crate::environment::of(device)?;
        let records = StepRecords::new(writer, path, case(common, arguments), environment);
        trainer.observers.push(Box::new(records));
    }
    if arguments.resume {
        trainer.resume(train.as_mut())?;
    }
    if arguments.diagnose {
        let (validation, trace) = (lend(&mut validation), arguments.trace.as_deref());
        diagnosis::diagnose(&mut trainer, train.as_mut(), validation, data.loading, trace, common.json)?;
    }
    let ended = trainer.run(train.as_mut(), lend(&mut validation))?;
    finish(&trainer, ended)
}

/// What records say of the training.
fn case(common: &CommonArgs, arguments: &Train) -> Case {
    let name = |value: Option<clap::builder::PossibleValue>| {
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    };
    let case = Case::new()
        .with("model", name(arguments.model.to_possible_value()))
        .with("optimizer", name(arguments.optimizer.to_possible_value()))
        .with("schedule", name(arguments.schedule.to_possible_value()));
    arguments.data.describe(case).with("width", arguments.width).with("seed", common.seed)
}

/// What the end of a training means for whoever started it: a last step that is not on the disk is a failure.
fn finish(trainer: &Trainer, ended: Ended) -> anyhow::Result<()> {
    let step = trainer.step();
    let kept = match trainer.saved() {
        _ if trainer.checkpoints.is_none() => "nothing is saved without --checkpoint-dir".to_owned(),
        Some(saved) if saved == step && ended == Ended::Interrupted => {
            bail!("interrupted after step {step}, which is saved; go on with --resume")
        }
        Some(saved) if saved == step => return Ok(()),
        Some(saved) => {
            format!(
                "its checkpoint was not written, and the last is that of step {saved}; go on from there with --resume"
            )
        }
        None => "its checkpoint was not written, and there is no earlier one".to_owned(),
    };
    match ended {
        Ended::Interrupted => bail!("interrupted after step {step}; {kept}"),
        Ended::Done | Ended::OutOfData if trainer.checkpoints.is_none() => Ok(()),
        Ended::Done | Ended::OutOfData => bail!("trained up to step {step}; {kept}"),
    }
}

/// Puts a bar on the terminal, and lines on standard output. How well the machine is used is measured where somebody sees it.
fn observe(
    common: &CommonArgs,
    device: Device,
    trainer: &mut Trainer,
    train: &mut dyn Batches,
) -> anyhow::Result<()> {
    let steps = trainer.options.steps;
    let mut display = Display::new(steps, device, Efficiency::default());
    if (display.is_seen() || common.json)
        && let Some(probe) = Probe::run(trainer, train)?
    {
        let efficiency = Efficiency::measure(&probe, device)?;
        display = display.with_efficiency(efficiency);
        if common.json {
            log::line(&json!({ "efficiency": efficiency }));
        }
    }
    trainer.observers.push(Box::new(display));
    if common.json {
        trainer.observers.push(Box::new(Log));
    }
    Ok(())
}

/// A validation for one call of the loop.
fn lend(validation: &mut Option<Box<dyn Batches>>) -> Option<&mut dyn Batches> {
    validation.as_mut().map(|validation| validation.as_mut() as &mut dyn Batches)
}

fn model(arguments: &Train, vocabulary: i64, device: Device) -> anyhow::Result<Box<dyn LanguageModel>> {
    let &Train { width, heads, layers, dropout, .. } = arguments;
    let length = arguments.data.length();
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
