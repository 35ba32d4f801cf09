//! Stochastic rounding of many tensors as one CUDA kernel.

use runtime::tensor_memory::bump_version;
use runtime::{Error, Result};
use tch::Tensor;

use super::reference::Reference;
use super::{NAME, Rounding, RoundingPass, StepNumber};
use crate::cuda::{Source, are_ready, launch, table, type_of};

pub(crate) const SOURCE: Source = Source(include_str!("stochastic_rounding.cuh"));

/// Threads and numbers of a block, all of one tensor; the numbers are a multiple of the four that share a hash.
const THREADS: u32 = 128;
const CHUNK: u64 = 4096;

/// The kernel in CUDA C++, many tensors in a launch, and [`Reference`] without NVRTC.
pub(super) struct Cuda;

impl RoundingPass for Cuda {
    fn round(&self, all: &[Rounding<'_>]) -> Result<()> {
        if round(all)? { Ok(()) } else { Reference.round(all) }
    }
}

/// Rounds contiguous sources into contiguous targets on one device, as the caller has checked; returns false, with nothing changed,
/// without kernels.
fn round(all: &[Rounding<'_>]) -> Result<bool> {
    let Some(device) = all.first().map(|first| first.source.device()) else { return Ok(true) };
    if !are_ready(device) {
        return Ok(false);
    }
    if let Some(other) = all.iter().find(|one| one.source.device() != device) {
        let reason = format!(
            "{:?} beside tensors on {device:?}; round the tensors of each device apart",
            other.source
        );
        return Err(Error::invalid(NAME, reason));
    }
    let address = |tensor: &Tensor| tensor.data_ptr() as u64;
    let entries = all.iter().map(|one| {
        let Rounding { source, target, stream, step } = one;
        let (host, step) = match step {
            StepNumber::Host(step) => (*step, 0),
            StepNumber::Device(step) => (0, address(step)),
        };
        let members = [address(source), address(target), stream.key(), stream.first(), host, step];
        (target.kind(), members, source.numel())
    });
    for group in table::launches(entries, CHUNK) {
        let target_type = type_of(group.kind)
            .ok_or_else(|| Error::invalid(NAME, format!("a target of {:?}", group.kind)))?;
        let expression = format!("stochastic_rounding<{target_type}, {THREADS}, {CHUNK}>");
        launch(SOURCE, &expression, device, (group.blocks, THREADS), &group.arguments())?;
    }
    all.iter().try_for_each(|one| bump_version(one.target))?;
    Ok(true)
}
