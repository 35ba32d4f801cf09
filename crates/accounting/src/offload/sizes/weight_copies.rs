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
/// Bytes of casts of one tensor, beyond which it is updated a slice at a time.
const SLICE_CASTS: u64 = 32 << 20;

/// Returns the bytes of the copies that a step in the state's dtype makes of 16-bit weights without a master copy, and on a CPU of 16-bit
/// gradients: of tensors one after the other until they reach 64 MiB, and of a large one 32 MiB at a time. For
/// [`WorkingMemory::update_bytes`](crate::offload::WorkingMemory::update_bytes); on a GPU one kernel takes gradients of another dtype.
///
/// # Errors
/// Counts beyond 64 bits.
pub fn update_bytes(model: &Decoder, recipe: &Recipe, on_cpu: bool) -> Result<u64, Error> {
    update_copies(recipe, on_cpu, (largest(model, |_| true)?, model.parameters()?))
}

/// [`update_bytes`] where weights are updated one by one: of those of layers, and of the others.
pub(crate) fn update_bytes_of_one(model: &Decoder, recipe: &Recipe, on_cpu: bool) -> Result<[u64; 2], Error> {
    let in_layers = |part: Part| matches!(part, Part::Attention | Part::FeedForward);
    let one = |of_layers: bool| {
        let elements = largest(model, |part| in_layers(part) == of_layers)?;
        Ok::<_, Error>(copies(recipe, on_cpu, elements)?.min(SLICE_CASTS))
    };
    Ok([one(true)?, one(false)?])
}

/// [`update_bytes`] of tensors with so many elements: the largest of them, and all.
pub(crate) fn update_copies(recipe: &Recipe, on_cpu: bool, (largest, all): (u64, u64)) -> Result<u64, Error> {
    let one = copies(recipe, on_cpu, largest)?.min(SLICE_CASTS);
    Ok(copies(recipe, on_cpu, all)?.min(sum(WHAT, [one, UPDATE_CASTS])?))
}

const WHAT: &str = "bytes of the optimizer's step";

/// Returns the bytes of copies of so many weights and gradients.
fn copies(recipe: &Recipe, on_cpu: bool, elements: u64) -> Result<u64, Error> {
    let wide = |dtype: Dtype| dtype.storage_bits() >= recipe.state.storage_bits();
    let copies = u64::from(on_cpu && !wide(recipe.gradients))
        + u64::from(recipe.master.is_none() && !wide(recipe.parameters));
    product(WHAT, &[copies, recipe.state.bytes(elements)?])
}

/// Returns the elements of the largest tensor of some parts.
fn largest(model: &Decoder, is_counted: impl Fn(Part) -> bool) -> Result<u64, Error> {
    let groups = model.tensor_groups()?.into_iter().filter(|(_, tensor)| is_counted(tensor.part));
    let elements = groups.map(|(_, tensor)| tensor.elements());
    Ok(elements.collect::<Result<Vec<_>, _>>()?.into_iter().max().unwrap_or(0))
}
