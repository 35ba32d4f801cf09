//! SwiGLU with a hand-written backward.
//!
//! Notation: n tokens (all leading dimensions of x as one), h hidden, f feed-forward. ⊙ is elementwise.
//!
//! Forward, with W, V `[h, f]` and U `[f, h]`:
//!
//! - g = x·W, u = x·V `[n, f]`
//! - s = SiLU(g) = g ⊙ σ(g), z = s ⊙ u
//! - y = z·U `[n, h]`
//!
//! Backward. For a product C = A·B with gradient G = ∂L/∂C, element by element ∂L/∂A_ij = Σ_k G_ik·B_jk and ∂L/∂B_jk = Σ_i
//! A_ij·G_ik, that is G·Bᵀ and Aᵀ·G. With D = ∂L/∂y:
//!
//! - dU = zᵀ·D, dz = D·Uᵀ
//! - du = dz ⊙ s, ds = dz ⊙ u
//! - σ′ = σ·(1 − σ), so SiLU′(g) = σ + g·σ·(1 − σ) = σ·(1 + g·(1 − σ)), and dg = ds ⊙ SiLU′(g)
//! - dW = xᵀ·dg, dV = xᵀ·du
//! - dx = dg·Wᵀ + du·Vᵀ
//!
//! (The assignment's worked solution writes ∂(xV)/∂x = W; it is V. It writes ∂L/∂W in the order of the scalar chain rule; for
//! matrices the transposed input comes first: xᵀ·dg.)
//!
//! There are nine products, three in forward and six in backward. The level decides which of the three are recomputed; never
//! the down-projection, because no gradient needs its result y. z is never kept: the elementwise pass of backward recomputes it
//! at no cost ([`kernels::swiglu`]) and works in place. So on the CPU backward needs at most three `[n, f]` tensors,
//! including kept ones, plus SiLU if it was kept; on other devices one more.
//!
//! Low precision: on a processor without bf16 or fp16 products everything is computed in fp32 and rounded once at the end.
//! Weight gradients that are summed over tiles are summed in fp32.
//!
//! Under a policy of [`runtime::precision`] the input and the weights are cast first, as a part of the graph: kept tensors have
//! the policy's dtype, gradients the tensors' own, and backward computes in the policy's dtype on any thread. On a processor
//! without such products there are fewer roundings than in three linear layers, because g, u and z stay in fp32.
//!
//! Differences from PyTorch's operators: fewer kept tensors; a second derivative is an error.

mod tiles;

use kernels::matmul::mm_into;
use kernels::swiglu as fused;
use runtime::autograd::{Backward, Forward, Function, apply};
use runtime::precision;
use tch::{Kind, Tensor};

use crate::arguments::{Sizes, Weights, check, defined};
use crate::error::Result;
use crate::level::CheckpointLevel;
pub(crate) use tiles::check_tile;
use tiles::{Scratch, Sums, TilePlan};

/// Computes (SiLU(x·W) ⊙ x·V)·U.
///
/// Shapes: `x [..., h]`, `gate` (W) and `up` (V) `[h, f]`, `down` (U) `[f, h]`; the result is `[..., h]`. All have one floating
/// dtype and device. Any strides, and no tokens, are allowed.
///
/// # Errors
/// Shapes, dtypes or devices that do not match; a tile below one token's size.
pub fn swiglu(
    x: &Tensor,
    gate: &Tensor,
    up: &Tensor,
    down: &Tensor,
    level: CheckpointLevel,
) -> Result<Tensor> {
    run(x, Weights::Separate { gate, up, down }, level)
}

pub(crate) fn run(x: &Tensor, weights: Weights<'_>, level: CheckpointLevel) -> Result<Tensor> {
    if precision::current().is_none() {
        return run_as_is(x, weights, level);
    }
    defined(x, weights)?;
    let x = precision::operand(x)?;
    match weights {
        Weights::Separate { gate, up, down } => {
            let [gate, up, down] =
                [precision::weight(gate)?, precision::weight(up)?, precision::weight(down)?];
            run_as_is(&x, Weights::Separate { gate: &gate, up: &up, down: &down }, level)
        }
        Weights::Fused { gate_up, down } => {
            let [gate_up, down] = [precision::weight(gate_up)?, precision::weight(down)?];
            run_as_is(&x, Weights::Fused { gate_up: &gate_up, down: &down }, level)
        }
    }
}

/// Computes it in the dtype of the tensors.
pub(crate) fn run_as_is(x: &Tensor, weights: Weights<'_>, level: CheckpointLevel) -> Result<Tensor> {
    let sizes = check(x, weights)?;
    let plan = TilePlan::new(level, sizes, x)?;
    let function = Swiglu { plan, fused: matches!(weights, Weights::Fused { .. }), sizes, x_was_kept: false };
    let [y] = match weights {
        Weights::Separate { gate, up, down } => apply(function, &[x, gate, up, down])?,
        Weights::Fused { gate_up, down } => apply(function, &[x, gate_up, down])?,
    };
    Ok(y)
}

struct Swiglu {
    plan: TilePlan,
    fused: bool,
    sizes: Sizes,
    /// Decided in forward.
    x_was_kept: bool,
}

/// W, V, U in the computation's dtype.
struct Matrices {
    gate: Tensor,
    up: Tensor,
    down: Tensor,
}

impl Swiglu {
    fn matrices(&self, weights: &[&Tensor]) -> runtime::Result<Matrices> {
        let cast = |tensor: &Tensor| tensor.f_to_kind(self.plan.compute);
        if self.fused {
            let both = cast(weights[0])?;
            let features = self.sizes.features;
            let (gate, up) = (both.f_narrow(1, 0, features)?, both.f_narrow(1, features, features)?);
            return Ok(Matrices { gate, up, down: cast(weights[1])? });
        }
        Ok(Matrices { gate: cast(weights[0])?, up: cast(weights[1])?, down: cast(weights[2])? })
    }

    /// The input index of the down-projection.
    fn down_index(&self) -> usize {
        if self.fused { 2 } else { 3 }
    }

    /// The input that contains the gate, and the one that contains the up projection, each with its first column.
    fn gate_and_up(&self) -> [(usize, i64); 2] {
        if self.fused { [(1, 0), (1, self.sizes.features)] } else { [(1, 0), (2, 0)] }
    }

    /// Whether x is kept: for recomputation, or for the gradients of W and V.
    fn keeps_x(&self, needs: impl Fn(usize) -> bool) -> bool {
        self.plan.level.recomputed_products() > 0 || (1..self.down_index()).any(needs)
    }

    /// Returns the activations of one tile, as tensors that backward may overwrite.
    fn activations(
        &self,
        kept: Vec<Tensor>,
        overwrite: bool,
        x_th: Option<&Tensor>,
        weights: &Matrices,
        scratch: &mut Scratch,
        count: i64,
    ) -> runtime::Result<Activations> {
        let own = |tensor: Option<Tensor>| -> runtime::Result<Option<Tensor>> {
            let Some(tensor) = tensor else { return Ok(None) };
            if tensor.kind() != self.plan.compute {
                return Ok(Some(tensor.f_to_kind(self.plan.compute)?));
            }
            if overwrite {
                return Ok(Some(tensor));
            }
            let mut copy = tensor.f_empty_like()?;
            copy.f_copy_(&tensor)?;
            Ok(Some(copy))
        };
        let mut product = |slot: usize, weight: &Tensor| -> runtime::Result<Tensor> {
            let _recompute = runtime::profile::recompute();
            let x_th = x_th.expect("a level that computes again keeps x");
            let mut out = scratch.take(slot, count)?;
            mm_into(&mut out, x_th, weight, false)?;
            Ok(out)
        };
        let mut kept = kept.into_iter();
        let gate = match own(kept.next())? {
            Some(gate) => gate,
            None => product(0, &weights.gate)?,
        };
        let up = match own(kept.next())? {
            Some(up) => up,
            None => product(1, &weights.up)?,
        };
        let silu = kept.next().map(|silu| silu.f_to_kind(self.plan.compute)).transpose()?;
        Ok(Activations { gate, up, silu })
    }
}

struct Activations {
    gate: Tensor,
    up: Tensor,
    silu: Option<Tensor>,
}

impl Function for Swiglu {
    fn name(&self) -> &'static str {
        match self.plan.level {
            CheckpointLevel::SaveAll => "swiglu save-all",
            CheckpointLevel::SaveGateUp => "swiglu save-gate-up",
            CheckpointLevel::SaveOne => "swiglu save-one",
            CheckpointLevel::InputOnly => "swiglu input-only",
            CheckpointLevel::InputOnlyTiled { .. } => "swiglu input-only-tiled",
        }
    }

    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> runtime::Result<Vec<Tensor>> {
        let Sizes { tokens, hidden, features } = self.sizes;
        let TilePlan { level, kind, compute, .. } = self.plan;
        let (x, options) = (inputs[0], (compute, inputs[0].device()));
        let weights = self.matrices(&inputs[1..])?;
        let x_nh = x.f_reshape([tokens, hidden])?;
        let out = Tensor::f_empty(x.size(), (kind, x.device()))?;
        let out_nh = out.f_view([tokens, hidden])?;

        for weight in &inputs[1..] {
            ctx.save(weight);
        }
        self.x_was_kept = self.keeps_x(|index| ctx.needs_input_grad(index));
        if self.x_was_kept {
            ctx.save(x);
        }
        let empty = |rows: i64| Tensor::f_empty([rows, features], options);
        let tile = self.plan.tile.min(tokens);
        let (gate_tf, up_tf) = (empty(tile)?, empty(tile)?);
        for (start, count) in self.plan.tiles(tokens) {
            let x_th = x_nh.f_narrow(0, start, count)?.f_to_kind(compute)?;
            let (mut gate, mut up) = (gate_tf.f_narrow(0, 0, count)?, up_tf.f_narrow(0, 0, count)?);
            mm_into(&mut gate, &x_th, &weights.gate, false)?;
            mm_into(&mut up, &x_th, &weights.up, false)?;
            drop(x_th);
            let keeps_up = matches!(level, CheckpointLevel::SaveAll | CheckpointLevel::SaveGateUp);
            let mut silu = None;
            let mut product =
                if keeps_up && ctx.will_run_backward() { empty(count)? } else { up.shallow_clone() };
            if level == CheckpointLevel::SaveAll && ctx.will_run_backward() {
                silu = Some(empty(count)?);
            }
            fused::forward(&gate, &up, silu.as_ref(), &mut product)?;
            let kept: &[Option<&Tensor>] = match level {
                CheckpointLevel::SaveAll => &[Some(&gate), Some(&up), silu.as_ref()],
                CheckpointLevel::SaveGateUp => &[Some(&gate), Some(&up)],
                CheckpointLevel::SaveOne => &[Some(&gate)],
                CheckpointLevel::InputOnly | CheckpointLevel::InputOnlyTiled { .. } => &[],
            };
            if ctx.will_run_backward() {
                for activation in kept.iter().flatten() {
                    ctx.save(&activation.f_to_kind(kind)?);
                }
            }
            let target = &mut out_nh.f_narrow(0, start, count)?;
            write_rounded(target, compute, |target| mm_into(target, &product, &weights.down, false))?;
        }
        Ok(vec![out])
    }

    fn backward(
        &self,
        ctx: &mut Backward,
        mut grads: Vec<Option<Tensor>>,
    ) -> runtime::Result<Vec<Option<Tensor>>> {
        let Sizes { tokens, hidden, features } = self.sizes;
        let (plan, down_index) = (self.plan, self.down_index());
        let mut result: Vec<Option<Tensor>> = std::iter::repeat_with(|| None).take(down_index + 1).collect();
        let Some(grad) = grads.pop().flatten() else { return Ok(result) };
        let device = grad.device();

        let overwrite = ctx.may_overwrite_saved();
        let mut saved = ctx.take_saved().into_iter();
        let weight_inputs: Vec<Tensor> = saved.by_ref().take(down_index).collect();
        let weights = self.matrices(&weight_inputs.iter().collect::<Vec<_>>())?;
        // Forward decided what to keep; backward may need less.
        let x = if self.x_was_kept { saved.next() } else { None };
        let x_nh = x.map(|x| x.f_reshape([tokens, hidden])).transpose()?;
        let mut kept: Vec<Tensor> = saved.collect();

        let grad_nh = grad.f_reshape([tokens, hidden])?;
        if ctx.needs_input_grad(0) {
            result[0] = Some(Tensor::f_empty(grad.size(), (plan.kind, device))?);
        }
        let grad_x_nh = result[0].as_ref().map(|grad_x| grad_x.f_view([tokens, hidden])).transpose()?;
        let columns = if self.fused { 2 * features } else { features };
        let mut sums = Sums {
            options: (plan.sum_kind(tokens), device),
            // The input has no sum.
            column_major: std::iter::once(false)
                .chain(weight_inputs.iter().map(|weight| !weight.is_contiguous() && weight.stride()[0] == 1))
                .collect(),
            by_input: result.iter().map(|_| None).collect(),
        };
        let mut scratch = Scratch {
            held: (plan.tile < tokens).then_some([None, None, None]),
            tile: plan.tile,
            features,
            options: (plan.compute, device),
        };

        let gate_up_needed = (0..down_index).any(|index| ctx.needs_input_grad(index));
        for (start, count) in plan.tiles(tokens) {
            let first = start == 0;
            let x_th = match &x_nh {
                Some(x) => Some(x.f_narrow(0, start, count)?.f_to_kind(plan.compute)?),
                None => None,
            };
            let grad_th = grad_nh.f_narrow(0, start, count)?.f_to_kind(plan.compute)?;
            let Activations { gate, up, silu } = self.activations(
                std::mem::take(&mut kept),
                overwrite,
                x_th.as_ref(),
                &weights,
                &mut scratch,
                count,
            )?;
            if !gate_up_needed {
                // Only U is trained: its gradient needs only the product.
                let mut product = up.shallow_clone();
                fused::forward(&gate, &up, None, &mut product)?;
                if ctx.needs_input_grad(down_index) {
                    sums.add(down_index, [features, hidden], 0, &product.tr(), &grad_th, first)?;
                }
                continue;
            }
            let mut grad_product = scratch.take(2, count)?;
            mm_into(&mut grad_product, &grad_th, &weights.down.tr(), false)?;
            let fused::Gradients { gate, up, product } =
                fused::backward(gate, up, silu.as_ref(), grad_product)?;
            drop(silu);
            if ctx.needs_input_grad(down_index) {
                sums.add(down_index, [features, hidden], 0, &product.tr(), &grad_th, first)?;
            }
            drop((product, grad_th));
            for ((index, column), gradient) in self.gate_and_up().into_iter().zip([&gate, &up]) {
                if let (true, Some(x_th)) = (ctx.needs_input_grad(index), &x_th) {
                    sums.add(index, [hidden, columns], column, &x_th.tr(), gradient, first)?;
                }
            }
            if let Some(grad_x) = &grad_x_nh {
                write_rounded(&mut grad_x.f_narrow(0, start, count)?, plan.compute, |target| {
                    mm_into(target, &gate, &weights.gate.tr(), false)?;
                    mm_into(target, &up, &weights.up.tr(), true)
                })?;
            }
        }
        for (slot, sum) in result.iter_mut().zip(sums.by_input).skip(1) {
            *slot = sum.map(|sum| sum.f_to_kind(plan.kind)).transpose()?;
        }
        Ok(result)
    }
}

/// Calls `write` to fill `target`, through a tensor of dtype `compute` if `target` has another.
fn write_rounded(
    target: &mut Tensor,
    compute: Kind,
    write: impl FnOnce(&mut Tensor) -> runtime::Result<()>,
) -> runtime::Result<()> {
    if target.kind() == compute {
        return write(target);
    }
    let mut wide = Tensor::f_empty(target.size(), (compute, target.device()))?;
    write(&mut wide)?;
    Ok(target.f_copy_(&wide)?)
}
