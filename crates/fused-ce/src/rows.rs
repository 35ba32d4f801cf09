//! Selection of the rows with a label.
//!
//! An ignored row costs three products for nothing, so the labelled rows are gathered first. On a CPU the targets are read. On
//! a GPU that would synchronise: there the rows are sorted, labelled ones first, and the ignored rows at the end have a factor
//! of 0, or are skipped if the caller gives the number of labelled ones.

use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};
use crate::inputs::{Inputs, Sizes, Targets, compute_kind};
use crate::options::{CheckTargets, LinearCrossEntropy};

/// The rows to compute.
#[derive(Debug)]
pub(crate) struct Rows {
    /// Their number.
    pub(crate) count: i64,
    /// `[count]`: their indices among all tokens; `None` for all tokens in order.
    pub(crate) index: Option<Tensor>,
    /// `[count]`: their target classes; `None` if the targets are distributions.
    pub(crate) classes: Option<Tensor>,
    /// `[count]` in the dtype of logits: 1 for labelled rows, 0 for ignored ones; `None` if all are labelled.
    pub(crate) labelled: Option<Tensor>,
}

impl Rows {
    pub(crate) fn new(inputs: &Inputs<'_>, options: &LinearCrossEntropy, sizes: Sizes) -> Result<Self> {
        let classes = match inputs.targets {
            Targets::Classes(classes) => classes,
            Targets::Distributions(_) => {
                return Ok(Self { count: sizes.tokens, index: None, classes: None, labelled: None });
            }
        };
        let sequence = classes.size().last().copied().unwrap_or(1);
        let device = classes.device();
        if device == Device::Cpu {
            return labelled_rows(classes, options, sizes, sequence);
        }
        if options.check_targets == CheckTargets::Always {
            labelled_rows(&classes.f_to_device(Device::Cpu)?, options, sizes, sequence)?;
        }
        let kind = compute_kind(inputs.hidden.kind());
        sorted_rows(&classes.f_reshape([-1])?, options, inputs.labelled_tokens, sequence, kind)
    }

    /// Returns x `[tokens, …]` with zeros in the ignored rows, by differentiable operators. They may hold infinities, and 0·∞
    /// is not 0.
    pub(crate) fn zero_unlabelled(&self, x: &Tensor) -> Result<Tensor> {
        let Some(index) = &self.index else { return Ok(x.shallow_clone()) };
        let part = match &self.labelled {
            Some(labelled) => labelled.f_ne(0.0)?,
            None => Tensor::f_ones([self.count], (Kind::Bool, x.device()))?,
        };
        let part = Tensor::f_zeros([x.size()[0]], (Kind::Bool, x.device()))?.f_index_copy(0, index, &part)?;
        Ok(x.f_where_self(&part.f_unsqueeze(1)?, &Tensor::f_zeros([], (x.kind(), x.device()))?)?)
    }
}

/// Returns the labelled rows, by reading each target.
fn labelled_rows(
    classes: &Tensor,
    options: &LinearCrossEntropy,
    sizes: Sizes,
    sequence: i64,
) -> Result<Rows> {
    let vocabulary = sizes.vocabulary;
    let given = Vec::<i64>::try_from(classes.f_reshape([-1])?.f_contiguous()?)?;
    for (position, &found) in given.iter().enumerate() {
        if found != options.ignore_index && !(0..vocabulary).contains(&found) {
            return Err(Error::Target { found, position, vocabulary, ignore_index: options.ignore_index });
        }
    }
    let (mut index, mut labels) = (Vec::new(), Vec::new());
    for position in 0..given.len() as i64 {
        // The target must lie in the same row of tokens.
        if options.shift >= sequence - position % sequence {
            continue;
        }
        let label = given[(position + options.shift) as usize];
        if label != options.ignore_index {
            index.push(position);
            labels.push(label);
        }
    }
    let count = labels.len() as i64;
    let all = count == sizes.tokens;
    Ok(Rows {
        count,
        index: if all { None } else { Some(Tensor::f_from_slice(&index)?) },
        classes: Some(Tensor::f_from_slice(&labels)?),
        labelled: None,
    })
}

/// Returns all rows, or the first `labelled` ones, sorted with the labelled ones first, by operators whose shapes do not
/// depend on the targets.
pub(crate) fn sorted_rows(
    classes: &Tensor,
    options: &LinearCrossEntropy,
    labelled: Option<i64>,
    sequence: i64,
    kind: Kind,
) -> Result<Rows> {
    let (tokens, options_of) = (classes.size()[0], (Kind::Int64, classes.device()));
    let mut labels = classes.shallow_clone();
    let mut mask = classes.f_ne(options.ignore_index)?;
    let shift = options.shift.min(sequence);
    if shift > 0 {
        let position = Tensor::f_arange(tokens, options_of)?.f_remainder(sequence.max(1))?;
        let within = position.f_lt(sequence - shift)?;
        labels = labels.f_roll([-shift], [0])?;
        mask = mask.f_roll([-shift], [0])?.f_logical_and(&within)?;
    }
    let order = mask.f_logical_not()?.f_to_kind(Kind::Uint8)?.f_argsort_stable(true, 0, false)?;
    let count = labelled.unwrap_or(tokens);
    let index = order.f_narrow(0, 0, count)?;
    let mask = mask.f_index_select(0, &index)?;
    let labels = labels.f_index_select(0, &index)?;
    Ok(Rows {
        count,
        classes: Some(labels.f_where_self(&mask, &Tensor::f_zeros([], options_of)?)?),
        labelled: Some(mask.f_to_kind(kind)?),
        index: Some(index),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(tokens: i64, vocabulary: i64) -> Sizes {
        Sizes { tokens, hidden: 1, columns: vocabulary, vocabulary, first: 0, widest: vocabulary }
    }

    /// Sorting without reading the targets finds the same rows as reading them.
    #[test]
    fn both_implementations_find_the_same_rows() {
        let ignored = -7;
        let targets =
            Tensor::from_slice2(&[[3i64, ignored, 0, 4], [ignored, ignored, 2, ignored], [1, 1, 1, 1]]);
        for shift in [0, 1, 2, 3, 4, 5, 12, i64::MAX] {
            let options =
                LinearCrossEntropy { shift, ignore_index: ignored, ..LinearCrossEntropy::default() };
            let seen = labelled_rows(&targets, &options, sizes(12, 5), 4).unwrap();
            let flat = targets.reshape([-1]);
            for labelled in [None, Some(seen.count)] {
                let ordered = sorted_rows(&flat, &options, labelled, 4, Kind::Float).unwrap();
                let mask = ordered.labelled.unwrap();
                assert_eq!(mask.sum(Kind::Int64).int64_value(&[]), seen.count, "shift {shift}");
                let head = |t: &Tensor| Vec::<i64>::try_from(t.narrow(0, 0, seen.count)).unwrap();
                let all = Tensor::arange(12, (Kind::Int64, Device::Cpu));
                let index = seen.index.as_ref().unwrap_or(&all);
                assert_eq!(head(&ordered.index.unwrap()), Vec::<i64>::try_from(index).unwrap());
                assert_eq!(
                    head(&ordered.classes.unwrap()),
                    Vec::<i64>::try_from(seen.classes.as_ref().unwrap()).unwrap()
                );
                assert_eq!(ordered.count, labelled.unwrap_or(12));
            }
        }
    }
}
