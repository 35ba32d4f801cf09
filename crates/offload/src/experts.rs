//! Streaming the experts of mixtures from files: only those that tokens are given to are loaded.
//!
//! A layer of a mixture has E experts, and a token needs k of them. Layers that are offloaded as a whole load all E; here the unit is an
//! expert, and what is loaded is decided after the router:
//!
//! ```text
//! router ─► experts that have rows ─┬─ in a slot: computed first
//!                                   └─ not: read into a slot on a thread of its own, meanwhile
//! ```
//!
//! Slots are memory for one expert each, [`ExpertConfig::cache`] bytes in all for all layers. A slot that a pass is going to use is not
//! overwritten; of the others the one whose last use is longest ago is. Results have the same bits for any number of slots: each expert
//! writes to rows of its own ([`ExpertSource`](models::ExpertSource)).
//!
//! **What is loaded.** T tokens that are given to experts evenly reach `E·(1 − (1 − k/E)ᵀ)` of a layer's E: from some 64 tokens on nearly all,
//! so a training step reads nearly everything, once forward and once backward. Backward goes through the layers in the other direction,
//! so a cache of C bytes saves C in each: `2·m·(B − C)` bytes for m passes over experts of B bytes, while an order that repeated would save nothing
//! with fewer than all. A layer that runs again in backward shares one load between both, if the cache has room for the experts of one layer.
//! A generated token reaches k experts of each layer, and those of the last tokens are the ones that the slots have.
//!
//! **Frozen.** Experts are read and never written, so they are not trained; what surrounds them can be: adapters of the attention, and the
//! gradient of the router's weights passes through them. Nothing of them is saved for backward, which loads them again.
//!
//! On a CPU only, where the files are what is outside of the memory.
//!
//! ```
//! use offload::ExpertConfig;
//! use offload::models::module::{Input, LanguageModel, freeze};
//! use offload::models::llama::{Family, Mixture};
//! use offload::models::{DecoderConfig, Llama};
//! use offload::tch::{Device, Kind, Tensor};
//!
//! let mixture = Mixture {
//!     experts: 8, per_token: 2, intermediate_size: 16, shared: None, normalizes: true, step: 1, dense_layers: vec![],
//!     clamped: None,
//! };
//! let config = DecoderConfig {
//!     family: Family::Qwen3Moe, mixture: Some(mixture), ..DecoderConfig::qwen2(100, 32, 64, 2, 4)
//! };
//! let mut model = Llama::new(&config, (Kind::Float, Device::Cpu))?;
//! freeze(&model, ".*", true)?;
//! let tokens = Tensor::from_slice(&[3i64, 1, 4, 1]).view([1, 4]);
//! let before = model.logits(&Input::new(&tokens))?;
//!
//! // Room for five of the sixteen experts.
//! let one = 3 * 16 * 32 * 4;
//! let experts = ExpertConfig { cache: 5 * one, ..ExpertConfig::default() }.install(&mut model)?;
//! assert_eq!(model.logits(&Input::new(&tokens))?, before);
//! let counters = experts.counters();
//! assert!(counters.loads <= counters.requested && counters.loaded == counters.loads * one);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod cache;
mod in_files;
mod loads;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kernels::quantized::blocks;
use models::hugging_face::Folder;
use models::init::Init;
use models::module::{Module, ModuleMapper, map_modules};
use models::tensors_file::TensorLocation;
use models::{ExpertSlot, Llama};
use tch::{Device, Kind, Tensor};

use crate::error::{Result, refused};
use cache::{Cache, StoredExperts};
use in_files::LayerExperts;
use loads::Streamed;

/// How experts are streamed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertConfig {
    /// Bytes of the slots of all layers together: at least two experts.
    pub cache: u64,
    /// The folder for experts that are in no file of the model in its dtype. The files have no name, and are freed when the process ends.
    pub folder: PathBuf,
}

impl Default for ExpertConfig {
    /// 1 GiB, and the system's temporary folder.
    fn default() -> Self {
        Self { cache: 1 << 30, folder: std::env::temp_dir() }
    }
}

/// Experts that were requested and loaded since the model was prepared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ExpertCounters {
    /// Experts that had rows, in all passes.
    pub requested: u64,
    /// Those that were read from a file.
    pub loads: u64,
    /// Bytes that were read.
    pub loaded: u64,
    /// Time in which the computing thread waited for a read.
    pub waited: Duration,
}

/// A handle on the streamed experts of a model, which runs without it.
#[derive(Debug, Clone)]
pub struct StreamedExperts(Arc<Cache>);

impl ExpertConfig {
    /// Writes the experts of `model` to files, and streams them from there. Their tensors keep their identity, and show the files' pages.
    ///
    /// # Errors
    /// A model without a mixture of experts; experts that are trained, or on a GPU; a cache of fewer than two experts; a folder that cannot be
    /// written.
    pub fn install(&self, model: &mut (impl Module + ?Sized)) -> Result<StreamedExperts> {
        let mut install = Install { config: self, stored: &|_| None, layers: Vec::new() };
        map_modules(model, &mut install)?;
        let cache = self.cache(install.layers)?;
        map_modules(model, &mut Connect { cache: &cache, next: 0 })?;
        Ok(StreamedExperts(cache))
    }

    /// Loads a model on the CPU in a dtype (`None`: the files'), but for its experts, which stay in the model's own files if these have that
    /// dtype; otherwise they are written to others, layer by layer. The experts are frozen.
    ///
    /// # Errors
    /// As [`Folder::load`] and [`ExpertConfig::install`]; a model in the blocks of a GGUF file.
    pub fn open(&self, folder: &Folder, kind: Option<Kind>) -> Result<(Llama, StreamedExperts)> {
        if kind == Some(blocks::KIND) {
            let reason = "experts in the blocks of a GGUF file are not streamed; take bfloat16 or nf4";
            return Err(refused("experts", reason));
        }
        let kind = folder.kind_or(kind)?;
        let in_place = folder.kind().is_ok_and(|stored| stored == kind);
        let stored = |name: &str| folder.location(name).filter(|stored| in_place && stored.kind == kind);
        let mut layers = Vec::new();
        let options = (kind, Device::Cpu);
        let model =
            Llama::assemble(folder.config(), Init::Uninitialised, options, &mut |number, mut block| {
                let prefix = format!("layers.{number}");
                let mut fill = Fill { folder, prefix: &prefix, stored: &stored };
                map_modules(&mut *block, &mut fill)?;
                let stored = |name: &str| stored(&format!("{prefix}.{name}"));
                let mut install = Install { config: self, stored: &stored, layers: Vec::new() };
                map_modules(&mut *block, &mut install)?;
                layers.extend(install.layers);
                Ok(block)
            })?;
        folder.load_filtered(&model, &|name| !is_of_expert(name))?;
        let cache = self.cache(layers)?;
        let mut model = model;
        map_modules(&mut model, &mut Connect { cache: &cache, next: 0 })?;
        Ok((model, StreamedExperts(cache)))
    }

    fn cache(&self, layers: Vec<LayerExperts>) -> Result<Arc<Cache>> {
        if layers.is_empty() {
            return Err(refused("experts", "the model has no mixture of experts; leave out their streaming"));
        }
        let boxed = |layer| -> Box<dyn StoredExperts> { Box::new(layer) };
        Cache::new(layers.into_iter().map(boxed).collect(), self.cache)
    }
}

impl StreamedExperts {
    /// Returns the experts that were requested and loaded so far.
    pub fn counters(&self) -> ExpertCounters {
        self.0.counters()
    }

    /// Returns the bytes of a slot: of the largest expert, with each matrix at a multiple of 256 bytes.
    pub fn expert_bytes(&self) -> u64 {
        self.0.slot_bytes()
    }

    /// Returns the number of slots.
    pub fn slots(&self) -> usize {
        self.0.slots()
    }

    /// Returns the number of experts of all layers.
    pub fn experts(&self) -> usize {
        self.0.experts()
    }
}

/// Returns whether a tensor of a model is one of an expert that the router chooses.
fn is_of_expert(name: &str) -> bool {
    name.contains(".mlp.experts.")
}

/// Moves the experts of each mixture to files.
struct Install<'a> {
    config: &'a ExpertConfig,
    /// Where a tensor's values already are.
    stored: &'a dyn Fn(&str) -> Option<TensorLocation>,
    layers: Vec<LayerExperts>,
}

impl ModuleMapper for Install<'_> {
    fn experts(&mut self, name: &str, matrices: &[[Tensor; 3]], slot: &mut ExpertSlot) -> models::Result<()> {
        if slot.is_streamed() {
            return Err(refused("experts", format!("`{name}` is streamed already")));
        }
        self.layers.push(LayerExperts::new(name, matrices, &self.config.folder, self.stored)?);
        Ok(())
    }
}

/// Gives each mixture its source, in the order of [`Install`].
struct Connect<'a> {
    cache: &'a Arc<Cache>,
    next: usize,
}

impl ModuleMapper for Connect<'_> {
    fn experts(&mut self, _: &str, _: &[[Tensor; 3]], slot: &mut ExpertSlot) -> models::Result<()> {
        slot.stream_from(Arc::new(Streamed::new(self.cache.clone(), self.next)));
        self.next += 1;
        Ok(())
    }
}

/// Freezes the experts of a block, and reads the values of those that no file has in the model's dtype.
struct Fill<'a> {
    folder: &'a Folder,
    prefix: &'a str,
    stored: &'a dyn Fn(&str) -> Option<TensorLocation>,
}

impl ModuleMapper for Fill<'_> {
    fn experts(&mut self, name: &str, matrices: &[[Tensor; 3]], _: &mut ExpertSlot) -> models::Result<()> {
        for (expert, matrices) in matrices.iter().enumerate() {
            for (name, matrix) in
                in_files::names(&format!("{}.{name}", self.prefix), expert).iter().zip(matrices)
            {
                let _ = matrix.shallow_clone().f_set_requires_grad(false)?;
                if (self.stored)(name).is_none() {
                    self.folder.load_tensor(name, matrix)?;
                }
            }
        }
        Ok(())
    }
}
