//! Decoders of language models, described: families, sizes, and the names and shapes of their tensors. Nothing here computes with tensors.
//!
//! [`DecoderConfig`] is a `config.json` of transformers, in both of its spellings. [`Family`] is a row of one table: where a block has
//! norms, which projections have biases, transformers' defaults. [`Sizes`] are those of any model, the GPT-2s and presets included.
//! `models` builds the modules of a configuration, `accounting` predicts their parameters, FLOPs and bytes, and `gguf` converts their
//! files.
//!
//! ```
//! use decoder::{DecoderConfig, Family, NormPlacement};
//!
//! let text = r#"{
//!     "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
//!     "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": true, "rope_theta": 1e6
//! }"#;
//! let config: DecoderConfig = serde_json::from_str(text)?;
//! assert_eq!((config.family, config.head_dim), (Family::Qwen2, 64));
//! assert_eq!(config.family.facts().norms, NormPlacement::Pre);
//! assert_eq!(config.parameter_count(), 494_032_768);
//! # Ok::<(), serde_json::Error>(())
//! ```
//!
//! # A new family
//!
//! 1. A row in `family.rs`, which also defines its variant. Readers, tensors, parameters, FLOPs and modules follow from the rows.
//! 2. If no row can describe it: a field of [`Facts`], and the code that is really new, in `models::llama` and `accounting::passes`.
//! 3. For llama.cpp a row in `gguf`'s `model/family.rs`, once llama.cpp computes the log-probabilities of transformers with it.
//! 4. A fixture of transformers' results, by `xtask/peers/model_families.py`, and its name in `models`' `fixtures_families.rs`.

mod config;
mod error;
mod family;
mod presets;
pub mod rope;
mod sent_heads;
mod shapes;
mod sizes;
pub mod strict_json;
mod tensors;

pub use config::{
    AttentionPath, ClampedSwiglu, DecoderConfig, Gemma4, LayerType, LinearAttention, LongRope, Mixture,
    RopeFields, RopeSpellings, text_config,
};
pub use error::{Error, Result};
pub use family::{AttentionBias, Facts, Family, NormPlacement, QueryKeyNorm, WindowRule, Windows};
pub use presets::{PRESETS, Preset};
pub use sent_heads::sent_key_heads;
pub use shapes::{EMBEDDING, LM_HEAD};
pub use sizes::{ExpertSizes, Gemma4Sizes, LinearSizes, Sizes, WindowedLayers};
pub use tensors::{
    BiasOption, CLAMPED_ROUTER, EXPERT_PROJECTIONS, LAYER_SCALAR, LINEAR_ATTENTION, PER_LAYER_EMBEDDING,
    PER_LAYER_GATE, PER_LAYER_MODEL_PROJECTION, PER_LAYER_NORM, PER_LAYER_PROJECTION, POST_PER_LAYER_NORM,
    Projection, ROUTER, SHARED_EXPERT, SHARED_EXPERT_GATE, SINKS, Width, expert_projection, is_kept_wide,
    part_not_read, parts_not_read,
};
