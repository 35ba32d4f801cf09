//! Muon: momentum whose matrix is made orthogonal. For a matrix θ `[rows, columns]` and its gradient g:
//!
//! - m ← μ·m + (1−μ)·g; G ← μ·m + (1−μ)·g with Nesterov momentum, else m
//! - X ← G / ‖G‖, the wider side as columns; five times: A ← X·Xᵀ, X ← a·X + (b·A + c·A²)·X
//! - θ ← (1 − η·λ)·θ − η·s·X
//!
//! The iteration (Newton–Schulz, of degree 5) brings every singular value near 1: those from 0.01 to 1 into 0.68 to 1.13, which is as good as the
//! exact factor and needs products only. s is [`MuonScale`]. Muon is for the matrices between the layers; embeddings, heads, norms and biases
//! take AdamW ([`Muon::groups`]), as do tensors of three dimensions. A matrix in which a model has stacked several, as `qkv_proj` or
//! `gate_up_proj`, is made orthogonal as one.
//!
//! One slot for matrices: half of AdamW's state. An update takes 5·(4r²c + 2r³) FLOPs for a matrix of r ≤ c, and temporaries of 2rc + 2r²
//! numbers. It depends on the whole matrix, which ranks can therefore not divide. Products are in bf16 on a GPU, as PyTorch's are, and in the
//! arithmetic's dtype on a CPU ([`Muon::products`]): without instructions for bf16 an iteration of PyTorch's takes 32 to 43 times as long in bf16
//! as in fp32 (AMD Zen 3, 128 × 512 to 512 × 512), and differs by 1 % from it, where both are 20 % away from the nearest orthogonal matrix.

use std::sync::Arc;

use runtime::ops::{TryScalar, call, foreach, single};
use tch::{Kind, Tensor};

use super::rule::{Extent, Hyperparameters, Rule, Slot, Tensors, fraction, not_negative};
use super::{AdamW, Group};
use crate::error::{Error, Result};

/// The factor of an orthogonal update, whose root mean square is 1/√max(rows, columns).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MuonScale {
    /// √max(1, rows/columns): a learning rate of its own, about 0.02 (Jordan).
    Original,
    /// 0.2·√max(rows, columns): the root mean square of AdamW's updates, 0.2, so that AdamW's learning rate and weight decay suit both
    /// (Liu et al., arXiv:2502.16982).
    #[default]
    MatchRmsAdamW,
}

/// Muon (Jordan et al., 2024). λ is the group's weight decay, which is decoupled. See the [module](super).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Muon {
    /// μ, in [0, 1).
    pub momentum: f64,
    /// Whether the newest gradient counts once more.
    pub nesterov: bool,
    /// Iterations.
    pub steps: u32,
    /// a, b and c of the iteration.
    pub coefficients: [f64; 3],
    /// The least norm that a matrix is divided by.
    pub eps: f64,
    /// s.
    pub scale: MuonScale,
    /// The dtype of the iteration; `None` for bf16 on a GPU, and the parameter's fp32 or fp64 on a CPU.
    pub products: Option<Kind>,
}

impl Default for Muon {
    /// PyTorch's, but for [`MuonScale::MatchRmsAdamW`], with which one learning rate suits all parameters of a model.
    fn default() -> Self {
        Self {
            momentum: 0.95,
            nesterov: true,
            steps: 5,
            coefficients: [3.4445, -4.7750, 2.0315],
            eps: 1e-7,
            scale: MuonScale::default(),
            products: None,
        }
    }
}

impl Muon {
    /// Returns the groups of a model's parameters for an optimizer whose rule is Muon: `matrices`, which have that rule, and `decay` and
    /// `no_decay`, the matrices and vectors that take AdamW. `adam_w` are AdamW's coefficients.
    pub fn groups<'a>(
        parameters: impl IntoIterator<Item = (String, &'a Tensor)>,
        lr: f64,
        weight_decay: f64,
        adam_w: AdamW,
    ) -> Vec<Group> {
        let (hidden, others): (Vec<_>, Vec<_>) =
            parameters.into_iter().partition(|(name, tensor)| Self::is_hidden(name, tensor.dim()));
        let matrices = Group { name: "matrices".into(), weight_decay, ..Group::new(hidden, lr) };
        let others = Group::by_dimension(others, lr, weight_decay).into_iter();
        let others = others.map(|group| Group { rule: Some(Arc::new(adam_w)), ..group });
        let groups = std::iter::once(matrices).filter(|group| !group.parameters.is_empty());
        groups.chain(others).collect()
    }

    /// Returns whether a parameter is a matrix between a model's embedding and head, by its name and its number of dimensions: no embedding, no
    /// output head, no rows of tokens.
    pub fn is_hidden(name: &str, dimensions: usize) -> bool {
        accounting::memory::optimizer::is_hidden(name, dimensions)
    }

    /// Returns the matrix with its singular values near 1.
    fn orthogonal(&self, matrix: &Tensor) -> Result<Tensor> {
        let kind = match self.products {
            Some(kind) => kind,
            None if matrix.device().is_cuda() => Kind::BFloat16,
            None => matrix.kind(),
        };
        let is_tall = matrix.size()[0] > matrix.size()[1];
        let x = matrix.f_to_kind(kind)?;
        let x = if is_tall { x.f_transpose(0, 1)? } else { x };
        let norm = foreach::norm(&[&x], 2.0)?.pop();
        let norm = norm.ok_or_else(|| Error::config("muon", "libtorch returned no norm"))?;
        let mut x = x.f_div(&norm.try_clamp_min_(self.eps)?)?;
        let [a, b, c] = self.coefficients;
        for _ in 0..self.steps {
            let gram = x.f_matmul(&x.f_transpose(0, 1)?)?;
            let factor = product_sum((c, &gram, &gram), (b, &gram))?;
            x = product_sum((1.0, &factor, &x), (a, &x))?;
        }
        let x = if is_tall { x.f_transpose(0, 1)? } else { x };
        Ok(x.f_to_kind(matrix.kind())?)
    }
}

/// Returns α·l·r + β·sum.
fn product_sum((alpha, left, right): (f64, &Tensor, &Tensor), (beta, sum): (f64, &Tensor)) -> Result<Tensor> {
    let factors = [("beta", beta.into()), ("alpha", alpha.into())];
    Ok(single(call("aten::addmm", "", &[sum.into(), left.into(), right.into()], &factors)?)?)
}

impl Rule for Muon {
    fn name(&self) -> &'static str {
        "muon"
    }

    fn slots(&self, parameter: Extent<'_>) -> Vec<Slot> {
        Slot::like(parameter, &["momentum_buffer"])
    }

    fn check(&self) -> Result<()> {
        fraction("muon", "momentum", self.momentum)?;
        not_negative("muon", "eps", self.eps)?;
        if self.steps == 0 || self.steps >= 100 {
            return Err(Error::config("muon", format!("steps is {}; expected 1 to 99", self.steps)));
        }
        match self.products {
            Some(kind) if !matches!(kind, Kind::BFloat16 | Kind::Float | Kind::Double) => Err(Error::config(
                "muon",
                format!("products is {kind:?}; expected bf16, fp32 or fp64, as fp16 overflows"),
            )),
            _ => Ok(()),
        }
    }

    fn check_parameter(&self, name: &str, parameter: &Tensor) -> Result<()> {
        if parameter.dim() == 2 {
            return Ok(());
        }
        let reason = format!(
            "has the shape {:?}, and Muon is for matrices; put it in a group whose rule is AdamW, as `Muon::groups` does",
            parameter.size()
        );
        Err(Error::tensor("muon", name, reason))
    }

    fn granularity(&self) -> Option<i64> {
        None
    }

    fn update(&self, tensors: &Tensors<'_>, hyperparameters: Hyperparameters) -> Result<()> {
        let Hyperparameters { lr, weight_decay, .. } = hyperparameters;
        // One matrix after the other, whose temporaries are freed before the next one's.
        for ((param, grad), momentum) in tensors.params.iter().zip(tensors.grads).zip(&tensors.slots[0]) {
            foreach::lerp_(&[*momentum], &[*grad], 1.0 - self.momentum)?;
            let update = match self.nesterov {
                true => {
                    let arguments = [(*grad).into(), (*momentum).into(), self.momentum.into()];
                    single(call("aten::lerp", "Scalar", &arguments, &[])?)?
                }
                false => momentum.shallow_clone(),
            };
            let update = self.orthogonal(&update)?;
            let sizes = param.size();
            let (rows, columns) = (sizes[0] as f64, sizes[1] as f64);
            let scale = match self.scale {
                MuonScale::Original => (rows / columns).max(1.0).sqrt(),
                MuonScale::MatchRmsAdamW => 0.2 * rows.max(columns).sqrt(),
            };
            foreach::mul_scalar_(&[*param], 1.0 - lr * weight_decay)?;
            foreach::add_scaled_(&[*param], &[&update], -lr * scale)?;
        }
        Ok(())
    }
}
