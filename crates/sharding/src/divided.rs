//! A tensor that is sharded over the ranks, gathered on rank 0 piece by piece.

use std::ops::Range;

use runtime::collectives::Division;
use tch::{Device, Kind, Tensor};
use training::checkpoint::LazyTensor;

use crate::mesh::Mesh;

/// A tensor that is divided among ranks.
pub(crate) struct Divided {
    pub(crate) mesh: Mesh,
    /// Names it in errors.
    pub(crate) label: String,
    pub(crate) kind: Kind,
    /// How the flat memory is divided that it lies in.
    pub(crate) division: Division,
    /// Its elements there.
    pub(crate) range: Range<i64>,
    /// This rank's part, `[elements]`.
    pub(crate) own: Option<Tensor>,
}

impl Divided {
    /// Returns the tensor as rank 0 writes it.
    pub(crate) fn into_lazy<'a>(self, name: String, shape: &[i64]) -> LazyTensor<'a> {
        LazyTensor::new(name, self.kind, shape, move |piece| self.bring(piece))
    }

    /// Brings elements of the tensor to rank 0, in memory of the host. Only ranks that have some of them take part.
    fn bring(&self, piece: Range<i64>) -> runtime::Result<Option<Tensor>> {
        if !self.mesh.is_in_first_replica() {
            return Ok(None);
        }
        let _no_grad = tch::no_grad_guard();
        // The first replica has the first ranks.
        let ranks = self.mesh.control();
        let rank = self.mesh.shard.rank();
        let local = self.overlap(&piece, rank).map(|part| Ok::<_, runtime::Error>((self.own(&part)?, part)));
        let local = local.transpose()?;
        if rank > 0 {
            if let Some((values, _)) = local {
                ranks.send(&values, 0, &self.label)?.wait()?;
            }
            return Ok(None);
        }
        let others = (1..self.mesh.shard.size()).filter_map(|rank| Some((rank, self.overlap(&piece, rank)?)));
        let others: Vec<(usize, Range<i64>)> = others.collect();
        if let (Some((values, _)), []) = (&local, &others[..]) {
            return Ok(Some(values.shallow_clone()));
        }
        let gathered = Tensor::f_empty([piece.end - piece.start], (self.kind, Device::Cpu))?;
        let place = |part: &Range<i64>| gathered.f_narrow(0, part.start - piece.start, part.end - part.start);
        let mut arriving = Vec::new();
        for (rank, part) in &others {
            arriving.push(ranks.recv(&place(part)?, *rank, &self.label)?);
        }
        if let Some((values, part)) = &local {
            place(part)?.f_copy_(values)?;
        }
        arriving.into_iter().try_for_each(runtime::collectives::Work::wait)?;
        Ok(Some(gathered))
    }

    /// The elements of a piece that a rank has; `None` for none.
    fn overlap(&self, piece: &Range<i64>, rank: usize) -> Option<Range<i64>> {
        let part = self.part(rank);
        let (start, end) = (piece.start.max(part.start), piece.end.min(part.end));
        (start < end).then_some(start..end)
    }

    /// A rank's elements of the tensor; the end is before the start where it has none.
    fn part(&self, rank: usize) -> Range<i64> {
        let shard = self.division.range(rank);
        let origin = self.range.start;
        shard.start.max(origin) - origin..shard.end.min(self.range.end) - origin
    }

    /// The values of elements that this rank has.
    fn own(&self, elements: &Range<i64>) -> runtime::Result<Tensor> {
        let values = self.own.as_ref().ok_or_else(|| {
            runtime::Error::invalid(
                "gather",
                format!("`{}`: this rank has no values of its part", self.label),
            )
        })?;
        let first = self.part(self.mesh.shard.rank()).start;
        let values = values.f_narrow(0, elements.start - first, elements.end - elements.start)?;
        Ok(values.f_to_device(Device::Cpu)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bucket::divide;
    use crate::norm::BLOCK;

    #[test]
    fn a_tensor_within_a_shard_is_brought_without_a_copy() {
        let mesh = Mesh::from(&runtime::collectives::Group::alone());
        let flat = Tensor::arange(3 * BLOCK, (Kind::Float, Device::Cpu));
        let range = 100..100 + 2 * BLOCK;
        let shard = flat.narrow(0, range.start, range.end - range.start);
        let division = divide(flat.numel() as i64, &mesh.shard);
        let memory = shard.data_ptr();
        let divided =
            Divided { mesh, label: "w".to_owned(), kind: Kind::Float, division, range, own: Some(shard) };
        let piece = divided.bring(0..BLOCK).unwrap().unwrap();
        assert_eq!((piece.data_ptr(), piece.size()), (memory, vec![BLOCK]));
        let gathered = divided.into_lazy("w".to_owned(), &[2, BLOCK]).whole().unwrap().unwrap();
        assert_eq!(gathered, flat.narrow(0, 100, 2 * BLOCK).view([2, BLOCK]));
    }
}
