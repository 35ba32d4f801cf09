//! Rotary position embedding (Su et al., arXiv:2104.09864) of queries and keys, in one pass over memory.
//!
//! A head x of width e is a pair of halves, x = (x₁, x₂). The token at place p turns pair i by the angle p·ωᵢ
//! ([`Frequencies`]):
//!
//! - y₁ = x₁·cos(p·ω) − x₂·sin(p·ω)
//! - y₂ = x₂·cos(p·ω) + x₁·sin(p·ω)
//!
//! so that the product of a query at p with a key at p′ depends on p − p′ alone. Column i is paired with column i + e/2, as in
//! Hugging Face's Llama and Qwen2; Meta's own checkpoints pair neighbours, and are permuted when they are converted.
//!
//! # What is kept, and what it costs
//!
//! A rotation is orthogonal: the gradient of x is the upstream gradient turned back by the same angle. Backward reads nothing
//! but that gradient and the table, so forward keeps nothing (the positions are held, not copied, where they were given), and
//! the gradient is written over the upstream one where nobody else can see that. Composed of operators, `x·cos +
//! rotate_half(x)·sin` moves each of q and k some seven times and makes four temporaries of their size; here each is read once
//! and written once, and the row of the table once per token, for all heads of both.
//!
//! # Precision
//!
//! The table is computed in f64 and rounded to fp32 once. (transformers multiplies place and ω in fp32, which strays by up
//! to 10⁻³ rad at place 10⁴.) fp32, bf16 and fp16 are computed in fp32 and rounded once; f64 in f64, with the
//! fp32 table.
//!
//! ```
//! use runtime::fused::rope::{Frequencies, RotaryTable};
//! use tch::{Device, Kind, Tensor, kind};
//!
//! let table = RotaryTable::new(4, 16, &Frequencies::default(), Device::Cpu)?;
//! let q = Tensor::ones([1, 3, 2, 4], kind::FLOAT_CPU);
//! let k = Tensor::ones([1, 3, 1, 4], kind::FLOAT_CPU);
//! let (q, k) = table.rotate(&q, &k, None)?;
//! // Place 0 is not turned; place 2 turns the first pair by 2 rad.
//! assert_eq!(k.double_value(&[0, 0, 0, 0]), 1.0);
//! assert!((q.double_value(&[0, 2, 1, 0]) - (2f64.cos() - 2f64.sin())).abs() < 1e-6);
//! # Ok::<(), runtime::Error>(())
//! ```

mod frequencies;
mod function;

pub use frequencies::{Frequencies, Scaling};

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use tch::{Device, Kind, Tensor};

use crate::autograd;
use crate::error::{Error, Result};
use crate::sys::rope as sys;
use function::Rotate;

pub(crate) use sys::NAME;

/// Cosines and sines of every place. Its clones, one for each layer of a model, share its memory.
#[derive(Debug, Clone)]
pub struct RotaryTable {
    shared: Arc<Shared>,
}

/// Rows of a table that are computed at first, on the CPU: 4 MiB for heads of 128.
const FIRST_ROWS: i64 = 8192;

#[derive(Debug)]
struct Shared {
    places: i64,
    angles: Vec<f64>,
    device: Device,
    /// `[rows, 2, head / 2]`, fp32: the places that were needed so far, and not more than there are.
    rows: Mutex<Tensor>,
}

impl RotaryTable {
    /// The table of places 0 to `places` − 1 for heads of width `head`: `places · head` numbers of 4 bytes. On the CPU those beyond the
    /// first 8192 places are computed when such a place is first rotated.
    ///
    /// # Errors
    /// Those of [`Frequencies::angles`]; fewer than one place; too little memory.
    pub fn new(head: i64, places: i64, frequencies: &Frequencies, device: Device) -> Result<Self> {
        let angles = frequencies.angles(head)?;
        if places < 1 {
            return Err(Error::invalid(NAME, format!("{places} places; expected at least 1")));
        }
        // Elsewhere the places of given positions are not known without waiting for the device.
        let first = if device == Device::Cpu { places.min(FIRST_ROWS) } else { places };
        let rows = Mutex::new(rows(0..first, &angles)?.f_to_device(device)?);
        Ok(Self { shared: Arc::new(Shared { places, angles, device, rows }) })
    }

    /// How many places there are.
    pub fn places(&self) -> i64 {
        self.shared.places
    }

    /// Width of the heads.
    pub fn head(&self) -> i64 {
        2 * self.shared.angles.len() as i64
    }

    /// `[rows, 2, head / 2]`, fp32: the cosines of a place, then its sines, for the places below `needed` at least.
    ///
    /// # Errors
    /// More places than there are; too little memory.
    pub fn values(&self, needed: i64) -> Result<Tensor> {
        let Shared { places, ref angles, device, ref rows } = *self.shared;
        if needed > places {
            return Err(sys::beyond(needed - 1, places));
        }
        let mut computed = rows.lock();
        let known = computed.size()[0];
        if needed > known {
            // Twice as many, so that one place after the other does not copy the table each time.
            let enough = needed.max(known.saturating_mul(2)).min(places);
            let more = self::rows(known..enough, angles)?.f_to_device(device)?;
            *computed = Tensor::f_cat(&[&*computed, &more], 0)?;
        }
        Ok(computed.shallow_clone())
    }

    /// [`RotaryTable::values`] of the places of a call.
    fn values_for(&self, sequence: i64, positions: Option<&Tensor>) -> Result<Tensor> {
        let Some(positions) = positions else { return self.values(sequence) };
        let known = self.values(0)?;
        if known.size()[0] == self.places() || positions.numel() == 0 {
            return Ok(known);
        }
        let (least, most) = (i64::try_from(positions.f_min()?)?, i64::try_from(positions.f_max()?)?);
        if least < 0 {
            return Err(sys::beyond(least, self.places()));
        }
        self.values(most.saturating_add(1))
    }

    /// Rotates `q` `[b, t, heads, head]` and `k` `[b, t, kv_heads, head]`, of one dtype and any strides: windows of a joint
    /// projection are read where they lie. The token at `[b, t]` has the place `positions[b, t]` (int64), or t without
    /// `positions`. The results are contiguous.
    ///
    /// On the CPU a position outside the table is an error. On CUDA it ends the process's context, because to look first
    /// would wait for the device.
    ///
    /// # Errors
    /// Shapes, dtypes or devices that do not fit; a position outside the table; those of libtorch. A second derivative is
    /// computed.
    pub fn rotate(&self, q: &Tensor, k: &Tensor, positions: Option<&Tensor>) -> Result<(Tensor, Tensor)> {
        self.check(q, k, positions)?;
        let values = self.values_for(q.size()[1], positions)?;
        let function = Rotate::new(&values, positions, false)?;
        let [q, k]: [Tensor; 2] = autograd::apply(function, &[q, k])?
            .try_into()
            .map_err(|_| Error::invalid(NAME, "two tensors in, another number out"))?;
        Ok((q, k))
    }

    fn check(&self, q: &Tensor, k: &Tensor, positions: Option<&Tensor>) -> Result<()> {
        let invalid = |reason: String| Err(Error::invalid(NAME, reason));
        let (size, kind, device) = (q.size(), q.kind(), self.shared.device);
        let head = self.head();
        for (name, x) in [("q", q), ("k", k)] {
            let found = x.size();
            if found.len() != 4 || found[3] != head || found[..2] != size[..2] {
                let rows =
                    if size.len() == 4 { format!("{}, {}", size[0], size[1]) } else { "b, t".to_owned() };
                return invalid(format!("`{name}` has shape {found:?}; expected [{rows}, heads, {head}]"));
            }
            if x.kind() != kind || !sys::takes(kind) || x.device() != device {
                return invalid(format!(
                    "`{name}` is {:?} on {:?}; expected Float, Double, BFloat16 or Half, the same for q and k, on {device:?} \
                     where the table is",
                    x.kind(),
                    x.device()
                ));
            }
        }
        match positions {
            Some(positions)
                if positions.size() != size[..2]
                    || positions.kind() != Kind::Int64
                    || positions.device() != device =>
            {
                invalid(format!(
                    "positions are {:?} {:?} on {:?}; expected Int64 [{}, {}] on {device:?}",
                    positions.kind(),
                    positions.size(),
                    positions.device(),
                    size[0],
                    size[1]
                ))
            }
            None if size[1] > self.places() => Err(sys::beyond(size[1] - 1, self.places())),
            _ => Ok(()),
        }
    }
}

/// The rows of some places, on the CPU.
fn rows(places: Range<i64>, angles: &[f64]) -> Result<Tensor> {
    let (count, half) = ((places.end - places.start) as usize, angles.len());
    let mut values: Vec<f32> = Vec::new();
    let numbers = half.checked_mul(2).and_then(|width| width.checked_mul(count));
    if numbers.is_none_or(|numbers| values.try_reserve_exact(numbers).is_err()) {
        let head = 2 * half;
        return Err(Error::invalid(
            NAME,
            format!(
                "a table of {count} places for heads of {head} has 4 · {count} · {head} bytes, more memory than there is; make \
                 the model with fewer positions"
            ),
        ));
    }
    for place in places {
        let turned = |angle: &f64| (place as f64 * angle).sin_cos();
        values.extend(angles.iter().map(|angle| turned(angle).1 as f32));
        values.extend(angles.iter().map(|angle| turned(angle).0 as f32));
    }
    Ok(Tensor::f_from_slice(&values)?.f_reshape([count as i64, 2, half as i64])?)
}
