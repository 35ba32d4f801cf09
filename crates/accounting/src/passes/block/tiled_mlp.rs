//! A SwiGLU over tiles of tokens that keeps its input alone (`swiglu-ckpt`'s levels `input-only` and `input-only-tiled`).
//!
//! With n tokens in tiles of t, d hidden, f feed-forward, it has two `[t, f]` in forward; in backward three, which all tiles share, the
//! gradient of the input `[n, d]`, and sums of the weights' gradients: in fp32 where several tiles of 16 bits add to them, rounded one by
//! one at the end. Where 16 bits are multiplied in fp32, the weights and each tile's input are cast, too.

use crate::exact::{self, product};
use crate::memory::recipe::Recipe;
use crate::model::Decoder;
use crate::passes::PeakTracker;
use crate::{Error, exact::positive};

/// Bytes of the MLP's tensors.
pub(super) struct TiledMlp {
    /// `[n, d]`.
    narrow: u64,
    /// `[t, f]` and, where they are cast, `[t, d]`.
    tile: u64,
    cast: u64,
    /// The weights, where they are cast.
    weights: u64,
    /// One weight's sum, and its gradient where that is another tensor.
    sum: u64,
    rounded: u64,
    /// Gradients of the weights, as far as they are counted.
    gradients: u64,
    /// Whether there is more than one tile.
    is_divided: bool,
}

/// The options of a block that decide an MLP.
pub(super) struct TiledMlpOptions<'a> {
    pub(super) tokens: u64,
    pub(super) recipe: &'a Recipe,
    pub(super) widens: bool,
    /// Whether the weights are trained, and whether their gradients are counted.
    pub(super) everything: bool,
    pub(super) gradients: bool,
    /// Bytes of the temporaries of a tile.
    pub(super) most: u64,
}

impl TiledMlp {
    pub(super) fn new(model: &Decoder, options: &TiledMlpOptions<'_>) -> Result<Self, Error> {
        let TiledMlpOptions { tokens, recipe, widens, everything, gradients, most } = *options;
        if recipe.casts || recipe.is_quantized() {
            return Err(Error::Shape {
                what: "a tiled MLP in mixed precision or over NF4 is not modelled".into(),
                remedy: "leave out the tiles, or take another dtype".into(),
            });
        }
        let (d, f) = (model.hidden, model.feed_forward);
        let c = recipe.compute.storage_bits() / 8;
        let is_cast = widens && c < 4;
        let bytes = if is_cast { 4 } else { c };
        // Gate, up and the product's gradient, and casts if needed.
        let numbers = exact::sum("numbers of a token", [3 * f, if is_cast { 3 * d } else { 0 }])?;
        let token = product("bytes of a token", &[numbers, bytes])?;
        if most < token {
            return Err(Error::Shape {
                what: format!("a tile of {most} bytes is below the {token} of one token's temporaries"),
                remedy: "give at least that".into(),
            });
        }
        let tokens = positive("tokens", tokens)?;
        let rows = tokens.div_ceil(tokens.div_ceil((most / token).min(tokens)));
        let is_divided = rows < tokens;
        let matrix = product("elements of a weight", &[d, f])?;
        let sum = if c < 4 && (is_divided || is_cast) { 4 } else { c };
        let trained =
            |bytes: u64| if everything { product("bytes of a gradient", &[matrix, bytes]) } else { Ok(0) };
        Ok(Self {
            narrow: product("bytes of an activation", &[tokens, d, c])?,
            tile: product("bytes of a tile", &[rows, f, bytes])?,
            cast: if is_cast { product("bytes of a tile", &[rows, d, 4])? } else { 0 },
            weights: if is_cast { product("bytes of the weights", &[3, matrix, 4])? } else { 0 },
            sum: trained(sum)?,
            rounded: if sum == c { 0 } else { trained(c)? },
            gradients: if gradients && everything { recipe.gradients.bytes(3 * matrix)? } else { 0 },
            is_divided,
        })
    }

    /// Leaves the result.
    pub(super) fn forward(&self, tracker: &mut PeakTracker) {
        tracker.make(self.weights + self.narrow + 2 * self.tile);
        // A tile's input, then its result.
        tracker.touch(self.cast);
        tracker.free(self.weights + 2 * self.tile);
    }

    /// Leaves the gradient of the input, and those of the weights as far as they are counted.
    pub(super) fn backward(&self, tracker: &mut PeakTracker) {
        tracker.make(self.narrow);
        let before = tracker.live();
        tracker.make(self.weights);
        // A tile's input and the gradient of its result.
        tracker.make(2 * self.cast + 3 * self.tile);
        tracker.make(self.sum);
        tracker.free(self.cast);
        if !self.is_divided {
            tracker.free(self.tile);
        }
        tracker.make(2 * self.sum);
        // The gradient of a tile's input.
        tracker.touch(self.cast);
        tracker.free(self.cast);
        if !self.is_divided {
            tracker.free(2 * self.tile);
        }
        // Each sum is freed when it has been rounded.
        for _ in 0..3 {
            tracker.make(self.rounded);
            tracker.free(if self.rounded > 0 { self.sum } else { 0 });
        }
        tracker.release_since(before);
        tracker.make(self.gradients);
    }
}
