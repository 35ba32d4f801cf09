//! A teacher that is asked once: its most probable tokens at every label of some rows, in a file.

use std::path::Path;

use dataloading::IGNORE_INDEX;
use models::module::LanguageModel;
use runtime::ops::TryScalar;
use tch::Tensor;

use super::{hidden, projection};
use crate::batches::Batches;
use crate::error::{Error, Result};
use crate::masked_rows::{MaskedBatches, TopKHeader, TopKWriter};

/// Numbers of the logits that exist at a time.
const LOGITS: i64 = 1 << 24;

/// Writes the `header.k` most probable tokens of `teacher` at every label of `rows` to `path`, over the first `header.vocabulary` tokens. A
/// training takes them by [`MaskedBatches::with_top_k`].
///
/// # Errors
/// A k that is no number of its tokens; a teacher whose head is not one projection; a file that cannot be written; errors of the model.
pub fn write_top_k(
    teacher: &dyn LanguageModel,
    rows: &MaskedBatches,
    path: &Path,
    header: &TopKHeader,
) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    let projection = projection(teacher)?;
    let k = header.k as i64;
    if !(1..=header.vocabulary).contains(&k) {
        let reason =
            format!("the {k} most probable of {} tokens; expected 1 to all of them", header.vocabulary);
        return Err(Error::config("distillation", reason));
    }
    let at_once = (LOGITS / teacher.vocabulary().max(1)).max(1);
    let mut writer = TopKWriter::create(path, header, rows.learned())?;
    let mut source = rows.in_row_order();
    while let Some(batch) = source.next()? {
        let hidden_nd = hidden(teacher, &batch)?.f_flatten(0, 1)?;
        let labelled = batch.labels.f_reshape([-1])?.try_ne(IGNORE_INDEX)?;
        // In the order of the rows, and of the positions in each.
        let positions = labelled.f_nonzero()?.f_squeeze_dim(1)?;
        let count = positions.size()[0];
        for first in (0..count).step_by(at_once as usize) {
            let part = positions.f_narrow(0, first, at_once.min(count - first))?;
            let logits = projection.logits(&hidden_nd.f_index_select(0, &part)?)?;
            let logits = logits.f_narrow(1, 0, header.vocabulary)?.try_div_scalar(header.temperature)?;
            let log_q = logits.f_log_softmax(-1, logits.kind())?;
            let (values, tokens): (Tensor, Tensor) = log_q.f_topk(k, -1, true, true)?;
            writer.append(&tokens, &values)?;
        }
    }
    writer.finish()
}
