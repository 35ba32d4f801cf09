//! Known models by name.
//!
//! Sizes are those of the `config.json` on the Hugging Face hub (`openai-community/gpt2*`, `Qwen/Qwen2.5-*`,
//! `meta-llama/*`, `TinyLlama/TinyLlama-1.1B-*`). `cs336-*` are GPT-2's sizes in the course's architecture (SwiGLU,
//! RMSNorm, rotary positions, untied, `d_ff = 4 d`). `gpt2-like` has the width, heads and vocabulary of the training
//! assignment (BERT's uncased vocabulary, 1024 wide, 8 heads, one layer).

use crate::Error;
use crate::model::{Decoder, Family, Shape};

/// A row: family, vocabulary, context, hidden, layers, heads, key-value heads, head size, feed-forward, tied.
type Row = (Family, u64, u64, u64, u64, u64, u64, u64, u64, bool);

use Family::{Gpt2, Gpt2Like, Llama, Qwen2};

/// Name and sizes of each known model.
pub(crate) const ALL: [(&str, Row); 25] = [
    ("gpt2", (Gpt2, 50257, 1024, 768, 12, 12, 12, 64, 3072, true)),
    ("gpt2-medium", (Gpt2, 50257, 1024, 1024, 24, 16, 16, 64, 4096, true)),
    ("gpt2-large", (Gpt2, 50257, 1024, 1280, 36, 20, 20, 64, 5120, true)),
    ("gpt2-xl", (Gpt2, 50257, 1024, 1600, 48, 25, 25, 64, 6400, true)),
    ("gpt2-like", (Gpt2Like, 30522, 512, 1024, 1, 8, 8, 128, 2048, false)),
    ("cs336-small", (Llama, 50257, 1024, 768, 12, 12, 12, 64, 3072, false)),
    ("cs336-medium", (Llama, 50257, 1024, 1024, 24, 16, 16, 64, 4096, false)),
    ("cs336-large", (Llama, 50257, 1024, 1280, 36, 20, 20, 64, 5120, false)),
    ("cs336-xl", (Llama, 50257, 1024, 1600, 48, 25, 25, 64, 6400, false)),
    ("qwen2.5-0.5b", (Qwen2, 151_936, 32768, 896, 24, 14, 2, 64, 4864, true)),
    ("qwen2.5-1.5b", (Qwen2, 151_936, 131_072, 1536, 28, 12, 2, 128, 8960, true)),
    ("qwen2.5-3b", (Qwen2, 151_936, 32768, 2048, 36, 16, 2, 128, 11008, true)),
    ("qwen2.5-7b", (Qwen2, 152_064, 131_072, 3584, 28, 28, 4, 128, 18944, false)),
    ("qwen2.5-14b", (Qwen2, 152_064, 131_072, 5120, 48, 40, 8, 128, 13824, false)),
    ("qwen2.5-32b", (Qwen2, 152_064, 131_072, 5120, 64, 40, 8, 128, 27648, false)),
    ("qwen2.5-72b", (Qwen2, 152_064, 131_072, 8192, 80, 64, 8, 128, 29568, false)),
    ("llama-2-7b", (Llama, 32000, 4096, 4096, 32, 32, 32, 128, 11008, false)),
    ("llama-2-13b", (Llama, 32000, 4096, 5120, 40, 40, 40, 128, 13824, false)),
    ("llama-2-70b", (Llama, 32000, 4096, 8192, 80, 64, 8, 128, 28672, false)),
    ("llama-3-8b", (Llama, 128_256, 8192, 4096, 32, 32, 8, 128, 14336, false)),
    ("llama-3-70b", (Llama, 128_256, 8192, 8192, 80, 64, 8, 128, 28672, false)),
    ("llama-3.1-405b", (Llama, 128_256, 131_072, 16384, 126, 128, 8, 128, 53248, false)),
    ("llama-3.2-1b", (Llama, 128_256, 131_072, 2048, 16, 32, 8, 64, 8192, true)),
    ("llama-3.2-3b", (Llama, 128_256, 131_072, 3072, 28, 24, 8, 128, 8192, true)),
    ("tinyllama-1.1b", (Llama, 32000, 2048, 2048, 22, 32, 4, 64, 5632, false)),
];

/// Returns the names of all known models.
pub fn names() -> impl Iterator<Item = &'static str> {
    ALL.iter().map(|(name, _)| *name)
}

/// Returns the model of that name, whatever its case.
///
/// ```
/// let model = accounting::presets::find("gpt2")?;
/// assert_eq!(model.parameters()?, 124_439_808);
/// assert!(accounting::presets::find("gpt5").unwrap_err().to_string().starts_with("unknown model `gpt5`; known are: gpt2, "));
/// # Ok::<(), accounting::Error>(())
/// ```
pub fn find(name: &str) -> Result<Decoder, Error> {
    let (_, row) = ALL
        .iter()
        .find(|(known, _)| known.eq_ignore_ascii_case(name))
        .ok_or_else(|| Error::unknown("model", name, names()))?;
    let &(family, vocabulary, context, hidden, layers, heads, kv_heads, head_dim, feed_forward, tied) = row;
    Decoder::new(Shape {
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
    })
}
