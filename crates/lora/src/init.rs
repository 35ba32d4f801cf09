//! Initialisation of A and B.
//!
//! | | A `[r, i]` | B `[o, r]` | s·B·A |
//! |---|---|---|---|
//! | [`Init::Kaiming`] | uniform in ±1/√i | 0 | 0 |
//! | [`Init::Gaussian`] | normal, deviation 1/r | 0 | 0 |
//! | [`Init::Random`] | uniform in ±1/√i | uniform in ±1/√r | not 0 |
//! | [`Init::Pissa`] | √(Σ/s)·Vᵀ | U·√(Σ/s) | the best rank-r approximation of W |
//! | [`Init::Olora`] | R | Q | s·Q·R, of W = QR cut to r |
//! | [`Init::Orthogonal`] | rows of one half of an orthogonal basis, mixed | the other half | 0 |
//!
//! U·Σ·Vᵀ are the r largest singular triples of W (Meng, Wang & Zhang, arXiv:2404.02948). With PiSSA and OLoRA (Büyükakyüz,
//! arXiv:2406.01775) the adapted projection initially equals W, so s·B₀·A₀ must be subtracted. PEFT overwrites W with W − s·B₀·A₀, rounded
//! to its dtype. Here W does not change, and a second, frozen low-rank term subtracts s·B₀·A₀: nothing is rounded, W is unchanged, and
//! disabling an adapter gives the base model. It costs r·(i + o) numbers and a product of rank r, where a copy of W would be i·o. Nor need
//! W be written, so a base in NF4 can have such adapters; a rank-r part of the dequantized W is what they take. Files contain only A and B,
//! as PEFT's do: loading recomputes A₀ and B₀ from the base's W.

use kernels::matmul::wide_kind;
use kernels::quantized;
use runtime::ops::TryScalar;
use runtime::random::Generator;
use tch::{Kind, Tensor};

use crate::error::Result;

/// How an adapter is initialised: see the [table](self).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Init {
    /// A as in PyTorch's `nn.Linear`, B zero: PEFT's `true`.
    #[default]
    Kaiming,
    /// A normal, B zero: PEFT's `"gaussian"`.
    Gaussian,
    /// Both as in `nn.Linear`: PEFT's `false`. The adapter changes the model from the start.
    Random,
    /// The principal components of W: PEFT's `"pissa"`; `"pissa_niter_N"`, a faster approximation, is read as this.
    Pissa,
    /// W's QR decomposition: PEFT's `"olora"`.
    Olora,
    /// Halves of one orthogonal basis, whose product is zero: PEFT's `"orthogonal"`. Needs an even rank.
    Orthogonal,
}

/// A and B, and A₀ and B₀ if they are subtracted.
#[derive(Debug)]
pub(crate) struct Initial {
    pub(crate) a: Tensor,
    pub(crate) b: Tensor,
    pub(crate) offset: Option<(Tensor, Tensor)>,
}

impl Init {
    /// Initialises an adapter for W `[o, i]`, in fp32 (f64 for f64), on W's device.
    pub(crate) fn draw(
        self,
        weight: &Tensor,
        r: i64,
        scaling: f64,
        generator: &mut Generator,
    ) -> Result<Initial> {
        let _no_grad = tch::no_grad_guard();
        let [out, inner] = quantized::matrix_shape(weight).unwrap_or_default();
        let options = (wide_kind(weight.kind()), weight.device());
        let mut uniform = |rows: i64, columns: i64, fan_in: i64| {
            let bound = 1.0 / (fan_in as f64).sqrt();
            generator.uniform(&[rows, columns], (-bound, bound), options)
        };
        let zero = || Tensor::f_zeros([out, r], options);
        let (a, b) = match self {
            Self::Kaiming => (uniform(r, inner, inner)?, zero()?),
            Self::Random => (uniform(r, inner, inner)?, uniform(out, r, r)?),
            Self::Gaussian => {
                let drawn = generator.normal(&[r, inner], options)?;
                (drawn.try_mul_scalar(1.0 / r as f64)?, zero()?)
            }
            Self::Orthogonal => {
                let mut normal = |rows: i64, columns: i64| generator.normal(&[rows, columns], options);
                let (basis, _) = Tensor::f_linalg_qr(&normal(r, r)?, "reduced")?;
                let (odd, even) = (every_second(&basis, 0)?, every_second(&basis, 1)?);
                let a = normal(inner, r / 2)?.f_mm(&odd)?.f_tr()?.try_mul_scalar(0.1)?;
                (a, normal(out, r / 2)?.f_mm(&even)?.try_mul_scalar(0.1)?)
            }
            Self::Pissa | Self::Olora => return self.of_weight(weight, r, scaling),
        };
        Ok(Initial { a: a.f_contiguous()?, b: b.f_contiguous()?, offset: None })
    }

    /// Whether A₀ and B₀ are computed from W and subtracted.
    pub(crate) fn has_offset(self) -> bool {
        matches!(self, Self::Pissa | Self::Olora)
    }

    /// Returns A₀ and B₀ of PiSSA or OLoRA twice: as initial values, and to subtract.
    fn of_weight(self, weight: &Tensor, r: i64, scaling: f64) -> Result<Initial> {
        let wide = match quantized::is_quantized(weight) {
            true => quantized::dequantize(weight, Kind::Float)?,
            false => weight.f_detach()?.f_to_kind(wide_kind(weight.kind()))?,
        };
        let rank = r.min(wide.size()[0]).min(wide.size()[1]);
        let (a, b) = if self == Self::Pissa {
            let (u, singular, v) = wide.f_svd(true, true)?;
            let root = singular.f_narrow(0, 0, rank)?.try_div_scalar(scaling)?.f_sqrt()?;
            let a = v.f_narrow(1, 0, rank)?.f_mul(&root)?.f_tr()?;
            (a, u.f_narrow(1, 0, rank)?.f_mul(&root)?)
        } else {
            let (q, triangle) = Tensor::f_linalg_qr(&wide, "reduced")?;
            (triangle.f_narrow(0, 0, rank)?, q.f_narrow(1, 0, rank)?)
        };
        // A rank beyond W's own is padded with zeros.
        let a = a.f_constant_pad_nd([0, 0, 0, r - rank])?.f_contiguous()?;
        let b = b.f_constant_pad_nd([0, r - rank])?.f_contiguous()?;
        let offset = Some((copied(&a)?, copied(&b)?));
        Ok(Initial { a, b, offset })
    }
}

/// Rows `first`, `first + 2`, …
fn every_second(basis: &Tensor, first: i64) -> Result<Tensor> {
    Ok(basis.f_slice(0, first, None, 2)?)
}

fn copied(tensor: &Tensor) -> Result<Tensor> {
    let mut copy = tensor.f_empty_like()?;
    copy.f_copy_(tensor)?;
    Ok(copy)
}
