//! The tensors that operations take: contiguous memory on the group's device, divided among ranks.

use tch::{Device, Tensor};

use super::Division;
use super::group::Group;
use crate::autograd::GradMode;
use crate::error::{Error, Result};
use crate::sys::tensor::memory_range;

impl Group {
    pub(super) fn invalid(&self, operation: &'static str, label: &str, reason: &str) -> Error {
        Error::invalid(operation, format!("`{label}`: {reason}"))
    }

    pub(super) fn check_peer(&self, operation: &'static str, peer: usize) -> Result<()> {
        if peer < self.size() && peer != self.rank() {
            return Ok(());
        }
        let reason = format!("rank {} has no peer {peer} in a group of {}", self.rank(), self.size());
        Err(Error::invalid(operation, reason))
    }

    pub(super) fn check_tensor(&self, operation: &'static str, what: &str, tensor: &Tensor) -> Result<()> {
        let refuse = |is: String| {
            let place = match self.device() {
                Device::Cpu => "the CPU".to_owned(),
                device => format!("{}, the group's device", crate::device::flag(device)),
            };
            Err(Error::invalid(operation, format!("{what} {is}; expected contiguous memory on {place}")))
        };
        if !tensor.defined() {
            return refuse("is undefined".to_owned());
        }
        if tensor.device() != self.device() {
            return refuse(format!("is on {}", crate::device::flag(tensor.device())));
        }
        if tensor.is_sparse() || !tensor.is_contiguous() {
            return refuse(format!("of shape {:?} is not contiguous", tensor.size()));
        }
        Ok(())
    }

    /// Returns the elements of a tensor in one dimension, without history.
    pub(super) fn flat(&self, operation: &'static str, what: &str, tensor: &Tensor) -> Result<Tensor> {
        self.check_tensor(operation, what, tensor)?;
        let _no_grad = GradMode::off();
        Ok(tensor.f_detach()?.f_view([-1])?)
    }

    pub(super) fn check_division(
        &self,
        operation: &'static str,
        whole: &Tensor,
        division: Division,
        shard: &Tensor,
    ) -> Result<()> {
        let (elements, per_rank) = (division.elements, division.per_rank);
        let covered = i64::try_from(self.size()).is_ok_and(|size| per_rank.saturating_mul(size) >= elements);
        let (whole, shard) = (whole.numel() as i64, shard.numel() as i64);
        if elements >= 0 && covered && whole == elements && shard == division.len(self.rank()) {
            return Ok(());
        }
        let reason = format!(
            "the whole tensor has {whole} elements and the shard of rank {} has {shard}; expected {elements} and {}, as {per_rank} \
             per rank give for {} ranks",
            self.rank(),
            division.len(self.rank()),
            self.size()
        );
        Err(Error::invalid(operation, reason))
    }
}

pub(super) fn byte_count(tensor: &Tensor) -> u64 {
    (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64
}

/// The part of a flat tensor that a rank has.
pub(super) fn part(whole: &Tensor, division: Division, rank: usize) -> Result<Tensor> {
    let _no_grad = GradMode::off();
    Ok(whole.f_narrow(0, division.range(rank).start, division.len(rank))?)
}

/// Whether two tensors share memory.
pub(super) fn overlap(a: &Tensor, b: &Tensor) -> Result<bool> {
    let (a, b) = (memory_range(a)?, memory_range(b)?);
    Ok(a.start < b.end && b.start < a.end)
}
