//! The gradient norm over all ranks.
//!
//! ‖g‖² = Σ over blocks of Σ over a block's elements of g², both in f64 and in order. A block's sum is one rank's, so the result
//! depends neither on the number of ranks nor on vector width.

use runtime::collectives::{Group, ReduceOptions};
use tch::kind::Element;
use tch::{Device, Kind, Tensor};

use crate::Result;

/// Elements of a block: shards begin at multiples of it.
pub const BLOCK: i64 = 4096;

/// Returns the sum of squares of each block of `shard`, fp32 or fp64.
pub(crate) fn block_squares(shard: &Tensor) -> Result<Vec<f64>> {
    match shard.kind() {
        Kind::Double => squares::<f64>(shard),
        _ => squares::<f32>(shard),
    }
}

fn squares<T: Element + Copy + Default + Into<f64>>(shard: &Tensor) -> Result<Vec<f64>> {
    let count = shard.numel() as i64;
    let mut values = vec![T::default(); BLOCK as usize];
    let mut squares = Vec::new();
    for start in (0..count).step_by(BLOCK as usize) {
        let length = BLOCK.min(count - start);
        let block = &mut values[..length as usize];
        shard.f_narrow(0, start, length)?.f_copy_data(block, length as usize)?;
        squares.push(sum_of_squares(block));
    }
    Ok(squares)
}

/// Eight partial sums, so that the compiler can use vectors; their number is fixed, and so is the result.
fn sum_of_squares<T: Copy + Into<f64>>(values: &[T]) -> f64 {
    let square = |value: &T| (*value).into() * (*value).into();
    let (mut sums, chunks) = ([0.0f64; 8], values.chunks_exact(8));
    let rest = chunks.remainder();
    for chunk in chunks {
        for (sum, value) in sums.iter_mut().zip(chunk) {
            *sum += square(value);
        }
    }
    let rest: f64 = rest.iter().map(square).sum();
    sums.iter().sum::<f64>() + rest
}

/// Returns the norm, given for each bucket this rank's blocks: the number of the first, the sums, and the number of all.
pub(crate) fn global_norm(group: &Group, buckets: &[(usize, Vec<f64>, usize)]) -> Result<f64> {
    let mut all = Vec::new();
    for (first, own, count) in buckets {
        let start = all.len() + first;
        all.resize(all.len() + count, 0.0);
        all[start..start + own.len()].copy_from_slice(own);
    }
    let all = Tensor::f_from_slice(&all)?.f_to_kind(Kind::Double)?.f_to_device(Device::Cpu)?;
    // Zeros on all ranks but one: exact.
    group.all_reduce(&all, ReduceOptions::default(), "gradient norm")?;
    Ok(Vec::<f64>::try_from(all)?.iter().sum::<f64>().sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_norm_is_that_of_all_elements() {
        for kind in [Kind::Float, Kind::Double] {
            // 1/3 is not an fp32 number.
            let shard = Tensor::arange(10_000, (kind, Device::Cpu)) / 3.0;
            let squares = block_squares(&shard).unwrap();
            assert_eq!(squares.len(), 3);
            let norm = global_norm(&Group::alone(), &[(0, squares, 3)]).unwrap();
            let expected = shard.to_kind(Kind::Double).norm().double_value(&[]);
            assert!((norm / expected - 1.0).abs() < 1e-13, "{norm}, expected {expected}");
        }
    }
}
