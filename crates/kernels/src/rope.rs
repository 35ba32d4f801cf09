//! Rotary position embedding (Su et al., arXiv:2104.09864) of queries and keys, in one pass over memory.
//!
//! A head x of width e is a pair of halves, x = (x₁, x₂). The token at position p rotates pair i by the angle p·ωᵢ, where
//! ωᵢ = theta^(−2i/e) unless the frequencies are scaled for longer rows:
//!
//! - y₁ = x₁·cos(p·ω) − x₂·sin(p·ω)
//! - y₂ = x₂·cos(p·ω) + x₁·sin(p·ω)
//!
//! so that the product of a query at p and a key at p′ depends on p − p′ alone. Column i is paired with column i + e/2, as in
//! Hugging Face's Llama and Qwen2; Meta's own checkpoints pair neighbours, and are permuted when they are converted.
//!
//! # Saved tensors and cost
//!
//! A rotation is orthogonal: the gradient of x is the upstream gradient rotated back by the same angle (and multiplied by the same
//! amplitude). Backward reads only that gradient and the table, so forward saves nothing (except a reference to given positions), and the
//! gradient overwrites the upstream one if nothing else uses it. As a chain of operators, `x·cos + rotate_half(x)·sin` moves each of q and
//! k about seven times and creates four temporaries of their size; here each is read and written once, and a row of the table is read once
//! per token for all heads of both.
//!
//! # Precision
//!
//! The table is computed in f64 and rounded to fp32 once. (transformers multiplies position and ω in fp32, which is off by up to
//! 10⁻³ rad at position 10⁴.) fp32, bf16 and fp16 are computed in fp32 and rounded once; f64 in f64, with the fp32 table.
//!
//! ```
//! use kernels::rope::RotaryTable;
//! use tch::{Device, Kind, Tensor, kind};
//!
//! let table = RotaryTable::new(4, 16, 1e4, Device::Cpu)?;
//! let q = Tensor::ones([1, 3, 2, 4], kind::FLOAT_CPU);
//! let k = Tensor::ones([1, 3, 1, 4], kind::FLOAT_CPU);
//! let (q, k) = table.rotate(&q, &k, None)?;
//! // Position 0 is not rotated; position 2 rotates the first pair by 2 rad.
//! assert_eq!(k.double_value(&[0, 0, 0, 0]), 1.0);
//! assert!((q.double_value(&[0, 2, 1, 0]) - (2f64.cos() - 2f64.sin())).abs() < 1e-6);
//! # Ok::<(), runtime::Error>(())
//! ```

mod cpu;
pub(crate) mod cuda;
mod function;
mod reference;

use std::ops::Range;
use std::sync::Arc;

use crate::processor::computes_on;
use function::Rotate;
use parking_lot::Mutex;
use runtime::autograd;
use runtime::device::graph::operators_only;
use runtime::profile::{Flops, is_counting, record_external};
use runtime::tensor_layout::TensorLayout;
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

pub(crate) use cpu::NAME;

/// Cosines and sines of every position. Clones, one for each layer of a model, share its memory.
#[derive(Debug, Clone)]
pub struct RotaryTable {
    shared: Arc<Shared>,
}

/// Initial rows of a table on the CPU: 4 MiB for heads of 128.
const FIRST_ROWS: i64 = 8192;

#[derive(Debug)]
struct Shared {
    positions: i64,
    angles: Vec<f64>,
    amplitude: f64,
    device: Device,
    /// The number of rows, and `[rows, 2, head / 2]`, fp32: the positions needed so far.
    rows: Mutex<(i64, Tensor)>,
}

impl RotaryTable {
    /// Creates the table of positions 0 to `positions` − 1 for heads of width `head`, whose pair i rotates by theta^(−2i/head) radians
    /// from one position to the next: `positions · head` numbers of 4 bytes. On the CPU, positions beyond the first 8192 are computed
    /// when first needed.
    ///
    /// # Errors
    /// An odd width or one below 2; a theta that is not a finite number above 0; fewer than one position; too little memory.
    pub fn new(head: i64, positions: i64, theta: f64, device: Device) -> Result<Self> {
        if head < 2 || head % 2 != 0 {
            let reason = format!("heads of width {head}; expected an even width from 2 on");
            return Err(Error::invalid(NAME, reason));
        }
        if !(theta.is_finite() && theta > 0.0) {
            let reason = format!("theta is {theta}; expected a finite number above 0");
            return Err(Error::invalid(NAME, reason));
        }
        let angles = (0..head / 2).map(|pair| theta.powf(-2.0 * pair as f64 / head as f64));
        Self::from_angles(angles.collect(), 1.0, positions, device)
    }

    /// Creates the table of positions 0 to `positions` − 1 for heads whose pair i rotates by `angles[i]` radians from one position to
    /// the next. Cosines and sines are multiplied by `amplitude`, and with them the rotated heads.
    ///
    /// # Errors
    /// No angle; angles or an amplitude that are not finite; fewer than one position; too little memory.
    pub fn from_angles(angles: Vec<f64>, amplitude: f64, positions: i64, device: Device) -> Result<Self> {
        if positions < 1 {
            return Err(Error::invalid(NAME, format!("{positions} positions; expected at least 1")));
        }
        if angles.is_empty() || !angles.iter().chain([&amplitude]).all(|number| number.is_finite()) {
            let reason =
                format!("angles {angles:?} and amplitude {amplitude}; expected at least one, all finite");
            return Err(Error::invalid(NAME, reason));
        }
        // On other devices, reading given positions would wait for the device.
        let first = if device == Device::Cpu { positions.min(FIRST_ROWS) } else { positions };
        let rows = Mutex::new((first, rows(0..first, &angles, amplitude)?.f_to_device(device)?));
        Ok(Self { shared: Arc::new(Shared { positions, angles, amplitude, device, rows }) })
    }

    /// Returns the number of positions.
    pub fn positions(&self) -> i64 {
        self.shared.positions
    }

    /// Returns the width of the heads.
    pub fn head(&self) -> i64 {
        2 * self.shared.angles.len() as i64
    }

    /// Returns `[rows, 2, head / 2]`, fp32: the cosines of a position, then its sines, for at least the positions below
    /// `needed`.
    ///
    /// # Errors
    /// More positions than the table has; too little memory.
    pub fn values(&self, needed: i64) -> Result<Tensor> {
        let Shared { positions, ref angles, amplitude, device, ref rows } = *self.shared;
        if needed > positions {
            return Err(cpu::beyond(needed - 1, positions));
        }
        let mut computed = rows.lock();
        let (known, values) = &*computed;
        if needed > *known {
            // Twice as many, so that increasing positions do not copy the table each time.
            let enough = needed.max(known.saturating_mul(2)).min(positions);
            let more = self::rows(*known..enough, angles, amplitude)?.f_to_device(device)?;
            *computed = (enough, Tensor::f_cat(&[values, &more], 0)?);
        }
        Ok(computed.1.shallow_clone())
    }

    /// Returns [`RotaryTable::values`] for the positions of a call.
    fn values_for(&self, sequence: i64, positions: Option<&Tensor>) -> Result<Tensor> {
        let Some(positions) = positions else { return self.values(sequence) };
        if operators_only() {
            // Without reading the positions.
            return self.values(self.positions());
        }
        let known = self.values(0)?;
        if known.size()[0] == self.positions() || positions.numel() == 0 {
            return Ok(known);
        }
        let (least, most) = (i64::try_from(positions.f_min()?)?, i64::try_from(positions.f_max()?)?);
        if least < 0 {
            return Err(cpu::beyond(least, self.positions()));
        }
        self.values(most.saturating_add(1))
    }

    /// Rotates `q` `[b, t, heads, head]` and `k` `[b, t, kv_heads, head]`, of one dtype and any strides, such as views of a joint
    /// projection; each may also be `[b, t, heads·head]`, as a projection returns it. The token at `[b, t]` has the position `positions[b, t]` (int64), or t without `positions`. The results are
    /// contiguous.
    ///
    /// On the CPU a position outside the table is an error. On CUDA it destroys the process's context, because a check would wait
    /// for the device.
    ///
    /// # Errors
    /// Shapes, dtypes or devices that do not fit; a position outside the table; errors of libtorch. Second derivatives are
    /// supported.
    pub fn rotate(&self, q: &Tensor, k: &Tensor, positions: Option<&Tensor>) -> Result<(Tensor, Tensor)> {
        let sequence = self.check(q, k, positions)?;
        let values = self.values_for(sequence, positions)?;
        let function = Rotate::new(values, self.shared.device, positions, false)?;
        let [q, k] = autograd::apply(function, &[q, k])?;
        Ok((q, k))
    }

    /// Rotates queries alone, as [`RotaryTable::rotate`] does.
    ///
    /// # Errors
    /// As [`RotaryTable::rotate`].
    pub fn rotate_queries(&self, q: &Tensor, positions: Option<&Tensor>) -> Result<Tensor> {
        let sequence = self.check(q, q, positions)?;
        let values = self.values_for(sequence, positions)?;
        let function = Rotate::new(values, self.shared.device, positions, false)?;
        let [q] = autograd::apply(function, &[q])?;
        Ok(q)
    }

    /// Returns the length of the rows.
    fn check(&self, q: &Tensor, k: &Tensor, positions: Option<&Tensor>) -> Result<i64> {
        let invalid = |reason: String| Err(Error::invalid(NAME, reason));
        let [q, k] = [TensorLayout::of(q)?, TensorLayout::of(k)?];
        let (size, kind, device) = (q.size(), q.kind(), self.shared.device);
        let head = self.head();
        for (name, x) in [("q", &q), ("k", &k)] {
            let x_size = x.size();
            let fits = match *x_size {
                [batch, sequence, _, width] => width == head && [batch, sequence] == size[..2],
                [batch, sequence, width] => width % head == 0 && [batch, sequence] == size[..2],
                _ => false,
            };
            if !fits {
                let rows =
                    if size.len() == 4 { format!("{}, {}", size[0], size[1]) } else { "b, t".to_owned() };
                return invalid(format!("`{name}` has shape {x_size:?}; expected [{rows}, heads, {head}]"));
            }
            if x.kind() != kind || !cpu::takes(kind) || x.device() != device {
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
            None if size[1] > self.positions() => Err(cpu::beyond(size[1] - 1, self.positions())),
            _ => Ok(size[1]),
        }
    }
}

/// A rotation of heads.
#[derive(Clone, Copy)]
struct Rotation<'a> {
    /// `[positions, 2, head / 2]`, fp32: the cosines of a position, then its sines.
    table: &'a Tensor,
    /// `[b, t]`, int64, contiguous; the index in its row if absent.
    positions: Option<&'a Tensor>,
    /// Whether to rotate by the negative angles.
    inverse: bool,
}

/// The pass on one kind of device.
trait RotaryPass {
    /// Rotates tensors `[b, t, heads, head]` or `[b, t, heads·head]`; with `overwrite` in place where nothing else uses their memory.
    fn rotate(&self, rotation: Rotation<'_>, tensors: &[&Tensor], overwrite: bool) -> Result<Vec<Tensor>>;
}

/// Rotates tensors `[b, t, heads·head]` as `[b, t, heads, head]`, by a pass that takes no others; `None` if all have the latter shape.
fn by_heads(
    pass: &dyn RotaryPass,
    rotation: Rotation<'_>,
    tensors: &[&Tensor],
) -> Result<Option<Vec<Tensor>>> {
    if tensors.iter().all(|x| x.dim() == 4) {
        return Ok(None);
    }
    let head = 2 * rotation.table.size()[2];
    let views = tensors.iter().map(|x| Ok(x.f_reshape([x.size()[0], x.size()[1], -1, head])?));
    let views: Vec<Tensor> = views.collect::<Result<_>>()?;
    let results = pass.rotate(rotation, &views.iter().collect::<Vec<_>>(), false)?;
    let shaped = results.iter().zip(tensors).map(|(result, x)| Ok(result.f_reshape(x.size())?));
    shaped.collect::<Result<_>>().map(Some)
}

/// Returns the fastest pass for tensors on `device`.
fn pass_for(device: Device) -> &'static dyn RotaryPass {
    if computes_on(device) { &cpu::Cpu } else { &cuda::Cuda }
}

/// Reports the bytes that a pass over these tensors read and wrote to running counters. Elementwise work counts no FLOPs.
fn record<'a>(tensors: impl Iterator<Item = &'a Tensor>) -> Result<()> {
    if !is_counting() {
        return Ok(());
    }
    let bytes = tensors.map(|x| (2 * x.numel() * x.kind().elt_size_in_bytes()) as u64).sum();
    record_external("runtime::rope", Flops::default(), bytes)
}

/// Returns the rows of some positions, on the CPU.
fn rows(positions: Range<i64>, angles: &[f64], amplitude: f64) -> Result<Tensor> {
    let (count, half) = ((positions.end - positions.start) as usize, angles.len());
    let mut values: Vec<f32> = Vec::new();
    let numbers = half.checked_mul(2).and_then(|width| width.checked_mul(count));
    if numbers.is_none_or(|numbers| values.try_reserve_exact(numbers).is_err()) {
        let head = 2 * half;
        return Err(Error::invalid(
            NAME,
            format!(
                "a table of {count} positions for heads of {head} has 4 · {count} · {head} bytes, more memory than there is; make \
                 the model with fewer positions"
            ),
        ));
    }
    for position in positions {
        let turned = |angle: &f64| (position as f64 * angle).sin_cos();
        values.extend(angles.iter().map(|angle| (amplitude * turned(angle).1) as f32));
        values.extend(angles.iter().map(|angle| (amplitude * turned(angle).0) as f32));
    }
    Ok(Tensor::f_from_slice(&values)?.f_reshape([count as i64, 2, half as i64])?)
}
