//! Noise of embeddings in training (NEFTune: Jain et al., arXiv:2310.05914).
//!
//! Each number of a token's embedding gets a number that is uniform in ±α/√(L·d), where d is the width and L are the positions of the token's
//! example: the tokens that the model reads of a row, or of a document of a packed row. As the authors' code has it, padding gets none and does
//! not count in L. transformers' hook has the padded length of the batch for every L, and with packing that of the packed row, so that an
//! example's noise depends on what it shares a batch with.
//!
//! The noise is a function of the step's seed, the micro-batch and the position in it ([`models::add_noise`]), so that a step that is computed
//! again, on other ranks or in another process has the same bits. There is none in evaluations, and none in the passes of a preference's
//! reference.

use dataloading::Batch;
use tch::Tensor;

use crate::error::Result;

/// Why steps with noise are not captured.
pub const NOT_CAPTURED: &str = "the noise of embeddings (NEFTune) depends on lengths that the host knows";

/// Returns α/√L of each position of a batch, `[rows, length]` in fp32; 0 for padding.
pub(crate) fn strength(batch: &Batch, alpha: f64) -> Result<Tensor> {
    let (rows, length) = batch.tokens.size2()?;
    let (count, length) = (rows as usize, length as usize);
    let of = |positions: usize| (alpha / (positions as f64).sqrt()) as f32;
    let padding = |row: usize| batch.padding.get(row).map_or(0, |padding| *padding as usize);
    let mut all = Vec::with_capacity(count * length);
    match &batch.packing {
        None => (0..count).for_each(|row| {
            let positions = length - padding(row);
            all.extend(std::iter::repeat_n(of(positions.max(1)), positions));
            all.resize((row + 1) * length, 0.0);
        }),
        Some(packing) => {
            for ends in packing.starts.windows(2) {
                let positions = (ends[1] - ends[0]) as usize;
                all.extend(std::iter::repeat_n(of(positions.max(1)), positions));
            }
            for row in 0..count {
                let end = (row + 1) * length;
                all[end - padding(row)..end].fill(0.0);
            }
        }
    }
    let device = batch.tokens.device();
    Ok(Tensor::f_from_slice(&all)?.f_reshape([rows, length as i64])?.f_to_device(device)?)
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;
    use crate::Batches;
    use crate::masked_rows::Arrangement::{self, Packed, Padded, PaddingFree};
    use crate::masked_rows::{Layout, MaskedBatches, MaskedRow};

    fn strengths(arrangement: Arrangement, batch: usize) -> Vec<Vec<f64>> {
        let row = |tokens: i64| MaskedRow::new((0..tokens).collect(), (0..tokens).collect());
        let layout = Layout { batch, arrangement, ..Layout::default() };
        let rows = vec![row(5), row(2), row(10)];
        let batch = MaskedBatches::new(rows, layout, Device::Cpu).unwrap().next().unwrap().unwrap();
        Vec::<Vec<f64>>::try_from(&strength(&batch, 6.0).unwrap().to_kind(tch::Kind::Double)).unwrap()
    }

    #[test]
    fn each_example_has_its_own_length() {
        let padded = strengths(Padded, 3);
        assert_eq!(padded[0], [[3.0; 4].as_slice(), &[0.0; 5]].concat());
        assert_eq!(padded[1], [[6.0; 1].as_slice(), &[0.0; 8]].concat());
        assert_eq!(padded[2], [2.0; 9]);
        assert_eq!(strengths(PaddingFree, 3), [[[3.0; 4].as_slice(), &[6.0; 1], &[2.0; 9]].concat()]);
        // Documents of 9 and of 4 and 1 positions, and padding.
        let packed = strengths(Packed(9), 2);
        let mut rows = packed.clone();
        rows.sort_by(|a, b| a[0].total_cmp(&b[0]));
        assert_eq!(rows[0], [2.0; 9]);
        let mut second = rows[1].clone();
        second.sort_by(f64::total_cmp);
        assert_eq!(second, [[0.0; 4].as_slice(), &[3.0; 4], &[6.0; 1]].concat());
        assert_eq!(rows[1][5..], [0.0; 4]);
    }
}
