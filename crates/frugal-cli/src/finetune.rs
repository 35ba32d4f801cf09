//! `frugal finetune`.

mod data;
mod exports;
mod learned_end;
mod new_tokens;
mod origin;
mod other_model;
mod reference;
mod rewards;
mod samples;
mod targets;
mod teacher;
mod weights;

use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::bail;
use clap::Args;
use frugal::companion_files::CompanionFiles;
use frugal::config::{Config, Given, ObjectiveKind, Task};
use frugal::models::hugging_face::Folder;
use frugal::models::module::ParameterCount;
use frugal::planning::{self, DataShape, WeightFormat};
use frugal::run_folder::SplitRecord;
use frugal::training::Batches;
use frugal::training::masked_rows::{Layout, MaskedBatches};
use frugal::training::step_tracing::Loading;
use runtime::collectives::Launch;
use tch::Kind;

use crate::common_flags::Common;
use crate::flags::hub::{HubArgs, same_folder};
use crate::flags::no_effect;
use crate::flags::origins::with_origins;
use crate::flags::table::FINETUNE;
use crate::flags::unread;
use crate::flags::{Flags, QLORA};
use crate::folder::run_model::Target;
use crate::folder::run_record::About;
use crate::output::figures::{counted, grouped, share};
use crate::run::diagnosis::DiagnosisArgs;
use crate::run::job::{self, Feed, Job, RunOptions, Start};
use crate::run::plan::PlannedTraining;
use data::{Data, with_date};
use reference::{ReferenceFolder, with_reference};
use targets::with_own_targets;
use teacher::TeacherFolder;
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
    /// The configuration that the file, `--set` and the flags make, these values, and the base.
    fn config(&self, common: &Common) -> anyhow::Result<(Config, Given, Option<Target>)> {
        let mut given = self.flags.given()?;
        if self.load_in_4bit {
            bail!(QLORA);
        }
        self.flags.give_method(&mut given)?;
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
                    Ok(path) => path.display().to_string(),
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
) -> anyhow::Result<(Config, frugal::config::origins::Origins)> {
    let (config, given, _) = arguments.config(common)?;
    let origins = crate::flags::origins::origins(&config, &given)?;
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
        base.inspect(|base| base.note(&common));
    }
    let start = Start::from_flags(arguments.dry_run, arguments.resume);
    let diagnosis = arguments.diagnosis.diagnosis()?;
    let options = RunOptions { out: arguments.out.as_deref(), start, diagnosis: diagnosis.as_ref() };
    launch(&common, &config, options)
}

/// How batches of a fine-tuning are loaded.
const IN_PLACE: Loading = Loading { workers: 0, pinned: false };

/// Fine-tunes as the configuration says.
///
/// # Errors
/// Whatever can be wrong; without the weights wherever it can be found without them.
pub(crate) fn launch(common: &Common, config: &Config, options: RunOptions<'_>) -> anyhow::Result<()> {
    if let (Some(name), Some(out)) = (&config.model.name, options.out) {
        refuse_own_folder(Path::new(name), out)?;
    }
    job::run(common, config, options, tune)
}

/// Refuses to write into the folder of the model.
fn refuse_own_folder(model: &Path, out: &Path) -> anyhow::Result<()> {
    if same_folder(model, out) {
        bail!("--out {} is the model's own folder; give another", out.display());
    }
    Ok(())
}

fn tune(job: Job<'_>) -> anyhow::Result<()> {
    match job.config().objective.kind {
        ObjectiveKind::Grpo => rewards::tune(job),
        _ => tune_on_rows(job),
    }
}

/// Fine-tunes on rows that the data have.
fn tune_on_rows(mut job: Job<'_>) -> anyhow::Result<()> {
    let (common, out, device) = (job.common, job.out(), job.device);

    // The model's folder, and the files that its rows are made with.
    let mut folder = open_base(&mut job)?;
    let mut companions = origin::companions(job.config(), &folder, out, job.resumes())?;
    let new_rows = match new_tokens::add(common, job.config(), &folder, &mut companions)? {
        None => None,
        Some(new) => {
            job.complete(new.config)?;
            job.recipe().check_folder(&new.folder)?;
            folder = new.folder;
            Some(new.rows)
        }
    };
    let (config, template) = with_date(job.config(), &companions, out, job.resumes())?;
    job.complete(config)?;

    // The rows, and the token with which their answers end.
    let data = Data::read(common, job.config(), &folder, &companions, template)?;
    // A system that does not count gives no figure.
    let _ = planning::note_preparation();
    if let Some((note, end)) = data.learned_end(job.config(), companions.end_tokens())? {
        note.iter().for_each(|note| common.note(note));
        companions.add_end(end);
    }
    let samples = data.samples(common, job.config(), companions.end_tokens().to_vec(), out)?;

    // The batches and the number of steps.
    let (train, validation) = batches(&job, &folder, &data)?;
    let steps = steps(job.config(), train.batches_per_epoch());

    // The plan, before a weight is read.
    let (kind, resumes) = (kind(job.config(), &folder)?, job.resumes());
    let shape = DataShape::of(&train, steps.saturating_mul(job.config().training.accumulation as u64))?;
    let longest = train.longest().max(validation.as_ref().map_or(0, MaskedBatches::longest));
    let teacher = TeacherFolder::open(&job, (&companions, folder.config().vocab_size), longest)?;
    let reference = ReferenceFolder::open(&job, &companions, longest)?;
    let of_teacher = match &teacher {
        Some(teacher) => teacher.shape(job.config())?,
        None => None,
    };
    let shape = DataShape { teacher: of_teacher, ..shape };
    let planned = job.plan(PlannedTraining {
        shape: Some(folder.config()),
        format: WeightFormat::of(&folder, kind)?,
        device,
        data: match &validation {
            Some(validation) => shape.with_evaluations(validation)?,
            None => shape,
        },
        steps,
        resumes,
    })?;
    let Some(planned) = planned else { return Ok(()) };

    // The output folder and the model.
    let has_adapter = planned.run.config.adapter.is_some();
    let record = |about: &mut About| {
        about.train = SplitRecord::of(&data.train_files, data.train.len())?;
        about.validation = SplitRecord::of(&data.validation_files, data.validation.len())?;
        if let Some(teacher) = &teacher {
            about.teacher = teacher.record(out, resumes)?;
        }
        write_companions(about, &companions, out, has_adapter)
    };
    let once = planned.run.config.objective.teacher_top_k.is_some();
    let opened = planned.open(record, |recipe| {
        let all: Vec<&MaskedBatches> = std::iter::once(&train).chain(&validation).collect();
        if let Some(teacher) = teacher.as_ref().filter(|_| once) {
            teacher.ask((common, recipe.config()), out, &all, device)?;
        }
        if let Some(reference) = &reference {
            reference.ask((common, recipe.config()), out, &all, device)?;
        }
        let prepared = match new_rows {
            Some(rows) => recipe.clone().with_new_rows(rows).open(&folder, device)?,
            None => recipe.open(&folder, device)?,
        };
        Ok(match teacher.as_ref().filter(|_| !once) {
            Some(teacher) => prepared.with_teacher(teacher.load(recipe.config(), device)?),
            None => prepared,
        })
    })?;
    let mut ready = opened.ready(|| Ok(Some(train.largest()?)))?;

    // What an evaluation takes at a time, and what writes the weights.
    let validation = match (validation, ready.evaluation_rows()) {
        (Some(batches), Some(rows)) if rows < batches.rows_per_batch() => {
            Some(batches.with_rows_per_batch(rows)?)
        }
        (validation, _) => validation,
    };
    let (train, validation) = with_reference(&ready, out, (train, validation))?;
    let (train, validation) = match teacher.as_ref().filter(|_| once) {
        None => (train, validation),
        Some(teacher) => {
            let answered = |rows| teacher.answered(&ready.run.config, out, rows);
            (answered(train)?, validation.map(answered).transpose()?)
        }
    };
    let (common, adapters) = (ready.run.common.clone(), ready.handles.adapters.take());
    let writer = Weights { common: common.clone(), adapters, base: folder.clone(), companions };
    common.note(&trained_text(ready.parameters(), &train, steps));
    teacher.iter().for_each(|teacher| common.note(&teacher.text(&ready.run.config)));
    // Each token of a sample would load every offloaded layer.
    if samples.is_some() && ready.handles.offload.is_some() {
        common.note("no samples: layers are offloaded (`frugal generate` writes texts)");
    }
    let mut samples = samples.filter(|_| ready.handles.offload.is_none());

    // The training, after an evaluation and answers of the base.
    let has_baseline = ready.run.config.training.baseline;
    let feed = Feed {
        train: Box::new(train),
        validation: validation.map(|validation| Box::new(validation) as Box<dyn Batches>),
        loading: IN_PLACE,
        writer: Some(Rc::new(writer)),
    };
    let finished = ready.train(feed, |common, trainer, _, validation| {
        if let Some(validation) = validation.filter(|_| trainer.step() == 0 && has_baseline) {
            trainer.evaluate(validation)?;
        }
        match &mut samples {
            Some(samples) => samples.before(common, trainer.model.as_ref(), trainer.step()),
            None => Ok(()),
        }
    })?;

    // The weights and the result.
    finished.write()?;
    let samples = match (samples, finished.shown_model()) {
        (Some(samples), Some(model)) => samples.after(&common, model)?,
        _ => Vec::new(),
    };
    finished.print(&samples, data.is_chat);
    Ok(())
}

/// Writes the chat template into the output folder, and beside an adapter the tokenizer's files.
fn write_companions(
    about: &mut About,
    companions: &CompanionFiles,
    out: &Path,
    has_adapter: bool,
) -> anyhow::Result<()> {
    about.chat_template = companions.write_template(out)?;
    if has_adapter {
        companions.write(out)?;
    }
    Ok(())
}

/// Opens the folder of the base, whose weights are not read, and completes the configuration by it.
fn open_base(job: &mut Job<'_>) -> anyhow::Result<Rc<Folder>> {
    let (common, out) = (job.common, job.out());
    let config = origin::as_before(job.config(), out, job.resumes())?;
    let Some(name) = &config.model.name else {
        bail!(
            "`model.name` is missing; give a folder in Hugging Face's layout or a name on the hub as --model"
        )
    };
    let hub = HubArgs {
        revision: config.model.revision.clone(),
        offline: config.model.offline,
        untied: config.model.untied,
    };
    let folder = common.in_turn("the model", || hub.open(name))?;
    refuse_own_folder(folder.path(), out)?;
    let config = with_own_targets(common, &config, folder.config());
    job.complete(origin::with_commit(&config, &folder))?;
    job.recipe().check_folder(&folder)?;
    let config = job.config();
    no_effect::note_optimizer(common, config, kind(config, &folder)?);
    if let Some(adapter) = &config.adapter {
        no_effect::note_pattern(common, adapter, folder.config())?;
    }
    exports::print_notes(common, config, &folder);
    Ok(Rc::new(folder))
}

/// The dtype of the weights.
fn kind(config: &Config, folder: &Folder) -> anyhow::Result<Kind> {
    Ok(config.model.dtype.map_or_else(|| folder.kind(), |dtype| Ok(dtype.kind()))?)
}

/// The batches of the training, and those of an evaluation.
fn batches(
    job: &Job<'_>,
    folder: &Folder,
    data: &Data,
) -> anyhow::Result<(MaskedBatches, Option<MaskedBatches>)> {
    let config = job.config();
    let context = usize::try_from(folder.config().max_position_embeddings).unwrap_or(usize::MAX);
    if config.data.packing.is_some_and(|positions| positions > context) {
        job.common.note(&format!("packed rows have {context} positions, the model's context"));
    }
    let layout = Layout {
        batch: config.training.batch,
        arrangement: config.data.arrangement(context),
        pad: data.pad,
        shuffle: Some(config.training.seed),
        by_length: config.training.accumulation.max(1),
        epochs: match (config.training.steps, config.training.epochs) {
            (Some(_), None) => None,
            (_, epochs) => Some(epochs.unwrap_or(1)),
        },
        grouping: config.objective.grouping()?,
    };
    let train = MaskedBatches::over(&data.train, layout, job.device)?;
    let train = match config.data.mixed()? {
        Some(mixture) => train.with_mixture(mixture)?,
        None => train,
    };
    let validation = (!data.validation.is_empty())
        .then(|| MaskedBatches::over(&data.validation, layout.of_evaluation(), job.device))
        .transpose()?;
    Ok((train, validation))
}

/// Describes the trained parameters and the data.
fn trained_text(parameters: ParameterCount, train: &MaskedBatches, steps: u64) -> String {
    let (tokens, padding) = train.tokens_and_padding();
    let batches = match train.batches_per_epoch() {
        1 => "1 batch".to_owned(),
        batches => format!("{} batches", grouped(batches)),
    };
    let padding = match padding {
        0 => String::new(),
        positions => format!(" with {} positions of padding", grouped(positions as u64)),
    };
    format!(
        "trains {} parameters; an epoch is {} in {batches}{padding}; {}",
        share(parameters.trainable, parameters.total),
        counted(tokens as u64, "token"),
        counted(steps, "step"),
    )
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
