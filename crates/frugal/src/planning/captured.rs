//! Whether a graph repeats the steps of a configuration, as far as that is known before there is a model.

use accounting::candidates::{Candidate, CapturedMemory, Job, Placement};
use accounting::quantity::bytes_text;
use tch::Device;
use training::embedding_noise::NOT_CAPTURED;
use training::trainer::captured::SHAPES;

use crate::config::{CaptureMode, Config, ObjectiveKind, Recomputed};

/// Returns why no graph repeats the steps of a training on `device`; `None` if one does ([`training::trainer::captured`]). A
/// [`Trainer`](training::Trainer) has the same reasons.
pub fn capture_refusal(config: &Config, over_ranks: bool, device: Device) -> Option<String> {
    if config.training.capture == CaptureMode::Off {
        return Some("capture is off".to_owned());
    }
    if !device.is_cuda() {
        return Some("on a CPU a launch is a call".to_owned());
    }
    if config.training.neftune_noise_alpha.is_some_and(|alpha| alpha > 0.0) {
        return Some(NOT_CAPTURED.to_owned());
    }
    if over_ranks {
        return Some("ranks communicate during a step".to_owned());
    }
    if let Some(reason) = offload_refusal(config) {
        return Some(reason.to_owned());
    }
    if config.objective.kind == ObjectiveKind::Distillation {
        return Some(TEACHER.to_owned());
    }
    let rule = config.optimizer.rule.rule();
    (!rule.has_fused()).then(|| {
        format!(
            "steps by the fused kernel of Adam or AdamW only are decided on the device; the rule is {}",
            rule.name()
        )
    })
}

/// Why steps of offloaded layers cannot be captured.
pub(crate) const OFFLOADED_LAYERS: &str = "layers are offloaded, so their addresses change";

/// Why a graph cannot repeat a step over pairs.
pub(crate) const PREFERENCES: &str = "an objective over preferences has never been captured";
/// Why a graph cannot repeat a step with a teacher.
pub(crate) const TEACHER: &str = "steps with a teacher have never been captured";
/// Why steps of a mixture of experts cannot be captured.
pub(crate) const EXPERTS: &str = "the host reads which experts a token is given to";

/// Returns why steps of offloaded tensors cannot be captured; `None` where nothing is offloaded.
pub(crate) fn offload_refusal(config: &Config) -> Option<&'static str> {
    if config.offload.is_some() {
        return Some(OFFLOADED_LAYERS);
    }
    let is_offloaded = config.activations.recompute == Recomputed::Offload;
    is_offloaded.then_some("activations are offloaded by a worker of the host")
}

/// Predicts the memory of captured steps that run as `candidate` says; `None` where its layers are offloaded.
///
/// # Errors
/// As [`Job::evaluate`].
pub fn captured_memory(
    job: &Job,
    candidate: &Candidate,
) -> Result<Option<CapturedMemory>, accounting::Error> {
    match candidate.placement {
        Placement::Resident(_) => job.captured(candidate, SHAPES as u64).map(Some),
        Placement::Offloaded { .. } => Ok(None),
    }
}

/// Describes the memory of captured steps in a line.
pub fn captured_text(memory: &CapturedMemory) -> String {
    let CapturedMemory { pool, inputs, most } = *memory;
    format!(
        "graphs keep a pool of {} and inputs of at most {}, beside a step of another shape or an evaluation {} in all; where that is not \
         free, steps run without graphs",
        bytes_text(pool),
        bytes_text(inputs),
        bytes_text(most)
    )
}
