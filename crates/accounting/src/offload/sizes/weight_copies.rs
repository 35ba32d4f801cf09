//! Copies of weights that a step makes: casts of mixed precision, and those of an optimizer.

use super::Choices;
use crate::activation_plan::LayerPlan;
use crate::exact::{product, sum};
use crate::memory::recipe::Recipe;
use crate::model::{Decoder, Part};
use crate::parameters::ParameterTensor;
use crate::{Dtype, Error};

/// Returns the bytes of the casts of the weights that a layer of this plan runs again; of all weights if it runs everything again.
pub(super) fn cast_bytes(model: &Decoder, choices: &Choices, plan: LayerPlan) -> Result<u64, Error> {
    const WHAT: &str = "bytes of casts";
    let within = |part: Part| match plan {
        LayerPlan::RecomputeMlp => part == Part::FeedForward,
        LayerPlan::RecomputeAttention => part == Part::Attention,
        _ => true,
    };
    let tensors = model.block_tensors_of(model.attention_of(0))?;
    // Norms are not cast.
    let is_cast = |part: Part| matches!(part, Part::Attention | Part::FeedForward) && within(part);
    let cast = tensors.iter().filter(|tensor| is_cast(tensor.part));
    let counts = cast.map(ParameterTensor::elements).collect::<Result<Vec<_>, _>>()?;
    choices.recipe.compute.bytes(sum(WHAT, counts)?)
}

/// Bytes of casts after which `training`'s optimizers step the tensors that they have cast.
const UPDATE_CASTS: u64 = 64 << 20;

/// Returns the bytes of the copies that a step in the state's dtype makes of 16-bit weights without a master copy, and on a CPU of 16-bit
/// gradients: of tensors one after the other until they reach 64 MiB. For
/// [`WorkingMemory::update_bytes`](crate::offload::WorkingMemory::update_bytes); on a GPU one kernel takes gradients of another dtype.
///
/// # Errors
/// Counts beyond 64 bits.
pub fn update_bytes(model: &Decoder, recipe: &Recipe, on_cpu: bool) -> Result<u64, Error> {
    let elements =
        model.tensor_groups()?.iter().map(|(_, tensor)| tensor.elements()).collect::<Result<Vec<_>, _>>()?;
    let largest = elements.into_iter().max().unwrap_or(0);
    update_copies(recipe, on_cpu, (largest, model.parameters()?))
}

/// [`update_bytes`] of tensors with so many elements: the largest of them, and all.
pub(crate) fn update_copies(recipe: &Recipe, on_cpu: bool, (largest, all): (u64, u64)) -> Result<u64, Error> {
    const WHAT: &str = "bytes of the optimizer's step";
    let wide = |dtype: Dtype| dtype.storage_bits() >= recipe.state.storage_bits();
    let copies = u64::from(on_cpu && !wide(recipe.gradients))
        + u64::from(recipe.master.is_none() && !wide(recipe.parameters));
    let one = product(WHAT, &[copies, recipe.state.bytes(largest)?])?;
    let all = product(WHAT, &[copies, recipe.state.bytes(all)?])?;
    Ok(all.min(sum(WHAT, [one, UPDATE_CASTS])?))
}
