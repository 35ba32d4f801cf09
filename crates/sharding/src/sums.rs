//! This rank's sums of a bucket's gradients over the rounds of a step.

use runtime::collectives::Division;
use runtime::file_memory;
use tch::{Kind, Tensor};

use crate::Result;
use crate::bucket::{Member, narrow};
use crate::mesh::Mesh;

/// Sums of gradients, fp32 (fp64 for fp64 parameters).
#[derive(Debug)]
pub(crate) enum Sums {
    /// Of this rank's shard, in one piece of memory.
    Flat(Tensor),
    /// By member, of one rank whose gradients are in the dtype of sums: the first gradient itself, without a copy, to which the others are
    /// added; `None` where none has arrived.
    Each(Vec<Option<Tensor>>),
}

impl Sums {
    /// Creates sums beside `weights`: in a file where these are in one.
    pub(crate) fn new(weights: &Tensor, division: Division, members: usize, mesh: &Mesh) -> Result<Self> {
        let kind = weights.kind();
        if mesh.world.size() == 1 && matches!(kind, Kind::Float | Kind::Double) {
            return Ok(Self::Each((0..members).map(|_| None).collect()));
        }
        let kind = if kind == Kind::Double { Kind::Double } else { Kind::Float };
        let sums = file_memory::zeros_beside(weights, &[division.len(mesh.shard.rank())], kind)?;
        Ok(Self::Flat(sums))
    }

    /// Forgets the gradients of a step, as far as they take memory of their own.
    pub(crate) fn clear(&mut self) {
        if let Self::Each(sums) = self {
            sums.fill_with(|| None);
        }
    }

    /// Ends the use of sums in a file for now.
    pub(crate) fn release(&self) -> Result<()> {
        match self {
            Self::Flat(sums) => Ok(file_memory::release(sums)?),
            Self::Each(_) => Ok(()),
        }
    }

    /// All of them, but for empty ones.
    pub(crate) fn tensors(&self) -> Vec<Tensor> {
        let all: Vec<&Tensor> = match self {
            Self::Flat(sums) => vec![sums],
            Self::Each(sums) => sums.iter().flatten().collect(),
        };
        all.into_iter().filter(|sums| sums.numel() > 0).map(Tensor::shallow_clone).collect()
    }

    /// Returns contiguous pieces of the sums, each with its first element in the shard, in order. Between them all are 0.
    pub(crate) fn pieces(&self, members: &[Member]) -> Result<Vec<(i64, Tensor)>> {
        match self {
            Self::Flat(sums) => Ok(vec![(0, sums.shallow_clone())]),
            Self::Each(sums) => {
                let arrived =
                    sums.iter().zip(members).filter_map(|(sum, member)| Some((sum.as_ref()?, member)));
                arrived.map(|(sum, member)| Ok((member.range.start, sum.f_reshape([-1])?))).collect()
            }
        }
    }

    /// Returns the sums of a member's part, elements of the shard; `None` where no gradient has arrived.
    pub(crate) fn of(&self, member: usize, part: &std::ops::Range<i64>) -> Result<Option<Tensor>> {
        match self {
            Self::Flat(sums) => Ok(Some(narrow(sums, part)?)),
            Self::Each(sums) => Ok(sums[member].as_ref().map(|sum| sum.f_reshape([-1])).transpose()?),
        }
    }
}

/// Adds a gradient to a sum; the first one is the sum.
pub(crate) fn add(sum: &mut Option<Tensor>, gradient: Tensor) -> Result<()> {
    match sum {
        None => *sum = Some(gradient.f_contiguous()?),
        Some(sum) => {
            let _ = sum.f_add_(&gradient)?;
        }
    }
    Ok(())
}
