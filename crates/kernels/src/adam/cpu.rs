//! A step of Adam in one pass over memory, with its checks.

use std::ops::Range;

use half::{bf16, f16};
use runtime::tensor_memory::{bump_version, memory_range};
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

mod kernel;

use kernel::{Coefficients, Pass};

pub(crate) const NAME: &str = "fused adam";

/// The hyperparameters of a step. The defaults are those of PyTorch's AdamW, for the first step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamStep {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first moment, in [0, 1).
    pub beta1: f64,
    /// Decay of the second moment, in [0, 1).
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// λ, the weight decay.
    pub weight_decay: f64,
    /// AdamW: the parameter shrinks by `lr · weight_decay`. Else Adam: `weight_decay · parameter` is added to the gradient.
    pub decoupled: bool,
    /// The step number, from 1.
    pub step: u64,
    /// Factor of the gradient, for clipping, with the rounding of an in-place product: the factor is rounded to the gradient's
    /// dtype, and so is the product. The gradient itself is not written.
    pub gradient_factor: Option<f64>,
}

impl Default for AdamStep {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 1e-2,
            decoupled: true,
            step: 1,
            gradient_factor: None,
        }
    }
}

/// The tensors of a step: of one shape, contiguous, on one device, without overlap. They may be views of flat buffers.
#[derive(Clone, Copy, Debug)]
pub struct AdamTensors<'a> {
    /// The gradient, in fp32, bf16 or fp16; read.
    pub gradient: &'a Tensor,
    /// The parameter, in fp32; updated.
    pub master: &'a Tensor,
    /// The first moment, in fp32; updated.
    pub exp_avg: &'a Tensor,
    /// The second moment, in fp32; updated.
    pub exp_avg_sq: &'a Tensor,
    /// The parameter in bf16 or fp16, rounded to nearest, ties to even; written.
    pub weight: Option<&'a Tensor>,
}

/// See [`super::adam`].
pub(crate) fn step(tensors: &AdamTensors<'_>, step: &AdamStep) -> Result<()> {
    let AdamTensors { gradient, master, exp_avg, exp_avg_sq, weight } = *tensors;
    check(tensors, Device::Cpu)?;
    let elements = master.numel();
    if elements == 0 {
        return Ok(());
    }
    let address = |tensor: &Tensor| tensor.data_ptr() as usize;
    let pass = Pass {
        elements,
        gradient: address(gradient),
        master: address(master),
        exp_avg: address(exp_avg),
        exp_avg_sq: address(exp_avg_sq),
        weight: weight.map_or(0, address),
        coefficients: Coefficients::of(step),
    };
    let out = weight.map_or(Kind::BFloat16, Tensor::kind);
    macro_rules! run {
        ($gradient:ty) => {
            // SAFETY: every tensor has this many dense elements of its type on the CPU, and written tensors overlap no other
            // (checked above); they outlive the call.
            unsafe {
                match out {
                    Kind::Half => kernel::run::<$gradient, f16>(pass),
                    _ => kernel::run::<$gradient, bf16>(pass),
                }
            }
        };
    }
    match gradient.kind() {
        Kind::BFloat16 => run!(bf16),
        Kind::Half => run!(f16),
        _ => run!(f32),
    }?;
    [Some(master), Some(exp_avg), Some(exp_avg_sq), weight].into_iter().flatten().try_for_each(bump_version)
}

/// Refuses tensors that differ in shape, are not dense, not on `device`, of unsupported dtypes, or overlap.
pub(crate) fn check(tensors: &AdamTensors<'_>, device: Device) -> Result<()> {
    let AdamTensors { gradient, master, exp_avg, exp_avg_sq, weight } = *tensors;
    let low = [Kind::BFloat16, Kind::Half];
    let all = [
        ("master", Some(master), &[Kind::Float][..]),
        ("exp_avg", Some(exp_avg), &[Kind::Float]),
        ("exp_avg_sq", Some(exp_avg_sq), &[Kind::Float]),
        ("weight", weight, &low),
        ("gradient", Some(gradient), &[Kind::Float, Kind::BFloat16, Kind::Half]),
    ];
    let mut ranges: Vec<(&str, Range<usize>)> = Vec::new();
    for (name, tensor, kinds) in all {
        let Some(tensor) = tensor else { continue };
        ranges.push((name, memory(name, tensor, kinds, master, device)?));
    }
    for (index, (name, range)) in ranges.iter().enumerate() {
        let meets = |other: &&(&str, Range<usize>)| other.1.start < range.end && range.start < other.1.end;
        if let Some((other, _)) = ranges[..index].iter().find(meets) {
            let reason = format!("`{name}` overlaps `{other}` in memory; give it memory of its own");
            return Err(Error::invalid(NAME, reason));
        }
    }
    Ok(())
}

/// Returns the address range of a tensor, checked to be dense, of the master's shape and of one of `kinds`.
fn memory(
    name: &str,
    tensor: &Tensor,
    kinds: &[Kind],
    master: &Tensor,
    device: Device,
) -> Result<Range<usize>> {
    let refuse = |reason: String| Err(Error::invalid(NAME, reason));
    if !tensor.defined() {
        return refuse(format!("`{name}` is undefined"));
    }
    if tensor.device() != device {
        let found = tensor.device();
        return refuse(format!("`{name}` is on {found:?}; expected {device:?}"));
    }
    if !kinds.contains(&tensor.kind()) {
        let remedy = if name == "weight" && tensor.kind() == Kind::Float {
            "; a weight in fp32 is the master itself, so give none"
        } else {
            ""
        };
        let kind = tensor.kind();
        return refuse(format!("`{name}` is {kind:?}; expected one of {kinds:?}{remedy}"));
    }
    if tensor.size() != master.size() {
        let (size, expected) = (tensor.size(), master.size());
        return refuse(format!("`{name}` is {size:?} and `master` {expected:?}; they must be equal"));
    }
    if tensor.is_sparse() || tensor.is_neg() || !tensor.is_contiguous() {
        let stride = if tensor.is_sparse() { Vec::new() } else { tensor.stride() };
        return refuse(format!("`{name}` has strides {stride:?} or is no plain memory; make it contiguous"));
    }
    memory_range(tensor)
}
