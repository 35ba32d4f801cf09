//! Describes a configuration's adapters to `accounting`.

use accounting::lora::{ExpertTargets, LowRank, Projection, Targets, TokenRows};
use lora::{BiasTraining, Init, LoraConfig};
use models::{DecoderConfig, ExpertTensor, hugging_face};

use super::job::{NotPredicted, refused};

/// What an adapter of a layer is on.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Place {
    Projection(Projection),
    Experts(ExpertTensor),
}

/// The names of a model's projections; of a family without separate ones those that it would need, and `accounting` refuses the model.
fn names(shape: &DecoderConfig) -> Vec<String> {
    if shape.family.has_separate_projections() {
        return shape.projections().iter().map(|(name, _)| hugging_face::tensor_name(name)).collect();
    }
    let name = |which: Projection| {
        let part = if which <= Projection::Output { "self_attn" } else { "mlp" };
        format!("model.layers.0.{part}.{}_proj", which.name())
    };
    Projection::ALL.into_iter().filter(|which| *which <= Projection::Down).map(name).collect()
}

/// Returns the adapters of a model's layers.
///
/// # Errors
/// Adapters that differ between layers, or are not on the projections and experts of the layers alone.
pub fn low_rank(adapter: &LoraConfig, shape: &DecoderConfig, on_cpu: bool) -> Result<LowRank, NotPredicted> {
    if adapter.bias != BiasTraining::None || adapter.modules_to_save.is_some() {
        return Err(refused("trained biases and modules saved whole"));
    }
    // Every place, with the rank of its adapters if it has any: one for all layers that have the place.
    let mut ranks: Vec<(Place, Option<i64>)> = Vec::new();
    let mut add = |place: Place, rank: Option<i64>| match ranks.iter().find(|(known, _)| *known == place) {
        Some((_, known)) if *known != rank => Err(refused("adapters that differ between layers")),
        Some(_) => Ok(()),
        None => {
            ranks.push((place, rank));
            Ok(())
        }
    };
    let in_layers = |name: &str| Some(name.strip_prefix("model.layers.")?.split_once('.')?.1.to_owned());
    for name in names(shape) {
        let rank = if adapter.adapts(&name)? { Some(adapter.options(&name)?.r) } else { None };
        match in_layers(&name).and_then(|within| Projection::of_module(&within)) {
            Some(which) => add(Place::Projection(which), rank)?,
            None if rank.is_some() => return Err(NotPredicted(format!("an adapter on `{name}`"))),
            None => {}
        }
    }
    for layer in 0..usize::try_from(shape.num_hidden_layers).unwrap_or(0) {
        for tensor in ExpertTensor::ALL.into_iter().filter(|_| shape.layer_mixture(layer).is_some()) {
            let name = format!("model.layers.{layer}.mlp.experts.{}", tensor.name());
            let is_adapted = adapter.adapts_parameter(&name)?;
            add(Place::Experts(tensor), if is_adapted { Some(adapter.options(&name)?.r) } else { None })?;
        }
    }
    for outside in ["lm_head", "model.embed_tokens"] {
        if adapter.adapts(outside)? {
            return Err(NotPredicted(format!("an adapter on `{outside}`")));
        }
    }
    let adapted = || ranks.iter().filter_map(|(place, rank)| Some((*place, (*rank)?)));
    let Some((_, rank)) = adapted().next() else {
        return Err(refused("adapters outside of the layers' projections"));
    };
    if adapted().any(|(_, other)| other != rank) {
        return Err(refused("adapters of several ranks"));
    }
    let projections = adapted().filter_map(|(place, _)| match place {
        Place::Projection(which) => Some(which),
        Place::Experts(_) => None,
    });
    let has = |tensor| adapted().any(|(place, _)| place == Place::Experts(tensor));
    Ok(LowRank {
        rank: rank.unsigned_abs(),
        targets: Targets::new(&projections.collect::<Vec<_>>()),
        experts: ExpertTargets { gate_up: has(ExpertTensor::GateUp), down: has(ExpertTensor::Down) },
        dropout: adapter.lora_dropout > 0.0,
        magnitudes: adapter.use_dora,
        subtracted: matches!(adapter.init()?, Init::Pissa | Init::Olora),
        on_cpu,
        token_rows: TokenRows {
            trained: adapter.token_rows(shape)?.unsigned_abs(),
            in_embedding: adapter.rows_in_embedding(shape)?.unsigned_abs(),
            in_head: adapter.rows_in_head(shape)?.unsigned_abs(),
        },
    })
}
