//! A model by the output folder of a training, or by an adapter's folder.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use frugal::Config;
use frugal::companion_files::{CHAT_TEMPLATE, TOKENIZER};
use frugal::config::{CONFIG_FILE, DataConfig, Dtype, Task};
use frugal::models::hugging_face::Folder;
use frugal::run_folder::{BEST, CHECKPOINTS};
use kernels::nf4::Scales;
use lora::LoraConfig;
use lora::peft::CONFIG_FILE as ADAPTER_FILE;

use crate::common_flags::Common;
use crate::flags::hub::{HubArgs, same_folder};
use crate::folder::best_weights::best_evaluation;
use crate::folder::vocabulary;
use crate::output::shell_command::shell_word;
use frugal::run_folder::MODEL;

/// The configuration of a model within its folder.
const MODEL_FILE: &str = "config.json";

/// The field of an adapter's configuration with the revision of its base on the hub.
pub(crate) const REVISION: &str = "revision";

/// Weights of a training: the last or the best.
#[derive(Args, Clone, Copy, Debug, Default)]
pub(crate) struct WhichArgs {
    /// Of a training's output folder, take the last weights instead of those with the least validation loss
    #[arg(long)]
    pub(crate) last: bool,
}

/// The model that a name leads to.
#[derive(Clone, Debug, Default)]
pub(crate) struct Target {
    /// A model's folder, or a name on the hub.
    pub(crate) model: String,
    /// The adapter that belongs to it.
    pub(crate) adapter: Option<PathBuf>,
    /// How rows were made, where a training made the weights.
    pub(crate) data: Option<DataConfig>,
    /// A note on the weights that are taken from a training's folder.
    note: Option<String>,
    /// The revision of the model that it was trained with.
    pub(crate) revision: Option<String>,
    /// Whether a training kept both matrices of a GGUF file that holds the embedding again.
    pub(crate) untied: bool,
    /// Whether an adapter was trained over its base in NF4.
    pub(crate) is_over_nf4: bool,
    /// The multiple that a vocabulary with new tokens has, by the training.
    pad_vocabulary_to: Option<i64>,
    /// The base that an adapter names which is given beside the model.
    other_base: Option<String>,
}

impl Target {
    /// Finds the model and the adapter of a training's output folder, of an adapter's folder, or of a model.
    ///
    /// # Errors
    /// A training without weights that can be loaded; an adapter that does not name its base.
    pub(crate) fn find(name: &str, which: WhichArgs) -> anyhow::Result<Self> {
        let path = Path::new(name);
        // A model may come with a file of this name from another program.
        let is_model = path.join(MODEL_FILE).is_file() || path.join(ADAPTER_FILE).is_file();
        match Config::read(&path.join(CONFIG_FILE)) {
            Ok(config) => return Self::of_training(path, config, which),
            Err(error) if path.join(CONFIG_FILE).is_file() && !is_model => return Err(error.into()),
            Err(_) => {}
        }
        // The folder of checkpoints, or one of them.
        let run = path.ancestors().skip(1).take(2).find(|run| path.starts_with(run.join(CHECKPOINTS)));
        if let Some(run) = run.filter(|run| Config::read(&run.join(CONFIG_FILE)).is_ok()) {
            let run = shell_word(&run.display().to_string());
            bail!(
                "{name} has checkpoints, from which {run} is resumed; give the run: {run}, or export the newest checkpoint of an adapter: \
                 `frugal export --checkpoints {run} --out ADAPTER`"
            );
        }
        if which.last {
            bail!("--last: {name} is not the output folder of a training; leave it out");
        }
        if !path.join(ADAPTER_FILE).is_file() || path.join(MODEL_FILE).is_file() {
            return Ok(Self { model: name.to_owned(), ..Self::default() });
        }
        let config = LoraConfig::read(&path.join(ADAPTER_FILE))?;
        let revision = config.read.get(REVISION).and_then(|revision| revision.as_str()).map(str::to_owned);
        let model = config.base_model_name_or_path.with_context(|| {
            format!("{name} does not name its base model; give that as --model, and this folder as --adapter")
        })?;
        let note = Some(format!("{name} is an adapter; its base is {model}"));
        Ok(Self { model, adapter: Some(path.to_owned()), note, revision, ..Self::default() })
    }

    /// Finds the model that a fine-tuning begins with: a model, or the one that a training of all weights made.
    ///
    /// # Errors
    /// An adapter, or a training of one; those of [`Target::find`].
    pub(crate) fn to_fine_tune(name: &str) -> anyhow::Result<Self> {
        let target = Self::find(name, WhichArgs::default())?;
        if target.adapter.is_none() {
            return Ok(target);
        }
        let word = shell_word(name);
        let resume = match target.data {
            Some(_) => format!("continue its training with `frugal resume {word}`, or "),
            None => String::new(),
        };
        bail!(
            "{name} has an adapter, and a fine-tuning begins with a whole model; {resume}merge it first: `frugal merge --model {word} \
             --out merged`"
        )
    }

    fn of_training(out: &Path, config: Config, which: WhichArgs) -> anyhow::Result<Self> {
        let shown = out.display();
        let word = shell_word(&shown.to_string());
        let is_adapter = config.adapter.is_some();
        let (what, file) = if is_adapter { ("adapter", ADAPTER_FILE) } else { ("model", MODEL_FILE) };
        let last = if is_adapter { out.to_owned() } else { out.join(MODEL) };
        let best = best_evaluation(out).filter(|_| out.join(BEST).join(file).is_file());
        let (path, text) = match best.filter(|_| !which.last) {
            Some(best) => (
                out.join(BEST),
                format!("the best {what}, of step {} with validation loss {:.4}", best.step, best.loss),
            ),
            None if last.join(file).is_file() => (last, format!("the last {what}")),
            None if best.is_some() => bail!(
                "{shown} has no last weights yet; leave out --last to use the best, or finish the training with `frugal resume \
                 {word}`"
            ),
            None if config.task == Task::Train && config.model.name.is_none() => bail!(
                "{shown} has checkpoints only: a model of the shape gpt2-like or gpt2 is measured in its training, and no other command \
                 opens it; train with `--model FILE`, a decoder's config.json"
            ),
            None => {
                bail!(
                    "{shown} has no trained weights yet: the first evaluation or the end of the training writes them; if it runs no more, \
                     finish it with `frugal resume {word}`"
                )
            }
        };
        let note = Some(format!("{shown}: {text} ({})", path.display()));
        let revision = config.model.revision.clone();
        let untied = config.model.untied;
        let pad_vocabulary_to = config.model.pad_vocabulary_to;
        let is_over_nf4 = is_adapter && config.model.dtype == Some(Dtype::Nf4);
        // The files that it was trained with are beside its weights, whatever became of those that its flags named.
        let mut data = config.data;
        if path.join(CHAT_TEMPLATE).is_file() {
            data.chat_template = None;
        }
        if path.join(TOKENIZER).is_file() {
            data.tokenizer = None;
        }
        let (model, adapter) = match is_adapter {
            true => {
                let base = config.model.name.clone();
                (base.with_context(|| format!("{shown}: `model.name` is missing"))?, Some(path))
            }
            false => (path.display().to_string(), None),
        };
        Ok(Self {
            model,
            adapter,
            data: Some(data),
            note,
            revision,
            untied,
            is_over_nf4,
            pad_vocabulary_to,
            other_base: None,
        })
    }

    /// Takes an adapter that is given beside the model, with what its folder says of its training.
    pub(crate) fn take_adapter(&mut self, adapter: Option<&Path>) {
        let Some(adapter) = adapter else { return };
        let out = if adapter.ends_with(BEST) { adapter.parent().unwrap_or(adapter) } else { adapter };
        let config = Config::read(&out.join(CONFIG_FILE)).ok();
        self.pad_vocabulary_to = config.as_ref().and_then(|config| config.model.pad_vocabulary_to);
        self.is_over_nf4 = config.is_some_and(|config| config.model.dtype == Some(Dtype::Nf4));
        let config = LoraConfig::read(&adapter.join(ADAPTER_FILE)).ok();
        self.other_base = config.and_then(|config| config.base_model_name_or_path);
        self.adapter = Some(adapter.to_owned());
    }

    /// Says what was taken of a training's folder, on standard error.
    pub(crate) fn note(&self, common: &Common) {
        self.note.iter().for_each(|note| common.note(note));
    }

    /// Says that an adapter names another base than the model of `folder`, and that one over NF4 is used with weights that are not quantized,
    /// unless they are, in `dtype`.
    pub(crate) fn note_other_base(&self, common: &Common, folder: &Folder, dtype: Option<Dtype>) {
        if let Some(base) = self.other_base.as_ref().filter(|base| !self.is_base(base, folder)) {
            common.note(&format!(
                    "note: the adapter names {base} as its base, and here it is over {}; unless the weights are the same, results differ from \
                     those of the training",
                    self.model
                ),
            );
        }
        let quantized = |kind| Scales::of(kind).is_some();
        let is_quantized = match dtype {
            Some(dtype) => dtype == Dtype::Nf4,
            None => folder.kind().is_ok_and(quantized),
        };
        if self.is_over_nf4 && !is_quantized {
            common.note("note: the adapter was trained over its base in NF4, and here the base is not quantized, so results differ from those of \
                 the training; where a model is not merged, --dtype nf4 computes as the training did",
            );
        }
    }

    /// Whether the model is the one of this name or path, as far as names tell: a folder may be a copy of a model on the hub.
    fn is_base(&self, base: &str, folder: &Folder) -> bool {
        let last = |name: &str| name.trim_end_matches('/').rsplit('/').next().map(str::to_lowercase);
        let in_cache = format!("models--{}", base.replace('/', "--"));
        let path = folder.path();
        base == self.model
            || same_folder(Path::new(base), path)
            || !Path::new(base).is_dir() && last(base) == last(&self.model)
            || path.components().any(|part| part.as_os_str() == in_cache.as_str())
    }

    /// Opens the model's folder, with the rows that the adapter has for new tokens; downloads it if it is not here.
    ///
    /// # Errors
    /// As [`HubArgs::open`]; an adapter that cannot be read.
    pub(crate) fn open(&self, hub: &HubArgs) -> anyhow::Result<Folder> {
        let revision = hub.revision.clone().or_else(|| self.revision.clone());
        let hub = HubArgs { revision, untied: hub.untied || self.untied, ..hub.clone() };
        vocabulary::for_adapter(hub.open(&self.model)?, self.adapter.as_deref(), self.pad_vocabulary_to)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;

    /// A folder with empty files.
    fn folder(files: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for file in files {
            let path = folder.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "{}").unwrap();
        }
        folder
    }

    fn best(out: &Path) {
        let best = json!({ "loss": 1.25, "step": 40, "evaluations_since": 1 });
        fs::write(out.join("best.json"), best.to_string()).unwrap();
    }

    fn found(path: &Path, last: bool) -> (String, Option<PathBuf>, String) {
        let target = Target::find(&path.display().to_string(), WhichArgs { last }).unwrap();
        (target.model, target.adapter, target.note.unwrap_or_default())
    }

    fn error(path: &Path, last: bool) -> String {
        Target::find(&path.display().to_string(), WhichArgs { last }).unwrap_err().to_string()
    }

    #[test]
    fn a_training_of_adapters_gives_its_base_and_the_best_adapter() {
        let run = folder(&["adapter_config.json", "best/adapter_config.json"]);
        let out = run.path();
        let config =
            "[model]\nname = \"base\"\nrevision = \"r1\"\n[adapter]\nr = 4\n[data]\nmask = \"last\"\n";
        fs::write(out.join(CONFIG_FILE), config).unwrap();
        let shown = out.display();
        assert_eq!(
            found(out, false),
            ("base".into(), Some(out.into()), format!("{shown}: the last adapter ({shown})"))
        );
        best(out);
        let note =
            format!("{shown}: the best adapter, of step 40 with validation loss 1.2500 ({shown}/best)");
        assert_eq!(found(out, false), ("base".into(), Some(out.join("best")), note));
        assert_eq!(found(out, true).1, Some(out.into()));
        let target = Target::find(&shown.to_string(), WhichArgs::default()).unwrap();
        assert_eq!(target.data.unwrap().mask, frugal::dataloading::chat::Mask::Last);
        assert_eq!(target.revision.as_deref(), Some("r1"));
        fs::remove_file(out.join("adapter_config.json")).unwrap();
        assert!(error(out, true).contains("leave out --last to use the best"));
        fs::remove_file(out.join("best/adapter_config.json")).unwrap();
        assert!(error(out, false).contains("has no trained weights yet: the first evaluation"));
    }

    #[test]
    fn a_training_of_all_weights_gives_its_model() {
        let run = folder(&["model/config.json"]);
        let out = run.path();
        fs::write(out.join(CONFIG_FILE), "method = \"full\"\n[model]\nname = \"base\"\n").unwrap();
        assert_eq!(found(out, false).0, out.join("model").display().to_string());
        fs::remove_file(out.join("model/config.json")).unwrap();
        fs::write(out.join(CONFIG_FILE), "task = \"train\"\n[model.shape]\nfamily = \"gpt2\"\n").unwrap();
        assert!(error(out, false).contains("no other command opens it; train with `--model FILE`"));
        fs::write(out.join(CONFIG_FILE), "[package]\nname = \"x\"\n").unwrap();
        assert!(error(out, false).contains("unknown field `package`"));
    }

    #[test]
    fn other_names_are_models_and_adapters() {
        let adapter = folder(&[]);
        let path = adapter.path();
        fs::write(
            path.join(ADAPTER_FILE),
            r#"{"peft_type": "LORA", "base_model_name_or_path": "owner/base", "r": 2}"#,
        )
        .unwrap();
        assert_eq!(found(path, false).0, "owner/base");
        assert!(error(path, true).contains("is not the output folder of a training"));
        assert_eq!(found(Path::new("owner/name"), false), ("owner/name".into(), None, String::new()));
        // A model with a file of this name that is another program's.
        let model = folder(&["config.json"]);
        fs::write(model.path().join(CONFIG_FILE), "[package]\n").unwrap();
        assert_eq!(found(model.path(), false).0, model.path().display().to_string());
    }
}
