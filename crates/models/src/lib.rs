//! Decoder building blocks and models, with named tensors and replaceable parts.
//!
//! | module | what it gives |
//! |---|---|
//! | [`module`] | the traits: a module, a projection, an MLP, a block, a loss head, a language model |
//! | [`state_dict`], [`tensors_file`] | a module's state as safetensors |
//! | [`attention`] | causal attention, over packed documents too, three ways |
//! | [`generation`] | new tokens from a model: a cache, batches, sampling |
//! | [`init`] | how weights begin |
//! | [`Linear`], [`Embedding`], [`LayerNorm`], [`RmsNorm`], [`PositionalEncoding`], [`LearnedPositions`], [`FeedForward`], [`Swiglu`] | the parts |
//! | [`TransformerDecoderLayer`] | PyTorch's post-norm layer, whose memory is its own input |
//! | [`Gpt2Like`] | the model of the training assignment |
//! | [`Gpt2`] | a pre-norm decoder of any depth |
//! | [`llama`] | Llama and Qwen2 |
//! | [`hugging_face`] | models from Hugging Face's folders, and back into them |
//! | `hub` (with the feature of that name) | those folders by name, from the hub or its cache |
//!
//! ```
//! use models::module::{Input, LanguageModel, parameter_count};
//! use models::{Gpt2, Gpt2Config};
//! use tch::{Device, Kind, Tensor};
//!
//! let config = Gpt2Config { vocabulary: 256, max_sequence: 32, hidden: 16, heads: 2, layers: 2, ..Gpt2Config::small() };
//! let model = Gpt2::new(&config, (Kind::Float, Device::Cpu))?;
//! assert_eq!(parameter_count(&model).total, 256 * 16 + 32 * 16 + 2 * (12 * 16 * 16 + 13 * 16) + 2 * 16);
//!
//! let tokens = Tensor::randint(256, [2, 32], (Kind::Int64, Device::Cpu));
//! // What is to predict at each place is the token after it.
//! let (read, labels) = (tokens.narrow(1, 0, 31), tokens.narrow(1, 1, 31));
//! let loss = model.loss(&Input::new(&read), &labels)?.sum / (2 * 31);
//! runtime::autograd::backward(&[&loss])?;
//! # Ok::<(), models::Error>(())
//! ```

pub mod attention;
pub mod generation;
#[cfg(feature = "hub")]
pub mod hub;
pub mod hugging_face;
pub mod init;
pub mod llama;
pub mod module;
pub mod state_dict;
pub mod strict_json;
pub mod tensors_file;

mod decoder_layer;
mod dropout;
mod embedding;
mod error;
mod feed_forward;
mod gpt2;
mod gpt2_like;
mod linear;
mod loss_head;
mod norm;
mod position;
mod swiglu;

pub use attention::{AttentionPath, Documents};
pub use decoder_layer::TransformerDecoderLayer;
pub use embedding::Embedding;
pub use error::{Error, Result};
pub use feed_forward::{Activation, FeedForward};
pub use gpt2::{Gpt2, Gpt2Config};
pub use gpt2_like::{Gpt2Like, Gpt2LikeConfig};
pub use init::Init;
pub use linear::Linear;
pub use llama::{Llama, LlamaConfig};
pub use loss_head::ProjectionHead;
pub use norm::{LayerNorm, RmsNorm};
pub use position::{LearnedPositions, PositionalEncoding};
pub use swiglu::Swiglu;
