//! The model flags of `frugal plan`: `--model` (a folder, a `config.json`, a name on the hub or a preset) or `--family` with sizes. A size
//! flag beside `--model` replaces that size of the model.

use std::path::{Path, PathBuf};

use accounting::model::{ExpertSizes, Family, Sizes, WindowedLayers};
use accounting::quantity::parse_count;
use accounting::{Decoder, presets};
use anyhow::Context;
use frugal::models::hub::{Hub, RepositoryKind};
use frugal::models::hugging_face::Folder;
use tch::Kind;

use crate::download_bar;
use crate::flags::hub::HubArgs;
use crate::folder::run_model::{Target, WhichArgs};

const CONFIG: &str = "config.json";

#[derive(clap::Args)]
#[group(skip)]
pub(crate) struct ModelArgs {
    #[command(flatten)]
    source: Source,
    #[command(flatten)]
    hub: HubArgs,
    /// Vocabulary size: rows of the embedding and of the output matrix
    #[arg(long, value_name = "N", value_parser = parse_count, allow_negative_numbers = true, hide_short_help = true, help_heading = SIZES)]
    vocabulary: Option<u64>,
    /// Maximum number of positions [default with --family: 1024]
    #[arg(long, value_name = "N", value_parser = parse_count, allow_negative_numbers = true, hide_short_help = true, help_heading = SIZES)]
    context: Option<u64>,
    /// Hidden size: width of the residual stream
    #[arg(long, value_name = "N", value_parser = parse_count, allow_negative_numbers = true, hide_short_help = true, help_heading = SIZES)]
    hidden: Option<u64>,
    /// Number of blocks
    #[arg(long, value_name = "N", value_parser = parse_count, allow_negative_numbers = true, hide_short_help = true, help_heading = SIZES)]
    layers: Option<u64>,
    /// Query heads
    #[arg(long, value_name = "N", value_parser = parse_count, allow_negative_numbers = true, hide_short_help = true, help_heading = SIZES)]
    heads: Option<u64>,
    /// Key-value heads [default: as many as heads]
    #[arg(long, value_name = "N", value_parser = parse_count, allow_negative_numbers = true, hide_short_help = true, help_heading = SIZES)]
    kv_heads: Option<u64>,
    /// Width of a head [default: hidden / heads]
    #[arg(long, value_name = "N", value_parser = parse_count, allow_negative_numbers = true, hide_short_help = true, help_heading = SIZES)]
    head_dim: Option<u64>,
    /// Width of the feed-forward layer [default: 4 · hidden]
    #[arg(long, value_name = "N", value_parser = parse_count, allow_negative_numbers = true, hide_short_help = true, help_heading = SIZES)]
    feed_forward: Option<u64>,
    /// Width of the embedding; gpt2-like only [default: hidden]
    #[arg(long, value_name = "N", value_parser = parse_count, allow_negative_numbers = true, hide_short_help = true, help_heading = SIZES)]
    embedding: Option<u64>,
    /// Whether output and embedding share a matrix [default with --family: true for gpt2]
    #[arg(long, value_name = "BOOL", hide_short_help = true, help_heading = SIZES)]
    tied: Option<bool>,
}

const SIZES: &str = "Sizes (replace those of --model)";

#[derive(clap::Args)]
#[group(required = true, multiple = false)]
struct Source {
    /// A config.json, a folder that has one, the output folder of a training, a name on the hub, or a preset such as qwen2.5-7b
    #[arg(long, value_name = "NAME_OR_FILE", alias = "config", help_heading = "Model (one of)")]
    model: Option<String>,
    /// gpt2, gpt2-like, or a model_type such as qwen2 or llama; needs --vocabulary, --hidden, --layers and --heads
    #[arg(long, value_name = "FAMILY", help_heading = "Model (one of)")]
    family: Option<Family>,
}

impl ModelArgs {
    /// Returns the model, with checked sizes.
    pub(crate) fn decoder(&self) -> anyhow::Result<Decoder> {
        let base = match &self.source {
            Source { model: Some(name), .. } => *self.find(name)?,
            Source { family: Some(family), .. } => self.all_sizes(*family)?,
            _ => anyhow::bail!("no model is given; give --model or --family"),
        };
        Ok(Decoder::new(self.replace(base))?)
    }

    /// Reads a model by its name: a folder, a file, a preset or a name on the hub, in this order.
    fn find(&self, name: &str) -> anyhow::Result<Decoder> {
        let path = Path::new(name);
        if path.is_dir() && !path.join(CONFIG).is_file() {
            // The output folder of a training or an adapter's folder names the model it belongs to.
            let target = Target::find(name, WhichArgs::default())?;
            if target.model != name {
                return self.find(&target.model);
            }
        }
        if path.is_dir() {
            let decoder = Decoder::read(&path.join(CONFIG))?;
            // The weights may have an output matrix although config.json ties it to the embedding.
            if Folder::open(path).is_ok_and(|folder| folder.has_own_head()) {
                return Ok(Decoder::new(Sizes { tied: false, ..*decoder })?);
            }
            return Ok(decoder);
        }
        if let Some(folder) = self.hub.of_file(name)? {
            return Ok(Decoder::read(&folder.join(CONFIG))?);
        }
        if path.exists() || path.extension().is_some_and(|extension| extension == "json") {
            return Ok(Decoder::read(path)?);
        }
        let unknown = match presets::find(name) {
            Ok(known) => return Ok(known),
            Err(unknown) => unknown,
        };
        // A name on the hub has an owner, so another name is a misspelt preset or folder.
        if !name.contains('/') {
            return Err(anyhow::anyhow!(
                "{unknown}; there is no folder `{name}`, and a name on the hub has an owner, as Qwen/Qwen2.5-0.5B"
            ));
        }
        let hub = Hub { progress: Some(download_bar::terminal_bar()), ..Hub::from_env(self.hub.offline) };
        let folder = hub.fetch_files(RepositoryKind::Model, name, self.hub.revision.as_deref(), &[CONFIG])?;
        Ok(Decoder::read(&folder.join(CONFIG))?)
    }

    /// Returns the model's folder, or the folder of its `config.json`; `None` for a preset, a family or a name on the hub.
    pub(crate) fn folder(&self) -> Option<PathBuf> {
        let name = self.source.model.as_deref()?;
        let path = Path::new(name);
        if let Ok(Some(folder)) = self.hub.of_file(name) {
            return Some(folder);
        }
        if path.is_file() {
            return path.parent().filter(|_| path.ends_with(CONFIG)).map(Path::to_owned);
        }
        let has_model = path.join(CONFIG).is_file();
        let target = if has_model { None } else { Target::find(name, WhichArgs::default()).ok() };
        let folder = target.map_or_else(|| path.to_owned(), |target| PathBuf::from(target.model));
        folder.is_dir().then_some(folder)
    }

    /// Returns the dtype of the weights in the model's folder; without weights, the dtype in its `config.json`.
    pub(crate) fn kind(&self) -> Option<Kind> {
        let folder = self.folder()?;
        if let Ok(folder) = Folder::open(&folder)
            && folder.gguf_file().is_some()
        {
            return folder.kind().ok();
        }
        let has_weights = std::fs::read_dir(&folder).ok()?.flatten().any(|entry| {
            Path::new(&entry.file_name()).extension().is_some_and(|extension| extension == "safetensors")
        });
        if has_weights {
            return Folder::open(&folder).ok()?.kind().ok();
        }
        let text = std::fs::read(folder.join(CONFIG)).ok()?;
        let config: serde_json::Value = serde_json::from_slice(&text).ok()?;
        match config.get("torch_dtype").or(config.get("dtype"))?.as_str()? {
            "float32" => Some(Kind::Float),
            "bfloat16" => Some(Kind::BFloat16),
            _ => None,
        }
    }

    /// Returns a name for tables.
    pub(crate) fn name(&self) -> String {
        let source = match &self.source {
            Source { model: Some(name), .. } => name.clone(),
            Source { family: Some(family), .. } => family.model_type().to_owned(),
            _ => "model".to_owned(),
        };
        let changed = self.source.family.is_none() && self.any_size();
        if changed { source + " (sizes changed)" } else { source }
    }

    /// Returns whether a size flag is given.
    pub(crate) fn any_size(&self) -> bool {
        let sizes = [
            self.vocabulary,
            self.context,
            self.hidden,
            self.layers,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.feed_forward,
            self.embedding,
        ];
        self.tied.is_some() || sizes.iter().any(Option::is_some)
    }

    /// Returns the sizes of a family from flags and their defaults.
    fn all_sizes(&self, family: Family) -> anyhow::Result<Sizes> {
        let required = |value: Option<u64>, flag: &str| {
            value.with_context(|| format!("--family {} needs --{flag}", family.model_type()))
        };
        let hidden = required(self.hidden, "hidden")?;
        let heads = required(self.heads, "heads")?;
        let head_dim = self.head_dim.map_or_else(|| head_dim(hidden, heads), Ok)?;
        Ok(Sizes {
            family,
            vocabulary: required(self.vocabulary, "vocabulary")?,
            context: 1024,
            embedding: hidden,
            hidden,
            layers: required(self.layers, "layers")?,
            heads,
            kv_heads: heads,
            head_dim,
            feed_forward: hidden.saturating_mul(4),
            tied: family == Family::Gpt2,
            attention_bias: false,
            mlp_bias: false,
            experts: None,
            linear: None,
            windows: None,
            gemma4: None,
        })
    }

    /// Replaces the sizes of `base` that have a flag. Sizes that follow others in `base` follow them in the result: the head's width (hidden
    /// size / heads), KV heads (heads) and the embedding's width (hidden size).
    fn replace(&self, base: Sizes) -> Sizes {
        let hidden = self.hidden.unwrap_or(base.hidden);
        let heads = self.heads.unwrap_or(base.heads);
        let follows = base.heads.checked_mul(base.head_dim) == Some(base.hidden);
        let resized = self.hidden.is_some() || self.heads.is_some();
        let head_dim = if follows && resized && hidden.is_multiple_of(heads.max(1)) {
            hidden / heads.max(1)
        } else {
            base.head_dim
        };
        let kv_heads = if base.kv_heads == base.heads { heads } else { base.kv_heads };
        let embedding = if base.embedding == base.hidden { hidden } else { base.embedding };
        let layers = self.layers.unwrap_or(base.layers);
        let windowed =
            |windows: WindowedLayers| WindowedLayers { layers: windows.layers.min(layers), ..windows };
        Sizes {
            vocabulary: self.vocabulary.unwrap_or(base.vocabulary),
            context: self.context.unwrap_or(base.context),
            embedding: self.embedding.unwrap_or(embedding),
            hidden,
            layers,
            heads,
            kv_heads: self.kv_heads.unwrap_or(kv_heads),
            head_dim: self.head_dim.unwrap_or(head_dim),
            feed_forward: self.feed_forward.unwrap_or(base.feed_forward),
            tied: self.tied.unwrap_or(base.tied),
            experts: base.experts.map(|experts| ExpertSizes {
                layers: if experts.layers == base.layers { layers } else { experts.layers.min(layers) },
                ..experts
            }),
            windows: base.windows.map(windowed),
            ..base
        }
    }
}

fn head_dim(hidden: u64, heads: u64) -> anyhow::Result<u64> {
    anyhow::ensure!(
        hidden.is_multiple_of(heads),
        "hidden size {hidden} is not a multiple of {heads} heads; give another --hidden or --heads, or the width of \
         a head with --head-dim"
    );
    Ok(hidden / heads)
}
