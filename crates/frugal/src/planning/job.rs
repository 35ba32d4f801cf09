//! Describes a configuration's training step to `accounting`, for predictions.

use accounting::Decoder;
use accounting::candidates::{Allowed, Candidate, Job, Layers, OffloadedLayers, Placement, Tier};
use accounting::experts::StreamedExperts;
use accounting::memory::logits::Loss;
use accounting::memory::optimizer::Optimizer;
use accounting::memory::recipe::Recipe;
use accounting::offload::{MOST_PLANNED_SLOTS, OptimizerPlace};
use models::DecoderConfig;
use swiglu_ckpt::CheckpointLevel;
use tch::{Device, Kind};
use training::activations::{LayerPlan, every_kth};

use super::low_rank::low_rank;
use super::over_ranks::divided;
use super::rates::product_kind;
use super::teacher;
use super::{DataShape, KnownRates, WeightFormat, choices, trained_recipe, widens};
use crate::config::{
    self, ActivationPlan, Bytes, Compute, Config, LossHeadKind, OffloadConfig, OffloadMethod, OffloadTier,
    OptimizerRule, Recomputed, ZeroStage,
};
use crate::error::Result;
use crate::recipe::Recipe as Applied;

/// Reason why a step is not predicted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotPredicted(pub String);

impl<E: std::error::Error> From<E> for NotPredicted {
    fn from(error: E) -> Self {
        Self(error.to_string())
    }
}

pub(super) fn refused(reason: &str) -> NotPredicted {
    NotPredicted(reason.to_owned())
}

/// Returns what a training of `shape` with weights in a format (a dtype, or a [`WeightFormat`]) computes in a step.
///
/// # Errors
/// Techniques, dtypes and families of models whose activations `accounting` does not predict, by name.
pub fn job(
    config: &Config,
    shape: &DecoderConfig,
    (format, device): (impl Into<WeightFormat>, Device),
    data: &DataShape,
    rates: &KnownRates,
) -> Result<Job, NotPredicted> {
    let format = format.into();
    let kind = format.kind;
    let Config { mlp, loss, optimizer, training, .. } = config;
    // What no prediction covers.
    let product_kind = product_kind(kind);
    if !matches!(product_kind, Kind::Float | Kind::BFloat16 | Kind::Half) {
        return Err(refused("weights in float64"));
    }
    let mlp_tile = mlp.level.as_deref().map(mlp_tile).transpose()?;
    if mlp_tile.is_some() && (config.adapter.is_some() || config.precision.compute != Compute::Fp32) {
        return Err(refused("`mlp.level` beside adapters or in mixed precision"));
    }
    if loss.gradients_in_backward {
        return Err(refused("`loss.gradients_in_backward`"));
    }
    if config.offload.as_ref().is_some_and(|offload| offload.method != OffloadMethod::Overlap) {
        return Err(refused("`offload.method` other than \"overlap\""));
    }
    if kind == kernels::quantized::blocks::KIND && format.stored.is_none() {
        return Err(refused("a base in the blocks of a GGUF file that is not here"));
    }
    let on_cpu = device == Device::Cpu;
    let mut lora = config.adapter.as_ref().map(|adapter| low_rank(adapter, shape, on_cpu)).transpose()?;
    if let Some(lora) = lora.as_mut().filter(|_| config.objective.kind.is_preference()) {
        lora.dropout = false;
    }
    if lora.is_none() && config.model.freeze.is_some() {
        return Err(refused("`model.freeze`"));
    }
    let state = state_of(optimizer.rule);
    // Those whose temporaries are known.
    let is_predicted = match optimizer.rule {
        OptimizerRule::Adam | OptimizerRule::AdamW => true,
        OptimizerRule::AdamW8bit | OptimizerRule::Lion | OptimizerRule::Muon | OptimizerRule::Adafactor => {
            device == Device::Cpu
        }
        _ => false,
    };
    if lora.is_none() && !is_predicted {
        return Err(refused(match device {
            Device::Cpu => "sgd, momentum, nesterov, adagrad or rmsprop on all weights",
            _ => "an optimizer other than Adam and AdamW on all weights on a GPU",
        }));
    }
    let model = Decoder::from_config(shape)?;
    let mixed = mixed(config, (kind, device))?;
    // Tokens whose logits exist at a time.
    let row = model.vocabulary.saturating_mul(4).max(1);
    let learned = config.objective.distillation()?;
    let of_teacher = learned.map(|own| {
        teacher::chunk(
            (&own, config.objective.teacher_top_k.is_some()),
            shape.vocab_size,
            (product_kind, device),
        )
    });
    let further_tiles = of_teacher.map_or(0, |[_, tiles]| tiles);
    let tokens = match (loss.chunk_tokens, loss.chunk_bytes) {
        (Some(tokens), _) => tokens.unsigned_abs(),
        (None, Some(Bytes(bytes))) => (bytes / (row * (1 + further_tiles))).max(1),
        (None, None) if further_tiles > 0 => of_teacher.map_or(1, |[tokens, _]| tokens),
        (None, None) => loss_chunk(shape.vocab_size, kind, device),
    };
    let all_tokens = match (loss.chunk_tokens, loss.chunk_bytes) {
        (None, None) if lora.is_none() && further_tiles == 0 => {
            let matrix = [shape.vocab_size, shape.hidden_size];
            fused_ce::one_chunk_tokens(matrix, product_kind, device).unsigned_abs()
        }
        _ => 0,
    };
    let loss = match loss.head {
        LossHeadKind::Plain => Loss::Eager,
        LossHeadKind::Auto | LossHeadKind::Fused => Loss::LinearCrossEntropy { tokens, whole: all_tokens },
    };
    // Dtypes of weights, gradients and state.
    let (formats, operands) = match (mixed, &lora) {
        (Some(mixed), _) => mixed,
        (None, None) => (trained_recipe(kind, optimizer.master_weights.keeps_copies()), kind),
        (None, Some(_)) => (format.recipe(), kind),
    };
    let choices = accounting::offload::sizes::Choices {
        recipe: formats,
        loss,
        optimizer: state,
        documents: data.packed,
        sequence_ranks: training.sequence_parallel_size as u64,
        widens: widens(operands, device),
        packs: on_cpu,
        flash_workspace: device.is_cuda(),
        mlp_tile,
        experts: config
            .experts
            .as_ref()
            .map(|experts| StreamedExperts { cache: experts.cache.0, rate: rates.file_load }),
        further_tiles,
        ..choices((kind, device), &rates.machine(), tokens)
    };
    Ok(Job {
        model,
        lora,
        choices,
        largest: data.largest.iter().map(|(_, batch)| *batch).collect(),
        mean: data.mean,
        evaluation: data.evaluations.last().map(|(_, batch)| *batch),
        accumulation: training.accumulation as u64,
        clips: optimizer.clip > 0.0,
        in_backward: optimizer.in_backward,
        rates: rates.transfers(),
        file_load: rates.file_load,
        file_optimizer: rates.file_optimizer,
        on_cpu,
        ranks: None,
        further_passes: config.objective.further_passes(config.adapter.is_some()),
        teacher: teacher::teacher(config, data.teacher.as_ref(), device, rates, data.packed)?,
    })
}

/// The bytes of a tile of the MLPs at a level that keeps their input alone.
fn mlp_tile(level: &str) -> Result<u64, NotPredicted> {
    match level.parse::<CheckpointLevel>()? {
        CheckpointLevel::InputOnlyTiled { bytes } => Ok(bytes),
        CheckpointLevel::InputOnly => Ok(u64::MAX),
        other => Err(NotPredicted(format!("`mlp.level` {}", other.name()))),
    }
}

/// Returns the tokens whose logits exist at a time in a training that says nothing of it, with weights in `kind`.
pub fn loss_chunk(vocabulary: i64, kind: Kind, device: Device) -> u64 {
    // So many tokens that all chunks but the last are full.
    fused_ce::default_chunk_tokens(1 << 40, vocabulary, product_kind(kind), device).unsigned_abs()
}

/// The number formats of mixed precision, and the dtype of its products; `None` for a step without.
fn mixed(config: &Config, (kind, device): (Kind, Device)) -> Result<Option<(Recipe, Kind)>, NotPredicted> {
    let compute = match config.precision.compute {
        Compute::Fp32 => return Ok(None),
        Compute::Bf16 => (Recipe::AMP_BF16, Kind::BFloat16),
        Compute::Fp16 => return Err(refused("mixed precision in fp16")),
        Compute::Fp8 => return Err(refused("mixed precision in fp8")),
    };
    if device != Device::Cpu {
        return Err(refused("mixed precision on a GPU"));
    }
    if kind != Kind::Float {
        return Err(refused("mixed precision of weights that are not float32"));
    }
    if config.offload.is_some() {
        return Err(refused("mixed precision of offloaded layers"));
    }
    if config.loss.head == LossHeadKind::Plain {
        return Err(refused("mixed precision with all logits at once"));
    }
    let training = &config.training;
    let splits =
        training.accumulation > 1 || training.micro_batch_size.is_some_and(|rows| rows < training.batch);
    // The casts of the first pass are in the graphs of the others, and their gradients wait until the backward is done.
    if config.adapter.is_none() && splits {
        return Err(refused("mixed precision of all weights over several passes in a step"));
    }
    Ok(Some(compute))
}

fn state_of(rule: OptimizerRule) -> Optimizer {
    match rule {
        OptimizerRule::Sgd => Optimizer::Sgd,
        OptimizerRule::Momentum | OptimizerRule::Nesterov => Optimizer::Momentum,
        OptimizerRule::AdaGrad => Optimizer::AdaGrad,
        OptimizerRule::RmsProp => Optimizer::RmsProp,
        OptimizerRule::Adam => Optimizer::Adam,
        OptimizerRule::AdamW => Optimizer::AdamW,
        OptimizerRule::AdamW8bit => Optimizer::Adam8bit,
        OptimizerRule::Lion => Optimizer::Lion,
        OptimizerRule::Adafactor => Optimizer::Adafactor,
        OptimizerRule::Muon => Optimizer::Muon,
    }
}

/// Returns which ways to run a step the configuration leaves open for a model of `layers` layers. What it names is kept.
///
/// # Errors
/// `activations.every` of 0.
pub fn allowed(config: &Config, layers: usize, device: Device) -> Result<Allowed> {
    let Config { activations, training, optimizer, .. } = config;
    let rows = training.micro_batch_size.filter(|rows| *rows < training.batch).map(|rows| rows as u64);
    let mixed = config.precision.compute != Compute::Fp32;
    // The answers of a pair stay together.
    let splits = training.micro_batch_size.is_none()
        && !config.objective.kind.is_preference()
        && activations.plan != ActivationPlan::Plan
        && !optimizer.in_backward
        && !(mixed && config.adapter.is_none());
    let place = |place: config::OptimizerPlace| match place {
        config::OptimizerPlace::Host => OptimizerPlace::Host,
        config::OptimizerPlace::Device => OptimizerPlace::Device,
    };
    if let Some(offload) = &config.offload {
        let offloaded = OffloadedLayers {
            tiers: vec![tier(offload.tier)],
            most_slots: offload.ring,
            resident: Some(offload.resident.clone()),
            keep: config.kept_layers(layers)?,
            inputs_on_host: match activations.plan {
                // Divided layers keep their inputs on the device.
                ActivationPlan::Auto if optimizer.zero_stage != ZeroStage::Three => None,
                _ => Some(config.keeps_inputs_on_host()),
            },
            optimizer: place(optimizer.place),
        };
        return Ok(Allowed { layers: None, offloaded: Some(offloaded), splits, rows, ..Allowed::default() });
    }
    let again = activations.recompute.layer_plan();
    let plan = match activations.plan {
        ActivationPlan::Auto | ActivationPlan::Plan => Layers::Any,
        ActivationPlan::Keep => Layers::Only(vec![LayerPlan::KeepAll; layers]),
        ActivationPlan::Recompute => Layers::Only(every_kth(layers, 1, again)?),
        ActivationPlan::EveryK => Layers::Only(every_kth(layers, activations.every, again)?),
    };
    let offloaded = match activations.plan {
        ActivationPlan::Auto if !mixed && !optimizer.in_backward && config.experts.is_none() => {
            offloaded_layers(config, device)
        }
        _ => None,
    };
    Ok(Allowed { layers: Some(plan), offloaded, splits, rows, ..Allowed::default() })
}

/// Ways to offload layers that a plan compares by default.
fn offloaded_layers(config: &Config, device: Device) -> Option<OffloadedLayers> {
    let on_cpu = device == Device::Cpu;
    let frozen = config.adapter.is_some();
    // Of a CPU, host memory is the device's: only files are outside.
    let tiers: Vec<Tier> = match on_cpu {
        true => vec![Tier::File],
        false => vec![Tier::Host, Tier::File],
    };
    let optimizer = if frozen { OptimizerPlace::Device } else { OptimizerPlace::Host };
    let works = |tier: &Tier| {
        let placement = Placement::Offloaded {
            tier: *tier,
            ring: 1,
            resident: Vec::new(),
            keep: Vec::new(),
            inputs_on_host: false,
            optimizer,
        };
        Applied::new(&with_placement(config, &placement)).is_ok()
    };
    let tiers: Vec<Tier> = tiers.into_iter().filter(works).collect();
    (!tiers.is_empty()).then_some(OffloadedLayers {
        tiers,
        most_slots: MOST_PLANNED_SLOTS,
        resident: None,
        keep: None,
        inputs_on_host: None,
        optimizer,
    })
}

/// Returns the configuration of a training that runs a step as `candidate` plans it. What layers on the device keep that ranks do not divide is not in it:
/// [`Activations::change`](training::activations::Activations::change) says that.
pub fn with_choice(config: &Config, candidate: &Candidate) -> Config {
    let mut config = with_placement(config, &candidate.placement);
    if let Some(rows) = candidate.rows {
        config.training.micro_batch_size = Some(rows as usize);
    }
    if let (Some(ranks), Placement::Resident(plan)) = (&candidate.ranks, &candidate.placement) {
        divided(&mut config, ranks, plan);
    }
    config
}

fn with_placement(config: &Config, placement: &Placement) -> Config {
    let mut config = config.clone();
    if let Placement::Offloaded { tier, ring, resident, keep, inputs_on_host, optimizer } = placement {
        let offload = config.offload.unwrap_or_default();
        config.offload = Some(OffloadConfig {
            tier: match tier {
                Tier::Host => OffloadTier::Host,
                Tier::File => OffloadTier::File,
            },
            ring: *ring,
            resident: resident.clone(),
            keep: Some(keep.clone()),
            ..offload
        });
        if *inputs_on_host {
            (config.activations.plan, config.activations.recompute) =
                (ActivationPlan::Recompute, Recomputed::Offload);
        }
        config.optimizer.place = match optimizer {
            OptimizerPlace::Device => config::OptimizerPlace::Device,
            OptimizerPlace::Host => config::OptimizerPlace::Host,
        };
    }
    config
}

fn tier(tier: OffloadTier) -> Tier {
    match tier {
        OffloadTier::Host => Tier::Host,
        OffloadTier::File => Tier::File,
    }
}
