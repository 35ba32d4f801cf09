//! A matrix that a file holds twice: the embedding, and the same as the output head, quantised in another type.
//!
//! llama.cpp's converter writes both where a `config.json` does not tie them but has one matrix, and some quantisers do so for every
//! model. The copies a and b of one matrix differ by what quantising costs: with b bits a value, blocks of bell-shaped values have a
//! relative error of about 1.7·2⁻ᵇ (Q8_0 0.005, Q5_0 0.04, Q4_K 0.07). Two matrices that were trained apart differ by about √2. So they
//! are one matrix if ‖a − b‖ ≤ 4·2⁻ᵇ·‖a‖ with b of the coarser type, in each row of a sample.

use crate::error::Result;
use crate::reader::Reader;
use crate::tensor_type::TensorType;
use crate::writer::TensorInfo;

/// Rows that are compared, evenly over the matrix.
const SAMPLE: u64 = 512;

/// A tensor of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) file: usize,
    pub(super) position: usize,
}

/// Returns which of two tensors has more bits a value, if they are one matrix in each row of a sample.
///
/// # Errors
/// Errors of the files.
pub(super) fn finer(files: &[Reader], one: Place, other: Place) -> Result<Option<Place>> {
    let info = |place: Place| &files[place.file].header().tensors[place.position];
    let (first, second) = (info(one), info(other));
    let [rows, _] = first.shape[..] else { return Ok(None) };
    if first.shape != second.shape {
        return Ok(None);
    }
    let (finer, coarser) = if bits(first) >= bits(second) {
        (one, first.kind.max_error(second.kind))
    } else {
        (other, second.kind.max_error(first.kind))
    };
    let read = |place: Place, row: u64| files[place.file].rows(place.position, row..row + 1);
    let step = rows.div_ceil(SAMPLE).max(1);
    for row in (0..rows).step_by(step as usize) {
        let (a, b) = (read(one, row)?, read(other, row)?);
        let square = |x: f32| f64::from(x) * f64::from(x);
        let norm: f64 = a.iter().chain(&b).map(|x| square(*x)).sum::<f64>() / 2.0;
        let distance: f64 = a.iter().zip(&b).map(|(a, b)| square(a - b)).sum();
        // Not for values that are not finite, either.
        let is_close = distance <= coarser * coarser * norm;
        if !is_close {
            return Ok(None);
        }
    }
    Ok(Some(finer))
}

/// Bits a value, a scale's share included.
fn bits(info: &TensorInfo) -> f64 {
    let values: u64 = info.shape.iter().product();
    8.0 * info.bytes().unwrap_or(0) as f64 / values.max(1) as f64
}

impl TensorType {
    /// The largest relative distance of a matrix in this type and in another.
    fn max_error(self, other: Self) -> f64 {
        self.relative_error().max(other.relative_error())
    }

    fn relative_error(self) -> f64 {
        match self {
            Self::F32 => 0.0,
            Self::F16 => 2f64.powi(-11),
            Self::BF16 => 2f64.powi(-8),
            quantized => {
                const COLUMNS: u64 = 256;
                let bits = 8.0 * quantized.row_bytes(COLUMNS).unwrap_or(0) as f64 / COLUMNS as f64;
                4.0 * 2f64.powf(-bits)
            }
        }
    }
}
