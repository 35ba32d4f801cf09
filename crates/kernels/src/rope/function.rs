//! The rotation as an autograd function.

use runtime::autograd::{self, Backward, Forward, Function};
use runtime::profile::{Flops, kernel, record_external};
use runtime::tensor_memory::{dense, is_sole_owner};
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

use super::NAME;
use super::cpu;
use super::cuda;
use crate::operands::has_dense_heads;

/// Inputs: any number of tensors of heads. Outputs: the same, rotated.
pub(super) struct Rotate {
    table: Tensor,
    /// Used by forward; backward gets them from libtorch, which detects changes in between.
    positions: Option<Tensor>,
    given: bool,
    inverse: bool,
}

impl Rotate {
    pub(super) fn new(table: &Tensor, positions: Option<&Tensor>, inverse: bool) -> Result<Self> {
        let positions = positions.map(dense).transpose()?;
        Ok(Self { table: table.shallow_clone(), given: positions.is_some(), positions, inverse })
    }
}

impl Function for Rotate {
    const TWICE_DIFFERENTIABLE: bool = true;

    fn name(&self) -> String {
        "fused rotary embedding".to_owned()
    }

    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let positions = self.positions.take();
        let owned = inputs.iter().map(|x| x.shallow_clone()).collect();
        let outputs = rotate(&self.table, positions.as_ref(), owned, self.inverse, false)?;
        if let Some(positions) = &positions {
            ctx.save(positions);
        }
        Ok(outputs)
    }

    fn backward(&self, ctx: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let positions = ctx.take_saved().pop();
        if self.given && positions.is_none() {
            return Err(Error::invalid(NAME, "the positions that forward kept are gone"));
        }
        let mut results: Vec<Option<Tensor>> = grads.iter().map(|_| None).collect();
        let (mut indices, mut upstream) = (Vec::new(), Vec::new());
        for (index, grad) in grads.into_iter().enumerate() {
            if let Some(grad) = grad.filter(|_| ctx.needs_input_grad(index)) {
                indices.push(index);
                upstream.push(grad);
            }
        }
        let turned = if ctx.is_recorded() {
            let back = Self::new(&self.table, positions.as_ref(), !self.inverse)?;
            autograd::apply_any(back, &upstream.iter().collect::<Vec<_>>())?
        } else {
            rotate(&self.table, positions.as_ref(), upstream, !self.inverse, true)?
        };
        for (index, gradient) in indices.into_iter().zip(turned) {
            results[index] = Some(gradient);
        }
        Ok(results)
    }
}

/// Rotates every tensor, with `overwrite` in place if nothing else uses its memory.
fn rotate(
    table: &Tensor,
    positions: Option<&Tensor>,
    tensors: Vec<Tensor>,
    inverse: bool,
    overwrite: bool,
) -> Result<Vec<Tensor>> {
    if table.device() != Device::Cpu {
        return on_device(table, positions, tensors, inverse, overwrite);
    }
    let mut turns = Vec::with_capacity(tensors.len());
    for x in tensors {
        let x = if x.is_neg() { x.f_resolve_neg()? } else { x };
        let target = if overwrite && cpu::writes(&x) && is_sole_owner(&x)? {
            None
        } else {
            Some(Tensor::f_empty(x.size(), (x.kind(), Device::Cpu))?)
        };
        let x = if has_dense_heads(&x) { x } else { x.f_contiguous()? };
        turns.push((x, target));
    }
    let positions =
        positions.map(|positions| Vec::<i64>::try_from(positions.f_reshape([-1])?)).transpose()?;
    let pairs: Vec<cpu::Turn<'_>> =
        turns.iter().map(|(from, to)| (from, to.as_ref().unwrap_or(from))).collect();
    let Some((first, _)) = turns.first() else { return Ok(Vec::new()) };
    let _scope = kernel("runtime::rope", [first]);
    cpu::rotate(table, positions.as_deref(), &pairs, inverse)?;
    record_external(
        "runtime::rope",
        Flops::default(),
        turns.iter().map(|(from, _)| bytes_moved(from)).sum(),
    )?;
    Ok(turns.into_iter().map(|(from, to)| to.unwrap_or(from)).collect())
}

/// Rotates on a CUDA device: q and k in one launch.
fn on_device(
    table: &Tensor,
    positions: Option<&Tensor>,
    tensors: Vec<Tensor>,
    inverse: bool,
    overwrite: bool,
) -> Result<Vec<Tensor>> {
    if !tensors.iter().all(cuda::takes) {
        return tensors.iter().map(|x| by_operators(table, positions, x, inverse)).collect();
    }
    let mut turns = Vec::with_capacity(tensors.len());
    for x in tensors {
        let x = if x.stride()[3] == 1 && !x.is_neg() { x } else { dense(&x)? };
        let out = if overwrite && is_sole_owner(&x)? {
            x.shallow_clone()
        } else {
            Tensor::f_empty(x.size(), (x.kind(), x.device()))?
        };
        turns.push((x, out));
    }
    let pairs: Vec<(&Tensor, &Tensor)> = turns.iter().map(|(x, out)| (x, out)).collect();
    cuda::rotate(table, positions, &pairs, inverse)?;
    record_external("runtime::rope", Flops::default(), turns.iter().map(|(x, _)| bytes_moved(x)).sum())?;
    Ok(turns.into_iter().map(|(_, out)| out).collect())
}

/// Returns the bytes that are read and written.
fn bytes_moved(x: &Tensor) -> u64 {
    (2 * x.numel() * x.kind().elt_size_in_bytes()) as u64
}

/// Rotates by libtorch's operators, for devices and dtypes without a kernel.
fn by_operators(table: &Tensor, positions: Option<&Tensor>, x: &Tensor, inverse: bool) -> Result<Tensor> {
    let (_, sequence, _, head) = x.size4()?;
    let rows = match positions {
        None => table.f_narrow(0, 0, sequence)?.f_unsqueeze(0)?,
        Some(positions) => {
            let picked = table.f_index_select(0, &positions.f_reshape([-1])?)?;
            picked.f_reshape([positions.size()[0], sequence, 2, head / 2])?
        }
    };
    let compute = if x.kind() == Kind::Double { Kind::Double } else { Kind::Float };
    // [b or 1, t, 1, head / 2], the same for every head.
    let of = |index: i64| rows.f_select(2, index)?.f_unsqueeze(2)?.f_to_kind(compute);
    let (cos, sin) = (of(0)?, of(1)?);
    let sin = if inverse { sin.f_neg()? } else { sin };
    let half = |index: i64| x.f_narrow(3, index * (head / 2), head / 2)?.f_to_kind(compute);
    let (first, second) = (half(0)?, half(1)?);
    let y1 = first.f_mul(&cos)?.f_sub_(&second.f_mul(&sin)?)?;
    let y2 = second.f_mul(&cos)?.f_add_(&first.f_mul(&sin)?)?;
    Ok(Tensor::f_cat(&[y1, y2], 3)?.f_to_kind(x.kind())?)
}

#[cfg(test)]
mod tests {
    use runtime::random::Generator;

    use super::super::RotaryTable;
    use super::*;

    #[test]
    fn the_chain_of_operators_supports_empty_tensors() {
        let table = RotaryTable::new(6, 40, 1e4, Device::Cpu).unwrap();
        for size in [[0i64, 3, 4, 6], [2, 0, 4, 6], [2, 3, 0, 6]] {
            let x = Tensor::ones(size, (Kind::Float, Device::Cpu));
            let positions = Tensor::zeros([size[0], size[1]], (Kind::Int64, Device::Cpu));
            for positions in [None, Some(&positions)] {
                assert_eq!(
                    by_operators(&table.values(3).unwrap(), positions, &x, false).unwrap().size(),
                    size
                );
            }
        }
    }

    /// The chain for other devices, compared on the CPU.
    #[test]
    fn the_chain_of_operators_matches_the_pass() {
        let mut generator = Generator::new(3).unwrap();
        let table = RotaryTable::new(6, 40, 1e4, Device::Cpu).unwrap();
        let values = table.values(table.positions()).unwrap();
        let positions = Tensor::from_slice(&[0i64, 1, 39, 7, 7, 3]).view([2, 3]);
        for (kind, tolerance) in [(Kind::Double, 1e-15), (Kind::Float, 3e-7), (Kind::BFloat16, 8e-3)] {
            let x = generator.normal(&[2, 3, 4, 6], (Kind::Double, Device::Cpu)).unwrap().to_kind(kind);
            for positions in [None, Some(&positions)] {
                for inverse in [false, true] {
                    let chain = by_operators(&values, positions, &x, inverse).unwrap();
                    let ours = rotate(&values, positions, vec![x.copy()], inverse, true).unwrap();
                    let scale = x.to_kind(Kind::Double).abs().max().double_value(&[]);
                    let worst = (ours[0].to_kind(Kind::Double) - chain.to_kind(Kind::Double)).abs().max();
                    let worst = worst.double_value(&[]) / scale;
                    assert!(worst <= tolerance, "{kind:?} {inverse}: {worst}");
                }
            }
        }
    }
}
