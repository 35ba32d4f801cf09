//! Copies of weights that a step makes: casts of mixed precision, and those of an optimizer.

use super::Choices;
use crate::activation_plan::LayerPlan;
use crate::exact::{product, sum};
use crate::lora::LowRank;
use crate::memory::optimizer::{Extent, Optimizer};
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

/// Returns the bytes that a step allocates for weights in `recipe`: the copies in the state's dtype of 16-bit weights without a master copy, and
/// on a CPU of 16-bit gradients, of tensors one after the other until they reach 64 MiB and of a large one 32 MiB at a time; and what the
/// optimizer's update of a tensor takes beside them. For
/// [`WorkingMemory::update_bytes`](crate::offload::WorkingMemory::update_bytes); on a GPU one kernel takes gradients of another dtype.
///
/// # Errors
/// Counts beyond 64 bits.
pub fn update_bytes(
    model: &Decoder,
    recipe: &Recipe,
    optimizer: Optimizer,
    on_cpu: bool,
) -> Result<u64, Error> {
    let tensors: Vec<_> = model.tensor_groups()?.into_iter().map(|(_, tensor)| tensor).collect();
    let largest = largest(&tensors, |_| true)?;
    let copies = update_copies(recipe, optimizer, on_cpu, (largest, model.parameters()?))?;
    let own = optimizer.update_bytes_of(tensors.iter().map(Extent::from), recipe.state)?;
    sum(WHAT, [copies, own])
}

/// [`update_bytes`] where weights are updated one by one: of those of layers, and of the others.
pub(crate) fn update_bytes_of_one(
    model: &Decoder,
    recipe: &Recipe,
    optimizer: Optimizer,
    on_cpu: bool,
) -> Result<[u64; 2], Error> {
    let tensors: Vec<_> = model.tensor_groups()?.into_iter().map(|(_, tensor)| tensor).collect();
    let in_layers = |part: Part| matches!(part, Part::Attention | Part::FeedForward);
    let one = |of_layers: bool| {
        let is_counted = |tensor: &ParameterTensor| in_layers(tensor.part) == of_layers;
        let copies = copies_of_one(recipe, optimizer, on_cpu, largest(&tensors, is_counted)?)?;
        let counted = tensors.iter().filter(|tensor| is_counted(tensor)).map(Extent::from);
        sum(WHAT, [copies, optimizer.update_bytes_of(counted, recipe.state)?])
    };
    Ok([one(true)?, one(false)?])
}

/// Returns the bytes that the optimizer's update of an adapter's tensor takes: adapters are in the state's dtype.
pub(crate) fn update_bytes_of_adapters(
    model: &Decoder,
    lora: &LowRank,
    optimizer: Optimizer,
) -> Result<u64, Error> {
    let mut most = 0;
    for (kind, _) in model.attention_kinds() {
        let shapes = lora.shapes(model, kind)?;
        let extents = shapes.iter().map(|shape| Extent::of_adapter(shape));
        most = most.max(optimizer.update_bytes_of(extents, LowRank::WIDE)?);
    }
    Ok(most)
}

/// The copies of [`update_bytes`] for tensors with so many elements: the largest of them, and all.
pub(crate) fn update_copies(
    recipe: &Recipe,
    optimizer: Optimizer,
    on_cpu: bool,
    (largest, all): (u64, u64),
) -> Result<u64, Error> {
    let one = copies_of_one(recipe, optimizer, on_cpu, largest)?;
    Ok(copies(recipe, on_cpu, all)?.min(sum(WHAT, [one, UPDATE_CASTS])?))
}

const WHAT: &str = "bytes of the optimizer's step";

/// Returns the bytes of the copies of one tensor. A rule that needs the whole tensor is given no slices.
fn copies_of_one(recipe: &Recipe, optimizer: Optimizer, on_cpu: bool, elements: u64) -> Result<u64, Error> {
    let whole = copies(recipe, on_cpu, elements)?;
    Ok(if optimizer.updates_whole_tensors() { whole } else { whole.min(SLICE_CASTS) })
}

/// Returns the bytes of copies of so many weights and gradients.
fn copies(recipe: &Recipe, on_cpu: bool, elements: u64) -> Result<u64, Error> {
    let wide = |dtype: Dtype| dtype.storage_bits() >= recipe.state.storage_bits();
    let copies = u64::from(on_cpu && !wide(recipe.gradients))
        + u64::from(recipe.master.is_none() && !wide(recipe.parameters));
    product(WHAT, &[copies, recipe.state.bytes(elements)?])
}

/// Returns the elements of the largest of some tensors.
fn largest(tensors: &[ParameterTensor], is_counted: impl Fn(&ParameterTensor) -> bool) -> Result<u64, Error> {
    let elements = tensors.iter().filter(|tensor| is_counted(tensor)).map(ParameterTensor::elements);
    Ok(elements.collect::<Result<Vec<_>, _>>()?.into_iter().max().unwrap_or(0))
}
