//! The casts of weights in mixed precision.

use super::Choices;
use crate::Error;
use crate::activation_plan::LayerPlan;
use crate::exact::{product, sum};
use crate::model::{Decoder, Linear, Part};

/// Bytes of the casts of a layer's weights that are in what a layer of this plan recomputes; of all of them if it recomputes nothing.
pub(super) fn cast_bytes(model: &Decoder, choices: &Choices, kept: LayerPlan) -> Result<u64, Error> {
    const WHAT: &str = "bytes of casts";
    let within = |part: Part| match kept {
        LayerPlan::RecomputeMlp => part == Part::FeedForward,
        LayerPlan::RecomputeAttention => part == Part::Attention,
        _ => true,
    };
    let linears = model.block_linears()?;
    let of = |linear: &Linear| {
        let weight = product(WHAT, &[linear.inputs, linear.outputs])?;
        sum(WHAT, [weight, if linear.bias { linear.outputs } else { 0 }])
    };
    let elements =
        linears.iter().filter(|linear| within(linear.part)).map(of).collect::<Result<Vec<_>, _>>()?;
    choices.recipe.compute.bytes(sum(WHAT, elements)?)
}
