//! The layers of a model in their order.

use crate::Error;
use crate::memory::quantized;
use crate::memory::recipe::Recipe;
use crate::model::{AttentionKind, Decoder};
use crate::offload::step_costs::Layer;

/// Returns the layers, each with its own bytes where they are in the blocks of a file.
pub(super) fn in_order(
    of: &dyn Fn(AttentionKind) -> Result<Layer, Error>,
    model: &Decoder,
    recipe: &Recipe,
) -> Result<Vec<Layer>, Error> {
    /// Maximum number of layers in a simulation.
    const MOST: u64 = 10_000;
    if model.layers > MOST {
        return Err(Error::Shape {
            what: format!("a schedule of {} layers is too long", model.layers),
            remedy: format!("give a model of at most {MOST} layers"),
        });
    }
    let mut kinds = Vec::new();
    for (kind, _) in model.attention_kinds() {
        kinds.push((kind, of(kind)?));
    }
    let of_kind = |kind| kinds.iter().filter(move |(other, _)| *other == kind).map(|(_, layer)| *layer);
    let mut layers: Vec<Layer> =
        (0..model.layers).flat_map(|layer| of_kind(model.attention_of(layer))).collect();
    for (number, layer) in layers.iter_mut().enumerate() {
        layer.slot_bytes = layer.slot_bytes.saturating_sub(quantized::smaller_by(model, recipe, number));
    }
    Ok(layers)
}
