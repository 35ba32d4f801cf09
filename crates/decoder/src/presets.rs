//! Known models by name.
//!
//! Sizes are those of the `config.json` on the Hugging Face hub (`openai-community/gpt2*`, `Qwen/Qwen2.5-*`, `meta-llama/*`,
//! `TinyLlama/TinyLlama-1.1B-*`, `HuggingFaceTB/SmolLM*`, `Qwen/Qwen3-*`, `mistralai/Mistral-7B-v0.3`, `ibm-granite/granite-3.3-2b-base`,
//! `allenai/OLMo-2-1124-7B`, `google/gemma-*`, `microsoft/Phi-*`). `cs336-*` are GPT-2's sizes in the course's architecture (SwiGLU,
//! RMSNorm, rotary positions, untied, `d_ff = 4 d`). `gpt2-like` has the width, heads and vocabulary of the training assignment (BERT's
//! uncased vocabulary, 1024 wide, 8 heads, one layer).

use crate::family::Family;
use crate::sizes::{Sizes, WindowedLayers};
use Family::{Gemma2, Gemma3, Gpt2, Gpt2Like, Granite, Llama, Mistral, Olmo2, Phi3, Qwen2, Qwen3, SmolLm3};

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
        experts: None,
        linear: None,
        windows: None,
        gemma4: None,
    };
    Preset { name, sizes }
}

/// The same with so many layers that attend to a window of tokens.
const fn windowed(preset: Preset, layers: u64, tokens: u64) -> Preset {
    let windows = Some(WindowedLayers { layers, tokens });
    Preset { sizes: Sizes { windows, ..preset.sizes }, ..preset }
}

/// All known models.
pub static PRESETS: [Preset; 39] = [
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
    preset("smollm2-135m", Llama, [49152, 8192, 576, 30, 9, 3, 64, 1536], true),
    preset("smollm2-1.7b", Llama, [49152, 8192, 2048, 24, 32, 32, 64, 8192], true),
    preset("smollm3-3b", SmolLm3, [128_256, 65536, 2048, 36, 16, 4, 128, 11008], true),
    preset("qwen3-0.6b", Qwen3, [151_936, 40960, 1024, 28, 16, 8, 128, 3072], true),
    preset("qwen3-1.7b", Qwen3, [151_936, 40960, 2048, 28, 16, 8, 128, 6144], true),
    preset("qwen3-4b", Qwen3, [151_936, 40960, 2560, 36, 32, 8, 128, 9728], true),
    preset("qwen3-8b", Qwen3, [151_936, 40960, 4096, 36, 32, 8, 128, 12288], false),
    preset("mistral-7b", Mistral, [32768, 32768, 4096, 32, 32, 8, 128, 14336], false),
    preset("granite-3.3-2b", Granite, [49159, 131_072, 2048, 40, 32, 8, 64, 8192], true),
    preset("olmo-2-7b", Olmo2, [100_352, 4096, 4096, 32, 32, 32, 128, 11008], false),
    windowed(preset("gemma-2-2b", Gemma2, [256_000, 8192, 2304, 26, 8, 4, 256, 9216], true), 13, 4096),
    windowed(preset("gemma-3-1b", Gemma3, [262_144, 32768, 1152, 26, 4, 1, 256, 6912], true), 22, 512),
    windowed(preset("phi-3-mini", Phi3, [32064, 4096, 3072, 32, 32, 32, 96, 8192], false), 32, 2047),
    preset("phi-4-mini", Phi3, [200_064, 131_072, 3072, 32, 24, 8, 128, 8192], true),
];
