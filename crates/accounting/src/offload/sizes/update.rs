//! The copies that a step of the optimizer makes.

use crate::exact::{product, sum};
use crate::memory::recipe::Recipe;
use crate::model::Decoder;
use crate::{Dtype, Error};

/// Bytes of casts after which `training`'s optimizers step what they have cast.
const UPDATE_CASTS: u64 = 64 << 20;

/// Returns the bytes of the copies that a step in the state's dtype makes of 16-bit weights without a master copy, and on a CPU of 16-bit
/// gradients: of tensors one after the other until they reach 64 MiB. For
/// [`WorkingMemory::update_bytes`](crate::offload::WorkingMemory::update_bytes); on a GPU one kernel takes gradients of another dtype.
///
/// # Errors
/// Counts beyond 64 bits.
pub fn update_bytes(model: &Decoder, recipe: &Recipe, on_cpu: bool) -> Result<u64, Error> {
    let wide = |dtype: Dtype| dtype.storage_bits() >= recipe.state.storage_bits();
    let copies = u64::from(on_cpu && !wide(recipe.gradients))
        + u64::from(recipe.master.is_none() && !wide(recipe.parameters));
    let largest =
        model.tensor_groups()?.iter().map(|(_, tensor)| tensor.elements()).collect::<Result<Vec<_>, _>>()?;
    let largest = largest.into_iter().max().unwrap_or(0);
    let one = product("bytes of the optimizer's step", &[copies, recipe.state.bytes(largest)?])?;
    let all = product("bytes of the optimizer's step", &[copies, recipe.state.bytes(model.parameters()?)?])?;
    Ok(all.min(sum("bytes of the optimizer's step", [one, UPDATE_CASTS])?))
}
