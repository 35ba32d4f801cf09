//! Operations that move tensors: point to point, gathers and broadcasts. And the barrier.

use tch::Tensor;

use super::Division;
use super::failure::of_barrier;
use super::group::Group;
use super::operands::{byte_count, overlap, part};
use super::operation_log::Progress;
use super::work::{Operation, Work};
use crate::autograd::GradMode;
use crate::error::Result;
use crate::sys::collectives::Native;
use crate::sys::tensor::bump_version;

impl Group {
    /// Begins to send a tensor to another rank, which receives it with [`Group::recv`]. The n-th tensor sent to a rank is the n-th that
    /// it receives from this one. `label` names the transfer in errors. On GPUs, of two ranks that send to each other one
    /// [receives first](super#gpus).
    ///
    /// # Errors
    /// A tensor that is not contiguous and on the group's device; a rank that is not another one of the group; a dead group.
    pub fn send(&self, tensor: &Tensor, to: usize, label: &str) -> Result<Work> {
        self.check_peer("send", to)?;
        self.check_tensor("send", "the tensor", tensor)?;
        let operation = self.begin("send", label, byte_count(tensor))?;
        let pending = self.exchange(&operation, Vec::new(), vec![(to, tensor.shallow_clone())])?;
        Ok(Work::new(self, operation, pending))
    }

    /// Begins to receive a tensor from another rank into `tensor`, of the shape and dtype that is sent.
    ///
    /// # Errors
    /// Errors of [`Group::send`].
    pub fn recv(&self, tensor: &Tensor, from: usize, label: &str) -> Result<Work> {
        self.check_peer("recv", from)?;
        self.check_tensor("recv", "the tensor", tensor)?;
        let operation = self.begin("recv", label, 0)?;
        bump_version(tensor)?;
        let pending = self.exchange(&operation, vec![(from, tensor.shallow_clone())], Vec::new())?;
        Ok(Work::new(self, operation, pending))
    }

    /// Begins to gather a divided tensor: each rank's `shard` arrives in its place in `whole`, on every rank. The shards are
    /// received in place, and `shard` may be this rank's part of `whole` itself. Each rank sends its shard to every other: as the
    /// shards of a division are, `(N − 1) / N` of the whole tensor.
    ///
    /// # Errors
    /// Tensors that are not contiguous, on the group's device, of one dtype and of the division's sizes; a shard that overlaps `whole` elsewhere
    /// than in its place; a dead group.
    pub fn all_gather(
        &self,
        whole: &Tensor,
        division: Division,
        shard: &Tensor,
        label: &str,
    ) -> Result<Work> {
        const NAME: &str = "all_gather";
        let whole = self.flat(NAME, "the whole tensor", whole)?;
        let shard = self.flat(NAME, "the shard", shard)?;
        self.check_division(NAME, &whole, division, &shard)?;
        if whole.kind() != shard.kind() {
            let reason =
                format!("the shard is {:?}; expected {:?}, as the whole tensor", shard.kind(), whole.kind());
            return Err(self.invalid(NAME, label, &reason));
        }
        let own = part(&whole, division, self.rank())?;
        let in_place = own.data_ptr() == shard.data_ptr();
        if !in_place && overlap(&whole, &shard)? {
            return Err(self.invalid(NAME, label, "the shard overlaps another part of the whole tensor"));
        }
        let bytes = byte_count(&shard) * (self.size() as u64 - 1);
        let operation = self.begin(NAME, label, bytes)?;
        if self.is_over_nccl() && division.is_equal(self.size()) {
            let pending = self.native(&operation, Native::AllGather, &shard, Some(&whole))?;
            self.count(bytes, bytes);
            return Ok(Work::new(self, operation, pending));
        }
        bump_version(&whole)?;
        let copy_own = || -> Result<()> {
            if !in_place && shard.numel() > 0 {
                let _no_grad = GradMode::off();
                own.shallow_clone().f_copy_(&shard)?;
            }
            Ok(())
        };
        // On a device it is enqueued, so that the stream that waits for the messages waits for the copy, too. On the CPU it overlaps
        // them.
        if self.is_over_nccl() {
            copy_own()?;
        }
        let receives = self.others().map(|from| Ok((from, part(&whole, division, from)?)));
        let receives = receives.collect::<Result<Vec<_>>>()?;
        let sends = self.others().map(|to| (to, shard.shallow_clone())).collect();
        let pending = self.exchange(&operation, receives, sends)?;
        let work = Work::new(self, operation, pending);
        if !self.is_over_nccl() {
            copy_own()?;
        }
        Ok(work)
    }

    /// Begins to exchange equal parts: part r of `source` goes to rank r, and part r of `target` comes from rank r. Each rank sends
    /// `(N − 1) / N` of its tensor.
    ///
    /// # Errors
    /// Tensors that are not contiguous, on the group's device, of one dtype and size; a number of elements that the ranks do not divide;
    /// tensors that overlap; a dead group.
    pub fn all_to_all(&self, target: &Tensor, source: &Tensor, label: &str) -> Result<Work> {
        const NAME: &str = "all_to_all";
        let target = self.flat(NAME, "the target", target)?;
        let source = self.flat(NAME, "the source", source)?;
        let (elements, size) = (source.numel(), self.size());
        let refuse = |reason: String| Err(self.invalid(NAME, label, &reason));
        if (target.numel(), target.kind()) != (elements, source.kind()) {
            return refuse(format!(
                "the target has {} elements of {:?} and the source {elements} of {:?}; expected the same",
                target.numel(),
                target.kind(),
                source.kind()
            ));
        }
        if !elements.is_multiple_of(size) {
            return refuse(format!(
                "{elements} elements; expected a multiple of {size}, a part for each rank"
            ));
        }
        if overlap(&target, &source)? {
            return refuse("the target overlaps the source".to_owned());
        }
        let division = Division::even(elements as i64, size);
        let own = [part(&target, division, self.rank())?, part(&source, division, self.rank())?];
        let operation = self.begin(NAME, label, byte_count(&own[0]) * (size as u64 - 1))?;
        bump_version(&target)?;
        let copy_own = || -> Result<()> {
            let _no_grad = GradMode::off();
            let [target, source] = &own;
            Ok(target.shallow_clone().f_copy_(source)?)
        };
        // As in a gather.
        if self.is_over_nccl() {
            copy_own()?;
        }
        let parts = |whole: &Tensor| -> Result<Vec<_>> {
            self.others().map(|rank| Ok((rank, part(whole, division, rank)?))).collect()
        };
        let pending = self.exchange(&operation, parts(&target)?, parts(&source)?)?;
        let work = Work::new(self, operation, pending);
        if !self.is_over_nccl() {
            copy_own()?;
        }
        Ok(work)
    }

    /// [`Group::all_gather`] of equal shards by the backend's own collective. Gloo's takes more than twice as long, and is not counted in
    /// [`Group::bytes`].
    ///
    /// # Errors
    /// Tensors that are not contiguous and on the group's device, of different dtypes, or that overlap; a shard that is not one of as many equal
    /// ones as there are ranks; a dead group.
    pub fn all_gather_native(&self, whole: &Tensor, shard: &Tensor, label: &str) -> Result<Work> {
        const NAME: &str = "all_gather";
        let whole = self.flat(NAME, "the whole tensor", whole)?;
        let shard = self.flat(NAME, "the shard", shard)?;
        if whole.kind() != shard.kind()
            || whole.numel() != shard.numel() * self.size()
            || overlap(&whole, &shard)?
        {
            let reason = format!(
                "{:?} {:?} of shards {:?} {:?}; expected {} shards of one dtype in other memory",
                whole.kind(),
                whole.size(),
                shard.kind(),
                shard.size(),
                self.size()
            );
            return Err(self.invalid(NAME, label, &reason));
        }
        let operation = self.begin(NAME, label, 0)?;
        let pending = self.native(&operation, Native::AllGather, &shard, Some(&whole))?;
        Ok(Work::new(self, operation, pending))
    }

    /// Copies the tensor of rank `root` into those of all others, and waits until it has arrived. The root sends it to each.
    ///
    /// # Errors
    /// A tensor that is not contiguous and on the group's device; a rank outside of the group; a failure, after which the group is dead.
    pub fn broadcast(&self, tensor: &Tensor, root: usize, label: &str) -> Result<()> {
        const NAME: &str = "broadcast";
        self.check_tensor(NAME, "the tensor", tensor)?;
        if root >= self.size() {
            return Err(self.invalid(
                NAME,
                label,
                &format!("there is no rank {root} in a group of {}", self.size()),
            ));
        }
        let sent = if self.rank() == root { byte_count(tensor) * (self.size() as u64 - 1) } else { 0 };
        let operation = self.begin(NAME, label, sent)?;
        let to_or_from = |peer: usize| (peer, tensor.shallow_clone());
        let pending = if self.rank() == root {
            self.exchange(&operation, Vec::new(), self.others().map(to_or_from).collect())?
        } else {
            bump_version(tensor)?;
            self.exchange(&operation, vec![to_or_from(root)], Vec::new())?
        };
        Work::new(self, operation, pending).wait()
    }

    /// Waits until all ranks have come. To be called before a process ends, because the others may still need its store. On a GPU it
    /// first waits for the device's work.
    ///
    /// # Errors
    /// Ranks that do not come within the timeout, by number. The group is dead then.
    pub fn barrier(&self, label: &str) -> Result<()> {
        if self.is_over_nccl() {
            self.check_alive()?;
            crate::device::synchronize(self.device())?;
            return self.meet("barrier", label, &[]);
        }
        let operation = self.begin("barrier", label, 0)?;
        self.arrive(&operation)?;
        self.log(&operation, Progress::Done);
        Ok(())
    }

    /// Waits over Gloo until all ranks have come. If one has ended, this fails at once, because its connection is closed.
    pub(super) fn arrive(&self, operation: &Operation) -> Result<()> {
        let Some(backend) = &self.0.backend else { return Ok(()) };
        backend.monitored_barrier(self.timeout()).map_err(|cause| {
            let cause = of_barrier(&cause.to_string(), &self.machines());
            self.fail(operation, None, &cause)
        })
    }
}
