//! `frugal finetune`.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use frugal::config::{Config, DataFormat, Task};
use frugal::models::hugging_face::{self, Folder};
use frugal::models::module::LanguageModel;
use frugal::rows::{self, RowOptions};
use frugal::tasks::gsm8k;
use frugal::training::Batches;
use frugal::training::masked_rows::{Layout, MaskedBatches, MaskedRow};

use super::Common;
use super::adapter::AdapterArgs;
use super::encoding::{EncodingArgs, Ends};
use super::figures::{counted, grouped, share};
use super::merge::complete;
use super::model::{HubArgs, same_folder, shared_llama};
use super::output::say;
use super::problems::Problems;
use super::ranks;
use super::settings::{DATA, DtypeArg, FormatArg, SettingsArgs, put, put_some};
use super::training::{NO_VALIDATION, Run, Saving, Trained, enforce, name_budget, report};

/// What is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Method {
    /// Low-rank adapters
    Lora,
    /// Low-rank adapters with a learned magnitude for each row of the weights
    Dora,
    /// All weights
    Full,
}

#[derive(Args)]
pub(crate) struct Finetune {
    /// A folder in Hugging Face's layout, or a name on the hub, such as Qwen/Qwen2.5-0.5B
    #[arg(long, value_name = "NAME_OR_FOLDER", required_unless_present = "config")]
    model: Option<String>,
    #[command(flatten)]
    hub: HubArgs,
    /// Dtype of the weights [default: that of the files]
    #[arg(long, value_enum)]
    dtype: Option<DtypeArg>,
    /// Training data: GSM8K (a folder with train.jsonl and test.jsonl, or JSON lines with question and answer), JSON lines with
    /// prompt and completion or with text, or a text file
    #[arg(long, value_name = "PATH", required_unless_present = "config", help_heading = DATA)]
    data: Option<String>,
    /// Format of the data [default: found from the name and the first line]
    #[arg(long, value_enum, help_heading = DATA)]
    format: Option<FormatArg>,
    /// Validation data: a file; GSM8K has its own split
    #[arg(long, value_name = "FILE", help_heading = DATA)]
    validation: Option<PathBuf>,
    /// Field of a JSON line that holds the text [default: text]
    #[arg(long, help_heading = DATA)]
    field: Option<String>,
    /// Output folder: the adapter or model, config.toml, losses.jsonl, checkpoints
    #[arg(long, value_name = "FOLDER")]
    out: PathBuf,
    /// Resume from the newest checkpoint in --out, if there is one
    #[arg(long)]
    resume: bool,
    /// What is trained [default: lora]
    #[arg(long, value_enum)]
    method: Option<Method>,
    #[command(flatten, next_help_heading = "Adapter")]
    adapter: AdapterArgs,
    #[command(flatten, next_help_heading = DATA)]
    encoding: EncodingArgs,
    /// Solved examples before each question (GSM8K) [default: 0]
    #[arg(long, help_heading = DATA)]
    shots: Option<usize>,
    /// Remove calculator annotations (<<6*7=42>>) from answers (GSM8K)
    #[arg(long, help_heading = DATA)]
    strip_annotations: bool,
    /// Seed of the split into 90, 5 and 5 % and of the choice of solved examples (GSM8K) [default: 42]
    #[arg(long, help_heading = DATA)]
    split_seed: Option<u64>,
    /// Train on the first N rows
    #[arg(long, value_name = "N", help_heading = DATA)]
    limit: Option<usize>,
    #[command(flatten)]
    settings: SettingsArgs,
}

/// Learning rate of full fine-tuning, by default.
const FULL_LEARNING_RATE: f64 = 2e-5;

impl Finetune {
    /// The configuration that the flags and the file make.
    fn config(&self, common: &Common) -> anyhow::Result<Config> {
        let from_file = self.settings.is_from_file();
        let mut config = self.settings.base(Config::default())?;
        config.task = Task::Finetune;
        let full = match self.method {
            Some(method) => method == Method::Full,
            None => from_file && config.adapter.is_none() && !self.adapter.is_given(),
        };
        if full && self.adapter.is_given() {
            bail!("--method full trains all weights and has no adapter; leave out the adapter's flags");
        }
        put_some(&mut config.model.name, self.model.as_deref().map(str::to_owned));
        put_some(&mut config.model.revision, self.hub.revision.clone());
        config.model.offline |= self.hub.offline;
        put_some(&mut config.model.dtype, self.dtype.map(DtypeArg::get));
        put(&mut config.data.source, self.data.as_deref().map(str::to_owned));
        put(&mut config.data.format, self.format.map(FormatArg::get));
        put_some(&mut config.data.validation, self.validation.clone());
        put(&mut config.data.field, self.field.clone());
        put(&mut config.data.shots, self.shots);
        config.data.strip_annotations |= self.strip_annotations;
        put(&mut config.data.split_seed, self.split_seed);
        put_some(&mut config.data.limit, self.limit);
        self.encoding.apply(&mut config.data);
        if full {
            config.adapter = None;
            if !from_file {
                config.optimizer.lr = FULL_LEARNING_RATE;
            }
        } else {
            let base = self.model.clone().or_else(|| config.model.name.clone());
            let adapter = config.adapter.take().unwrap_or_else(AdapterArgs::default_config);
            let mut adapter = self.adapter.apply(adapter);
            put_some(&mut adapter.base_model_name_or_path, base);
            adapter.use_dora |= self.method == Some(Method::Dora);
            config.adapter = Some(adapter);
        }
        self.settings.apply(&mut config, common)?;
        Ok(config)
    }
}

pub(crate) fn run(common: &Common, arguments: &Finetune) -> anyhow::Result<()> {
    let config = arguments.config(common)?;
    launch(common, &config, &arguments.out, arguments.resume)
}

/// Fine-tunes as the configuration says, into a folder.
///
/// # Errors
/// Whatever can be wrong; without the weights wherever it can be found without them.
pub(crate) fn launch(common: &Common, config: &Config, out: &Path, resume: bool) -> anyhow::Result<()> {
    ranks::run(common, config, |common| {
        tune(common, config, out, resume).map_err(|error| name_budget(error, config))
    })
}

fn tune(common: &Common, config: &Config, out: &Path, resume: bool) -> anyhow::Result<()> {
    let recipe = ranks::recipe(common, config)?;
    let device = runtime::device::select(&config.training.device)?;
    runtime::memory::track_cpu()?;
    runtime::random::seed(config.training.seed)?;
    let Some(name) = &config.model.name else {
        bail!(
            "`model.name` is missing; give a folder in Hugging Face's layout or a name on the hub as --model"
        )
    };
    let hub = HubArgs { revision: config.model.revision.clone(), offline: config.model.offline };
    let folder = common.in_turn("the model", || hub.open(name))?;
    if same_folder(folder.path(), out) {
        bail!("--out {} is the model's own folder; give another", out.display());
    }
    recipe.check_folder(&folder)?;
    let Data { train, validation, pad } = data(common, config, &folder)?;
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
    let train = MaskedBatches::new(train, layout, device)?;
    let ordered = Layout { shuffle: None, epochs: Some(1), ..layout };
    let validation =
        (!validation.is_empty()).then(|| MaskedBatches::new(validation, ordered, device)).transpose()?;
    let steps = steps(config, train.batches_per_epoch());
    let saving = Some(Saving::open(out, common, config, resume)?);

    let _limit = enforce(config, device)?;
    let mut prepared = recipe.open(&folder, device)?;
    if let Some(chosen) = prepared.plan_activations(&train.largest()?)? {
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
    let (trainer, handles) = prepared.trainer_over(steps, common.ranks.as_ref().map(|ranks| &ranks.group))?;
    let (tokens, padding) = train.tokens_and_padding();
    let batches = train.batches_per_epoch();
    let validation = validation.map(|validation| Box::new(validation) as Box<dyn Batches>);
    let run = Run { trainer, config, handles, train: Box::new(train), validation, saving };
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
    let trained = run.run(common, device, |_, _, _| Ok(()))?;
    if !common.is_first() {
        return Ok(());
    }
    finish(common, &folder, out, &trained)
}

/// Optimizer steps in all.
fn steps(config: &Config, batches: u64) -> u64 {
    let accumulation = config.training.accumulation.max(1) as u64;
    let of_epochs = |epochs: u64| (batches * epochs).div_ceil(accumulation);
    match (config.training.steps, config.training.epochs) {
        (Some(steps), None) => steps,
        (Some(steps), Some(epochs)) => steps.min(of_epochs(epochs)),
        (None, epochs) => of_epochs(epochs.unwrap_or(1)),
    }
}

/// Rows to train on and to measure on, and the token that pads.
struct Data {
    train: Vec<MaskedRow>,
    validation: Vec<MaskedRow>,
    pad: i64,
}

fn data(common: &Common, config: &Config, folder: &Folder) -> anyhow::Result<Data> {
    let own = &config.data;
    let path = Path::new(&own.source);
    let ends = Ends::find(folder, own)?;
    let pad = i64::from(ends.end);
    if own.source.is_empty() {
        bail!("`data.source` is missing; give what to learn from as --data");
    }
    if !path.exists() {
        bail!(
            "{} is not there; give a folder with GSM8K's train.jsonl and test.jsonl, a file of JSON lines, or a text file",
            path.display()
        );
    }
    let format = match own.format {
        DataFormat::Auto => rows::detect(path)?,
        format => format,
    };
    let left_out = |count: usize, all: usize, which: &str, why: &str| {
        if count > 0 {
            say(common, &format!("{count} of {all} {which} rows {why} and are left out"));
        }
    };
    if format == DataFormat::Gsm8k {
        let encoder = ends.encoder(folder, own)?;
        if own.validation.is_some() {
            bail!("--validation: GSM8K has a validation split of its own; leave it out");
        }
        let problems = Problems::of(own);
        let parts = problems.parts()?;
        let few_shot = problems.few_shot(&parts.train, own.shots)?;
        let limit = own.limit.unwrap_or(parts.train.len()).min(parts.train.len());
        let encoded = |problems: &[gsm8k::Problem], which: &str| -> anyhow::Result<Vec<MaskedRow>> {
            let rows = encoder
                .tokenize_all(problems, &few_shot)
                .with_context(|| format!("the {which} rows (--skip-long leaves long ones out)"))?;
            left_out(rows.skipped.len(), problems.len(), which, "are too long");
            Ok(rows.rows.into_iter().map(MaskedRow::from).collect())
        };
        return Ok(Data {
            train: encoded(&parts.train[..limit], "training")?,
            validation: encoded(&parts.validation, "validation")?,
            pad,
        });
    }
    let options = RowOptions {
        longest: ends.longest(folder, own),
        begin: ends.begin,
        end: ends.end,
        field: own.field.clone(),
        skip_long: own.skip_long,
    };
    if let Some(path) = own.validation.as_deref().filter(|path| !path.is_file()) {
        bail!("--validation {}: no such file", path.display());
    }
    if config.training.evaluate_every.is_some() && own.validation.is_none() {
        bail!(NO_VALIDATION);
    }
    let read = |path: &Path, which: &str| -> anyhow::Result<Vec<MaskedRow>> {
        let rows = match format {
            DataFormat::Text => rows::text(path, &ends.tokenizer, &options)?,
            _ => rows::json_lines(path, &ends.tokenizer, &options)?,
        };
        let all = rows.skipped + rows.empty + rows.rows.len();
        left_out(rows.skipped, all, which, "are too long");
        left_out(rows.empty, all, which, "have no text to learn");
        Ok(rows.rows)
    };
    let mut train = read(path, "training")?;
    train.truncate(own.limit.unwrap_or(usize::MAX));
    let validation = own.validation.as_deref().map(|path| read(path, "validation")).transpose()?;
    Ok(Data { train, validation: validation.unwrap_or_default(), pad })
}

/// Folder of the model within an output folder, after full fine-tuning.
pub(crate) const MODEL: &str = "model";

/// Writes the adapter or the model, and reports the result.
fn finish(common: &Common, folder: &Folder, out: &Path, trained: &Trained) -> anyhow::Result<()> {
    let Trained { model, handles, .. } = trained;
    let (what, path) = match &handles.adapters {
        Some(adapters) => {
            adapters.save(out)?;
            ("adapter", out.to_owned())
        }
        None => {
            let path = out.join(MODEL);
            save_model(model.as_ref(), folder, &path)?;
            ("model", path)
        }
    };
    report(common, Some(out), trained, Some((what, &path)));
    Ok(())
}

/// Writes a model in Hugging Face's layout, with what its base's folder has beside the weights.
fn save_model(model: &dyn LanguageModel, folder: &Folder, path: &Path) -> anyhow::Result<()> {
    let llama = shared_llama(model, folder.config())?;
    Ok(hugging_face::save_with(&llama, path, hugging_face::SHARD_BYTES, |new| {
        complete(folder, new).map_err(|error| std::io::Error::other(format!("{error:#}")))
    })?)
}
