//! Parameters whose weights lie in one piece of memory and are sent together.

use std::ops::Range;

use runtime::collectives::{Division, Group, Work};
use runtime::ops::TryScalar;
use tch::{Kind, Tensor};

use crate::mesh::{Mesh, Reduction, Terms};
use crate::norm::BLOCK;
use crate::sums::{Sums, add};
use crate::{Result, refused};

/// Elements at which a parameter begins in its bucket, unless its state is in blocks of more: a cache line of any dtype.
pub const ALIGNMENT: i64 = 64;

/// A parameter in a bucket.
#[derive(Debug)]
pub(crate) struct Member {
    /// Its index among all parameters.
    pub(crate) parameter: usize,
    pub(crate) tensor: Tensor,
    /// Its elements in the bucket.
    pub(crate) range: Range<i64>,
}

/// Parameters of one dtype.
#[derive(Debug)]
pub(crate) struct Bucket {
    pub(crate) members: Vec<Member>,
    pub(crate) kind: Kind,
    pub(crate) division: Division,
    /// The weights, `[elements]`; the parameters are views of them; of a layer's region this rank's shard of them.
    pub(crate) weights: Tensor,
    /// Whether this is a layer's region.
    pub(crate) is_layer: bool,
    pub(crate) sums: Sums,
}

impl Bucket {
    /// Moves parameters into a new bucket, each to a multiple of `alignment` elements.
    pub(crate) fn new(parameters: &[(usize, &str, &Tensor)], mesh: &Mesh, alignment: i64) -> Result<Self> {
        let (kind, device) = (parameters[0].2.kind(), mesh.device());
        let (mut members, mut elements) = (Vec::new(), 0);
        for &(parameter, name, tensor) in parameters {
            if tensor.device() != device {
                let [is, expected] = [tensor.device(), device].map(runtime::device::flag);
                return Err(refused(format!(
                    "`{name}` is on {is}, and the ranks' group is for tensors on {expected}; move the model there before its optimizer is \
                     made"
                )));
            }
            if !tensor.is_contiguous() || tensor.is_sparse() {
                return Err(refused(format!("`{name}` is not contiguous; expected contiguous parameters")));
            }
            let end = elements + tensor.numel() as i64;
            members.push(Member { parameter, tensor: tensor.shallow_clone(), range: elements..end });
            elements = (end + alignment - 1) / alignment * alignment;
        }
        let division = divide(elements, &mesh.shard);
        let _no_grad = tch::no_grad_guard();
        let weights = Tensor::f_zeros([elements], (kind, device))?;
        for Member { tensor, range, .. } in &mut members {
            let mut view = narrow(&weights, range)?.f_view(tensor.size().as_slice())?;
            view.f_copy_(tensor)?;
            tensor.f_set_data(&view)?;
        }
        let sums = Sums::new(&weights, division, members.len(), mesh)?;
        Ok(Self { members, kind, division, weights, is_layer: false, sums })
    }

    /// The region of a layer; `shard` is this rank's part.
    pub(crate) fn of_layer(
        members: Vec<Member>,
        division: Division,
        shard: &Tensor,
        mesh: &Mesh,
    ) -> Result<Self> {
        let (kind, weights) = (shard.kind(), shard.shallow_clone());
        let sums = Sums::new(shard, division, members.len(), mesh)?;
        Ok(Self { members, kind, division, weights, is_layer: true, sums })
    }

    /// Returns the weights of elements that this rank owns.
    pub(crate) fn own_weights(&self, owned: &Range<i64>, rank: usize) -> Result<Tensor> {
        let origin = if self.is_layer { self.division.range(rank).start } else { 0 };
        narrow(&self.weights, &(owned.start - origin..owned.end - origin))
    }

    /// Returns gradients of all members that change nothing they are added to: as many as `reduction` takes.
    pub(crate) fn no_gradients(&self, (mesh, reduction): (&Mesh, Reduction)) -> Result<Tensor> {
        let elements = match reduction {
            Reduction::Ordered => self.division.elements,
            Reduction::Native => self.division.per_rank * mesh.shard.size() as i64,
        };
        Ok(Tensor::try_full([elements], -0.0, (self.kind, mesh.device()))?)
    }

    /// Returns the part of a member that a rank owns, as elements of the bucket.
    pub(crate) fn owned(&self, member: &Member, rank: usize) -> Range<i64> {
        owned(&member.range, self.division, rank)
    }

    /// Returns the gradients of all members, and clears them. Where there is none, and between members, it is −0,
    /// which changes nothing that it is added to. Sets `seen` for each parameter that has one.
    pub(crate) fn take_gradients(&self, over: (&Mesh, Reduction), seen: &mut [bool]) -> Result<Tensor> {
        let _no_grad = tch::no_grad_guard();
        let flat = self.no_gradients(over)?;
        for member in &self.members {
            let gradient = member.tensor.f_grad()?;
            if gradient.defined() {
                let view = narrow(&flat, &member.range)?.f_view(member.tensor.size().as_slice())?;
                runtime::ops::foreach::copy_(&[view], &[gradient])?;
                runtime::autograd::set_grad(&member.tensor, None)?;
                seen[member.parameter] = true;
            }
        }
        Ok(flat)
    }

    /// Adds the gradients of all members to the sums, and clears them. Without other ranks that is what a reduction of
    /// [`take_gradients`](Self::take_gradients) computes, without the copy.
    pub(crate) fn add_gradients(&mut self, first: bool, seen: &mut [bool]) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        for (index, member) in self.members.iter().enumerate() {
            let gradient = member.tensor.f_grad()?;
            if gradient.defined() {
                runtime::autograd::set_grad(&member.tensor, None)?;
                seen[member.parameter] = true;
            }
            match &mut self.sums {
                Sums::Each(sums) if gradient.defined() => add(&mut sums[index], gradient)?,
                Sums::Each(_) => {}
                Sums::Flat(sums) => {
                    let mut sums = narrow(sums, &member.range)?;
                    match (gradient.defined(), first) {
                        (true, true) => sums.f_copy_(&gradient.f_reshape([-1])?)?,
                        (true, false) => drop(sums.f_add_(&gradient.f_reshape([-1])?)?),
                        (false, true) => drop(sums.try_fill_(-0.0)?),
                        (false, false) => {}
                    }
                }
            }
        }
        Ok(())
    }

    /// Adds gradients by member to [`Sums::Each`], and takes them.
    pub(crate) fn add_each(&mut self, gradients: &mut [Option<Tensor>]) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let Sums::Each(sums) = &mut self.sums else { return Ok(()) };
        let arrived = sums.iter_mut().zip(gradients).filter_map(|(sum, new)| Some((sum, new.take()?)));
        arrived.into_iter().try_for_each(|(sum, gradient)| add(sum, gradient))
    }

    /// Clears the gradients of all members.
    pub(crate) fn clear_gradients(&self) -> Result<()> {
        Ok(self.members.iter().try_for_each(|member| runtime::autograd::set_grad(&member.tensor, None))?)
    }

    /// Returns a round's gradients with the sums that they are added to; `None` for sums of each member, which are of one rank, whose
    /// gradients are not reduced.
    pub(crate) fn terms(&self, gradients: Tensor, first: bool, label: String) -> Option<Terms> {
        let Sums::Flat(sums) = &self.sums else { return None };
        Some(Terms { gradients, division: self.division, sums: sums.shallow_clone(), first, label })
    }

    /// Begins to gather the weights from their owners, within the replica.
    pub(crate) fn gather(&self, mesh: &Mesh, label: &str) -> Result<Work> {
        let shard = narrow(&self.weights, &self.division.range(mesh.shard.rank()))?;
        Ok(mesh.shard.all_gather(&self.weights, self.division, &shard, label)?)
    }

    /// Refuses parameters that have other memory than the bucket's.
    pub(crate) fn check_memory(&self, names: &[String]) -> Result<()> {
        if self.is_layer {
            return Ok(());
        }
        let width = self.kind.elt_size_in_bytes();
        let origin = self.weights.data_ptr() as usize;
        for member in &self.members {
            let expected = origin + usize::try_from(member.range.start).unwrap_or(0) * width;
            if member.tensor.numel() > 0 && member.tensor.data_ptr() as usize != expected {
                return Err(refused(format!(
                    "`{}` was given other memory after the optimizer was made; make the optimizer after offloading, merging or \
                     loading in other memory",
                    names[member.parameter]
                )));
            }
        }
        Ok(())
    }
}

/// Returns the part of a range of elements that a rank owns; empty where it owns none.
pub(crate) fn owned(range: &Range<i64>, division: Division, rank: usize) -> Range<i64> {
    let shard = division.range(rank);
    let start = range.start.max(shard.start);
    start..range.end.min(shard.end).max(start)
}

/// Divides elements among ranks, in whole blocks.
pub(crate) fn divide(elements: i64, ranks: &Group) -> Division {
    let blocks = (elements + BLOCK - 1) / BLOCK;
    let per_rank = (blocks + ranks.size() as i64 - 1) / ranks.size() as i64 * BLOCK;
    Division { elements, per_rank }
}

/// Returns elements of a flat tensor.
pub(crate) fn narrow(flat: &Tensor, range: &Range<i64>) -> Result<Tensor> {
    Ok(flat.f_narrow(0, range.start, range.end - range.start)?)
}
