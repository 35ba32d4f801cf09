//! The types of a file's matrices: one for all, or llama.cpp's mixtures, which give more bits to the matrices that need them.
//!
//! Source: llama.cpp's `llama_tensor_get_type` (`src/llama-quant.cpp`, 2026), without an importance matrix. Routers and biases of
//! experts are stored as vectors are.

use std::fmt;

use crate::tensor_type::TensorType;
use crate::writer::TensorInfo;

/// How a file's matrices are stored (`general.file_type`). Vectors are always `f32`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FileType {
    /// 32-bit floats.
    F32,
    /// 16-bit floats of IEEE 754.
    F16,
    /// 16-bit brain floats.
    BF16,
    /// All matrices in `q8_0`: 8.5 bits a value.
    Q8_0,
    /// `q6_K`: 6.6 bits.
    Q6K,
    /// `q5_K`, and `q6_K` for the head and half of the layers' values and down projections: 5.7 bits.
    Q5KM,
    /// `q4_K`, and `q6_K` for the head and half of the layers' values and down projections: 4.9 bits.
    Q4KM,
    /// `q4_0`, and `q6_K` for the head: 4.6 bits.
    Q4_0,
    /// `mxfp4` for the experts of a mixture, 4.25 bits, and `q8_0` for all else.
    Mxfp4Moe,
}

/// The decoder that the types are chosen for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Decoder {
    pub(crate) layers: u64,
    /// Experts of a layer; 1 for a model without.
    pub(crate) experts: u64,
    /// Whether eight heads of 80 layers share a value matrix, as in models of 70 to 72 billion parameters.
    pub(crate) is_70b: bool,
}

impl FileType {
    /// All types.
    pub const ALL: [Self; 9] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q8_0,
        Self::Q6K,
        Self::Q5KM,
        Self::Q4KM,
        Self::Q4_0,
        Self::Mxfp4Moe,
    ];

    /// The number in llama.cpp, the name, and the type of most matrices.
    const fn facts(self) -> (u32, &'static str, TensorType) {
        match self {
            Self::F32 => (0, "f32", TensorType::F32),
            Self::F16 => (1, "f16", TensorType::F16),
            Self::BF16 => (32, "bf16", TensorType::BF16),
            Self::Q8_0 => (7, "q8_0", TensorType::Q8_0),
            Self::Q6K => (18, "q6_k", TensorType::Q6K),
            Self::Q5KM => (17, "q5_k_m", TensorType::Q5K),
            Self::Q4KM => (15, "q4_k_m", TensorType::Q4K),
            Self::Q4_0 => (2, "q4_0", TensorType::Q4_0),
            Self::Mxfp4Moe => (38, "mxfp4_moe", TensorType::Q8_0),
        }
    }

    /// Returns the number in llama.cpp.
    pub const fn number(self) -> u32 {
        self.facts().0
    }

    /// Returns llama.cpp's name, in lower case.
    pub const fn name(self) -> &'static str {
        self.facts().1
    }

    /// Returns the type of most matrices.
    pub const fn base(self) -> TensorType {
        self.facts().2
    }

    /// Sets the types of tensors in a file's order, and returns the matrices whose rows are not whole blocks of the type that they
    /// should have, with the length of these blocks.
    pub(crate) fn choose<'a>(
        self,
        decoder: Decoder,
        tensors: impl Iterator<Item = &'a mut TensorInfo>,
    ) -> Vec<(&'a TensorInfo, usize)> {
        let is_vector = |tensor: &&mut TensorInfo| {
            tensor.shape.len() < 2 || FLOATS.iter().any(|end| tensor.name.ends_with(end))
        };
        let (vectors, matrices): (Vec<_>, Vec<_>) = tensors.partition(is_vector);
        for vector in vectors {
            vector.kind = TensorType::F32;
        }
        let values = matrices.iter().filter(|tensor| is_value(&tensor.name)).count();
        let has_head = matrices.iter().any(|tensor| tensor.name == HEAD);
        let (mut value, mut down) = (0, 0);
        let mut shorter = Vec::new();
        for tensor in matrices {
            let columns = tensor.shape.last().copied().unwrap_or(0);
            let is_table = [EMBEDDING, PER_LAYER_EMBEDDING].contains(&&*tensor.name);
            let wanted = if !self.base().is_quantized() {
                self.base()
            } else if tensor.name == PER_LAYER_PROJECTION {
                TensorType::BF16
            } else if tensor.name == HEAD || (!has_head && is_table) {
                self.head(columns)
            } else if self == Self::Mxfp4Moe {
                if tensor.shape.len() == 3 { TensorType::MXFP4 } else { TensorType::Q8_0 }
            } else if is_value(&tensor.name) {
                value += 1;
                self.value(value - 1, values as u64, decoder)
            } else if decoder.experts == EIGHT && tensor.name.ends_with("attn_k.weight") {
                TensorType::Q8_0
            } else if decoder.experts == EIGHT
                && self == Self::Q4KM
                && tensor.name.ends_with("attn_output.weight")
            {
                TensorType::Q5K
            } else if tensor.name.contains("ffn_down") {
                down += 1;
                let layer = if decoder.experts > 1 { layer(&tensor.name) } else { down - 1 };
                if self.is_mixture() && has_more_bits(layer, decoder.layers) {
                    TensorType::Q6K
                } else {
                    self.base()
                }
            } else {
                self.base()
            };
            tensor.kind = fitting(wanted, columns);
            if tensor.kind != wanted {
                shorter.push((&*tensor, wanted.block_values()));
            }
        }
        shorter
    }

    fn is_mixture(self) -> bool {
        matches!(self, Self::Q4KM | Self::Q5KM)
    }

    fn head(self, columns: u64) -> TensorType {
        match self.base() {
            TensorType::Q8_0 => TensorType::Q8_0,
            base if base.row_bytes(columns).is_none() => TensorType::Q8_0,
            _ => TensorType::Q6K,
        }
    }

    fn value(self, index: u64, count: u64, decoder: Decoder) -> TensorType {
        match self.base() {
            _ if decoder.experts == EIGHT => TensorType::Q8_0,
            _ if self.is_mixture() && has_more_bits(index, count) => TensorType::Q6K,
            TensorType::Q4K if decoder.is_70b => TensorType::Q5K,
            base => base,
        }
    }
}

/// A convolution, whose rows are as short as its window; routers; biases of experts.
const FLOATS: [&str; 3] = [".ssm_conv1d.weight", ".ffn_gate_inp.weight", "_exps.bias"];
const HEAD: &str = "output.weight";
const EMBEDDING: &str = "token_embd.weight";
/// The second embedding of a Gemma 4.
const PER_LAYER_EMBEDDING: &str = "per_layer_token_embd.weight";
/// The projection of the first to its width, which llama.cpp does not quantise.
const PER_LAYER_PROJECTION: &str = "per_layer_model_proj.weight";

/// The number of experts, Mixtral's, whose models have finer types in attention.
const EIGHT: u64 = 8;

/// The layer of a tensor, by its name.
fn layer(name: &str) -> u64 {
    name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse().ok()).unwrap_or(0)
}

fn is_value(name: &str) -> bool {
    ["attn_v.weight", "attn_qkv.weight", "attn_kv_b.weight"].iter().any(|end| name.ends_with(end))
}

/// The first and the last eighth of the layers, and every third between: about half.
fn has_more_bits(index: u64, count: u64) -> bool {
    index < count / 8 || index >= 7 * count / 8 || (index - count / 8) % 3 == 2
}

/// The type that llama.cpp takes where rows are not whole blocks.
fn fitting(wanted: TensorType, columns: u64) -> TensorType {
    let smaller = match wanted {
        _ if wanted.row_bytes(columns).is_some() => return wanted,
        TensorType::Q4K => TensorType::Q5_0,
        TensorType::Q5K => TensorType::Q5_1,
        TensorType::Q6K => TensorType::Q8_0,
        _ => TensorType::F16,
    };
    if smaller.row_bytes(columns).is_some() { smaller } else { TensorType::F16 }
}

impl fmt::Display for FileType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tensors of a decoder like Qwen2.5-0.5B: rows of 896, but of 4864 in the down projections.
    fn kinds(kind: FileType, layers: u64, has_head: bool, is_70b: bool) -> Vec<(String, TensorType)> {
        let tensor = |name: String, columns: u64| TensorInfo {
            name,
            shape: vec![128, columns],
            kind: TensorType::F32,
        };
        let mut tensors = vec![tensor(EMBEDDING.to_owned(), 896)];
        for layer in 0..layers {
            tensors.extend(
                [("attn_q", 896), ("attn_v", 896), ("ffn_down", 4864), ("ffn_up", 4096)]
                    .map(|(name, columns)| tensor(format!("blk.{layer}.{name}.weight"), columns)),
            );
        }
        tensors.push(TensorInfo { shape: vec![896], ..tensor("output_norm.weight".to_owned(), 0) });
        if has_head {
            tensors.push(tensor(HEAD.to_owned(), 4096));
        }
        kind.choose(Decoder { layers, experts: 1, is_70b }, tensors.iter_mut());
        tensors.into_iter().map(|tensor| (tensor.name, tensor.kind)).collect()
    }

    fn layers(kinds: &[(String, TensorType)], part: &str) -> String {
        let matching = kinds.iter().filter(|(name, _)| name.contains(part));
        matching.map(|(_, kind)| kind.name()).collect::<Vec<_>>().join(" ")
    }

    /// As `llama_model_quantize` chooses for Qwen2.5-Coder-0.5B-Instruct.
    #[test]
    fn half_of_the_layers_have_more_bits() {
        let found = kinds(FileType::Q4KM, 24, true, false);
        let more: Vec<usize> = vec![0, 1, 2, 5, 8, 11, 14, 17, 20, 21, 22, 23];
        for layer in 0..24 {
            let has_more = more.contains(&layer);
            let kind = |name: &str| {
                found.iter().find(|(other, _)| *other == format!("blk.{layer}.{name}.weight")).unwrap().1
            };
            assert_eq!(kind("attn_v"), if has_more { TensorType::Q8_0 } else { TensorType::Q5_0 }, "{layer}");
            assert_eq!(kind("ffn_down"), if has_more { TensorType::Q6K } else { TensorType::Q4K }, "{layer}");
            assert_eq!((kind("attn_q"), kind("ffn_up")), (TensorType::Q5_0, TensorType::Q4K));
        }
        assert_eq!(layers(&found, "token_embd"), "q5_0");
        assert_eq!(layers(&found, "output"), "f32 q6_K");
    }

    #[test]
    fn the_embedding_is_the_head_where_there_is_none() {
        for (kind, embedding) in [
            (FileType::F16, "f16"),
            (FileType::Q8_0, "q8_0"),
            (FileType::Q4KM, "q8_0"),
            (FileType::Q4_0, "q8_0"),
        ] {
            assert_eq!(layers(&kinds(kind, 2, false, false), "token_embd"), embedding, "{kind}");
        }
        assert_eq!(layers(&kinds(FileType::Q4_0, 2, true, false), "token_embd"), "q4_0");
        assert_eq!(layers(&kinds(FileType::Q5KM, 2, true, false), "token_embd"), "q5_1");
    }

    #[test]
    fn a_model_of_70_billion_parameters_has_finer_values() {
        let tensor = |layer: u64| TensorInfo {
            name: format!("blk.{layer}.attn_v.weight"),
            shape: vec![1024, 8192],
            kind: TensorType::F32,
        };
        let mut values: Vec<_> = (0..80).map(tensor).collect();
        FileType::Q4KM.choose(Decoder { layers: 80, experts: 1, is_70b: true }, values.iter_mut());
        assert_eq!(
            (values[9].kind, values[10].kind, values[12].kind),
            (TensorType::Q6K, TensorType::Q5K, TensorType::Q6K)
        );
    }
}
