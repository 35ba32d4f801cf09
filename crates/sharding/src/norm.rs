//! The gradient norm over all ranks.
//!
//! ‖g‖² = Σ over blocks of Σ over a block's elements of g², both in f64. A block has 512 rows of 8 squares: neighbours are added, row by row,
//! until one row is left, and then its halves; blocks are added in order. A block's sum is one rank's, so the result depends neither on the
//! number of ranks, nor on vector width, nor on the device: on a GPU each level is one operator over all blocks.

use runtime::collectives::ReduceConfig;
use tch::kind::Element;
use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::mesh::Mesh;

/// Elements of a block: shards begin at multiples of it.
pub const BLOCK: i64 = 4096;

/// Elements of a row of a block.
const LANES: usize = 8;

/// Blocks that a GPU squares at a time.
const AT_ONCE: i64 = 1024;

/// Returns the sum of squares of each block of a shard of `elements`, fp32 or fp64, whose values are in `pieces`, each with its first
/// element, in order; between them all are 0. The result is f64, `[blocks]`, on `device`, where the pieces are.
pub(crate) fn block_squares(elements: i64, pieces: &[(i64, Tensor)], device: Device) -> Result<Tensor> {
    if device != Device::Cpu {
        return squares_on_device(elements, pieces, device);
    }
    let squares = match pieces.first().map(|(_, piece)| piece.kind()) {
        Some(Kind::Double) => squares::<f64>(elements, pieces),
        _ => squares::<f32>(elements, pieces),
    }?;
    Ok(Tensor::f_from_slice(&squares)?)
}

/// [`block_squares`] by element-wise operators of libtorch, so that the order of additions is this function's. Nothing waits for the device.
fn squares_on_device(elements: i64, pieces: &[(i64, Tensor)], device: Device) -> Result<Tensor> {
    let _no_grad = tch::no_grad_guard();
    let mut all = vec![Tensor::f_zeros([0], (Kind::Double, device))?];
    for start in (0..elements).step_by((AT_ONCE * BLOCK) as usize) {
        let blocks = (elements - start + BLOCK - 1).div_euclid(BLOCK).min(AT_ONCE);
        let end = start + blocks * BLOCK;
        let mut values = Tensor::f_zeros([blocks * BLOCK], (Kind::Double, device))?;
        for (begin, piece) in pieces {
            let (from, to) = (start.max(*begin), end.min(begin + piece.numel() as i64));
            if from < to {
                let part = piece.f_narrow(0, from - begin, to - from)?;
                values.f_narrow(0, from - start, to - from)?.f_copy_(&part)?;
            }
        }
        values = values.f_mul(&values)?;
        let (mut rows, lanes) = (BLOCK / LANES as i64, LANES as i64);
        while rows > 1 {
            rows /= 2;
            let pairs = values.f_view([blocks, rows, 2, lanes])?;
            values = pairs.f_select(2, 0)?.f_add(&pairs.f_select(2, 1)?)?;
        }
        values = values.f_view([blocks, lanes])?;
        for half in [4, 2, 1] {
            values = values.f_narrow(1, 0, half)?.f_add(&values.f_narrow(1, half, half)?)?;
        }
        all.push(values.f_reshape([blocks])?);
    }
    Ok(Tensor::f_cat(&all, 0)?)
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

/// Adds the squares of a block's values. Of the pairs of rows that are not complete yet, the sums of each size are on a stack: a row that
/// completes pairs is added to those before it. What is behind the values is 0, which changes no sum.
fn sum_of_squares<T: Copy + Into<f64>>(values: &[T]) -> f64 {
    let mut stack: Vec<[f64; LANES]> = Vec::with_capacity(10);
    for (number, row) in values.chunks(LANES).enumerate() {
        let mut sums = [0.0; LANES];
        for (sum, value) in sums.iter_mut().zip(row) {
            *sum = (*value).into() * (*value).into();
        }
        for _ in 0..(number + 1).trailing_zeros() {
            sums = stack.pop().map_or(sums, |before| add_rows(before, sums));
        }
        stack.push(sums);
    }
    let last = stack.pop().unwrap_or_default();
    let sums = stack.into_iter().rev().fold(last, |sums, before| add_rows(before, sums));
    let [a, b, c, d, e, f, g, h] = sums;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

fn add_rows(mut a: [f64; LANES], b: [f64; LANES]) -> [f64; LANES] {
    a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
    a
}

/// A bucket's blocks: this rank's sums of squares, the number of the first, and how many all ranks have.
pub(crate) struct Blocks {
    pub(crate) squares: Tensor,
    pub(crate) first: i64,
    pub(crate) count: i64,
}

/// Returns the norm, given all buckets' blocks.
pub(crate) fn global_norm(mesh: &Mesh, buckets: &[Blocks]) -> Result<f64> {
    let count = buckets.iter().map(|blocks| blocks.count).sum::<i64>();
    let all = Tensor::f_zeros([count], (Kind::Double, mesh.device()))?;
    let mut start = 0;
    for Blocks { squares, first, count } in buckets {
        all.f_narrow(0, start + first, squares.numel() as i64)?.f_copy_(squares)?;
        start += count;
    }
    // Zeros on all ranks but one: exact.
    mesh.shard.all_reduce(&all, ReduceConfig::default(), "gradient norm")?;
    Ok(Vec::<f64>::try_from(all.f_to_device(Device::Cpu)?)?.iter().sum::<f64>().sqrt())
}

#[cfg(test)]
mod tests {
    use runtime::collectives::Group;

    use super::*;

    #[test]
    fn the_norm_is_that_of_all_elements() {
        for kind in [Kind::Float, Kind::Double] {
            // 1/3 is not an fp32 number.
            let shard = Tensor::arange(10_000, (kind, Device::Cpu)) / 3.0;
            let squares = block_squares(10_000, &[(0, shard.shallow_clone())], Device::Cpu).unwrap();
            assert_eq!(squares.size(), [3]);
            let blocks = Blocks { squares, first: 0, count: 3 };
            let norm = global_norm(&Mesh::from(&Group::alone()), &[blocks]).unwrap();
            let expected = shard.to_kind(Kind::Double).norm().double_value(&[]);
            assert!((norm / expected - 1.0).abs() < 1e-13, "{norm}, expected {expected}");
        }
    }

    #[test]
    fn pieces_have_the_sums_of_the_whole_with_zeros_between_by_both_ways() {
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
        let expected = block_squares(20_000, &[(0, sums.shallow_clone())], Device::Cpu).unwrap();
        assert_eq!(expected.size(), [5]);
        for found in
            [block_squares(20_000, &pieces, Device::Cpu), squares_on_device(20_000, &pieces, Device::Cpu)]
        {
            assert!(found.unwrap().equal(&expected), "other bits");
        }
        let _ = sums.zero_();
        for none in [block_squares(20_000, &[], Device::Cpu), squares_on_device(20_000, &[], Device::Cpu)] {
            assert_eq!(Vec::<f64>::try_from(none.unwrap()).unwrap(), [0.0; 5]);
        }
    }

    #[test]
    fn a_device_has_the_bits_of_the_host_over_many_blocks() {
        let elements = (AT_ONCE + 2) * BLOCK + 77;
        let values = Tensor::arange(elements, (Kind::Float, Device::Cpu)).sin();
        let pieces = [(0, values)];
        let host = block_squares(elements, &pieces, Device::Cpu).unwrap();
        assert!(squares_on_device(elements, &pieces, Device::Cpu).unwrap().equal(&host));
        assert_eq!(host.size(), [AT_ONCE + 3]);
    }
}
