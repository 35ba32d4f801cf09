//! Frozen weights in few bits, as `kernels::quantized` stores and multiplies them: in NF4 (QLoRA, Dettmers et al., arXiv:2305.14314), or in
//! the blocks of a GGUF file, whose types differ from matrix to matrix.
//!
//! In NF4 a matrix of n weights has ⌈n/2⌉ bytes of codes, and with nested scales a byte for each block of 64, 4 for each 256 blocks, and 4:
//! 4.13 bits per weight. A product has one dequantized tile at a time.
//!
//! ```
//! use accounting::memory::quantized::nf4_bytes;
//!
//! let bits = 8.0 * nf4_bytes(4864, 896)? as f64 / (4864.0 * 896.0);
//! assert!((4.12..4.14).contains(&bits), "{bits}");
//! # Ok::<(), accounting::Error>(())
//! ```

use std::collections::BTreeMap;

use decoder::ROUTER;

use crate::exact::{product, sum};
use crate::memory::recipe::Recipe;
use crate::model::{AttentionKind, Decoder};
use crate::parameters::ParameterTensor;
use crate::{Error, exact, experts};

/// Weights of a block with one scale, and blocks with one factor.
const BLOCK: u64 = 64;
const NESTED: u64 = 256;
/// Alignment of the codes.
const ALIGNMENT: u64 = 64;
/// Largest number of bytes of a tile on a CPU, as `kernels::quantized::tile_bytes` has it.
pub const CPU_TILE: u64 = 8 << 20;
/// The fewest rows of a tile.
const LEAST: u64 = 128;

/// Bytes of a weight of a large matrix in NF4.
pub const NF4_WEIGHT_BYTES: f64 = 0.5 + 1.0 / 64.0 + 4.0 / (64.0 * 256.0);

/// Returns the bytes of a matrix `[out, in]` in NF4 with nested scales.
pub fn nf4_bytes(out: u64, inner: u64) -> Result<u64, Error> {
    const WHAT: &str = "bytes of a matrix in NF4";
    exact::positive("the rows of a matrix", out)?;
    let elements = product(WHAT, &[out, inner])?;
    let blocks = elements.div_ceil(BLOCK);
    let scales = sum(WHAT, [blocks, 4 * blocks.div_ceil(NESTED), 4])?.next_multiple_of(ALIGNMENT);
    Ok(sum(WHAT, [scales, elements.div_ceil(2)])?.next_multiple_of(out))
}

/// Bytes of the tile of a product that gives `length` rows or columns, each from `width` weights of this many bytes; `most` is the largest
/// number of them that a tile has.
pub(crate) fn tile_bytes(most: u64, length: u64, width: u64, bytes: u64) -> Result<u64, Error> {
    let width = width.max(1);
    let rows = (most / bytes / width / BLOCK * BLOCK).max(LEAST).min(length);
    product("bytes of a tile", &[rows, width, bytes])
}

/// How the matrices of a model are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Matrices {
    /// In the dtype of the parameters.
    #[default]
    Dense,
    /// Those of the layers in NF4, the others in the dtype of the parameters.
    Nf4,
    /// All in the blocks of a GGUF file.
    Blocks(StoredBytes),
}

/// The most layers that are each counted with their own bytes; those of a deeper model are counted with their mean.
const MOST_LAYERS: usize = 128;
/// The share of the largest layer.
const LARGEST: u8 = u8::MAX;

/// The bytes of the matrices in a GGUF file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredBytes {
    /// Of the layer that has most.
    pub largest_layer: u64,
    /// Of all layers.
    pub layers: u64,
    /// Of the embedding, and of an output matrix that is not tied to it.
    pub outer: u64,
    /// Of each layer, as a share of the largest in 255ths, rounded up.
    shares: [u8; MOST_LAYERS],
}

impl Default for StoredBytes {
    /// Returns a file without matrices.
    fn default() -> Self {
        Self { largest_layer: 0, layers: 0, outer: 0, shares: [0; MOST_LAYERS] }
    }
}

impl StoredBytes {
    /// Adds up matrices by the name of their tensor in the model: `layers.0.mlp.up_proj.weight`, `embed_tokens.weight`.
    ///
    /// # Errors
    /// More bytes than 64 bits count.
    pub fn new<'a>(matrices: impl IntoIterator<Item = (&'a str, u64)>) -> Result<Self, Error> {
        const WHAT: &str = "bytes of the matrices of a file";
        let mut layers: BTreeMap<&str, u64> = BTreeMap::new();
        let mut outer = 0;
        for (name, bytes) in matrices {
            let layer = name.strip_prefix("layers.").and_then(|rest| rest.split('.').next());
            let place = layer.map_or(&mut outer, |layer| layers.entry(layer).or_default());
            *place = sum(WHAT, [*place, bytes])?;
        }
        let largest_layer = layers.values().copied().max().unwrap_or(0);
        let mut shares = [LARGEST; MOST_LAYERS];
        for (layer, bytes) in &layers {
            let share = layer.parse().ok().and_then(|layer: usize| shares.get_mut(layer));
            let of_largest = u128::from(*bytes) * u128::from(LARGEST);
            if let Some(share) = share.filter(|_| largest_layer > 0) {
                *share = u8::try_from(of_largest.div_ceil(largest_layer.into())).unwrap_or(LARGEST);
            }
        }
        Ok(Self { largest_layer, layers: sum(WHAT, layers.into_values())?, outer, shares })
    }

    /// Returns the bytes by which one of `layers` layers is smaller than the largest: by 1/255 of the largest too few at most.
    fn smaller_by(&self, layer: usize, layers: u64) -> u64 {
        match self.shares.get(layer) {
            Some(share) if layers <= MOST_LAYERS as u64 => {
                let bytes =
                    u128::from(self.largest_layer) * u128::from(LARGEST - share) / u128::from(LARGEST);
                u64::try_from(bytes).unwrap_or(self.largest_layer)
            }
            // The first is the largest.
            _ if layer == 0 => 0,
            _ => self.smaller_layers(layers) / (layers - 1).max(1),
        }
    }

    /// Returns the bytes by which the other layers are smaller than the largest one together.
    fn smaller_layers(&self, layers: u64) -> u64 {
        self.largest_layer.saturating_mul(layers).saturating_sub(self.layers)
    }
}

/// Bytes of each tensor of a block of a frozen model, without those of routed experts if these are streamed; for blocks of a file, whose
/// layers differ, the matrices of the largest layer are one.
pub(crate) fn block_bytes(
    model: &Decoder,
    recipe: &Recipe,
    kind: AttentionKind,
    without_experts: bool,
) -> Result<Vec<u64>, Error> {
    let tensors = model.block_tensors_of(kind)?;
    let counted =
        tensors.iter().filter(|tensor| !(without_experts && tensor.name.starts_with(experts::PREFIX)));
    let mut all: Vec<u64> = counted.map(|tensor| tensor_bytes(tensor, recipe)).collect::<Result<_, _>>()?;
    if let Matrices::Blocks(stored) = recipe.matrices {
        all.push(stored.largest_layer);
    }
    Ok(all)
}

fn tensor_bytes(tensor: &ParameterTensor, recipe: &Recipe) -> Result<u64, Error> {
    match (tensor.shape.as_slice(), recipe.matrices) {
        ([_, _], Matrices::Blocks(_)) => Ok(0),
        // The router stays dense.
        (&[out, inner], Matrices::Nf4) if tensor.name.strip_prefix(ROUTER) != Some(".weight") => {
            nf4_bytes(out, inner)
        }
        _ => recipe.parameters.bytes(tensor.elements()?),
    }
}

/// Bytes of each matrix of a routed expert.
pub(crate) fn expert_bytes(model: &Decoder, recipe: &Recipe) -> Result<Vec<u64>, Error> {
    if matches!(recipe.matrices, Matrices::Blocks(_)) {
        return Err(Error::Shape {
            what: "experts in the blocks of a GGUF file are not streamed".into(),
            remedy: "take bfloat16 or nf4".into(),
        });
    }
    let first = format!("{}0.", experts::PREFIX);
    let tensors = model.block_tensors_of(model.attention_of(0))?;
    tensors.iter().filter(|one| one.name.starts_with(&first)).map(|one| tensor_bytes(one, recipe)).collect()
}

/// Bytes by which a layer is smaller than what [`block_bytes`] counts.
pub(crate) fn smaller_by(model: &Decoder, recipe: &Recipe, layer: usize) -> u64 {
    match recipe.matrices {
        Matrices::Blocks(stored) => stored.smaller_by(layer, model.layers),
        _ => 0,
    }
}

/// Returns the bytes of the parameters outside of the layers.
pub(crate) fn outer_bytes(model: &Decoder, recipe: &Recipe) -> Result<u64, Error> {
    const WHAT: &str = "bytes outside of the layers";
    let outer = model.parameters()? - model.all_block_parameters()?;
    let Matrices::Blocks(stored) = recipe.matrices else { return recipe.parameters.bytes(outer) };
    let matrix = product(WHAT, &[model.vocabulary, model.hidden])?;
    let matrices = product(WHAT, &[matrix, if model.tied { 1 } else { 2 }])?;
    sum(WHAT, [stored.outer, recipe.parameters.bytes(outer.saturating_sub(matrices))?])
}

/// Returns the bytes of the output matrix.
pub(crate) fn output_bytes(model: &Decoder, recipe: &Recipe) -> Result<u64, Error> {
    match recipe.matrices {
        Matrices::Blocks(stored) => Ok(if model.tied { stored.outer } else { stored.outer / 2 }),
        _ => recipe.parameters.bytes(product("parameters of the output", &[model.vocabulary, model.hidden])?),
    }
}

/// Returns the bytes of all parameters of a frozen model.
///
/// # Errors
/// More bytes than 64 bits count.
pub fn model_bytes(model: &Decoder, recipe: &Recipe) -> Result<u64, Error> {
    const WHAT: &str = "bytes of the parameters";
    let mut blocks = 0;
    for (kind, layers) in model.attention_kinds() {
        let of_block = sum(WHAT, block_bytes(model, recipe, kind, false)?)?;
        blocks = sum(WHAT, [blocks, product(WHAT, &[layers, of_block])?])?;
    }
    let smaller = match recipe.matrices {
        Matrices::Blocks(stored) => stored.smaller_layers(model.layers),
        _ => 0,
    };
    sum(WHAT, [outer_bytes(model, recipe)?, blocks - smaller])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets;

    /// The file of Qwen2.5-Coder-0.5B in Q4_K_M: 491,400,064 bytes, with the matrix of the embedding twice.
    #[test]
    fn blocks_of_a_file_are_counted_by_layer() {
        let model = presets::find("qwen2.5-0.5b").unwrap();
        let layer = |number: u64| format!("layers.{number}.mlp.down_proj.weight");
        let names: Vec<(String, u64)> = (0..24).map(|number| (layer(number), 1000 + number % 2)).collect();
        let matrices =
            names.iter().map(|(name, bytes)| (&**name, *bytes)).chain([("embed_tokens.weight", 77)]);
        let stored = StoredBytes::new(matrices).unwrap();
        assert_eq!((stored.largest_layer, stored.layers, stored.outer), (1001, 24 * 1000 + 12, 77));
        let recipe = Recipe::blocks(stored);
        // Norms and biases in bf16.
        let small = 24 * (2 * 896 + 896 + 2 * 128) + 896;
        assert_eq!(model_bytes(&model, &recipe).unwrap(), 24 * 1000 + 12 + 77 + 2 * small);
        assert_eq!(output_bytes(&model, &recipe).unwrap(), 77);
        assert!(recipe.check_trained().is_err());
    }

    /// A resident layer, or one in a slot, has its own bytes, not the mean of all.
    #[test]
    fn each_layer_of_a_file_is_counted_by_itself() {
        let names: Vec<String> = (0..30).map(|layer| format!("layers.{layer}.mlp.up_proj.weight")).collect();
        let bytes = |layer: usize| 1_000_000 - 37_003 * (layer as u64 % 7);
        let stored =
            StoredBytes::new(names.iter().enumerate().map(|(at, name)| (&**name, bytes(at)))).unwrap();
        for layer in 0..30 {
            let counted = stored.largest_layer - stored.smaller_by(layer, 30);
            let excess = counted.checked_sub(bytes(layer)).expect("no byte is left out");
            assert!(excess <= 1_000_000 / 255 + 1, "{layer}: {excess}");
        }
        assert_eq!(stored.smaller_by(0, 30), 0);
        // Those of a deeper model share what they have, and the first is as large as the largest.
        let names: Vec<String> = (0..200).map(|layer| format!("layers.{layer}.mlp.up_proj.weight")).collect();
        let stored =
            StoredBytes::new(names.iter().enumerate().map(|(at, name)| (&**name, bytes(at)))).unwrap();
        let counted: u64 = (0..200).map(|layer| stored.largest_layer - stored.smaller_by(layer, 200)).sum();
        assert_eq!(stored.smaller_by(0, 200), 0);
        assert!((0..200).contains(&(counted - stored.layers)), "{counted} {}", stored.layers);
        assert_eq!(StoredBytes::default().smaller_by(3, 30), 0);
    }

    #[test]
    fn published_bytes_of_qwen() {
        let mib = |model: &str, recipe| {
            model_bytes(&presets::find(model).unwrap(), recipe).unwrap() as f64 / (1u64 << 20) as f64
        };
        assert!((mib("qwen2.5-0.5b", &Recipe::BF16) - 942.3).abs() < 0.1);
        // The projections take 682 MiB in bf16 and 176 MiB in NF4; the embedding stays.
        assert!(
            (mib("qwen2.5-0.5b", &Recipe::NF4) - 436.0).abs() < 0.5,
            "{}",
            mib("qwen2.5-0.5b", &Recipe::NF4)
        );
        assert!(
            (mib("qwen2.5-7b", &Recipe::NF4) / 1024.0 - 5.16).abs() < 0.05,
            "{}",
            mib("qwen2.5-7b", &Recipe::NF4) / 1024.0
        );
        assert_eq!(tile_bytes(CPU_TILE, 4864, 896, 4).unwrap(), 2304 * 896 * 4);
        assert_eq!(tile_bytes(CPU_TILE, 100, 896, 4).unwrap(), 100 * 896 * 4);
        assert_eq!(tile_bytes(CPU_TILE, 4864, 1 << 20, 4).unwrap(), 128 << 22);
    }
}
