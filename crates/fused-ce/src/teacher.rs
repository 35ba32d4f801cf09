//! A teacher's tensors: their checks, and what the function reads of them.

use kernels::quantized::matrix_shape;
use models::distillation::{DistillationConfig, Divergence, OUTSIDE_THE_SET, OutputProjection, Teacher};
use tch::{Kind, Tensor};

use crate::error::{Result, dtype, refused, shape};
use crate::function::{Source, Taught};
use crate::inputs::{Inputs, Sizes, Targets, same};
use crate::options::LinearCrossEntropy;

/// Checks a teacher beside the other inputs.
pub(crate) fn check(inputs: &Inputs<'_>, options: &LinearCrossEntropy) -> Result<()> {
    let Some((teacher, distillation)) = &inputs.teacher else { return Ok(()) };
    distillation.check()?;
    let reason = match () {
        () if inputs.shard.is_some() => {
            "a teacher's distributions are of the whole vocabulary, not of a shard"
        }
        () if matches!(inputs.targets, Targets::Distributions(_)) => {
            "the targets are distributions, and so are a teacher's; give classes; positions whose class is ignored have no teacher"
        }
        () if options.shift != 0 => {
            "a shift moves the targets and not the teacher's positions; shift the targets themselves"
        }
        () if options.round_logits => {
            "differences from a teacher are smaller than what rounded logits err by; leave `round_logits` out"
        }
        () => "",
    };
    if !reason.is_empty() {
        return Err(refused(reason));
    }
    let (x, size) = (inputs.hidden, inputs.hidden.size());
    let leading = &size[..size.len() - 1];
    match teacher {
        Teacher::Hidden { hidden_btd, projection } => {
            let own = hidden_btd.size();
            let Some((&width, own_leading)) = own.split_last() else {
                return Err(shape("teacher.hidden", hidden_btd, "[…, hidden]"));
            };
            if own_leading != leading {
                return Err(shape(
                    "teacher.hidden",
                    hidden_btd,
                    format!("{leading:?} and its own hidden size"),
                ));
            }
            if !hidden_btd.is_floating_point() {
                return Err(dtype("teacher.hidden", hidden_btd.kind(), "a floating dtype"));
            }
            same("teacher.hidden", hidden_btd, hidden_btd.kind(), x.device())?;
            match matrix_shape(projection.weight) {
                Some([rows, columns]) if columns == width && rows > 0 => {}
                _ => {
                    let expected = format!("[vocabulary, {width}] for hidden states {own:?}");
                    return Err(shape("teacher.weight", projection.weight, expected));
                }
            }
            same("teacher.weight", projection.weight, projection.weight.kind(), x.device())
        }
        Teacher::TopK { tokens_btk, log_probabilities_btk } => {
            if distillation.divergence != Divergence::ForwardKl {
                return Err(refused(OUTSIDE_THE_SET));
            }
            let own = tokens_btk.size();
            let is_shaped = own.split_last().is_some_and(|(k, own)| *k > 0 && own == leading);
            if !is_shaped {
                return Err(shape("teacher.tokens", tokens_btk, format!("{leading:?} and k of at least 1")));
            }
            if log_probabilities_btk.size() != own {
                return Err(shape("teacher.log_probabilities", log_probabilities_btk, format!("{own:?}")));
            }
            same("teacher.tokens", tokens_btk, Kind::Int64, x.device())?;
            same("teacher.log_probabilities", log_probabilities_btk, Kind::Float, x.device())
        }
    }
}

/// Returns a checked teacher as the function reads it; logits are in `compute`.
pub(crate) fn taught(
    (teacher, options): &(Teacher<'_>, DistillationConfig),
    sizes: Sizes,
    compute: Kind,
) -> Result<Taught> {
    let flat = |tensor: &Tensor| -> Result<Tensor> {
        let last = tensor.size().last().copied().unwrap_or(1);
        Ok(tensor.f_detach()?.f_reshape([sizes.tokens, last])?)
    };
    let source = match teacher {
        Teacher::Hidden { hidden_btd, projection } => {
            let OutputProjection { weight, bias, transform, token_rows } = projection;
            let [columns, _] = matrix_shape(weight).unwrap_or_default();
            let own = if hidden_btd.kind() == Kind::Double { Kind::Double } else { Kind::Float };
            Source::Hidden {
                x: flat(hidden_btd)?,
                weight: weight.f_detach()?,
                bias: bias.map(|bias| bias.f_detach()?.f_to_kind(own)?.f_contiguous()).transpose()?,
                replaced: match token_rows {
                    Some(own) => Some([
                        own.tokens().shallow_clone(),
                        own.rows.f_detach()?.f_to_kind(hidden_btd.kind())?,
                    ]),
                    None => None,
                },
                scale: transform.scale,
                softcap: transform.softcap,
                columns,
            }
        }
        Teacher::TopK { tokens_btk, log_probabilities_btk } => Source::TopK {
            tokens: flat(tokens_btk)?,
            log_probabilities: flat(log_probabilities_btk)?.f_to_kind(compute)?,
        },
    };
    Ok(Taught { options: *options, source })
}
