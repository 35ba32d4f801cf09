//! `frugal export`.

mod gguf_files;
mod peft;
mod verify;

use std::io::Read as _;
use std::path::{Path, PathBuf};

use crate::common_flags::Common;
use anyhow::{Context, bail};
use clap::{ArgGroup, Args, ValueEnum};
use files::atomic_write;
use frugal::Config;
use frugal::companion_files::{self, CHAT_TEMPLATE, CompanionFiles, TOKENIZER};
use frugal::config::{Bytes, CONFIG_FILE, DataConfig, Dtype};
use frugal::llama_cpp::LlamaCpp;
use frugal::run_folder::{BEST, CHECKPOINTS};
use models::hugging_face::{self, Folder};
use models::state_dict::state_dict;
use serde_json::{Value, json};
use tch::Device;

use super::merge;
use super::output::print_line;
use crate::flags::hub::{HubArgs, same_folder};
use crate::folder::model_folder;
use crate::folder::output_folder::{self, Existing};
use crate::folder::run_model::{Target, WhichArgs};
use crate::folder::signals;
use crate::folder::vocabulary;
use crate::output::shell_command::shell_word;

/// The format that is written.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Format {
    /// The adapter as PEFT's files
    Peft,
    /// The model with the adapter merged into its weights, as Hugging Face's files
    Merged,
    /// The model with the matrices of its layers in NF4, as bitsandbytes' files, which transformers reads
    Nf4,
    /// The model, with the adapter merged, as one GGUF file for llama.cpp
    Gguf,
    /// The adapter as a GGUF file that llama.cpp applies to the model's
    GgufLora,
    /// A folder for `ollama create`: a Modelfile, the model and the adapter as GGUF files
    Ollama,
}

/// The types of matrices in GGUF files.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Type {
    F32,
    F16,
    Bf16,
    #[value(name = "q8_0")]
    Q8,
    #[value(name = "q6_k")]
    Q6,
    #[value(name = "q5_k_m")]
    Q5,
    #[value(name = "q4_k_m")]
    Q4,
    #[value(name = "q4_0")]
    Q4Plain,
    Mxfp4Moe,
}

impl Type {
    fn get(self) -> gguf::FileType {
        match self {
            Self::F32 => gguf::FileType::F32,
            Self::F16 => gguf::FileType::F16,
            Self::Bf16 => gguf::FileType::BF16,
            Self::Q8 => gguf::FileType::Q8_0,
            Self::Q6 => gguf::FileType::Q6K,
            Self::Q5 => gguf::FileType::Q5KM,
            Self::Q4 => gguf::FileType::Q4KM,
            Self::Q4Plain => gguf::FileType::Q4_0,
            Self::Mxfp4Moe => gguf::FileType::Mxfp4Moe,
        }
    }
}

#[derive(Args, Clone)]
#[command(group(ArgGroup::new("from").required(true).multiple(true).args(["checkpoints", "adapter", "model"])))]
pub(crate) struct Export {
    /// Format of the output
    #[arg(long, value_enum, default_value = "peft")]
    format: Format,
    /// A run's --out folder, or the folder of checkpoints in it: the adapter of the newest checkpoint
    #[arg(long, value_name = "FOLDER", conflicts_with = "adapter")]
    checkpoints: Option<PathBuf>,
    /// An adapter that PEFT or this program wrote
    #[arg(long, value_name = "FOLDER")]
    adapter: Option<PathBuf>,
    /// The model, for every format but peft: a folder in Hugging Face's layout, a GGUF file, or a name on the hub. For every format: a run's
    /// output folder, for its adapter or model
    #[arg(long, value_name = "NAME_OR_FOLDER")]
    model: Option<String>,
    #[command(flatten)]
    which: WhichArgs,
    #[command(flatten)]
    hub: HubArgs,
    /// Output folder; for gguf and gguf-lora the output file
    #[arg(long, value_name = "PATH")]
    out: PathBuf,
    /// Overwrite --out
    #[arg(long)]
    overwrite: bool,
    /// peft, merged: dtype of the tensors [default: unchanged]
    #[arg(long, value_enum)]
    dtype: Option<Dtype>,
    /// gguf, ollama: type of the matrices, as llama.cpp names files; the mixtures q4_k_m and q5_k_m give some matrices q6_K
    /// [default: q8_0 for ollama, else f16]
    #[arg(long = "type", value_enum)]
    kind: Option<Type>,
    /// peft: name of the base model for adapter_config.json
    #[arg(long, value_name = "NAME")]
    base: Option<String>,
    /// The output folder of a training that `--model` names.
    #[arg(skip)]
    run: Option<String>,
    /// How the training that made the adapter read its data.
    #[arg(skip)]
    data: Option<DataConfig>,
    /// merged, nf4: maximum size of a file of weights
    #[arg(long, value_name = "BYTES", default_value = "5GB")]
    max_shard_bytes: Bytes,
    /// gguf, gguf-lora, ollama: fail where llama.cpp's log-probabilities cannot be compared with this program's; without it they are
    /// compared if there is a Python with xllamacpp, and memory for the weights in fp32
    #[arg(long, conflicts_with = "no_verify")]
    verify: bool,
    /// gguf, gguf-lora, ollama: do not compare with llama.cpp
    #[arg(long)]
    no_verify: bool,
    /// The Python with xllamacpp [default: $FRUGAL_PYTHON, else python3]
    #[arg(long, value_name = "PROGRAM")]
    python: Option<PathBuf>,
}

pub(crate) fn run(common: &Common, arguments: &Export) -> anyhow::Result<()> {
    let arguments = &arguments.of_training(common)?;
    arguments.check()?;
    signals::remove_unfinished_files(&arguments.out)?;
    let result = match arguments.format {
        Format::Peft => return peft::run(common, arguments),
        Format::Merged => merged(common, arguments)?,
        Format::Nf4 => quantized(arguments)?,
        Format::Gguf => gguf_files::model(common, arguments)?,
        Format::GgufLora => gguf_files::adapter(common, arguments)?,
        Format::Ollama => gguf_files::ollama(common, arguments)?,
    };
    if common.json {
        print_line(&json!({ "result": result }));
    } else {
        common.note(&format!("exported to {}", arguments.out.display()));
        if arguments.format == Format::GgufLora {
            let out = shell_word(&arguments.out.display().to_string());
            common
                .note(&format!("with a GGUF file of the base model: llama-server -m BASE.gguf --lora {out}"));
        }
    }
    Ok(())
}

fn merged(common: &Common, arguments: &Export) -> anyhow::Result<Value> {
    let Some(adapter) = arguments.adapter()? else {
        bail!(
            "there is nothing to merge; give --adapter or --checkpoints (the model of a training of all weights is whole: it is the folder \
             model of the training's output)"
        )
    };
    arguments.merge(common, adapter.path(), &arguments.out)?;
    Ok(json!({ "model": arguments.out }))
}

/// Quantizes a model and writes it; reads it again and compares.
fn quantized(arguments: &Export) -> anyhow::Result<Value> {
    let Export { out, max_shard_bytes, .. } = arguments;
    let folder = arguments.hub.open(arguments.model.as_deref().context("give --model")?)?;
    if same_folder(folder.path(), out) {
        bail!("--out {} is the model's own folder; give another", out.display());
    }
    let companions = arguments.companions(&folder)?;
    let model = folder.load(Some(Dtype::Nf4.kind()), Device::Cpu)?;
    let mut kept = Vec::new();
    hugging_face::save_with(&model, out, max_shard_bytes.0, |new| {
        model_folder::complete(&folder, &companions, new)
            .map_err(|error| std::io::Error::other(format!("{error:#}")))?;
        kept = companion_files::names(new);
        Ok(())
    })?;
    companion_files::remove_others(out, &kept)?;
    let again = state_dict(&Folder::open(out)?.load(None, Device::Cpu)?);
    for ((name, meant), (_, read)) in state_dict(&model).into_iter().zip(again) {
        if read.kind() != meant.kind() || read != meant {
            bail!("{}: `{name}` is read differently than it was written, or not finite", out.display());
        }
    }
    Ok(json!({ "model": out }))
}

/// An adapter's folder, which may be a temporary one.
enum AdapterFolder {
    Given(PathBuf),
    Temporary(tempfile::TempDir),
}

impl AdapterFolder {
    fn path(&self) -> &Path {
        match self {
            Self::Given(path) => path,
            Self::Temporary(folder) => folder.path(),
        }
    }
}

impl Export {
    /// The arguments with the model and the adapter of a training, if its output folder is what `--model` names.
    fn of_training(&self, common: &Common) -> anyhow::Result<Self> {
        let mut own = self.clone();
        let Some(name) = &self.model else { return Ok(own) };
        let target = Target::find(name, self.which)?;
        if target.adapter.is_none() && target.data.is_none() {
            return Ok(own);
        }
        target.note(common);
        own.run = Some(name.clone());
        own.data.clone_from(&target.data);
        if self.format != Format::Peft && target.is_over_nf4 {
            target.note_other_base(common, &target.open(&self.hub)?, self.dtype);
        }
        if self.checkpoints.is_none() {
            own.adapter = own.adapter.or(target.adapter);
        }
        let needs_base = self.format != Format::Peft || own.adapter.is_none();
        own.model = needs_base.then_some(target.model);
        own.hub.revision = own.hub.revision.or(target.revision);
        own.hub.untied |= target.untied;
        Ok(own)
    }

    /// Refuses flags that the format does not have.
    fn check(&self) -> anyhow::Result<()> {
        let format =
            self.format.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
        let is_gguf = [Format::Gguf, Format::GgufLora, Format::Ollama].contains(&self.format);
        let flags = [
            ("--model", self.model.is_some(), self.format != Format::Peft),
            ("--type", self.kind.is_some(), [Format::Gguf, Format::Ollama].contains(&self.format)),
            ("--dtype", self.dtype.is_some(), !is_gguf && self.format != Format::Nf4),
            ("--dtype nf4", self.dtype == Some(Dtype::Nf4), self.format == Format::Merged),
            ("--adapter", self.adapter.is_some(), self.format != Format::Nf4),
            ("--checkpoints", self.checkpoints.is_some(), self.format != Format::Nf4),
            ("--base", self.base.is_some(), self.format == Format::Peft),
            ("--verify", self.verify, is_gguf),
            ("--no-verify", self.no_verify, is_gguf),
        ];
        match flags.iter().find(|(_, given, has)| *given && !has) {
            None => {}
            Some((flag @ "--model", ..)) if self.adapter.is_some() || self.checkpoints.is_some() => {
                bail!("--format {format} writes the adapter alone; leave out {flag}")
            }
            Some(("--model", ..)) => bail!(
                "{} is a model, and --format {format} writes an adapter; choose --format gguf, nf4 or ollama",
                self.model.as_deref().unwrap_or_default()
            ),
            Some(("--adapter" | "--checkpoints", ..)) => {
                let word = |path: &Path| shell_word(&path.display().to_string());
                let from = match (&self.run, &self.model, &self.adapter) {
                    (Some(run), ..) => shell_word(run),
                    (None, Some(model), Some(adapter)) => {
                        format!("{} --adapter {}", shell_word(model), word(adapter))
                    }
                    _ => "MODEL --adapter ADAPTER".to_owned(),
                };
                bail!(
                    "--format {format} writes a whole model; merge the adapter first, `frugal merge --model {from} --out merged`, \
                     then export that: --model merged"
                )
            }
            Some((flag, ..)) => bail!("--format {format} has no {flag}"),
        }
        if self.format != Format::Peft && self.model.is_none() {
            bail!("--format {format} needs the base model; give --model");
        }
        let named = |name: &Option<String>| name.as_deref().map(PathBuf::from);
        let sources = [self.adapter.clone(), self.checkpoints.clone(), named(&self.model), named(&self.run)];
        let sources = || sources.iter().flatten();
        if let Some(source) = sources().find(|source| same_folder(source, &self.out)) {
            bail!("--out {} is {}, which is read; give another", self.out.display(), source.display());
        }
        let is_gguf_name =
            self.out.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
        if is_gguf_name && ![Format::Gguf, Format::GgufLora].contains(&self.format) {
            bail!(
                "--out {} names a GGUF file, and --format {format} writes a folder; give --format gguf or gguf-lora, or another --out",
                self.out.display()
            );
        }
        // A folder in place of a file has an error of its own.
        let is_file = [Format::Gguf, Format::GgufLora].contains(&self.format);
        if !(is_file && self.out.is_dir()) {
            output_folder::check(&self.out, Existing::by_flag(self.overwrite))?;
        }
        let beside = atomic_write::parent(&self.out);
        if is_file
            && self.out.is_file()
            && sources().any(|source| same_folder(source, beside))
            && !is_gguf_file(&self.out)
        {
            bail!("--out {} is a file of what is exported; give another", self.out.display());
        }
        if self.verify {
            // Before anything is converted.
            LlamaCpp::find(self.python.as_deref())?;
        }
        Ok(())
    }

    /// llama.cpp, if what was written is to be compared with it; says why not where no flag does. `folder` is the model's.
    ///
    /// # Errors
    /// No Python with it, where a flag demands one.
    fn llama_cpp(
        &self,
        common: &Common,
        folder: &Path,
        model: &gguf::Model,
    ) -> anyhow::Result<Option<LlamaCpp>> {
        if self.no_verify {
            return Ok(None);
        }
        let found = LlamaCpp::find(self.python.as_deref());
        if self.verify || self.python.is_some() {
            return Ok(Some(found?));
        }
        let why = match found {
            Ok(_) if model.tokenizer().plain_tokens().is_empty() => {
                "the tokenizer has no token of letters alone"
            }
            Ok(found) if verify::fits_memory(folder)? => return Ok(Some(found)),
            Ok(_) => {
                "it takes the weights in fp32, which are more than half of the free memory; --verify does it"
            }
            Err(_) => "there is no Python with xllamacpp, which has it (pip install xllamacpp)",
        };
        common.note(&format!("not verified with llama.cpp: {why}"));
        Ok(None)
    }

    /// The folder of the base model.
    fn base_model(&self) -> anyhow::Result<PathBuf> {
        let model = self.model.as_deref().context("give --model")?;
        self.hub.resolve(model)
    }

    /// The adapter's folder, if there is one.
    fn adapter(&self) -> anyhow::Result<Option<AdapterFolder>> {
        match (&self.checkpoints, &self.adapter) {
            (Some(folder), _) => {
                let (config, tensors) = peft::of_checkpoint(folder)?;
                let folder = tempfile::tempdir()?;
                lora::peft::write_folder(folder.path(), &config, &tensors)?;
                Ok(Some(AdapterFolder::Temporary(folder)))
            }
            (None, Some(folder)) => Ok(Some(AdapterFolder::Given(folder.clone()))),
            (None, None) => Ok(None),
        }
    }

    /// The folder of the adapter that was given, or of the training whose checkpoint is taken.
    fn adapter_files(&self) -> Option<&Path> {
        match &self.checkpoints {
            // The folder of checkpoints is in that of the training.
            Some(folder) if !folder.join(CHECKPOINTS).is_dir() => folder.parent(),
            Some(folder) => Some(folder),
            None => self.adapter.as_deref(),
        }
    }

    /// The files of the model besides its weights, with those of the adapter if there is one.
    fn companions(&self, folder: &Folder) -> anyhow::Result<CompanionFiles> {
        let adapter = self.adapter_files();
        let of_run = || Some(Config::read(&adapter?.join(CONFIG_FILE)).ok()?.data);
        let mut data = self.data.clone().or_else(of_run).unwrap_or_default();
        if adapter.is_some_and(|adapter| adapter.join(CHAT_TEMPLATE).is_file()) {
            data.chat_template = None;
        }
        if adapter.is_some_and(|adapter| adapter.join(TOKENIZER).is_file()) {
            data.tokenizer = None;
        }
        Ok(CompanionFiles::of(folder, adapter, &data)?)
    }

    /// Merges an adapter into the model, and writes that to a folder.
    fn merge(&self, common: &Common, adapter: &Path, out: &Path) -> anyhow::Result<()> {
        let folder = self.hub.open(self.model.as_deref().context("give --model")?)?;
        let of_run = self.adapter_files().and_then(|run| {
            let run = if run.ends_with(BEST) { run.parent()? } else { run };
            Config::read(&run.join(CONFIG_FILE)).ok()?.model.pad_vocabulary_to
        });
        let folder = vocabulary::for_adapter(folder, Some(adapter), of_run)?;
        for (taken, what) in [(folder.path(), "the model's"), (adapter, "the adapter's")] {
            if same_folder(taken, out) {
                bail!("--out {} is {what} own folder; give another", out.display());
            }
        }
        merge::refuse_nf4(&folder, self.dtype)?;
        let model = folder.load(self.dtype.map(|dtype| dtype.kind()), common.device_of_weights()?)?;
        merge::into_folder((&folder, &self.companions(&folder)?), model, adapter, out, self.max_shard_bytes)
    }
}

/// Whether a file is of the format, so that it is no file of a model that is read.
fn is_gguf_file(path: &Path) -> bool {
    let mut mark = [0; 4];
    std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut mark)).is_ok() && mark == *b"GGUF"
}
