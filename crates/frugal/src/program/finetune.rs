//! `frugal finetune`.

mod data;
mod exports;
mod learned_end;
mod origin;
mod samples;
mod targets;
mod weights;

use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::bail;
use clap::Args;
use frugal::config::{Config, Given, Task};
use frugal::planning::{self, DataShape};
use frugal::run_folder::SplitRecord;
use frugal::training::Batches;
use frugal::training::masked_rows::{Layout, MaskedBatches};
use frugal::training::step_tracing::Loading;
use runtime::collectives::Launch;
use serde_json::json;

use super::Common;
use super::output::say;
use crate::program::flags::Flags;
use crate::program::flags::hub::{HubArgs, same_folder};
use crate::program::flags::no_effect;
use crate::program::flags::origins::with_origins;
use crate::program::flags::table::FINETUNE;
use crate::program::flags::unread;
use crate::program::folder::best_weights::Writer;
use crate::program::folder::offload_folder;
use crate::program::folder::open::{Saving, as_begun};
use crate::program::folder::run_model::Target;
use crate::program::folder::run_record::{note_other_data, write_page};
use crate::program::output::figures::{counted, grouped, share};
use crate::program::output::report::report;
use crate::program::output::summary;
use crate::program::run::diagnosis::{Diagnose, DiagnosisArgs, diagnose};
use crate::program::run::plan::{PlannedTraining, RunPlan};
use crate::program::run::ranks;
use crate::program::run::training::{Run, name_budget, name_resume};
use data::{Data, with_date};
use frugal::run_folder::MODEL;
use targets::{TARGETS, with_own_targets};
use weights::Weights;

#[derive(Args)]
pub(crate) struct Finetune {
    #[command(flatten)]
    flags: Flags<FINETUNE>,
    /// Output folder: the adapter or model, config.toml, losses.jsonl, checkpoints
    #[arg(long, value_name = "FOLDER", required_unless_present = "dry_run")]
    out: Option<PathBuf>,
    /// Resume from the newest checkpoint in --out, if there is one
    #[arg(long)]
    resume: bool,
    /// Read the data, print the plan for it, and end; nothing is trained
    #[arg(long, conflicts_with = "resume")]
    dry_run: bool,
    /// As in other programs; `--dtype nf4` is its name here
    #[arg(long, hide = true)]
    load_in_4bit: bool,
    #[command(flatten)]
    diagnosis: DiagnosisArgs,
}

/// The key of the chat template.
const TEMPLATE: &str = "data.chat_template";

impl Finetune {
    /// Takes --method, and refuses it beside --dora or --set adapter.use_dora that says otherwise; over a file's value the flag wins.
    fn give_method(&self, given: &mut Given) -> anyhow::Result<()> {
        let method = self.flags.text("--method");
        if method == Some("qlora") || self.load_in_4bit {
            bail!("a frozen base in four bits (QLoRA) is --method lora with --dtype nf4");
        }
        if let Some(name) = method {
            let other = match (name, given.assigned_dora()) {
                ("lora", _) if self.flags.has(&["--dora"]) => Some("--dora"),
                ("lora", Some(true)) => Some("--set adapter.use_dora=true"),
                ("dora", Some(false)) => Some("--set adapter.use_dora=false"),
                _ => None,
            };
            if let Some(other) = other {
                bail!("--method {name} and {other} contradict each other; leave one of them out");
            }
            given.set("method", name.into(), "--method")?;
        }
        if given.config(Task::Finetune)?.adapter.is_none() && self.flags.has_adapter() {
            bail!("--method full trains all weights and has no adapter; leave out the adapter's flags");
        }
        Ok(())
    }

    /// The configuration that the file, `--set` and the flags make, these values, and the base.
    fn config(&self, common: &Common) -> anyhow::Result<(Config, Given, Option<Target>)> {
        let mut given = self.flags.given()?;
        self.give_method(&mut given)?;
        self.flags.give(&mut given, Task::Finetune)?;
        common.flags.give_common(&mut given)?;
        let mut config = given.config(Task::Finetune)?;
        let base = config.model.name.as_deref().map(Target::to_fine_tune).transpose()?;
        if let Some(base) = &base {
            config.model.name = Some(base.model.clone());
        }
        if let Some(adapter) = &mut config.adapter {
            // A training may have written its file where the base has another path.
            let key = "adapter.base_model_name_or_path";
            let is_asked = given.origins().has(key) && given.of_training() != Some(given.origins().get(key));
            let is_moved = self.flags.has(&["--model"]) && !is_asked;
            if is_moved || adapter.base_model_name_or_path.is_none() {
                // A folder's path has to lead to it from anywhere.
                let base = config.model.name.clone().map(|base| match std::fs::canonicalize(&base) {
                    Ok(path) if path.is_dir() => path.display().to_string(),
                    _ => base,
                });
                adapter.base_model_name_or_path = base.or(adapter.base_model_name_or_path.take());
                given.forget(key);
            }
        }
        Ok((config, given, base))
    }
}

/// The configuration of a command line, and where its values come from.
#[cfg(test)]
pub(crate) fn configured(
    common: &Common,
    arguments: &Finetune,
) -> anyhow::Result<(Config, frugal::run_folder::origins::Origins)> {
    let (config, given, _) = arguments.config(common)?;
    let origins = crate::program::flags::origins::origins(&config, &given)?;
    Ok((config, origins))
}

pub(crate) fn run(common: &Common, arguments: &Finetune) -> anyhow::Result<()> {
    let (mut config, given, base) = arguments.config(common)?;
    let is_set = arguments.flags.flag_for(TEMPLATE).is_some()
        || arguments.flags.assigned_keys().any(|key| key == TEMPLATE);
    if let Some(file) = arguments.flags.file().filter(|_| !is_set) {
        origin::take_template_of_run(&mut config, file);
    }
    let common = with_origins(common, (&config, &given), arguments.flags.file())?;
    unread::refuse(&common, &config)?;
    common.choose_device(&mut config)?;
    if Launch::from_environment()?.is_none_or(|launch| launch.rank == 0) {
        base.inspect(|base| base.tell(&common));
    }
    let start = match (arguments.dry_run, arguments.resume) {
        (true, _) => Start::DryRun,
        (_, true) => Start::Resume,
        (false, false) => Start::New,
    };
    let (diagnosis, out) = (arguments.diagnosis.diagnosis()?, arguments.out.as_deref());
    launch(&common, &config, out.unwrap_or(Path::new("")), start, diagnosis.as_ref())
}

/// How batches of a fine-tuning are loaded.
const IN_PLACE: Loading = Loading { workers: 0, pinned: false };

/// How a fine-tuning starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// In an empty folder.
    New,
    /// From the newest checkpoint, if there is one.
    Resume,
    /// Not at all: its plan is shown.
    DryRun,
}

/// Fine-tunes as the configuration says, into a folder, which a dry run does not look at.
///
/// # Errors
/// Whatever can be wrong; without the weights wherever it can be found without them.
pub(crate) fn launch(
    common: &Common,
    config: &Config,
    out: &Path,
    start: Start,
    diagnosis: Option<&Diagnose>,
) -> anyhow::Result<()> {
    ranks::run(common, config, |common| {
        let tuned = tune(common, config, out, start, diagnosis).map_err(|error| name_budget(error, config));
        tuned.map_err(|error| name_resume(error, Some(out)))
    })
}

fn tune(
    common: &Common,
    config: &Config,
    out: &Path,
    start: Start,
    diagnosis: Option<&Diagnose>,
) -> anyhow::Result<()> {
    Diagnose::check(common, diagnosis)?;
    let resume = start == Start::Resume;
    let begun = resume.then(|| as_begun(config, out));
    let config = begun.as_ref().unwrap_or(config);
    let recipe = ranks::recipe(common, config)?;
    let own = || format!("--out {} is the model's own folder; give another", out.display());
    if config.model.name.as_ref().is_some_and(|name| same_folder(Path::new(name), out)) {
        bail!(own());
    }
    if start != Start::DryRun {
        Saving::check(out, common, resume)?;
    }
    let device = runtime::device::select(&config.training.device)?;
    runtime::memory::track_cpu()?;
    runtime::memory::set_block_cache(true)?;
    runtime::random::seed(config.training.seed)?;
    let config = &origin::as_before(config, out, resume)?;
    let Some(name) = &config.model.name else {
        bail!(
            "`model.name` is missing; give a folder in Hugging Face's layout or a name on the hub as --model"
        )
    };
    let hub = HubArgs { revision: config.model.revision.clone(), offline: config.model.offline };
    let folder = Rc::new(common.in_turn("the model", || hub.open(name))?);
    if same_folder(folder.path(), out) {
        bail!(own());
    }
    let config = &with_own_targets(common, config, folder.config());
    let recipe = if common.asked.has(TARGETS) { recipe } else { ranks::recipe(common, config)? };
    recipe.check_folder(&folder)?;
    let kind = config.model.dtype.map_or_else(|| folder.kind(), |dtype| Ok(dtype.kind()))?;
    no_effect::tell_of_optimizer(common, config, kind);
    if let Some(adapter) = &config.adapter {
        no_effect::tell_of_pattern(common, adapter, folder.config())?;
    }
    exports::tell(common, config, &folder);
    let config = &origin::with_commit(config, &folder);
    let mut companions = origin::companions(config, &folder, out, resume)?;
    let config = &with_date(config, &companions, out, resume)?;
    let data = Data::read(common, config, &folder, &companions)?;
    // A system that does not count gives no figure.
    let _ = planning::note_preparation();
    if let Some((note, end)) = data.learned_end(config, companions.end_tokens())? {
        note.iter().for_each(|note| say(common, note));
        companions.add_end(end);
    }
    let ends = companions.end_tokens().to_vec();
    let rows = [data.train.len(), data.validation.len()];
    let samples = data.samples(common, config, ends, out)?;
    let Data { train, validation, pad, train_files, validation_files, is_chat, .. } = data;
    let context = usize::try_from(folder.config().max_position_embeddings).unwrap_or(usize::MAX);
    if config.data.packing.is_some_and(|positions| positions > context) {
        say(common, &format!("packed rows have {context} positions, the model's context"));
    }
    let layout = Layout {
        batch: config.training.batch,
        packed: config.data.packing.map(|positions| positions.min(context)),
        pad,
        shuffle: Some(config.training.seed),
        epochs: match (config.training.steps, config.training.epochs) {
            (Some(_), None) => None,
            (_, epochs) => Some(epochs.unwrap_or(1)),
        },
    };
    let train = MaskedBatches::over(&train, layout, device)?;
    let ordered = Layout { shuffle: None, epochs: Some(1), ..layout };
    let validation =
        (!validation.is_empty()).then(|| MaskedBatches::over(&validation, ordered, device)).transpose()?;
    let steps = steps(config, train.batches_per_epoch());
    recipe.schedule(steps)?;
    let data = DataShape::of(&train, steps.saturating_mul(config.training.accumulation as u64))?;
    let run_plan = RunPlan::of(
        common,
        config,
        PlannedTraining {
            shape: Some(folder.config()),
            kind,
            device,
            data: match &validation {
                Some(validation) => data.with_evaluations(validation)?,
                None => data,
            },
            steps,
            resumes: resume,
        },
    )?;
    if start == Start::DryRun {
        // It is the result.
        run_plan.tell(&Common { quiet: false, ..common.clone() });
        return Ok(());
    }
    run_plan.tell(common);
    let applied = origin::with_base_revision(run_plan.applied(config));
    offload_folder::note_memory(common, &applied);
    let recipe = ranks::recipe(common, &applied)?;
    let written = run_plan.written(config);
    let common = &RunPlan::with_origins(common, config, &written);
    let config = &written;
    let mut saving = Saving::open(out, common, config, resume)?;
    saving.about.plan = run_plan.json();
    if common.is_first() {
        saving.about.train = SplitRecord::of(&train_files, rows[0])?;
        saving.about.validation = SplitRecord::of(&validation_files, rows[1])?;
        saving.about.chat_template = companions.write_template(out)?;
        if config.adapter.is_some() {
            companions.write(out)?;
        }
        note_other_data(common, &saving.about);
    }

    let _limit = run_plan.enforce()?;
    let mut prepared = recipe.open(&folder, device)?;
    run_plan.apply(&prepared.handles)?;
    if !run_plan.is_predicted()
        && let Some(chosen) = prepared.plan_activations(&train.largest()?)?
    {
        let layers: Vec<String> = chosen.layers.iter().map(|plan| format!("{plan:?}")).collect();
        saving.about.plan =
            json!({ "layers": layers, "peak_bytes": chosen.peak_bytes, "seconds": chosen.seconds });
        let kept =
            chosen.layers.iter().filter(|plan| **plan == frugal::training::activations::LayerPlan::KeepAll);
        say(
            common,
            &format!(
                "activation plan: {} of {} layers keep their activations; predicted peak {}",
                kept.count(),
                chosen.layers.len(),
                frugal::config::Bytes(chosen.peak_bytes)
            ),
        );
    }
    let (mut trainer, mut handles) = prepared.trainer(steps)?;
    let _beside_offloaded = run_plan.enforce_beside_offloaded()?;
    trainer.cheaper_plans = run_plan.cheaper_plans(&handles)?;
    let (tokens, padding) = train.tokens_and_padding();
    let batches = train.batches_per_epoch();
    let validation = match (validation, run_plan.evaluation_rows()) {
        (Some(batches), Some(rows)) if rows < batches.rows_per_batch() => {
            Some(batches.with_rows_per_batch(rows)?)
        }
        (validation, _) => validation,
    };
    let validation = validation.map(|validation| Box::new(validation) as Box<dyn Batches>);
    let writer: Rc<dyn Writer> = Rc::new(Weights {
        common: common.clone(),
        adapters: handles.adapters.take(),
        base: folder.clone(),
        companions,
    });
    let run = Run {
        trainer,
        config,
        handles,
        train: Box::new(train),
        validation,
        saving: Some(saving),
        writer: Some(writer.clone()),
        expected: run_plan.expected(),
    };
    let all = run.parameters();
    say(
        common,
        &format!(
            "trains {} parameters; an epoch is {} in {}{}; {}",
            share(all.trainable, all.total),
            counted(tokens as u64, "token"),
            if batches == 1 { "1 batch".to_owned() } else { format!("{} batches", grouped(batches)) },
            if padding > 0 {
                format!(" with {} positions of padding", grouped(padding as u64))
            } else {
                String::new()
            },
            counted(steps, "step"),
        ),
    );
    // Each token of a sample would load every offloaded layer.
    if samples.is_some() && run.handles.offload.is_some() {
        say(common, "no samples: layers are offloaded (`frugal generate` writes texts)");
    }
    let mut samples = samples.filter(|_| run.handles.offload.is_none());
    let trained = run.run(common, device, |trainer, train, mut validation| {
        if let Some(validation) =
            validation.as_mut().filter(|_| trainer.step() == 0 && config.training.baseline)
        {
            trainer.evaluate(*validation)?;
        }
        if let Some(samples) = &mut samples {
            samples.before(common, trainer.model.as_ref(), trainer.step())?;
        }
        match diagnosis {
            // The thread of the training makes the batches.
            Some(asked) => diagnose(trainer, train, validation, IN_PLACE, asked, common.json),
            None => Ok(()),
        }
    })?;
    let path = match writer.what() {
        "adapter" => out.to_owned(),
        _ => out.join(MODEL),
    };
    let saved = writer.write(trained.model.as_ref(), trained.optimizer.as_ref(), &path);
    common.first_failure(writer.what(), saved)?;
    if common.is_first() {
        report(common, Some(out), &trained.ended(), Some((writer.what(), &path)));
        let samples = match samples.filter(|_| !trained.was_finished) {
            Some(samples) => samples.after(common, trained.model.as_ref())?,
            None => Vec::new(),
        };
        if let Some(outcome) = trained.outcome.as_ref().filter(|_| !samples.is_empty()) {
            write_page(common, out, outcome.state);
        }
        if !common.json && !trained.was_finished {
            let next = summary::next_commands(config, out, is_chat);
            summary::print(common, config, out, trained.outcome.as_ref(), &samples, &next);
        }
    }
    Ok(())
}

/// Optimizer steps in all.
fn steps(config: &Config, batches: u64) -> u64 {
    let accumulation = config.training.accumulation.max(1) as u64;
    let of_epochs = |epochs: u64| batches.saturating_mul(epochs).div_ceil(accumulation);
    match (config.training.steps, config.training.epochs) {
        (Some(steps), None) => steps,
        (Some(steps), Some(epochs)) => steps.min(of_epochs(epochs)),
        (None, epochs) => of_epochs(epochs.unwrap_or(1)),
    }
}
