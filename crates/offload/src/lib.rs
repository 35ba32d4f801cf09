//! Offloading of weights, gradients and optimizer state to host memory or files.
//!
//! A model of n layers needs one of them at a time. So the layers can live in the host's memory, or in files, and come to the device
//! when they run; with streams for the transfers the next ones come while one runs, and as long as a layer computes longer than it
//! loads, nothing is waited for:
//!
//! ```text
//! compute   │ layer 0   │ layer 1   │ layer 2   │ …      T tokens, P parameters: 2·P·T/F seconds
//! load      │ 1 │       │ 2 │       │ 3 │                s·P/B seconds for s bytes per parameter
//! ```
//!
//! [`Offload::apply`] does that to any model of [`models`]; embeddings, norms and head stay on the device.
//!
//! ```
//! use models::module::{Input, LanguageModel};
//! use models::{Llama, LlamaConfig};
//! use offload::{Offload, Options};
//! use tch::{Device, Kind, Tensor};
//!
//! let config = LlamaConfig { num_hidden_layers: 6, ..LlamaConfig::qwen2(100, 32, 64, 6, 4) };
//! let mut model = Llama::new(&config, (Kind::Float, Device::Cpu))?;
//! let tokens = Tensor::from_slice(&[3i64, 1, 4, 1]).view([1, 4]);
//! let before = model.loss(&Input::new(&tokens), &tokens)?.sum;
//!
//! let offload = Offload::apply(&mut model, &Options { ring: 3, ..Options::default() })?;
//! let loss = model.loss(&Input::new(&tokens), &tokens)?.sum;
//! assert_eq!(loss, before);
//! runtime::autograd::backward(&[&loss])?;
//! assert_eq!(offload.ring_bytes(), 3 * offload.layer_bytes());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Who owns a tensor's memory
//!
//! The model's tensors stay the handles that they were. [`Offload::apply`] gives those of a layer memory of its own, the layer's *home*:
//! one page-locked piece of the host's memory for each dtype, or pages of a file ([`Tier`]). **What a handle shows is what the layer
//! is**: every use of a layer compares its handles' memory and versions with what it read last, and reads where they point now. So others
//! may go on doing what they do to a model, before and after, in any order, and undo it on the other side:
//!
//! | who | does what to memory | with layers that are offloaded |
//! |---|---|---|
//! | an optimizer, `state_dict`, a checkpoint | writes it in place | computes with the new values |
//! | `set_data` of any tensor | exchanges it | computes with the new memory, wherever it is; what is on a device is copied to the host first |
//! | adapters' `merge` and `unmerge` | exchange a frozen weight's | the same. The merged weights are the adapters', in ordinary memory: their loads are slower on a GPU |
//! | trained biases, modules saved whole, `disable` | exchange a tensor's between the base's and an adapter's | the same; the values shown are the ones trained and saved |
//! | adapters' `install`, `add`, `delete`, `unload`, `merge_and_unload` | give a layer other tensors | the layer is taken home again |
//! | [`HostAdamW`] | writes the memory that a weight shows when its step is queued | knows parameters by their tensor: adapters may be installed and deleted after it was made, and those that no group has keep their `.grad` for others |
//! | a backward | sums gradients up out of sight, and puts them into `.grad` at its end | a `.grad` that somebody keeps is never written again by another backward than one that adds to it |
//!
//! With one thing in return: **loads and steps on the host are asynchronous**. Memory of a layer may be written from the host after a
//! backward has returned (a step of an ordinary optimizer), or after [`Offload::synchronize`] (anything else: a forward on a GPU
//! returns while layers are still read).
//!
//! Refused, in these words:
//!
//! | what | words |
//! |---|---|
//! | a layer that changes, or is stepped, between a forward and its backward, which would run the forward again with other values | `was written, or given other memory, between a forward and its backward` |
//! | other memory of another dtype or shape | `was given other memory, … expected …, contiguous, as it was when the model was offloaded` |
//! | a tensor in a file that is written in place, or is to be trained there | `was changed in memory, but it lives in …`; `is to be trained, but it lives in …` |
//! | a forward between a backward that stepped layers and [`HostAdamW::step`] | `was stepped within a backward, and other parameters were not yet` |
//! | gradients after a layer's step: more micro-batches than `begin` said | `came after the layer's step` |
//! | a weight used in the loss before the model's forward, with steps within backward | `got a gradient besides its layer's, after the layer was stepped` |
//! | adapters that are switched between a forward and its backward, and not back | `a setting that its layers read` |
//! | a second [`HostAdamW`] | `` there is a `HostAdamW` for these layers already `` |
//!
//! A layer that is used several times adds its gradients up one after the other, as recomputed segments do. libtorch first adds up what
//! one backward brings: where that comes on top of an earlier micro-batch's gradient, the last bit may differ.
//!
//! Sources: ZeRO-Offload (Ren et al., arXiv:2101.06840), ZeRO-Infinity (arXiv:2104.07857), FlexGen (arXiv:2303.06865).

mod blocks;
mod engine;
mod error;
mod function;
mod home;
mod host_adam_w;
mod layout;
mod occupancy;
mod offload;
mod options;
mod schedule;
mod trace;

pub use blocks::{
    OffloadBlock, OffloadBlockWithCheckpointing, OffloadBlockWithFunction, OverlapOffloadBlock, ResidentBlock,
};
pub use engine::Counters;
pub use error::{Error, Result};
pub use home::Tier;
pub use host_adam_w::{HostAdamW, HostOptions, StateBytes, Stepped};
pub use offload::Offload;
pub use options::{Method, Options, Point, Probe};
pub use schedule::Direction;
pub use trace::{Lane, Span, overlap, to_chrome};
