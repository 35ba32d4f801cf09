//! The layout of a layer's tensors in one piece of memory.
//!
//! Copying a layer tensor by tensor costs a call for each. Here tensors of one dtype, trained or frozen, form a region that is
//! copied at once, each tensor at a multiple of 256 bytes, which suits every kernel. Frozen regions are only loaded; gradients
//! of trained ones are stored.

use std::ops::Range;

use tch::{Kind, Tensor};
use training::layer_source::is_placeholder;

use crate::error::{Result, refused};

/// Alignment of views: a multiple of a GPU's memory transaction and of a cache line.
pub(crate) const ALIGNMENT: usize = 256;

/// The position of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) region: usize,
    /// Byte range from the start of the layer.
    pub(crate) range: Range<usize>,
    pub(crate) kind: Kind,
    pub(crate) shape: Vec<i64>,
}

/// Tensors that are copied together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Region {
    pub(crate) kind: Kind,
    pub(crate) trained: bool,
    pub(crate) range: Range<usize>,
}

/// The positions of a layer's tensors, in the tensors' order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) extents: Vec<Extent>,
    pub(crate) regions: Vec<Region>,
    pub(crate) bytes: usize,
}

impl Layout {
    /// Lays out `tensors`, each with its name and whether it is trained.
    pub(crate) fn of<'a>(tensors: impl Iterator<Item = (&'a str, &'a Tensor, bool)>) -> Result<Self> {
        let tensors: Vec<_> = tensors.collect();
        let mut layout = Self::default();
        let mut kinds: Vec<(Kind, bool)> = Vec::new();
        for &(name, tensor, trained) in &tensors {
            if !(tensor.is_contiguous() || is_placeholder(tensor)) || tensor.is_sparse() {
                let reason = format!("`{name}` is not contiguous; expected contiguous tensors");
                return Err(refused("layer", reason));
            }
            if !kinds.contains(&(tensor.kind(), trained)) {
                kinds.push((tensor.kind(), trained));
            }
        }
        let mut extents: Vec<Option<Extent>> = tensors.iter().map(|_| None).collect();
        for (region, &(kind, trained)) in kinds.iter().enumerate() {
            let begin = layout.bytes;
            for (index, (_, tensor, of)) in tensors.iter().enumerate() {
                if (tensor.kind(), *of) != (kind, trained) {
                    continue;
                }
                let start = layout.bytes;
                let end = start + tensor.numel() * kind.elt_size_in_bytes();
                extents[index] = Some(Extent { region, range: start..end, kind, shape: tensor.size() });
                layout.bytes = end.next_multiple_of(ALIGNMENT);
            }
            layout.regions.push(Region { kind, trained, range: begin..layout.bytes });
        }
        layout.extents = extents.into_iter().flatten().collect();
        Ok(layout)
    }

    /// Returns whether more bytes are trained than frozen.
    pub(crate) fn is_mostly_trained(&self) -> bool {
        let bytes = |trained: bool| -> usize {
            let regions = self.regions.iter().filter(|region| region.trained == trained);
            regions.map(|region| region.range.len()).sum()
        };
        bytes(true) > bytes(false)
    }

    /// Returns a view of `flat` for each tensor; its first byte is the layer's first.
    pub(crate) fn views(&self, flat: &Tensor) -> Result<Vec<Tensor>> {
        self.extents.iter().map(|extent| view(flat, 0, extent)).collect()
    }
}

/// Returns the tensor at `extent` in `flat`, whose first byte is the layer's `origin`.
pub(crate) fn view(flat: &Tensor, origin: usize, extent: &Extent) -> Result<Tensor> {
    let bytes = piece(flat, extent.range.start - origin..extent.range.end - origin)?;
    Ok(bytes.f_view_dtype(extent.kind)?.f_view(extent.shape.as_slice())?)
}

/// Returns a byte range of a flat buffer.
pub(crate) fn piece(flat: &Tensor, range: Range<usize>) -> Result<Tensor> {
    Ok(flat.f_narrow(0, range.start as i64, range.len() as i64)?)
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    fn tensor(shape: &[i64], kind: Kind) -> Tensor {
        Tensor::zeros(shape, (kind, Device::Cpu))
    }

    #[test]
    fn tensors_of_one_dtype_and_role_are_adjacent_and_aligned() {
        let tensors =
            [tensor(&[3, 5], Kind::BFloat16), tensor(&[7], Kind::Float), tensor(&[200], Kind::BFloat16)];
        let named = [("w", &tensors[0], false), ("a", &tensors[1], true), ("b", &tensors[2], false)];
        let layout = Layout::of(named.into_iter()).unwrap();
        assert_eq!(
            layout.extents.iter().map(|extent| extent.range.clone()).collect::<Vec<_>>(),
            [0..30, 768..796, 256..656]
        );
        assert_eq!(layout.bytes, 1024);
        let regions: Vec<_> =
            layout.regions.iter().map(|region| (region.trained, region.range.clone())).collect();
        assert_eq!(regions, [(false, 0..768), (true, 768..1024)]);

        let flat = Tensor::zeros([1024], (Kind::Uint8, Device::Cpu));
        let views = layout.views(&flat).unwrap();
        for (view, tensor) in views.iter().zip(&tensors) {
            assert_eq!((view.size(), view.kind()), (tensor.size(), tensor.kind()));
        }
        let _ = views[2].shallow_clone().fill_(1.0);
        assert_eq!(
            views[0].sum(Kind::Float).double_value(&[]) + views[1].sum(Kind::Float).double_value(&[]),
            0.0
        );
    }

    #[test]
    fn a_transposed_tensor_is_refused_by_name() {
        let tensor = tensor(&[2, 3], Kind::Float).tr();
        let error = Layout::of([("mlp.weight", &tensor, true)].into_iter()).unwrap_err();
        assert!(error.to_string().contains("`mlp.weight` is not contiguous"), "{error}");
    }
}
