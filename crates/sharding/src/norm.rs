//! The gradient norm over all ranks.
//!
//! ‖g‖² = Σ over blocks of Σ over a block's elements of g², both in f64 and in order. A block's sum is one rank's, so the result
//! depends neither on the number of ranks nor on vector width.

use runtime::collectives::{Group, ReduceConfig};
use tch::kind::Element;
use tch::{Device, Kind, Tensor};

use crate::Result;

/// Elements of a block: shards begin at multiples of it.
pub const BLOCK: i64 = 4096;

/// Returns the sum of squares of each block of a shard of `elements`, fp32 or fp64, whose values are in `pieces`, each with its first
/// element, in order; between them all are 0.
pub(crate) fn block_squares(elements: i64, pieces: &[(i64, Tensor)]) -> Result<Vec<f64>> {
    match pieces.first().map(|(_, piece)| piece.kind()) {
        Some(Kind::Double) => squares::<f64>(elements, pieces),
        _ => squares::<f32>(elements, pieces),
    }
}

fn squares<T: Element + Copy + Default + Into<f64>>(
    elements: i64,
    pieces: &[(i64, Tensor)],
) -> Result<Vec<f64>> {
    let mut values = vec![T::default(); BLOCK as usize];
    let (mut squares, mut first) = (Vec::new(), 0);
    for start in (0..elements).step_by(BLOCK as usize) {
        let length = BLOCK.min(elements - start);
        let block = &mut values[..length as usize];
        let mut filled = 0;
        for (begin, piece) in &pieces[first..] {
            let (from, to) = ((begin - start).max(0), (begin + piece.numel() as i64 - start).min(length));
            if from >= length {
                break;
            }
            if from < to {
                block[filled..from as usize].fill(T::default());
                filled = to as usize;
                let part = piece.f_narrow(0, start + from - begin, to - from)?;
                part.f_copy_data(&mut block[from as usize..filled], (to - from) as usize)?;
            }
            first += usize::from(begin + piece.numel() as i64 <= start + length);
        }
        block[filled..].fill(T::default());
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
    group.all_reduce(&all, ReduceConfig::default(), "gradient norm")?;
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
            let squares = block_squares(10_000, &[(0, shard.shallow_clone())]).unwrap();
            assert_eq!(squares.len(), 3);
            let norm = global_norm(&Group::alone(), &[(0, squares, 3)]).unwrap();
            let expected = shard.to_kind(Kind::Double).norm().double_value(&[]);
            assert!((norm / expected - 1.0).abs() < 1e-13, "{norm}, expected {expected}");
        }
    }

    #[test]
    fn pieces_have_the_sums_of_the_whole_with_zeros_between() {
        // Within a block, over its end, over several blocks, empty, at the very end.
        let ranges =
            [(3, 70), (128, 4100), (4160, 13_000), (13_056, 13_056), (13_056, 13_057), (16_000, 20_000)];
        let mut sums = Tensor::zeros([20_000], (Kind::Float, Device::Cpu));
        let pieces: Vec<(i64, Tensor)> = ranges
            .into_iter()
            .map(|(start, end)| {
                let piece = Tensor::arange_start(start, end, (Kind::Float, Device::Cpu)).sin();
                sums.narrow(0, start, end - start).copy_(&piece);
                (start, piece)
            })
            .collect();
        let expected = block_squares(20_000, &[(0, sums.shallow_clone())]).unwrap();
        assert_eq!(block_squares(20_000, &pieces).unwrap(), expected);
        assert_eq!(expected.len(), 5);
        let _ = sums.zero_();
        assert_eq!(block_squares(20_000, &[]).unwrap(), [0.0; 5]);
    }
}
