//! Every pair of techniques computes what either computes without the other, to the tolerance that each promises, or is refused by
//! name before anything is made.
//!
//! A technique that promises bits, or a tolerance, must keep that promise beside any other: `{A, B}` is compared with `{A}` by B's
//! promise, and with `{B}` by A's. Techniques that compute something else by design (adapters, mixed precision) promise nothing, and
//! the others keep their promises beside them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use expect_test::expect;
use frugal::config::{Dtype, LossHeadKind};
use frugal::models::hugging_face::{self, Folder};
use frugal::models::module::{self, LanguageModel};
use frugal::models::{DecoderConfig, Gpt2, Gpt2Config, Llama};
use frugal::recipe::{Handles, Prepared, Teacher};
use frugal::runtime::random::Generator;
use frugal::sharding::Mesh;
use frugal::training::masked_rows::{Grouping, Layout, MaskedBatches, MaskedRow};
use frugal::training::observer::{Observer, StepRecord};
use frugal::training::trainer::Overflow;
use frugal::training::{Batches, Trainer};
use frugal::{Config, Error, Recipe};
use gguf::TensorType;
use serde_json::json;
use tch::{Device, Kind, Tensor};

use crate::blocks_file::Shape;
use crate::techniques::{Family, Promise, TECHNIQUES, Technique, WEIGHTS};

/// Rows of an epoch, which is one step.
pub(crate) const ROWS: usize = 8;
const VOCABULARY: i64 = 61;
const STEPS: u64 = 2;

/// Rows of a training; with other weights of examples, if it `has_weights`.
pub(crate) fn rows(has_weights: bool) -> Vec<MaskedRow> {
    let row = |number: i64| {
        let length = 5 + number % 5;
        let tokens: Vec<i64> = (0..length).map(|at| (7 * number + 5 * at * at + 3) % VOCABULARY).collect();
        let labels = (0..).zip(&tokens).map(|(at, id)| if at < 2 { -100 } else { *id }).collect();
        // Every second one is an undesirable answer, for an objective over rated ones.
        let weight = if has_weights { [0.5, 3.0, 1.25][number as usize % 3] } else { 1.0 };
        MaskedRow { tokens, labels, weight: if number % 2 == 0 { weight } else { -weight } }
    };
    (0..ROWS as i64).map(row).collect()
}

fn model(family: Family) -> Box<dyn LanguageModel> {
    let options = (Kind::Float, Device::Cpu);
    let model: Box<dyn LanguageModel> = match family {
        Family::Llama => {
            Box::new(Llama::new(&DecoderConfig::llama(VOCABULARY, 16, 24, 3, 2), options).unwrap())
        }
        Family::Wide => {
            Box::new(Llama::new(&DecoderConfig::llama(VOCABULARY, 64, 72, 3, 2), options).unwrap())
        }
        Family::Gpt2 => {
            let config = Gpt2Config {
                vocabulary: VOCABULARY,
                max_sequence: 32,
                hidden: 16,
                heads: 2,
                layers: 3,
                ..Gpt2Config::small()
            };
            Box::new(Gpt2::new(&config, options).unwrap())
        }
        Family::Gemma4 => Box::new(Llama::new(&gemma4(), options).unwrap()),
    };
    noise(model.as_ref());
    model
}

/// Two layers with keys, then two that attend to theirs. With an input of each layer as narrow as the rest, rounding to 16 bits would
/// change what transformers computes as much.
fn gemma4() -> DecoderConfig {
    serde_json::from_value(json!({
        "model_type": "gemma4_text", "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "global_head_dim": 16, "num_kv_shared_layers": 2,
        "use_double_wide_mlp": true, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCABULARY, "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"], "max_position_embeddings": 64,
    }))
    .unwrap()
}

fn noise(model: &dyn LanguageModel) {
    let mut generator = Generator::new(3).unwrap();
    for named in module::tensors(model).into_iter().filter(|named| named.tensor.dim() == 2) {
        let noise = generator.normal(&named.tensor.size(), (Kind::Float, Device::Cpu)).unwrap() * 0.2;
        tch::no_grad(|| named.tensor.shallow_clone().copy_(&noise));
    }
}

/// A model of three layers in blocks of several types.
const BLOCKS: Shape = Shape {
    architecture: "llama",
    vocabulary: 260,
    hidden: 256,
    inner: 256,
    layers: 3,
    embedding: TensorType::Q6K,
    output: None,
};

/// Applies the techniques to a model: made here, or for a quantized base opened from files.
#[allow(clippy::result_large_err, reason = "a test's errors are few")]
pub(crate) fn prepare(recipe: &Recipe, family: Family) -> Result<Prepared, Error> {
    let folder = tempfile::tempdir().unwrap();
    match recipe.config().model.dtype {
        Some(Dtype::Gguf) => return recipe.open(&BLOCKS.open(folder.path()), Device::Cpu),
        Some(Dtype::Nf4) => {}
        _ => return recipe.apply(model(family)),
    }
    let options = (Kind::Float, Device::Cpu);
    let dense = Llama::new(&DecoderConfig::llama(VOCABULARY, 16, 24, 3, 2), options).unwrap();
    noise(&dense);
    hugging_face::save(&dense, folder.path(), hugging_face::SHARD_BYTES).unwrap();
    recipe.open(&Folder::open(folder.path())?, Device::Cpu)
}

/// A wider teacher of the same tokens.
fn teacher() -> Teacher {
    let options = (Kind::Float, Device::Cpu);
    let model = Llama::new(&DecoderConfig::llama(VOCABULARY, 24, 40, 2, 2), options).unwrap();
    noise(&model);
    Teacher::new(Box::new(model), None).unwrap()
}

/// What came of a training.
pub(crate) struct Outcome {
    pub(crate) losses: Vec<f64>,
    pub(crate) norms: Vec<f64>,
    pub(crate) weights: Vec<(String, Tensor)>,
    /// Steps that were skipped because gradients overflowed.
    pub(crate) skipped: usize,
    /// Steps' further attempts.
    pub(crate) retries: u32,
}

#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Vec<StepRecord>>>);

impl Observer for Seen {
    fn on_step(&mut self, record: &StepRecord) -> frugal::training::Result<()> {
        self.0.lock().unwrap().push(record.clone());
        Ok(())
    }
}

pub(crate) fn base() -> Config {
    let mut config = Config::default();
    config.loss.head = LossHeadKind::Plain;
    (config.training.batch, config.training.accumulation) = (ROWS, 1);
    (config.optimizer.lr, config.optimizer.warmup) = (1e-2, 0.0);
    config
}

#[allow(clippy::result_large_err, reason = "a test's errors are few")]
pub(crate) fn run(family: Family, techniques: &[&Technique]) -> Result<Outcome, Error> {
    run_over(family, techniques, None, Overflow::Skip)
}

#[allow(clippy::result_large_err, reason = "a test's errors are few")]
pub(crate) fn run_over(
    family: Family,
    techniques: &[&Technique],
    ranks: Option<Mesh>,
    overflow: Overflow,
) -> Result<Outcome, Error> {
    let mut config = base();
    techniques.iter().for_each(|technique| (technique.set)(&mut config, family));
    // The options of the plain head and of the fused one do not mix.
    let mut recipe = Recipe::new(&config)?;
    if let Some(ranks) = ranks {
        // Two, so that what is refused does not depend on the ranks of the run.
        recipe.check_ranks(ranks.world().size().max(2))?;
        recipe = recipe.over(ranks)?;
    }
    frugal::runtime::random::seed(1).unwrap();
    let grouping = config.objective.preference()?.map_or(Grouping::Rows, |objective| objective.grouping());
    let layout = Layout {
        batch: (config.training.batch / grouping.rows()).max(1),
        arrangement: config.data.arrangement(usize::MAX),
        shuffle: Some(1),
        grouping,
        ..Layout::default()
    };
    let has_weights = techniques.iter().any(|technique| technique.group == WEIGHTS);
    let mut data = MaskedBatches::new(rows(has_weights), layout, Device::Cpu)?;
    let mut prepared = prepare(&recipe, family)?;
    if config.objective.teacher.is_some() {
        prepared = prepared.with_teacher(teacher());
    }
    let first = data.next()?.unwrap();
    prepared.plan_activations(&first)?;
    let mut data = MaskedBatches::new(rows(has_weights), layout, Device::Cpu)?;
    outcome(prepared, &mut data, |trainer, _| {
        trainer.options.overflow = overflow;
        Ok(())
    })
}

/// Trains with what `set` changes.
#[allow(clippy::result_large_err, reason = "a test's errors are few")]
pub(crate) fn outcome(
    prepared: Prepared,
    data: &mut dyn Batches,
    set: impl FnOnce(&mut Trainer, &Handles) -> Result<(), Error>,
) -> Result<Outcome, Error> {
    let (mut trainer, handles) = prepared.trainer(STEPS)?;
    set(&mut trainer, &handles)?;
    let seen = Seen::default();
    trainer.observers.push(Box::new(seen.clone()));
    trainer.run(data, None)?;
    trainer.observers.clear();
    let records = seen.0.lock().unwrap();
    let weights = module::tensors(trainer.model.as_ref());
    Ok(Outcome {
        losses: records.iter().map(|record| record.loss).collect(),
        norms: records.iter().filter_map(|record| record.gradient_norm).collect(),
        weights: weights
            .into_iter()
            .map(|named| (named.name, trainer.optimizer.whole_weight(named.tensor).unwrap().copy()))
            .collect(),
        skipped: records.iter().filter(|record| record.skipped).count(),
        retries: records.iter().map(|record| record.retries).sum(),
    })
}

/// The precision of both trainings that are compared.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Rounding {
    Fp32,
    /// Another order of sums is another rounding of operands, and in fp8 another scale of a batch.
    Low,
    /// Losses alone, within 5 %: in fp8 the norms of a Gemma 4's gradients differ by a factor of 3 to 6, as those of transformers' model do
    /// with products of the same rounding, because the softmax of scores without a factor is steep.
    LossesInFp8,
}

/// What speaks against a promise, if anything does.
pub(crate) fn broken(
    promise: Promise,
    with: &Outcome,
    without: &Outcome,
    rounding: Rounding,
) -> Option<String> {
    if with.losses.len() != STEPS as usize || with.losses.len() != without.losses.len() {
        return Some(format!("{:?} steps and {:?}", with.losses, without.losses));
    }
    let close = |bound: f64| {
        let pairs =
            |bound: f64, a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| (a - b).abs() <= bound * b.abs());
        let [of_losses, of_norms] = match rounding {
            Rounding::Fp32 => [bound, bound],
            Rounding::Low => [1e-1; 2],
            Rounding::LossesInFp8 => [5e-2, f64::INFINITY],
        };
        pairs(of_losses, &with.losses, &without.losses) && pairs(of_norms, &with.norms, &without.norms)
    };
    let figures = || {
        format!(
            "losses {:?} and {:?}, norms {:?} and {:?}",
            with.losses, without.losses, with.norms, without.norms
        )
    };
    match promise {
        Promise::Nothing => None,
        Promise::Within(bound) if !close(bound) => Some(figures()),
        Promise::Within(_) => None,
        Promise::Bits if !same(&with.losses, &without.losses) || !same(&with.norms, &without.norms) => {
            Some(figures())
        }
        Promise::Bits => {
            let differ = with.weights.iter().zip(&without.weights).find(|(a, b)| a != b);
            differ.map(|((name, _), _)| format!("`{name}` has other bits"))
        }
    }
}

/// The same bits: the norm of a step that overflowed is no number.
fn same(a: &[f64], b: &[f64]) -> bool {
    a.iter().map(|a| a.to_bits()).eq(b.iter().map(|b| b.to_bits()))
}

type Runs = BTreeMap<Vec<usize>, Result<Outcome, Error>>;

/// Compares each set with each of its subsets of one technique less; returns what is refused, and what is broken.
#[allow(clippy::result_large_err, reason = "a test's errors are few")]
pub(crate) fn cross(family: Family, sets: &[Vec<usize>]) -> (Vec<String>, Vec<String>) {
    let of = |set: &[usize]| set.iter().map(|index| &TECHNIQUES[*index]).collect::<Vec<_>>();
    let names = |set: &[usize]| of(set).iter().map(|of| of.name).collect::<Vec<_>>().join(" + ");
    let mut runs = Runs::new();
    let (mut refused, mut failures) = (Vec::new(), Vec::new());
    for set in sets {
        for subset in std::iter::once(set.clone()).chain((0..set.len()).map(|out| without(set, out))) {
            runs.entry(subset.clone()).or_insert_with(|| run(family, &of(&subset)));
        }
        let with = match &runs[set] {
            Ok(with) => with,
            Err(error @ Error::Conflict { .. }) => {
                refused.push(format!("{}: {error}", names(set)));
                continue;
            }
            Err(error) => {
                failures.push(format!("{family:?}: {}: {error}", names(set)));
                continue;
            }
        };
        let precision = of(set).iter().find(|technique| technique.group == "precision").map(|of| of.name);
        let rounding = match (family, precision) {
            (_, None) => Rounding::Fp32,
            (Family::Gemma4, Some("fp8")) => Rounding::LossesInFp8,
            (_, Some(_)) => Rounding::Low,
        };
        for out in 0..set.len() {
            // One that makes sense beside another only has no run without it.
            let Ok(other) = &runs[&without(set, out)] else { continue };
            let technique = &TECHNIQUES[set[out]];
            if let Some(found) = broken(technique.promise, with, other, rounding) {
                failures.push(format!("{family:?}: {} breaks {}: {found}", names(set), technique.name));
            }
        }
    }
    (refused, failures)
}

fn without(set: &[usize], out: usize) -> Vec<usize> {
    set.iter().enumerate().filter(|(at, _)| *at != out).map(|(_, index)| *index).collect()
}

/// Groups of techniques that give a position another place in a micro-batch, and so other noise.
const LAYOUTS: [&str; 3] = ["accumulation", "rows", "packing"];

pub(crate) fn distinct(set: &[usize]) -> bool {
    let has = |groups: &[&str]| set.iter().any(|index| groups.contains(&TECHNIQUES[*index].group));
    !(has(&["noise"]) && has(&LAYOUTS))
        && set.windows(2).all(|pair| TECHNIQUES[pair[0]].group != TECHNIQUES[pair[1]].group)
        && TECHNIQUES[set[0]].group != TECHNIQUES[set[set.len() - 1]].group
}

#[test]
fn every_pair_keeps_its_promises_or_is_refused_by_name() {
    let count = TECHNIQUES.len();
    let singles = (0..count).map(|one| vec![one]);
    let pairs = (0..count).flat_map(|one| (one + 1..count).map(move |other| vec![one, other]));
    let sets: Vec<Vec<usize>> = singles.chain(pairs).filter(|set| set.len() == 1 || distinct(set)).collect();
    let mut all = Vec::new();
    for family in [Family::Llama, Family::Gpt2] {
        let (refused, failures) = cross(family, &sets);
        assert!(failures.is_empty(), "\n{}", failures.join("\n"));
        all.push(refused);
    }
    assert_eq!(all[0], all[1], "what is refused depends on the techniques alone");
    let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
    for line in &all[0] {
        *reasons.entry(line.split_once(": ").map_or("", |(_, reason)| reason)).or_default() += 1;
    }
    let reasons: Vec<String> = reasons.iter().map(|(reason, count)| format!("{count} × {reason}")).collect();
    expect![[r#"
        2 × `activations.plan = "every-k"` and `offload.method` other than "overlap" cannot be combined: with those methods every layer runs again in backward; use `offload.method = "overlap"`, or `activations.plan = "recompute"`
        2 × `activations.plan = "keep"` and `offload.method` other than "overlap" cannot be combined: with those methods every layer runs again in backward; use `offload.method = "overlap"`, or `activations.plan = "recompute"`
        6 × `activations.plan = "plan"` and `offload` cannot be combined: an offloaded layer keeps all its activations, or its input alone; use `activations.plan = "keep"`, "every-k" or "recompute" with `activations.recompute = "layer"` or "offload", or keep the weights on the device
        6 × `activations.recompute = "attention"` and `offload` cannot be combined: an offloaded layer keeps all its activations, or its input alone; use `activations.plan = "keep"`, "every-k" or "recompute" with `activations.recompute = "layer"` or "offload", or keep the weights on the device
        6 × `activations.recompute = "elementwise"` and `offload` cannot be combined: an offloaded layer keeps all its activations, or its input alone; use `activations.plan = "keep"`, "every-k" or "recompute" with `activations.recompute = "layer"` or "offload", or keep the weights on the device
        6 × `activations.recompute = "mlp"` and `offload` cannot be combined: an offloaded layer keeps all its activations, or its input alone; use `activations.plan = "keep"`, "every-k" or "recompute" with `activations.recompute = "layer"` or "offload", or keep the weights on the device
        4 × `model.freeze` and `adapter` cannot be combined: an adapter freezes the whole base; leave `model.freeze` out
        21 × `offload.tier = "file"` with full fine-tuning and `optimizer.place = "device"` cannot be combined: the optimizer's state of trained layers in files is in files, too; use `optimizer.place = "host"`, train an adapter, or use `offload.tier = "host"`
        1 × `optimizer.place = "host"` and the loss scaler of `precision.compute = "fp16"` cannot be combined: layers are updated during backward, before it is known whether a gradient overflows; use `precision.compute = "bf16"`, or `optimizer.place = "device"`
        29 × `optimizer.place = "host"` and weights on the device cannot be combined: the update on the host is that of offloaded layers; add `offload`, or use `optimizer.place = "device"`"#]].assert_eq(&reasons.join("\n"));
}

/// The keys that layers share, and the inputs of layers, are values of the graph under every technique. What needs layers that are alike, or a
/// SwiGLU, is refused by name.
#[test]
fn every_pair_keeps_its_promises_where_layers_share_keys() {
    let names = |refused: &[&str]| -> Vec<usize> {
        (0..TECHNIQUES.len()).filter(|index| refused.contains(&TECHNIQUES[*index].name)).collect()
    };
    let of_layers = names(&["activation plan"]);
    let of_swiglu = names(&["MLP level input-only", "MLP level save-one", "MLP level input-only-tiled"]);
    assert_eq!((of_layers.len(), of_swiglu.len()), (1, 3));
    for (refused, reason) in [
        (&of_layers, "the layers of this model differ and share values"),
        (&of_swiglu, "has a GELU as its gate"),
    ] {
        for index in refused {
            let error = run(Family::Gemma4, &[&TECHNIQUES[*index]]).err().expect("refused").to_string();
            assert!(error.contains(reason), "{error}");
        }
    }
    let kept: Vec<usize> = (0..TECHNIQUES.len())
        .filter(|index| !of_layers.contains(index) && !of_swiglu.contains(index))
        .collect();
    let pairs = kept
        .iter()
        .flat_map(|one| kept.iter().filter(move |other| *other > one).map(move |other| vec![*one, *other]));
    // The values that layers share go through plans and offloaded layers alone: other pairs are those of the families above.
    let of_blocks = |set: &Vec<usize>| {
        set.iter().any(|index| ["activations", "offload"].contains(&TECHNIQUES[*index].group))
    };
    let pairs = pairs.filter(|set| distinct(set) && of_blocks(set));
    let sets: Vec<Vec<usize>> = kept.iter().map(|one| vec![*one]).chain(pairs).collect();
    let (_, failures) = cross(Family::Gemma4, &sets);
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
}
