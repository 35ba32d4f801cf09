//! Offloading of weights, gradients and optimizer state to host memory or files.
//!
//! A model of n layers needs only one layer at a time. So layers can be stored in host memory or files and loaded when they
//! run. With separate streams for transfers the next layers are loaded while one runs; if a layer computes for longer than it
//! loads, loading takes no extra time:
//!
//! ```text
//! compute   │ layer 0   │ layer 1   │ layer 2   │ …      T tokens, P parameters: 2·P·T/F seconds
//! load      │ 1 │       │ 2 │       │ 3 │                s·P/B seconds for s bytes per parameter
//! ```
//!
//! [`OffloadConfig::install`] offloads the blocks of any model of [`models`]; embeddings, norms and head stay on the device. Layers are
//! loaded into a ring of slots, each with device memory for one layer.
//!
//! ```
//! use offload::{Offload, OffloadConfig};
//! use offload::models::module::{Input, LanguageModel};
//! use offload::models::{Llama, DecoderConfig};
//! use offload::runtime::autograd::backward;
//! use offload::tch::{Device, Kind, Tensor};
//!
//! let config = DecoderConfig { num_hidden_layers: 6, ..DecoderConfig::qwen2(100, 32, 64, 6, 4) };
//! let mut model = Llama::new(&config, (Kind::Float, Device::Cpu))?;
//! let tokens = Tensor::from_slice(&[3i64, 1, 4, 1]).view([1, 4]);
//! let before = model.loss(&Input::new(&tokens), &tokens)?.sum;
//!
//! let offload = OffloadConfig { ring: 3, ..OffloadConfig::default() }.install(&mut model)?;
//! let loss = model.loss(&Input::new(&tokens), &tokens)?.sum;
//! assert_eq!(loss, before);
//! backward(&[&loss])?;
//! assert_eq!(offload.ring_bytes(), 3 * offload.layer_bytes());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Of a mixture of experts, [`ExpertConfig`] loads only the experts that tokens are given to.
//!
//! # What a layer keeps between forward and backward
//!
//! By default its input, from which backward runs it again: with full fine-tuning four forwards' worth of products instead of three, with a
//! frozen base three instead of two. A layer of [`OffloadConfig::keep`] keeps its activations, as without offloading, but not its weights:
//! its graph refers to memory that is attached when the layer is loaded for backward. So both take as many loads, and have the same
//! bits. In mixed precision the activations include casts of the weights, which then stay.
//!
//! With [`OffloadConfig::inputs_on_host`] the inputs are in host memory: the device has those of two layers instead of all, which decides for
//! long sequences (Llama-3-8B over 131,072 tokens in bf16: 2 GB instead of 34 GB).
//!
//! # Who owns a tensor's memory
//!
//! The model's tensor handles do not change. [`OffloadConfig::install`] gives a layer's tensors new memory: one page-locked host buffer
//! per dtype, or pages of a file ([`Tier`]). **A layer's values are what its handles refer to**: each use compares the handles'
//! memory and versions with the last use, and reads the current memory. So others may change a model as usual, before and after
//! offloading and in any order:
//!
//! | who | change | with offloaded layers |
//! |---|---|---|
//! | an optimizer, `state_dict`, a checkpoint | writes values in place | computes with the new values |
//! | `set_data` of any tensor | replaces its memory | computes with the new memory; memory on a device is copied to the host first |
//! | adapters' `merge` and `unmerge` | replace a frozen weight's memory | the same. Merged weights are in the adapters' ordinary memory: loading them is slower on a GPU |
//! | trained biases, `modules_to_save`, `disable` | switch a tensor's memory between the base's and an adapter's | the same; the current values are trained and saved |
//! | adapters' `install`, `add`, `delete`, `unload`, `merge_and_unload` | give a layer other tensors | the layer is offloaded again |
//! | [`HostAdamW`] | writes to the memory that a weight has when its step is queued | identifies parameters by their tensor: adapters may be installed and deleted later, and parameters in no group keep their `.grad` |
//! | a backward | sums gradients internally, and sets `.grad` at its end | a later backward writes to a kept `.grad` only to add to it |
//!
//! **Loads and host steps are asynchronous.** So write a layer's memory from the host only after a backward has returned (a step
//! of an ordinary optimizer), or after [`Offload::synchronize`] (anything else: a forward on a GPU returns while layers are still
//! being read).
//!
//! These cases are refused:
//!
//! | case | message |
//! |---|---|
//! | a layer that is changed or updated between a forward and its backward, which would compute with other values | `was written, or given other memory, between a forward and its backward` |
//! | other memory of another dtype or shape | `was given other memory, … expected …, contiguous, as it was when the model was offloaded` |
//! | other memory, or other tensors, for a layer whose values a source holds ([`OffloadConfig::source`]) | `but its values are in shards` |
//! | a tensor in a file that is written in place, or is to be trained | `was changed in memory, but it is stored in …`; `is to be trained, but it is stored in …` |
//! | a forward between a backward that updated layers and [`HostAdamW::step`] | `was updated during backward, but other parameters were not yet` |
//! | gradients after a layer's update: more micro-batches than `begin` announced | `arrived after the layer's update` |
//! | a weight used in the loss before the model's forward, with updates during backward | `got another gradient after its layer was updated` |
//! | adapters that are switched between a forward and its backward | `a setting that its layers read` |
//! | a second [`HostAdamW`] | `` these layers already have a `HostAdamW` `` |
//!
//! A layer that is used several times adds up its gradients one after the other, as recomputed segments do. libtorch instead
//! sums the gradients of one backward first: added to an earlier micro-batch's gradient, the last bit may differ.
//!
//! Sources: ZeRO-Offload (Ren et al., arXiv:2101.06840), ZeRO-Infinity (arXiv:2104.07857), FlexGen (arXiv:2303.06865).

mod blocks;
mod engine;
mod error;
mod experts;
mod function;
mod host_adam_w;
mod kept_graph;
mod layout;
mod occupancy;
mod offload;
mod options;
mod schedule;
mod storage;
mod trace;

pub use blocks::{
    OffloadBlock, OffloadBlockWithCheckpointing, OffloadBlockWithFunction, OverlapOffloadBlock, ResidentBlock,
};
pub use engine::Counters;
pub use error::{Error, Result};
pub use experts::{ExpertConfig, ExpertCounters, StreamedExperts};
pub use host_adam_w::{HostAdamW, HostAdamWConfig, StateBytes, Stepped};
pub use offload::Offload;
pub use options::{HookPoint, Method, OffloadConfig, TestHook};
pub use schedule::Direction;
pub use storage::Tier;
pub use trace::{Span, StreamKind, load_rate, overlap, to_chrome};

// For its callers, who then depend on this crate alone.
pub use {models, runtime, tch, training};
