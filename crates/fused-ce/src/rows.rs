//! Selection of the rows with a label.
//!
//! An ignored row costs three products for nothing, so the labelled rows are gathered first. On a CPU the targets are read. On
//! a GPU that would synchronise: there ignored rows are computed with a factor of 0, or, if the caller gives the number of labelled
//! ones, the rows are sorted, labelled ones first, and the ignored rows at the end are skipped.

use runtime::device::graph::operators_only;
use runtime::ops::TryScalar;
use tch::{Device, Kind, Tensor};

use crate::error::{Result, refused};
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
        if device == Device::Cpu && !operators_only() {
            let rows = labelled_rows(classes, options, sizes, sequence)?;
            check_number(inputs, &rows)?;
            return Ok(rows);
        }
        if options.check_targets == CheckTargets::Always {
            let rows = labelled_rows(&classes.f_to_device(Device::Cpu)?, options, sizes, sequence)?;
            check_number(inputs, &rows)?;
        }
        let kind = compute_kind(inputs.hidden.kind());
        unread_rows(&classes.f_reshape([-1])?, options, inputs.labelled_tokens, sequence, kind)
    }

    /// Returns x `[tokens, …]` with zeros in the ignored rows, by differentiable operators. They may hold infinities, and 0·∞
    /// is not 0.
    pub(crate) fn zero_unlabelled(&self, x: &Tensor) -> Result<Tensor> {
        let labelled = self.labelled.as_ref().map(|labelled| labelled.try_ne(0.0)).transpose()?;
        let part = match (&self.index, labelled) {
            (None, None) => return Ok(x.shallow_clone()),
            (None, Some(labelled)) => labelled,
            (Some(index), labelled) => {
                let options = (Kind::Bool, x.device());
                let part = labelled.map_or_else(|| Tensor::f_ones([self.count], options), Ok)?;
                Tensor::f_zeros([x.size()[0]], options)?.f_index_copy(0, index, &part)?
            }
        };
        Ok(x.f_where_self(&part.f_unsqueeze(1)?, &Tensor::f_zeros([], (x.kind(), x.device()))?)?)
    }
}

/// Refuses a number of labelled tokens that is less than was found.
fn check_number(inputs: &Inputs<'_>, rows: &Rows) -> Result<()> {
    let Some(given) = inputs.labelled_tokens.filter(|given| *given < rows.count) else { return Ok(()) };
    Err(refused(format!(
        "{given} labelled tokens, and {} targets are not ignored; expected as many, or more",
        rows.count
    )))
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
    for (position, &target) in given.iter().enumerate() {
        if target != options.ignore_index && !(0..vocabulary).contains(&target) {
            return Err(refused(format!(
                "target {target} at position {position} is outside the vocabulary of {vocabulary} (0 to {}) and is not the ignore index \
                 {}; use the tokenizer of the model, or set the ignore index",
                vocabulary - 1,
                options.ignore_index
            )));
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

/// Returns all rows in order, or the first `labelled` ones, sorted with the labelled ones first, by operators whose shapes do not depend
/// on the targets.
pub(crate) fn unread_rows(
    classes: &Tensor,
    options: &LinearCrossEntropy,
    labelled: Option<i64>,
    sequence: i64,
    kind: Kind,
) -> Result<Rows> {
    let (tokens, options_of) = (classes.size()[0], (Kind::Int64, classes.device()));
    let mut labels = classes.shallow_clone();
    let mut mask = classes.try_ne(options.ignore_index)?;
    let shift = options.shift.min(sequence);
    if shift > 0 {
        let position = Tensor::try_arange(tokens, options_of)?.try_remainder(sequence.max(1))?;
        let within = position.try_lt(sequence - shift)?;
        labels = labels.f_roll([-shift], [0])?;
        mask = mask.f_roll([-shift], [0])?.f_logical_and(&within)?;
    }
    let index = match labelled.filter(|count| *count < tokens) {
        Some(count) => {
            let order = mask.f_logical_not()?.f_to_kind(Kind::Uint8)?.f_argsort_stable(true, 0, false)?;
            let index = order.f_narrow(0, 0, count)?;
            (mask, labels) = (mask.f_index_select(0, &index)?, labels.f_index_select(0, &index)?);
            Some(index)
        }
        None => None,
    };
    Ok(Rows {
        count: labelled.unwrap_or(tokens),
        classes: Some(labels.f_where_self(&mask, &Tensor::f_zeros([], options_of)?)?),
        labelled: Some(mask.f_to_kind(kind)?),
        index,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(tokens: i64, vocabulary: i64) -> Sizes {
        Sizes { tokens, hidden: 1, columns: vocabulary, vocabulary, first: 0, widest: vocabulary }
    }

    /// Without reading the targets the same rows are found, in their order or sorted.
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
                let unread = unread_rows(&flat, &options, labelled, 4, Kind::Float).unwrap();
                assert_eq!(
                    (unread.count, unread.index.is_some()),
                    (labelled.unwrap_or(12), labelled.is_some())
                );
                let all = Tensor::arange(12, (Kind::Int64, Device::Cpu));
                let labelled = unread.labelled.unwrap().nonzero().squeeze_dim(1);
                let index = unread.index.as_ref().unwrap_or(&all).index_select(0, &labelled);
                let classes = unread.classes.unwrap().index_select(0, &labelled);
                let numbers = |tensor: &Tensor| Vec::<i64>::try_from(tensor).unwrap();
                assert_eq!(numbers(&index), numbers(seen.index.as_ref().unwrap_or(&all)), "shift {shift}");
                assert_eq!(numbers(&classes), numbers(seen.classes.as_ref().unwrap()));
            }
        }
    }
}
