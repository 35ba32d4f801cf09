//! A teacher, as a plan counts it.

use accounting::Decoder;
use accounting::candidates::Teacher;
use accounting::offload::sizes::Choices;
use models::distillation::DistillationConfig;
use tch::{Device, Kind};

use super::{KnownRates, NotPredicted, TeacherShape, WeightFormat, choices};
use crate::config::{Config, LossHeadKind, TeacherPlace};
use crate::planning::job::refused;
use crate::recipe::TEACHER_RING;

/// Returns what the teacher of a training takes; `None` without one.
///
/// # Errors
/// A teacher whose sizes are not known, or whose forward is not predicted; all logits at once.
pub(super) fn teacher(
    config: &Config,
    shape: Option<&TeacherShape>,
    device: Device,
    rates: &KnownRates,
    packed: bool,
) -> Result<Option<Teacher>, NotPredicted> {
    if config.objective.distillation()?.is_none() || config.objective.teacher_top_k.is_some() {
        return Ok(None);
    }
    let Some(TeacherShape { config: shape, format }) = shape else {
        return Err(refused("a teacher that is not here"));
    };
    if config.loss.head == LossHeadKind::Plain {
        return Err(refused("a teacher with all logits at once"));
    }
    let WeightFormat { kind, .. } = *format;
    if kind == Kind::Double {
        return Err(refused("a teacher in float64"));
    }
    let tile = 1;
    let choices = Choices {
        recipe: format.recipe(),
        documents: packed,
        packs: device == Device::Cpu,
        ..choices((kind, device), &rates.machine(), tile)
    };
    let is_offloaded = config.objective.teacher_place == TeacherPlace::Offloaded;
    let on_cpu = device == Device::Cpu;
    Ok(Some(Teacher {
        model: Decoder::from_config(shape)?,
        choices,
        ring: is_offloaded.then_some(TEACHER_RING),
        load: if on_cpu { rates.file_load } else { rates.transfers().load },
        on_host: is_offloaded && !on_cpu,
    }))
}

/// Returns the tokens of a chunk of the loss with `learned`, and the tiles of logits beside the student's.
pub(super) fn chunk(
    (learned, has_sets): (&DistillationConfig, bool),
    vocabulary: i64,
    (kind, device): (Kind, Device),
) -> [u64; 2] {
    let tiles = if has_sets { 1 } else { fused_ce::taught_tiles(learned.divergence) };
    let tokens = fused_ce::default_taught_chunk_tokens(1 << 40, vocabulary, (kind, device), tiles);
    [tokens.unsigned_abs(), tiles]
}
