//! `frugal train`.

mod data;
mod weights;

use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use frugal::config::{Config, Given, ShapeConfig, ShapeFamily, Task};
use frugal::display::Efficiency;
use frugal::models::init::Init;
use frugal::models::module::LanguageModel;
use frugal::models::{DecoderConfig, Gpt2, Gpt2Config, Gpt2Like, Gpt2LikeConfig};
use frugal::planning::{self, DataShape};
use frugal::run_folder::SplitRecord;
use frugal::training::Batches;
use frugal::training::Trainer;
use frugal::training::probe::StepProbe;
use serde_json::json;
use tch::{Device, Kind};

use super::Common;
use super::output::{print_line, say};
use crate::program::flags::Flags;
use crate::program::flags::no_effect;
use crate::program::flags::origins::with_origins;
use crate::program::flags::table::TRAIN;
use crate::program::flags::unread;
use crate::program::folder::best_weights::Writer;
use crate::program::folder::open::{Saving, as_begun};
use crate::program::folder::run_record::note_other_data;
use crate::program::output::figures::{counted, grouped};
use crate::program::output::report::report;
use crate::program::output::summary;
use crate::program::run::diagnosis::{Diagnose, DiagnosisArgs, diagnose};
use crate::program::run::plan::{PlannedTraining, RunPlan};
use crate::program::run::ranks;
use crate::program::run::training::{NO_VALIDATION, Run, name_budget, name_resume};
use data::Data;
use frugal::run_folder::MODEL;
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
) -> anyhow::Result<(Config, frugal::run_folder::origins::Origins)> {
    let (config, given) = arguments.config(common)?;
    let origins = crate::program::flags::origins::origins(&config, &given)?;
    Ok((config, origins))
}

pub(crate) fn run(common: &Common, arguments: &Train) -> anyhow::Result<()> {
    let (mut config, given) = arguments.config(common)?;
    let diagnosis = arguments.diagnosis.diagnosis()?;
    let common = &with_origins(common, (&config, &given), arguments.flags.file())?;
    unread::refuse(common, &config)?;
    common.choose_device(&mut config)?;
    launch(common, &config, arguments.out.as_deref(), arguments.resume, diagnosis.as_ref())
}

/// Trains a model from scratch as the configuration says, into a folder if one is given. `diagnosis` reports bottlenecks.
///
/// # Errors
/// Whatever can be wrong.
pub(crate) fn launch(
    common: &Common,
    config: &Config,
    out: Option<&Path>,
    resume: bool,
    diagnosis: Option<&Diagnose>,
) -> anyhow::Result<()> {
    ranks::run(common, config, |common| {
        let trained =
            train(common, config, out, resume, diagnosis).map_err(|error| name_budget(error, config));
        trained.map_err(|error| name_resume(error, out))
    })
}

fn train(
    common: &Common,
    config: &Config,
    out: Option<&Path>,
    resume: bool,
    diagnosis: Option<&Diagnose>,
) -> anyhow::Result<()> {
    let begun = out.filter(|_| resume).map(|out| as_begun(config, out));
    let config = begun.as_ref().unwrap_or(config);
    let recipe = ranks::recipe(common, config)?;
    if config.adapter.is_some() || config.data.packing.is_some() {
        bail!(
            "adapters and --packing apply to fine-tuning only; training from scratch trains all weights, and packs documents with \
             --strategy packed"
        );
    }
    Diagnose::check(common, diagnosis)?;
    out.map_or(Ok(()), |out| Saving::check(out, common, resume))?;
    let device = runtime::device::select(&config.training.device)?;
    runtime::memory::track_cpu()?;
    runtime::memory::set_block_cache(true)?;
    runtime::random::seed(config.training.seed)?;
    let length = config.data.max_length.context("`data.max_length` (--length) is missing")?;
    let data = common.in_turn("the data", || Data::open(config, length, device))?;
    if !common.json {
        data.tell(common, &config.data);
    }
    // A system that does not count gives no figure.
    let _ = planning::note_preparation();
    recipe.schedule(data.steps)?;
    if config.training.evaluate_every.is_some() && data.validation.is_none() {
        bail!(NO_VALIDATION);
    }
    let file = config.model.name.as_deref().map(decoder_config).transpose()?;
    let kind = config.model.dtype.map_or(Kind::Float, frugal::config::Dtype::kind);
    no_effect::tell_of_optimizer(common, config, kind);
    file.as_ref().map_or(Ok(()), |file| check_sizes(config, file, (data.vocabulary, length)))?;
    let run_plan = RunPlan::of(
        common,
        config,
        PlannedTraining {
            shape: file.as_ref(),
            kind,
            device,
            data: DataShape::uniform(
                config.training.batch as u64,
                length as u64,
                config.data.source != "synthetic"
                    && ["packed", "sequenced"].contains(&&*config.data.strategy),
            ),
            steps: data.steps,
            resumes: resume,
        },
    )?;
    run_plan.tell(common);
    let recipe = ranks::recipe(common, &run_plan.applied(config))?;
    let written = run_plan.written(config);
    let common = &RunPlan::with_origins(common, config, &written);
    let config = &written;
    let mut saving = out.map(|out| Saving::open(out, common, config, resume)).transpose()?;
    if let Some(saving) = &mut saving {
        saving.about.plan = run_plan.json();
    }
    if let Some(saving) = saving.as_mut().filter(|_| common.is_first()) {
        saving.about.train = files(Path::new(&config.data.source))?;
        saving.about.validation =
            config.data.validation.as_deref().map_or_else(|| Ok(SplitRecord::default()), files)?;
        note_other_data(common, &saving.about);
    }
    let _limit = run_plan.enforce()?;
    let mut prepared = match &file {
        Some(file) => recipe.create(file, Init::Normal { std: file.initializer_range }, (kind, device))?,
        None => recipe.apply(small(config, data.vocabulary, length, device)?)?,
    };
    let Data { mut train, validation, steps, loading, documents, .. } = data;
    let state = train.state();
    run_plan.apply(&prepared.handles)?;
    if !run_plan.is_predicted()
        && let Some(batch) = train.next()?
    {
        prepared.plan_activations(&batch)?;
        train.resume(&state)?;
    }
    let (mut trainer, handles) = prepared.trainer(steps)?;
    let _beside_offloaded = run_plan.enforce_beside_offloaded()?;
    trainer.cheaper_plans = run_plan.cheaper_plans(&handles)?;
    let writer = file.clone().map(|file| {
        let tokenizer = documents.as_ref().and_then(|documents| documents.tokenizer.clone());
        Rc::new(Weights { common: common.clone(), config: file, tokenizer }) as Rc<dyn Writer>
    });
    let expected = run_plan.expected();
    let run = Run { trainer, config, handles, train, validation, saving, writer: writer.clone(), expected };
    let trained = run.parameters().trainable;
    if !common.json {
        say(common, &format!("trains {} parameters; {}", grouped(trained), counted(steps, "step")));
    }
    let trained = run.run(common, device, |trainer, train, validation| {
        measure_efficiency(common, device, trainer, train)?;
        match diagnosis {
            None => Ok(()),
            Some(asked) => diagnose(trainer, train, validation, loading, asked, common.json),
        }
    })?;
    let path = writer.as_ref().and(out).map(|out| out.join(MODEL));
    if let (Some(writer), Some(path)) = (&writer, &path) {
        let saved = writer.write(trained.model.as_ref(), trained.optimizer.as_ref(), path);
        common.first_failure(writer.what(), saved)?;
    }
    if common.is_first() {
        report(common, out, &trained.ended(), path.as_deref().map(|path| ("model", path)));
        if let Some(out) = out.filter(|_| !common.json && !trained.was_finished) {
            let next = path.map_or_else(Vec::new, |_| summary::next_commands(config, out, false));
            summary::print(common, config, out, trained.outcome.as_ref(), &[], &next);
        }
    }
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
