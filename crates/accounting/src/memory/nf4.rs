//! Weights in NF4 (QLoRA, Dettmers et al., arXiv:2305.14314), as `kernels::nf4` stores and multiplies them.
//!
//! A matrix of n weights has ⌈n/2⌉ bytes of codes, and with nested scales a byte for each block of 64, 4 for each 256 blocks, and 4:
//! 4.13 bits per weight. A product has one dequantized tile at a time.
//!
//! ```
//! use accounting::memory::nf4;
//!
//! let bits = 8.0 * nf4::matrix_bytes(4864, 896)? as f64 / (4864.0 * 896.0);
//! assert!((4.12..4.14).contains(&bits), "{bits}");
//! # Ok::<(), accounting::Error>(())
//! ```

use crate::exact::{product, sum};
use crate::memory::recipe::Recipe;
use crate::model::Decoder;
use crate::{Error, exact};

/// Weights of a block with one scale, and blocks with one factor.
const BLOCK: u64 = 64;
const NESTED: u64 = 256;
/// Alignment of the codes.
const ALIGNMENT: u64 = 64;
/// Largest number of bytes of a tile on a CPU, as `kernels::nf4::tile_bytes` has it.
pub const CPU_TILE: u64 = 8 << 20;
/// The fewest rows of a tile.
const LEAST: u64 = 128;

/// Bytes of a weight of a large matrix.
pub const WEIGHT_BYTES: f64 = 0.5 + 1.0 / 64.0 + 4.0 / (64.0 * 256.0);

/// Returns the bytes of a matrix `[out, in]` with nested scales.
pub fn matrix_bytes(out: u64, inner: u64) -> Result<u64, Error> {
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

/// Bytes of each tensor of a block of a frozen model.
pub(crate) fn block_bytes(model: &Decoder, recipe: &Recipe) -> Result<Vec<u64>, Error> {
    let bytes = |tensor: &crate::parameters::ParameterTensor| match tensor.shape[..] {
        [out, inner] if recipe.quantized => matrix_bytes(out, inner),
        _ => recipe.parameters.bytes(tensor.elements()?),
    };
    model.block_tensors()?.iter().map(bytes).collect()
}

/// Returns the bytes of all parameters of a frozen model.
pub fn model_bytes(model: &Decoder, recipe: &Recipe) -> Result<u64, Error> {
    let of_block = sum("bytes of a block", block_bytes(model, recipe)?)?;
    let blocks = product("parameters of all blocks", &[model.layers, model.block_parameters()?])?;
    let outer = recipe.parameters.bytes(model.parameters()? - blocks)?;
    sum("bytes of the parameters", [outer, product("bytes of all blocks", &[model.layers, of_block])?])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets;

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
