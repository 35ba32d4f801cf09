//! Sums and maxima over ranks.

use std::time::Duration;

use tch::{Kind, Tensor};

use super::group::Group;
use super::operands::{byte_count, overlap, part};
use super::ordered::{self, OrderedReduction, accumulation_kind, combine};
use super::work::{Operation, Pending, Work};
use super::{Division, Order, ReduceConfig, ReduceOp};
use crate::autograd::GradMode;
use crate::error::Result;
use crate::sys::collectives::{Native, Transfer};
use crate::sys::tensor::bump_version;

/// Up to how many bytes an all-reduce exchanges whole tensors: one round of messages instead of two.
const EXCHANGED: u64 = 64 << 10;

impl Group {
    /// Begins to reduce a divided tensor: `shard` receives this rank's part of the sum (or maximum) of all ranks' `source`. Ordered, it
    /// is summed in fp32 (f64, i64) in the order of ranks, and `shard` may have that dtype or the source's; with
    /// [`ReduceConfig::accumulate`] the terms are added to what `shard` contains. `shard` may be this rank's part of `source` itself.
    ///
    /// Most of the work is done by [`Work::wait`].
    ///
    /// # Errors
    /// Tensors that are not contiguous, on the group's device, and of the division's sizes; dtypes that are not those above; a shard that
    /// overlaps another rank's part; a native reduction of unequal parts, in another dtype, or with accumulation; a dead group.
    pub fn reduce_scatter(
        &self,
        source: &Tensor,
        division: Division,
        shard: &Tensor,
        options: ReduceConfig,
        label: &str,
    ) -> Result<Work> {
        const NAME: &str = "reduce_scatter";
        let source = self.flat(NAME, "the source", source)?;
        let shard = self.flat(NAME, "the shard", shard)?;
        self.check_division(NAME, &source, division, &shard)?;
        let refuse = |reason: String| Err(self.invalid(NAME, label, &reason));
        let own = part(&source, division, self.rank())?;
        if own.data_ptr() != shard.data_ptr() && overlap(&source, &shard)? {
            return refuse("the shard overlaps another part of the source".to_owned());
        }
        let (kind, wanted) = (shard.kind(), accumulation_kind(source.kind(), options.op)?);
        let rounded = kind == source.kind() && !options.accumulate;
        if kind != wanted && !rounded {
            return refuse(format!(
                "the shard is {kind:?}; expected {wanted:?}, in which {:?} is reduced, or without accumulation {:?}",
                source.kind(),
                source.kind()
            ));
        }
        if options.order == Order::Native {
            if options.accumulate || options.op != ReduceOp::Sum || kind != source.kind() {
                return refuse(
                    "a native reduction sums in the source's dtype, without accumulation".to_owned(),
                );
            }
            if !division.is_equal(self.size()) {
                return refuse(
                    "a native reduction needs equal parts; pad the source, or reduce in order".to_owned(),
                );
            }
            let operation = self.begin(NAME, label, 0)?;
            let pending = self.native(&operation, Native::ReduceScatterSum, &source, Some(&shard))?;
            return Ok(Work::new(self, operation, pending));
        }
        let operation = self.begin(NAME, label, ordered::bytes_of_parts(self, &source, division))?;
        bump_version(&shard)?;
        let how = (options.op, options.accumulate);
        let reduction = OrderedReduction::post(self, &operation, &source, division, &shard, how)?;
        let pending = ordered::send_parts(self, &operation, &source, division)?;
        Ok(Work::new(self, operation, pending).with_reduction(Some(reduction)))
    }

    /// Replaces the tensor by its sum (or maximum) over all ranks, and waits for it. Ordered, it is summed in fp32 (f64, i64) in the
    /// order of ranks and rounded once.
    ///
    /// Up to 64 KiB each rank sends the tensor to every other; larger ones are reduced and gathered in parts, `2 · (N − 1) / N` of the
    /// tensor.
    ///
    /// # Errors
    /// A tensor that is not contiguous and on the group's device, or whose dtype is not summed; accumulation; a failure, after which the group
    /// is dead.
    pub fn all_reduce(&self, tensor: &Tensor, options: ReduceConfig, label: &str) -> Result<()> {
        const NAME: &str = "all_reduce";
        let flat = self.flat(NAME, "the tensor", tensor)?;
        let kind = accumulation_kind(flat.kind(), options.op)?;
        if options.accumulate {
            return Err(self.invalid(NAME, label, "an all-reduce has nothing to accumulate onto"));
        }
        if options.order == Order::Native {
            let operation = self.begin(NAME, label, 0)?;
            let native =
                if options.op == ReduceOp::Sum { Native::AllReduceSum } else { Native::AllReduceMax };
            let pending = self.native(&operation, native, &flat, None)?;
            return Work::new(self, operation, pending).wait();
        }
        if byte_count(&flat) <= EXCHANGED {
            return self.reduce_whole(&flat, kind, options.op, label);
        }
        let division = Division::even(flat.numel() as i64, self.size());
        let own = part(&flat, division, self.rank())?;
        self.reduce_scatter(&flat, division, &own, options, label)?.wait()?;
        self.all_gather(&flat, division, &own, label)?.wait()
    }

    /// An all-reduce in which every rank receives and reduces all tensors.
    fn reduce_whole(&self, tensor: &Tensor, kind: Kind, op: ReduceOp, label: &str) -> Result<()> {
        let others = self.size() as u64 - 1;
        let operation = self.begin("all_reduce", label, byte_count(tensor) * others)?;
        let _no_grad = GradMode::off();
        let mut values: Vec<Tensor> = (0..self.size()).map(|_| tensor.shallow_clone()).collect();
        let mut receives = Vec::new();
        for from in self.others() {
            values[from] = tensor.f_empty_like()?;
            receives.push((from, values[from].shallow_clone()));
        }
        let sends = self.others().map(|to| (to, tensor.shallow_clone())).collect();
        let pending = self.exchange(&operation, receives, sends)?;
        Work::new(self, operation, pending).wait()?;
        let mut sum = values[0].f_to_kind(kind)?;
        if self.size() > 1 && sum.data_ptr() == values[0].data_ptr() {
            sum = sum.f_detach_copy()?;
        }
        for value in &values[1..] {
            combine(op, &mut sum, value)?;
        }
        let mut tensor = tensor.shallow_clone();
        Ok(tensor.f_copy_(&sum)?)
    }

    /// A collective of the backend's own. With Gloo, a size that differs among ranks would end their processes; so each first tells the
    /// next one, in a message of one byte whose tag has the size.
    pub(super) fn native(
        &self,
        operation: &Operation,
        native: Native,
        input: &Tensor,
        output: Option<&Tensor>,
    ) -> Result<Vec<Pending>> {
        let target = output.unwrap_or(input);
        bump_version(target)?;
        let Some(backend) = self.backend() else {
            let _no_grad = GradMode::off();
            if let Some(output) = output {
                let mut output = output.shallow_clone();
                if self.size() == 1 { output.f_copy_(input)? } else { drop(output.f_zero_()?) }
            }
            return Ok(Vec::new());
        };
        self.compare_sizes(operation, input)?;
        if input.numel() == 0 {
            return Ok(Vec::new());
        }
        let timeout: Duration = self.timeout();
        let transfer: Transfer = backend
            .native(native, input, output, timeout)
            .map_err(|cause| self.fail(operation, None, &cause))?;
        Ok(vec![Pending { transfer, peer: None }])
    }
}
