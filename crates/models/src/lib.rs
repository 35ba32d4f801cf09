//! Transformer decoders with named tensors and replaceable parts.
//!
//! | module | contents |
//! |---|---|
//! | [`module`] | the traits `Module`, `Projection`, `Attention`, `Mlp`, `Block`, `LossHead` and `LanguageModel`; visiting and replacing parts |
//! | [`Linear`], [`Embedding`], [`LayerNorm`], [`RmsNorm`], [`PositionalEncoding`], [`LearnedPositionalEmbedding`], [`FeedForward`], [`Swiglu`] | layers |
//! | [`attention`] | causal attention, also over packed documents |
//! | [`TransformerDecoderLayer`] | PyTorch's post-norm layer, which takes its own input as `memory` |
//! | [`Gpt2Like`] | the model of the training assignment |
//! | [`Gpt2`] | GPT-2 |
//! | [`llama`] | one decoder for Llama, Qwen2 to 3.5, gpt-oss, Mistral, SmolLM3, Granite, OLMo 2, Gemma 2 to 4, Phi-3 |
//! | [`generation`], [`key_value_cache`] | batched text generation, sampling, the KV cache |
//! | [`hugging_face`] | loading and saving Hugging Face's model folders |
//! | `stored_blocks` (feature `gguf`) | models whose matrices stay in the blocks of a GGUF file |
//! | `hub` (feature `hub`) | downloads from the Hugging Face hub, through its cache |
//! | [`state_dict`], [`tensors_file`] | a module's state; safetensors files |
//! | [`init`] | weight initialisation |
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
//! // The label of each position is the next token.
//! let (inputs, labels) = (tokens.narrow(1, 0, 31), tokens.narrow(1, 1, 31));
//! let loss = model.loss(&Input::new(&inputs), &labels)?.mean(2 * 31)?;
//! runtime::autograd::backward(&[&loss])?;
//! # Ok::<(), models::Error>(())
//! ```

pub mod attention;
pub mod distillation;
pub mod generation;
#[cfg(feature = "hub")]
pub mod hub;
pub mod hugging_face;
pub mod init;
pub mod key_value_cache;
pub mod llama;
pub mod module;
pub mod sequence_parallel;
pub mod state_dict;
#[cfg(feature = "gguf")]
pub mod stored_blocks;
pub mod tensors_file;
pub mod token_rows;

mod activation;
mod decoder_layer;
mod dropout;
mod embedding;
pub mod error;
mod feed_forward;
mod gpt2;
mod gpt2_like;
mod linear;
mod loss_head;
mod mixture;
mod norm;
mod position;
mod swiglu;

pub use activation::Activation;
pub use attention::{AttentionPath, Documents};
pub use decoder::strict_json;
pub use decoder_layer::TransformerDecoderLayer;
pub use embedding::{Embedding, EmbeddingChange, add_noise, look_up};
pub use error::{Error, Result};
pub use feed_forward::FeedForward;
pub use gpt2::{Gpt2, Gpt2Config};
pub use gpt2_like::{Gpt2Like, Gpt2LikeConfig};
pub use init::Init;
pub use linear::Linear;
pub use llama::{DecoderConfig, Llama};
pub use loss_head::ProjectionHead;
pub use mixture::{
    ExpertChange, ExpertLoads, ExpertSlot, ExpertSource, ExpertTensor, ExpertTerm, RouterBalance, SparseMlp,
    delta_of_expert,
};
pub use norm::{LayerNorm, NormKernel, RmsNorm};
pub use position::{LearnedPositionalEmbedding, PositionalEncoding};
pub use sequence_parallel::SequenceShard;
pub use swiglu::{Geglu, JointSwiglu, Swiglu};
pub use token_rows::TokenRows;
