//! Shapes of models with random weights, for measurements that do not depend on the weights' values, and models in GGUF files.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, anyhow, bail};
use models::{DecoderConfig, Llama};
use report::cli::Scale;
use tch::{Device, Kind};

use crate::installed::{self, GgufFolder};

/// A model shape.
#[derive(Debug, Clone)]
pub(crate) enum Shape {
    /// Qwen2.5-0.5B's.
    Small,
    /// Qwen2.5-1.5B's.
    Medium,
    /// Qwen2.5-7B's.
    Large,
    /// A block or two that keep the proportions.
    Tiny,
    /// As many layers as [`Self::Small`] with hardly any arithmetic: a step takes the host's time for its operators.
    Narrow,
    /// The shape of a `config.json`, or of a folder that has one.
    File(PathBuf),
    /// A GGUF file, with its weights, and its name.
    Gguf(GgufFolder, String),
}

impl FromStr for Shape {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text {
            "qwen2.5-0.5b" => Self::Small,
            "qwen2.5-1.5b" => Self::Medium,
            "qwen2.5-7b" => Self::Large,
            "tiny" => Self::Tiny,
            "narrow" => Self::Narrow,
            path if path.ends_with(".gguf") => {
                let path = Path::new(path);
                let file = installed::find(path).ok_or_else(|| anyhow!(installed::missing(path)))?;
                // Not where it lies.
                let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
                Self::Gguf(GgufFolder::new(&file)?, name)
            }
            path if Path::new(path).exists() => Self::File(path.into()),
            other => bail!(
                "no shape `{other}`: expected qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-7b, tiny, narrow, or the path of a config.json or a GGUF file"
            ),
        })
    }
}

impl Shape {
    /// The default of a scale.
    pub(crate) fn at_scale(scale: Scale) -> Self {
        match scale {
            Scale::Smoke => Self::Tiny,
            Scale::Laptop | Scale::Full | Scale::Paper => Self::Small,
        }
    }

    pub(crate) fn name(&self) -> String {
        match self {
            Self::Small => "Qwen2.5-0.5B".to_owned(),
            Self::Medium => "Qwen2.5-1.5B".to_owned(),
            Self::Large => "Qwen2.5-7B".to_owned(),
            Self::Tiny => "tiny".to_owned(),
            Self::Narrow => "24 layers of width 32".to_owned(),
            Self::File(path) => path.display().to_string(),
            Self::Gguf(_, name) => name.clone(),
        }
    }

    pub(crate) fn config(&self) -> anyhow::Result<DecoderConfig> {
        let qwen = |vocabulary, hidden, inner, layers, heads, kv_heads| DecoderConfig {
            num_key_value_heads: kv_heads,
            max_position_embeddings: 32_768,
            ..DecoderConfig::qwen2(vocabulary, hidden, inner, layers, heads)
        };
        Ok(match self {
            Self::Small => qwen(151_936, 896, 4864, 24, 14, 2),
            Self::Medium => qwen(151_936, 1536, 8960, 28, 12, 2),
            Self::Large => {
                DecoderConfig { tie_word_embeddings: false, ..qwen(152_064, 3584, 18_944, 28, 28, 4) }
            }
            Self::Tiny => qwen(4096, 128, 704, 2, 2, 1),
            Self::Narrow => qwen(1024, 32, 64, 24, 4, 2),
            Self::File(path) => {
                let file = if path.is_dir() { path.join("config.json") } else { path.clone() };
                DecoderConfig::read(&file)?
            }
            Self::Gguf(folder, _) => folder.open()?.config().clone(),
        })
    }

    /// Returns the shape with other numbers of layers, of tokens that it knows, and of positions.
    pub(crate) fn resized(
        &self,
        layers: i64,
        vocabulary: i64,
        positions: i64,
    ) -> anyhow::Result<DecoderConfig> {
        Ok(DecoderConfig {
            num_hidden_layers: layers,
            vocab_size: vocabulary,
            max_position_embeddings: positions,
            ..self.config()?
        })
    }

    /// The model, its weights drawn from libtorch's generator, or those of a GGUF file.
    pub(crate) fn model(&self, kind: Kind, device: Device) -> anyhow::Result<Llama> {
        if let Self::Gguf(folder, _) = self {
            return Ok(folder.open()?.load(Some(kind), device)?);
        }
        let config = self.config()?;
        let bytes = config.parameter_count() * kind.elt_size_in_bytes() as u64;
        let free = runtime::device::memory_info(device)?.free;
        if bytes > free {
            let gib = |bytes: u64| bytes as f64 / f64::from(1u32 << 30);
            return Err(anyhow!(
                "{} in {kind:?} has {:.1} GiB of weights, and {:.1} GiB are free",
                self.name(),
                gib(bytes),
                gib(free)
            ));
        }
        Llama::new(&config, (kind, device)).with_context(|| format!("making {}", self.name()))
    }
}
