//! Known models by name.
//!
//! Sizes are those of the `config.json` on the Hugging Face hub (`openai-community/gpt2*`, `Qwen/Qwen2.5-*`,
//! `meta-llama/*`, `TinyLlama/TinyLlama-1.1B-*`). `cs336-*` are GPT-2's sizes in the course's architecture (SwiGLU,
//! RMSNorm, rotary positions, untied, `d_ff = 4 d`). `gpt2-like` has the width, heads and vocabulary of the training
//! assignment (BERT's uncased vocabulary, 1024 wide, 8 heads, one layer).

use crate::family::Family;
use crate::sizes::Sizes;
use Family::{Gpt2, Gpt2Like, Llama, Qwen2};

/// A known model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preset {
    /// Its name.
    pub name: &'static str,
    /// Its sizes.
    pub sizes: Sizes,
}

/// A row of the table: vocabulary, context, hidden, layers, heads, key-value heads, head size, feed-forward; tied.
const fn preset(name: &'static str, family: Family, sizes: [u64; 8], tied: bool) -> Preset {
    let [vocabulary, context, hidden, layers, heads, kv_heads, head_dim, feed_forward] = sizes;
    let sizes = Sizes {
        family,
        vocabulary,
        context,
        embedding: hidden,
        hidden,
        layers,
        heads,
        kv_heads,
        head_dim,
        feed_forward,
        tied,
        attention_bias: false,
        mlp_bias: false,
        windows: None,
    };
    Preset { name, sizes }
}

/// All known models.
pub static PRESETS: [Preset; 25] = [
    preset("gpt2", Gpt2, [50257, 1024, 768, 12, 12, 12, 64, 3072], true),
    preset("gpt2-medium", Gpt2, [50257, 1024, 1024, 24, 16, 16, 64, 4096], true),
    preset("gpt2-large", Gpt2, [50257, 1024, 1280, 36, 20, 20, 64, 5120], true),
    preset("gpt2-xl", Gpt2, [50257, 1024, 1600, 48, 25, 25, 64, 6400], true),
    preset("gpt2-like", Gpt2Like, [30522, 512, 1024, 1, 8, 8, 128, 2048], false),
    preset("cs336-small", Llama, [50257, 1024, 768, 12, 12, 12, 64, 3072], false),
    preset("cs336-medium", Llama, [50257, 1024, 1024, 24, 16, 16, 64, 4096], false),
    preset("cs336-large", Llama, [50257, 1024, 1280, 36, 20, 20, 64, 5120], false),
    preset("cs336-xl", Llama, [50257, 1024, 1600, 48, 25, 25, 64, 6400], false),
    preset("qwen2.5-0.5b", Qwen2, [151_936, 32768, 896, 24, 14, 2, 64, 4864], true),
    preset("qwen2.5-1.5b", Qwen2, [151_936, 131_072, 1536, 28, 12, 2, 128, 8960], true),
    preset("qwen2.5-3b", Qwen2, [151_936, 32768, 2048, 36, 16, 2, 128, 11008], true),
    preset("qwen2.5-7b", Qwen2, [152_064, 131_072, 3584, 28, 28, 4, 128, 18944], false),
    preset("qwen2.5-14b", Qwen2, [152_064, 131_072, 5120, 48, 40, 8, 128, 13824], false),
    preset("qwen2.5-32b", Qwen2, [152_064, 131_072, 5120, 64, 40, 8, 128, 27648], false),
    preset("qwen2.5-72b", Qwen2, [152_064, 131_072, 8192, 80, 64, 8, 128, 29568], false),
    preset("llama-2-7b", Llama, [32000, 4096, 4096, 32, 32, 32, 128, 11008], false),
    preset("llama-2-13b", Llama, [32000, 4096, 5120, 40, 40, 40, 128, 13824], false),
    preset("llama-2-70b", Llama, [32000, 4096, 8192, 80, 64, 8, 128, 28672], false),
    preset("llama-3-8b", Llama, [128_256, 8192, 4096, 32, 32, 8, 128, 14336], false),
    preset("llama-3-70b", Llama, [128_256, 8192, 8192, 80, 64, 8, 128, 28672], false),
    preset("llama-3.1-405b", Llama, [128_256, 131_072, 16384, 126, 128, 8, 128, 53248], false),
    preset("llama-3.2-1b", Llama, [128_256, 131_072, 2048, 16, 32, 8, 64, 8192], true),
    preset("llama-3.2-3b", Llama, [128_256, 131_072, 3072, 28, 24, 8, 128, 8192], true),
    preset("tinyllama-1.1b", Llama, [32000, 2048, 2048, 22, 32, 4, 64, 5632], false),
];
