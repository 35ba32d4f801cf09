//! Tiles of tokens: their size, their temporaries, and sums over them.

use kernels::matmul::{compute_kind, mm_into};
use tch::{Device, Kind, Tensor};

use crate::arguments::Sizes;
use crate::error::{self, Result};
use crate::level::CheckpointLevel;

/// How the tokens are tiled, and in which dtype they are computed.
#[derive(Clone, Copy, Debug)]
pub(super) struct TilePlan {
    pub(super) level: CheckpointLevel,
    pub(super) tile: i64,
    pub(super) kind: Kind,
    pub(super) compute: Kind,
}

impl TilePlan {
    pub(super) fn new(level: CheckpointLevel, sizes: Sizes, x: &Tensor) -> Result<Self> {
        let (kind, compute) = (x.kind(), compute_kind(x.device(), x.kind()));
        let tokens = sizes.tokens.max(1);
        let tile = match level {
            CheckpointLevel::InputOnlyTiled { bytes } => {
                let token_bytes = token_bytes(sizes, kind, compute);
                if bytes < token_bytes {
                    return Err(error::tile(bytes, token_bytes));
                }
                let most = i64::try_from(bytes / token_bytes).unwrap_or(i64::MAX).min(tokens);
                // Tiles of equal size: a short last one would be slower.
                let tiles = (tokens + most - 1) / most;
                (tokens + tiles - 1) / tiles
            }
            _ => tokens,
        };
        Ok(Self { level, tile, kind, compute })
    }

    pub(super) fn tiles(&self, tokens: i64) -> impl Iterator<Item = (i64, i64)> + use<> {
        let tile = self.tile;
        // One empty tile for an empty batch, so that gradients are written as zeros.
        (0..tokens.max(1))
            .step_by(usize::try_from(tile).unwrap_or(1))
            .map(move |start| (start, tile.min(tokens - start)))
    }

    /// The dtype in which weight gradients are summed.
    pub(super) fn sum_kind(&self, tokens: i64) -> Kind {
        let low = matches!(self.kind, Kind::BFloat16 | Kind::Half);
        if low && (self.tile < tokens || self.compute == Kind::Float) { Kind::Float } else { self.kind }
    }
}

/// Refuses tiles in which no token fits, whichever dtype the input of weights of this dtype has.
pub(crate) fn check_tile(level: CheckpointLevel, sizes: Sizes, (kind, device): (Kind, Device)) -> Result<()> {
    let CheckpointLevel::InputOnlyTiled { bytes } = level else { return Ok(()) };
    // Autocast computes with a narrower input than the weights'.
    let token_bytes = |kind| token_bytes(sizes, kind, compute_kind(device, kind));
    let token_bytes = token_bytes(kind).min(token_bytes(Kind::BFloat16));
    if bytes < token_bytes { Err(error::tile(bytes, token_bytes)) } else { Ok(()) }
}

/// Bytes of backward per token of a tile: gate, up and the product's gradient, and casts if needed.
fn token_bytes(sizes: Sizes, kind: Kind, compute: Kind) -> u64 {
    let casts = if compute == kind { 0 } else { 3 * sizes.hidden };
    let elements = u64::try_from(3 * sizes.features + casts).unwrap_or(u64::MAX);
    elements * compute.elt_size_in_bytes() as u64
}

/// The `[tile, f]` temporaries of backward. With several tiles they are reused; with one, each is freed after its last use.
pub(super) struct Scratch {
    pub(super) held: Option<[Option<Tensor>; 3]>,
    pub(super) tile: i64,
    pub(super) features: i64,
    pub(super) options: (Kind, Device),
}

impl Scratch {
    pub(super) fn take(&mut self, slot: usize, count: i64) -> runtime::Result<Tensor> {
        let Some(held) = &mut self.held else {
            return Ok(Tensor::f_empty([count, self.features], self.options)?);
        };
        if held[slot].is_none() {
            held[slot] = Some(Tensor::f_empty([self.tile, self.features], self.options)?);
        }
        let whole = held[slot].as_ref().expect("it was just made");
        Ok(whole.f_narrow(0, 0, count)?)
    }
}

/// Gradients of the weights, one for each input of the function, summed over tiles. The first tile writes. Each has its
/// weight's layout, so that readers of a transposed view need no copy.
pub(super) struct Sums {
    pub(super) options: (Kind, Device),
    pub(super) column_major: Vec<bool>,
    pub(super) by_input: Vec<Option<Tensor>>,
}

impl Sums {
    /// Adds a·b to the columns from `column` on of the gradient of input `index`, of shape `size`.
    pub(super) fn add(
        &mut self,
        index: usize,
        size: [i64; 2],
        column: i64,
        a: &Tensor,
        b: &Tensor,
        first: bool,
    ) -> runtime::Result<()> {
        if self.by_input[index].is_none() {
            let [rows, columns] = size;
            self.by_input[index] = Some(if self.column_major[index] {
                Tensor::f_empty([columns, rows], self.options)?.f_tr()?
            } else {
                Tensor::f_empty(size, self.options)?
            });
        }
        let sum = self.by_input[index].as_ref().expect("it was just made");
        mm_into(&mut sum.f_narrow(1, column, b.size()[1])?, a, b, !first)
    }
}
