//! Arguments and results of the passes over a tile of logits. Letters as in [`crate::cross_entropy`].
//!
//! All tensors of floating-point numbers are in the tile's dtype, or Float for a tile in BFloat16 or Half.

use runtime::ops::TryScalar;
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

/// The transform from products to logits.
#[derive(Clone, Copy, Debug)]
pub struct Transform<'a> {
    /// b, one for each column of the tile.
    pub bias: Option<&'a Tensor>,
    /// s.
    pub scale: f64,
    /// k, above 0.
    pub softcap: Option<f64>,
}

impl Default for Transform<'_> {
    fn default() -> Self {
        Self { bias: None, scale: 1.0, softcap: None }
    }
}

impl Transform<'_> {
    /// Returns whether logits differ from products.
    pub fn changes(&self) -> bool {
        self.bias.is_some() || self.softcap.is_some() || self.scale != 1.0
    }
}

/// The target distributions of a tile's rows.
#[derive(Clone, Copy, Debug)]
pub enum Targets<'a> {
    /// One class for each row, `[n]` int64, as a column of the tile; a column outside belongs to another tile.
    Columns(&'a Tensor),
    /// The tile's part of each distribution, `[n, c]`.
    Dense(&'a Tensor),
}

/// The inputs of a pass beside the tile.
#[derive(Clone, Copy, Debug)]
pub struct TileInputs<'a> {
    /// The column of the vocabulary at which the tile begins.
    pub first: i64,
    /// The transform from products to logits.
    pub transform: Transform<'a>,
    /// The target distributions.
    pub targets: Targets<'a>,
    /// w, `[c]`; 1 for every class if absent.
    pub class_weights: Option<&'a Tensor>,
}

impl<'a> TileInputs<'a> {
    /// Returns the inputs of a tile that begins the vocabulary and whose products are its logits, without class weights.
    pub fn new(targets: Targets<'a>) -> Self {
        Self { first: 0, transform: Transform::default(), targets, class_weights: None }
    }

    /// Returns whether the targets are distributions.
    pub(crate) fn is_dense(&self) -> bool {
        matches!(self.targets, Targets::Dense(_))
    }
}

/// Which optional statistics to compute.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wanted {
    /// Σ w·z.
    pub total: bool,
    /// Σ e^(z − m)·z.
    pub moment: bool,
    /// argmax z.
    pub best: bool,
}

/// The statistics of each row: tensors `[n]`.
#[derive(Debug)]
pub struct Statistics {
    /// m; −∞ before the first tile.
    pub maximum: Tensor,
    /// Σ e^(z − m).
    pub sum: Tensor,
    /// Σ t·z.
    pub target: Tensor,
    /// Σ t, for target distributions.
    pub mass: Option<Tensor>,
    /// Σ w·z.
    pub total: Option<Tensor>,
    /// Σ e^(z − m)·z.
    pub moment: Option<Tensor>,
    /// argmax z, int64, the first of equal ones.
    pub best: Option<Tensor>,
}

impl Statistics {
    /// Creates the statistics of `rows` rows before their first tile. `dense` for target distributions.
    ///
    /// # Errors
    /// Too little memory.
    pub fn new(rows: i64, dense: bool, wanted: Wanted, options: (Kind, Device)) -> Result<Self> {
        let zeros = || Tensor::f_zeros([rows], options);
        let when = |wanted: bool| wanted.then(zeros).transpose();
        let best = wanted.best.then(|| Tensor::f_zeros([rows], (Kind::Int64, options.1))).transpose()?;
        Ok(Self {
            maximum: Tensor::try_full([rows], f64::NEG_INFINITY, options)?,
            sum: zeros()?,
            target: zeros()?,
            mass: when(dense)?,
            total: when(wanted.total)?,
            moment: when(wanted.moment)?,
            best,
        })
    }

    /// Returns log Σ eᶻ of each row.
    ///
    /// # Errors
    /// Errors of libtorch.
    pub fn log_sum_exp(&self) -> Result<Tensor> {
        Ok(self.sum.f_log()?.f_add(&self.maximum)?)
    }

    /// Returns the entropy of each row's softmax in nats, log Σ eᶻ − Σ p·z. Requires the moment.
    ///
    /// # Errors
    /// A moment that was not computed; errors of libtorch.
    pub fn entropy(&self) -> Result<Tensor> {
        let moment = self.moment.as_ref().ok_or_else(|| {
            Error::invalid("cross-entropy statistics", "the entropy needs the moment; ask for it in `Wanted`")
        })?;
        Ok(self.log_sum_exp()?.f_sub(&moment.f_div(&self.sum)?)?)
    }
}

/// The coefficients of each row's gradient, `[n]`. See the [module](crate::cross_entropy).
#[derive(Clone, Copy, Debug)]
pub struct Coefficients<'a> {
    /// m, the largest logit of the row. (The softmax is e^(z − m) over its sum; e^(z − log Σ eᶻ) would lose what the
    /// logarithm rounds away.)
    pub maximum: &'a Tensor,
    /// α, of the exponentials: the softmax's coefficient over Σ e^(z − m).
    pub powers: &'a Tensor,
    /// β, of the target.
    pub target: &'a Tensor,
    /// γ, of the class weights (of 1 without).
    pub constant: Option<&'a Tensor>,
}
