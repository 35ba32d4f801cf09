//! The rotation by libtorch's operators, for devices and dtypes without a kernel.

use runtime::Result;
use tch::{Kind, Tensor};

use super::{RotaryPass, Rotation};

/// A chain of libtorch's operators.
pub(super) struct Reference;

impl RotaryPass for Reference {
    fn rotate(&self, rotation: Rotation<'_>, tensors: &[&Tensor], _overwrite: bool) -> Result<Vec<Tensor>> {
        match super::by_heads(self, rotation, tensors)? {
            Some(results) => Ok(results),
            None => tensors.iter().map(|x| rotate(rotation, x)).collect(),
        }
    }
}

fn rotate(Rotation { table, positions, inverse }: Rotation<'_>, x: &Tensor) -> Result<Tensor> {
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
    let factors = |index: i64| rows.f_select(2, index)?.f_unsqueeze(2)?.f_to_kind(compute);
    let (cos, sin) = (factors(0)?, factors(1)?);
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
    use tch::Device;

    use super::*;
    use crate::rope::RotaryTable;
    use crate::rope::cpu::Cpu;

    #[test]
    fn the_chain_of_operators_supports_empty_tensors() {
        let table = RotaryTable::new(6, 40, 1e4, Device::Cpu).unwrap();
        for size in [[0i64, 3, 4, 6], [2, 0, 4, 6], [2, 3, 0, 6]] {
            let x = Tensor::ones(size, (Kind::Float, Device::Cpu));
            let positions = Tensor::zeros([size[0], size[1]], (Kind::Int64, Device::Cpu));
            for positions in [None, Some(&positions)] {
                let table = &table.values(3).unwrap();
                let rotation = Rotation { table, positions, inverse: false };
                assert_eq!(rotate(rotation, &x).unwrap().size(), size);
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
                    let rotation = Rotation { table: &values, positions, inverse };
                    let chain = rotate(rotation, &x).unwrap();
                    let ours = Cpu.rotate(rotation, &[&x.copy()], true).unwrap();
                    let scale = x.to_kind(Kind::Double).abs().max().double_value(&[]);
                    let worst = (ours[0].to_kind(Kind::Double) - chain.to_kind(Kind::Double)).abs().max();
                    let worst = worst.double_value(&[]) / scale;
                    assert!(worst <= tolerance, "{kind:?} {inverse}: {worst}");
                }
            }
        }
    }
}
