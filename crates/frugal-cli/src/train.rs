//! `frugal train`.

mod data;
mod data_source;
mod efficiency;
mod weights;

use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use frugal::config::{Config, Given, ShapeConfig, ShapeFamily, Task};
use frugal::models::init::Init;
use frugal::models::module::LanguageModel;
use frugal::models::{DecoderConfig, Gpt2, Gpt2Config, Gpt2Like, Gpt2LikeConfig};
use frugal::planning::{self, DataShape};
use frugal::run_folder::SplitRecord;
use frugal::training::Batches;
use frugal::training::Trainer;
use frugal::training::probe::StepProbe;
use frugal::training::strategy::Strategy;
use serde_json::json;
use tch::{Device, Kind};

use super::output::print_line;
use crate::common_flags::Common;
use crate::flags::Flags;
use crate::flags::no_effect;
use crate::flags::origins::with_origins;
use crate::flags::table::TRAIN;
use crate::flags::unread;
use crate::folder::best_weights::Writer;
use crate::folder::run_record::About;
use crate::output::figures::{counted, grouped};
use crate::run::diagnosis::DiagnosisArgs;
use crate::run::job::{self, Feed, Job, RunOptions, Start};
use crate::run::plan::PlannedTraining;
use crate::run::training::NO_VALIDATION;
use data::Data;
use efficiency::Efficiency;
use weights::{Weights, files};

const MODEL_FLAG: &str = "--model";

#[derive(Args)]
pub(crate) struct Train {
    #[command(flatten)]
    flags: Flags<TRAIN>,
    /// Output folder: config.toml, losses.jsonl, checkpoints, and the model if --model is a config.json [default: nothing is written]
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
    /// Resume from the newest checkpoint in --out, if there is one
    #[arg(long, requires = "out")]
    resume: bool,
    /// Read the data, print the plan for it, and end; nothing is trained
    #[arg(long, conflicts_with = "resume")]
    dry_run: bool,
    #[command(flatten)]
    diagnosis: DiagnosisArgs,
}

impl Train {
    /// The configuration that the file, `--set` and the flags make, and these values.
    fn config(&self, common: &Common) -> anyhow::Result<(Config, Given)> {
        let mut given = self.flags.given()?;
        self.flags.give(&mut given, Task::Train)?;
        common.flags.give_common(&mut given)?;
        // The name of a shape, or a file.
        if let Some(name) = self.flags.text(MODEL_FLAG) {
            match ShapeFamily::from_str(name, true) {
                Ok(family) => {
                    given.forget("model.name");
                    given.set("model.shape.family", family.name().into(), MODEL_FLAG)?;
                }
                Err(_) => {
                    given.forget("model.shape");
                    given.set("model.name", name.into(), MODEL_FLAG)?;
                }
            }
        }
        let mut config = given.config(Task::Train)?;
        if config.model.name.is_none() {
            config.model.shape.get_or_insert_default();
        } else if self.flags.has(&["--width", "--heads", "--layers", "--dropout"]) {
            bail!(
                "--width, --heads, --layers and --dropout apply to gpt2-like and gpt2 only; a config.json has its own sizes"
            );
        }
        Ok((config, given))
    }
}

/// The configuration of a command line, and where its values come from.
#[cfg(test)]
pub(crate) fn configured(
    common: &Common,
    arguments: &Train,
) -> anyhow::Result<(Config, frugal::config::origins::Origins)> {
    let (config, given) = arguments.config(common)?;
    let origins = crate::flags::origins::origins(&config, &given)?;
    Ok((config, origins))
}

pub(crate) fn run(common: &Common, arguments: &Train) -> anyhow::Result<()> {
    let (mut config, given) = arguments.config(common)?;
    let diagnosis = arguments.diagnosis.diagnosis()?;
    let common = &with_origins(common, (&config, &given), arguments.flags.file())?;
    unread::refuse(common, &config)?;
    common.choose_device(&mut config)?;
    let start = Start::from_flags(arguments.dry_run, arguments.resume);
    launch(
        common,
        &config,
        RunOptions { out: arguments.out.as_deref(), start, diagnosis: diagnosis.as_ref() },
    )
}

/// Trains a model from scratch as the configuration says, into a folder if one is given.
///
/// # Errors
/// Whatever can be wrong.
pub(crate) fn launch(common: &Common, config: &Config, options: RunOptions<'_>) -> anyhow::Result<()> {
    job::run(common, config, options, train)
}

fn train(job: Job<'_>) -> anyhow::Result<()> {
    let (common, config, device) = (job.common, job.config(), job.device);
    if config.adapter.is_some() || config.data.packing.is_some() {
        bail!(
            "adapters and --packing apply to fine-tuning only; training from scratch trains all weights, and packs documents with \
             --strategy packed"
        );
    }

    // The data.
    let length = config.data.max_length.context("`data.max_length` (--length) is missing")?;
    let data = common.in_turn("the data", || Data::open(config, length, device))?;
    if !common.json {
        data.print_summary(common, &config.data)?;
    }
    // A system that does not count gives no figure.
    let _ = planning::note_preparation();
    if config.training.evaluate_every.is_some() && data.validation.is_none() {
        bail!(NO_VALIDATION);
    }
    let Data { mut train, validation, vocabulary, steps, loading, documents } = data;

    // The model's shape.
    let file = config.model.name.as_deref().map(decoder_config).transpose()?;
    let kind = config.model.dtype.map_or(Kind::Float, frugal::config::Dtype::kind);
    no_effect::note_optimizer(common, config, kind);
    file.as_ref().map_or(Ok(()), |file| check_sizes(config, file, (vocabulary, length)))?;

    // The plan.
    let is_packed = documents.is_some()
        && matches!(config.data.strategy.parse(), Ok(Strategy::Packed | Strategy::Sequenced));
    let shape = DataShape::uniform(config.training.batch as u64, length as u64, is_packed);
    let resumes = job.resumes();
    let format = kind.into();
    let planned =
        job.plan(PlannedTraining { shape: file.as_ref(), format, device, data: shape, steps, resumes })?;
    let Some(planned) = planned else { return Ok(()) };

    // The output folder and the model.
    let config = planned.run.config.clone();
    let record = |about: &mut About| {
        about.train = files(Path::new(&config.data.source))?;
        about.validation =
            config.data.validation.as_deref().map_or_else(|| Ok(SplitRecord::default()), files)?;
        Ok(())
    };
    let opened = planned.open(record, |recipe| {
        Ok(match &file {
            Some(file) => {
                recipe.create(file, Init::Normal { std: file.initializer_range }, (kind, device))?
            }
            None => recipe.apply(small(&config, vocabulary, length, device)?)?,
        })
    })?;
    let ready = opened.ready(|| {
        let state = train.state();
        let first = train.next()?;
        train.resume(&state)?;
        Ok(first)
    })?;

    // The training, after a measurement of how well the machine is used.
    let common = ready.run.common.clone();
    let writer = file.map(|config| {
        let tokenizer = documents.as_ref().and_then(|documents| documents.tokenizer.clone());
        Rc::new(Weights { common: common.clone(), config, tokenizer }) as Rc<dyn Writer>
    });
    if !common.json {
        let trained = grouped(ready.parameters().trainable);
        common.note(&format!("trains {trained} parameters; {}", counted(steps, "step")));
    }
    let finished = ready
        .train(Feed { train, validation, loading, writer }, |common, trainer, train, _| {
            measure_efficiency(common, device, trainer, train)
        })?;

    // The weights and the result.
    finished.write()?;
    finished.print(&[], false);
    Ok(())
}

/// Measures how well the machine is used, for `--json`.
fn measure_efficiency(
    common: &Common,
    device: Device,
    trainer: &mut Trainer,
    train: &mut dyn Batches,
) -> anyhow::Result<()> {
    if common.json
        && common.ranks.is_none()
        && let Some(probe) = StepProbe::run(trainer, train)?
    {
        print_line(&json!({ "efficiency": Efficiency::measure(&probe, device)? }));
    }
    Ok(())
}

/// A `config.json`, or that of a folder.
fn decoder_config(name: &str) -> anyhow::Result<DecoderConfig> {
    let path = Path::new(name);
    let file = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
    if !file.is_file() {
        bail!("--model {name}: expected gpt2-like, gpt2, or a decoder's config.json");
    }
    Ok(DecoderConfig::read(&file)?)
}

/// Compares the data with the model of a `config.json`.
fn check_sizes(
    config: &Config,
    file: &DecoderConfig,
    (vocabulary, length): (i64, usize),
) -> anyhow::Result<()> {
    let name = config.model.name.as_deref().unwrap_or_default();
    if vocabulary > file.vocab_size {
        bail!(
            "the data has {vocabulary} tokens and the model of `{name}` knows {}; give a tokenizer of at most that many",
            file.vocab_size
        );
    }
    if i64::try_from(length)? > file.max_position_embeddings {
        bail!(
            "--length {length}: the model of `{name}` has {} positions; give at most that many",
            file.max_position_embeddings
        );
    }
    Ok(())
}

fn small(
    config: &Config,
    vocabulary: i64,
    length: usize,
    device: Device,
) -> anyhow::Result<Box<dyn LanguageModel>> {
    let ShapeConfig { family, width, heads, layers, dropout } =
        config.model.shape.clone().unwrap_or_default();
    let options = (config.model.dtype.map_or(Kind::Float, frugal::config::Dtype::kind), device);
    let length = i64::try_from(length)?;
    Ok(match family {
        ShapeFamily::Gpt2Like => {
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
        ShapeFamily::Gpt2 => {
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
