//! AdamW on the host, stepped within backward, compared with the device optimizer on the plain model, bit for bit.

use std::sync::{Arc, Mutex};

use crate::support::{FLOAT, alone, batch, tiny, ways};
use models::module::{
    Block, Context, Input, LanguageModel, Module, ModuleMapper, Visitor, VisitorMut, freeze, map_modules,
    parameters, replace, trainable,
};
use models::{DecoderConfig, Llama};
use offload::{HookPoint, HostAdamW, HostAdamWConfig, OffloadConfig, StateBytes, TestHook, Tier};
use runtime::autograd::{Backward, Forward, Function, apply, backward};
use runtime::file_memory::is_in_file;
use tch::{Device, Kind, Tensor};
use training::clip::{self, NonFinite};
use training::optimizer::{AdamW, DeviceOptimizer, Group, Optimizer, StepSettings, ZeroGrad};

const RULE: AdamW = AdamW { beta1: 0.8, beta2: 0.95, eps: 1e-6 };
const STEPS: u64 = 4;

#[derive(Clone, Debug, Default)]
struct Case {
    options: OffloadConfig,
    host: HostAdamWConfig,
    clip: Option<f64>,
    micro: u64,
    factor: bool,
}

fn groups(model: &Llama) -> Vec<Group> {
    Group::by_dimension(trainable(model), 3e-3, 0.1)
}

/// A schedule's factor for a step.
fn factor(step: u64, on: bool) -> f64 {
    if on { 1.0 / (1.0 + step as f64) } else { 1.0 }
}

/// Losses, norms before clipping, weights and state.
type Left = (Vec<f64>, Vec<f64>, Vec<(String, Tensor)>, Vec<(String, Tensor)>);

fn gradients_of(model: &Llama, step: u64, micro: u64) -> Vec<f64> {
    let of = |part| {
        let tokens = batch(model.vocabulary(), step * micro + part);
        let loss = model.loss(&Input::new(&tokens), &tokens).unwrap().sum;
        backward(&[&loss]).unwrap();
        loss.double_value(&[])
    };
    (0..micro).map(of).collect()
}

fn weights(model: &Llama) -> Vec<(String, Tensor)> {
    parameters(model).into_iter().map(|(name, tensor)| (name, tensor.detach().copy())).collect()
}

fn ordinary(model: &Llama, case: &Case) -> Left {
    let mut optimizer = DeviceOptimizer::new(RULE, groups(model)).unwrap();
    if case.host.master_weights {
        optimizer = optimizer.with_master_weights();
    }
    if let Some(seed) = case.host.stochastic_rounding {
        optimizer = optimizer.with_stochastic_rounding(seed);
    }
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 0..STEPS {
        losses.extend(gradients_of(model, step, case.micro));
        if let Some(limit) = case.clip {
            norms.push(clip::clip_(&optimizer.gradients().unwrap(), limit, NonFinite::Skip).unwrap());
        }
        optimizer.set_factor(factor(step, case.factor)).unwrap();
        optimizer.step().unwrap();
        optimizer.zero_grad(ZeroGrad::ToNone).unwrap();
    }
    (losses, norms, weights(model), optimizer.state())
}

fn on_host(mut model: Box<Llama>, case: &Case) -> Left {
    let offload = case.options.install(&mut *model).unwrap();
    let mut optimizer = HostAdamW::new(&offload, groups(&model), RULE, case.host).unwrap();
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 0..STEPS {
        let factor = factor(step, case.factor);
        let settings =
            StepSettings { micro_batches: case.micro, factor, clip: case.clip, ..StepSettings::default() };
        optimizer.begin(settings).unwrap();
        losses.extend(gradients_of(&model, step, case.micro));
        norms.extend(optimizer.step().unwrap().norm);
        assert!(
            trainable(&*model).iter().all(|(_, tensor)| !tensor.grad().defined()),
            "gradients are consumed"
        );
    }
    let state = optimizer.state().unwrap();
    (losses, norms, weights(&model), state)
}

fn same(expected: &Left, found: &Left, case: &Case) {
    assert_eq!(expected.0, found.0, "losses of {case:?}");
    assert_eq!(expected.1, found.1, "norms of {case:?}");
    for (what, expected, found) in [("weight", &expected.2, &found.2), ("state", &expected.3, &found.3)] {
        let sorted = |list: &[(String, Tensor)]| {
            let mut names: Vec<(String, Tensor)> =
                list.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect();
            names.sort_by(|a, b| a.0.cmp(&b.0));
            names
        };
        let (expected, found) = (sorted(expected), sorted(found));
        assert_eq!(expected.len(), found.len(), "{what} of {case:?}");
        for ((name, expected), (other, found)) in expected.iter().zip(&found) {
            assert_eq!(name, other);
            assert!(expected.equal(found), "{what} {name} of {case:?}");
        }
    }
}

fn check(model: &dyn Fn() -> Box<Llama>, case: Case) {
    let expected = ordinary(&model(), &case);
    same(&expected, &on_host(model(), &case), &case);
}

#[test]
fn the_host_optimizer_matches_the_device_optimizer() {
    let _alone = alone();
    for (_, options) in ways(5) {
        for (clip, micro) in [(None, 1), (None, 3), (Some(0.5), 1), (Some(0.5), 2), (Some(1e6), 1)] {
            for overlap in [false, true] {
                let (options, host) =
                    (options.clone(), HostAdamWConfig { overlap, ..HostAdamWConfig::default() });
                check(&tiny, Case { options, host, clip, micro, factor: true });
            }
        }
    }
}

/// Late streams, including the host's, do not change results, whether steps run within backward or overlap with the next forward.
#[test]
fn delays_do_not_change_results() {
    struct Late(Mutex<u64>);
    impl TestHook for Late {
        fn at(&self, _: HookPoint) -> runtime::Result<()> {
            let turns = {
                let mut state = self.0.lock().unwrap();
                *state =
                    state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                *state >> 56
            };
            // Some microseconds; a yield may take a turn of another process.
            (0..turns * 64).for_each(|turn| _ = std::hint::black_box(turn));
            std::thread::yield_now();
            Ok(())
        }
    }
    let _alone = alone();
    for seed in 0..4 {
        for (clip, micro) in [(None, 1), (None, 2), (Some(0.5), 1)] {
            let test_hook: Arc<dyn TestHook> = Arc::new(Late(Mutex::new(seed)));
            let options = OffloadConfig {
                test_hook: Some(test_hook),
                ring: 2 + seed as usize % 3,
                ..OffloadConfig::default()
            };
            let host = HostAdamWConfig { overlap: true, ..HostAdamWConfig::default() };
            check(&tiny, Case { options, host, clip, micro, factor: true });
        }
    }
}

#[test]
fn rings_and_resident_layers_do_not_change_results() {
    let _alone = alone();
    for (ring, resident) in
        [(1, vec![]), (2, vec![1]), (3, vec![0, 4]), (5, vec![]), (3, vec![0, 1, 2, 3, 4])]
    {
        for overlap in [false, true] {
            let options = OffloadConfig { ring, resident: resident.clone(), ..OffloadConfig::default() };
            let host = HostAdamWConfig { overlap, ..HostAdamWConfig::default() };
            check(&tiny, Case { options, host, micro: 1, ..Case::default() });
        }
    }
}

/// Whether there are master weights, and the seed of stochastic rounding.
const WAYS_OF_BF16: [(bool, Option<u64>); 3] = [(false, None), (true, None), (false, Some(5))];

#[test]
fn bf16_with_master_weights_with_stochastic_rounding_and_without() {
    let _alone = alone();
    let model = || {
        runtime::random::seed(2).unwrap();
        let config = DecoderConfig { num_key_value_heads: 2, ..DecoderConfig::llama(60, 32, 48, 4, 4) };
        Box::new(Llama::new(&config, (Kind::BFloat16, Device::Cpu)).unwrap())
    };
    for (master_weights, stochastic_rounding) in WAYS_OF_BF16 {
        for (clip, micro) in [(None, 1), (Some(0.3), 2)] {
            let host = HostAdamWConfig { master_weights, stochastic_rounding, overlap: true };
            check(&model, Case { host, clip, micro, ..Case::default() });
        }
    }
}

#[test]
fn frozen_layers_in_files_have_no_state() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let model = || {
        let model = tiny();
        freeze(&*model, ".*weight", true).unwrap();
        model
    };
    let options = OffloadConfig { tier: Tier::File(folder.path().to_owned()), ..OffloadConfig::default() };
    check(&model, Case { options, micro: 2, ..Case::default() });
}

/// Weights, sums of gradients, state and master weights are in files, and have the bits of those in memory.
#[test]
fn trained_layers_in_files() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let tier = Tier::File(folder.path().to_owned());
    let narrow = || {
        runtime::random::seed(2).unwrap();
        let config = DecoderConfig { num_key_value_heads: 2, ..DecoderConfig::llama(60, 32, 48, 4, 4) };
        Box::new(Llama::new(&config, (Kind::BFloat16, Device::Cpu)).unwrap())
    };
    for (clip, micro) in [(None, 1), (None, 3), (Some(0.5), 1), (Some(0.5), 2)] {
        for overlap in [false, true] {
            let host = HostAdamWConfig { overlap, ..HostAdamWConfig::default() };
            for (ring, resident, keep) in [(3, vec![], vec![]), (1, vec![2], vec![3, 4])] {
                let options =
                    OffloadConfig { tier: tier.clone(), ring, resident, keep, ..OffloadConfig::default() };
                check(&tiny, Case { options, host, clip, micro, factor: true });
            }
            for (master_weights, stochastic_rounding) in WAYS_OF_BF16 {
                let (options, host) = (
                    OffloadConfig { tier: tier.clone(), ..OffloadConfig::default() },
                    HostAdamWConfig { master_weights, stochastic_rounding, ..host },
                );
                check(&narrow, Case { options, host, clip, micro, factor: false });
            }
        }
    }
    let mut model = tiny();
    let offload = OffloadConfig { tier, ..OffloadConfig::default() }.install(&mut *model).unwrap();
    let mut optimizer = HostAdamW::new(&offload, groups(&model), RULE, HostAdamWConfig::default()).unwrap();
    optimizer.begin(StepSettings { clip: Some(1.0), ..StepSettings::default() }).unwrap();
    gradients_of(&model, 0, 1);
    let of_layers = |named: Vec<(String, Tensor)>| {
        let layers =
            named.into_iter().filter(|(name, tensor)| name.starts_with("layers.") && tensor.dim() > 0);
        layers.collect::<Vec<_>>()
    };
    let handles = parameters(&*model).into_iter().map(|(name, tensor)| (name, tensor.shallow_clone()));
    let weights = of_layers(handles.collect());
    assert!(weights.iter().all(|(_, weight)| is_in_file(weight) && is_in_file(&weight.grad())));
    optimizer.step().unwrap();
    let state = of_layers(optimizer.state().unwrap());
    assert!(state.len() == 2 * weights.len() && state.iter().all(|(_, tensor)| is_in_file(tensor)));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "files have no names");
}

#[test]
fn a_step_with_a_non_finite_norm_is_skipped() {
    let _alone = alone();
    let mut model = tiny();
    let before = weights(&model);
    let offload = OffloadConfig::default().install(&mut *model).unwrap();
    let mut optimizer = HostAdamW::new(&offload, groups(&model), RULE, HostAdamWConfig::default()).unwrap();
    optimizer.begin(StepSettings { clip: Some(1.0), ..StepSettings::default() }).unwrap();
    let tokens = batch(model.vocabulary(), 0);
    let loss = model.loss(&Input::new(&tokens), &tokens).unwrap().sum * f64::INFINITY;
    backward(&[&loss]).unwrap();
    let stepped = optimizer.step().unwrap();
    assert!(stepped.skipped && stepped.norm.is_some_and(|norm| !norm.is_finite()));
    for ((name, before), (_, after)) in before.iter().zip(weights(&model)) {
        assert!(before.equal(&after), "{name}");
    }
    gradients_of(&model, 1, 1);
    assert!(!optimizer.step().unwrap().skipped);
    assert!(
        optimizer
            .state()
            .unwrap()
            .iter()
            .any(|(name, step)| name.ends_with(".step") && step.int64_value(&[]) == 1)
    );
}

/// The identity of a block's input, whose gradient is NaN: the layers before it get NaN, those after it finite gradients, and the loss
/// is finite.
struct Poison;

impl Function for Poison {
    fn forward(&mut self, _: &mut Forward<'_>, inputs: &[&Tensor]) -> runtime::Result<Vec<Tensor>> {
        Ok(vec![inputs[0].shallow_clone()])
    }

    fn backward(&self, _: &mut Backward, grads: Vec<Option<Tensor>>) -> runtime::Result<Vec<Option<Tensor>>> {
        Ok(grads.into_iter().map(|grad| grad.map(|grad| grad * f64::NAN)).collect())
    }
}

#[derive(Debug)]
struct Poisoned(Box<dyn Block>);

impl Module for Poisoned {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        self.0.visit(visitor);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> models::Result<()> {
        self.0.visit_mut(visitor)
    }
}

impl Block for Poisoned {
    fn forward(&self, x_btd: &Tensor, context: &Context<'_>) -> models::Result<Tensor> {
        let [x_btd] = apply(Poison, &[x_btd])?;
        self.0.forward(&x_btd, context)
    }
}

/// Makes the third of five layers give NaN to those before it.
struct Spoil;

impl ModuleMapper for Spoil {
    fn block(&mut self, name: &str, slot: &mut Box<dyn Block>) -> models::Result<()> {
        if name == "layers.2" {
            replace(slot, |block| Box::new(Poisoned(block)));
        }
        Ok(())
    }
}

#[test]
fn gradients_that_are_not_finite_reach_no_weight_without_clipping() {
    let _alone = alone();
    for (name, options) in ways(5) {
        for non_finite in [Some(NonFinite::Skip), Some(NonFinite::Fail), None] {
            let mut model = tiny();
            map_modules(&mut *model, &mut Spoil).unwrap();
            let offload = options.install(&mut *model).unwrap();
            let before = weights(&model);
            let mut optimizer =
                HostAdamW::new(&offload, groups(&model), RULE, HostAdamWConfig::default()).unwrap();
            if let Some(non_finite) = non_finite {
                optimizer.begin(StepSettings { non_finite, ..StepSettings::default() }).unwrap();
            }
            let tokens = batch(model.vocabulary(), 0);
            let loss = model.loss(&Input::new(&tokens), &tokens).unwrap().sum;
            assert!(loss.double_value(&[]).is_finite());
            let stepped = backward(&[&loss]).map_err(training::Error::from);
            let stepped = stepped.and_then(|()| Ok(optimizer.step()?));
            let after = weights(&model);
            let case = format!("{name} {non_finite:?}");
            assert!(after.iter().all(|(_, w)| w.isfinite().all().int64_value(&[]) == 1), "{case}");
            if non_finite == Some(NonFinite::Skip) {
                assert!(stepped.unwrap().skipped, "{case}");
                for ((name, before), (_, after)) in before.iter().zip(&after) {
                    assert!(before.equal(after), "{case}: {name}");
                }
                continue;
            }
            // The layers behind it may be updated by then: the error says that the step cannot be undone.
            let error = stepped.unwrap_err().to_string();
            assert!(error.contains("a gradient is infinite or NaN (of `"), "{case}: {error}");
            let changed = before.iter().zip(&after).any(|((_, before), (_, after))| !before.equal(after));
            let whole = optimizer.abandon(ZeroGrad::ToNone).unwrap();
            assert!(!(whole && changed), "{case}: an update is known");
        }
    }
}

/// The weight that was written, less what the step takes.
#[test]
fn master_copies_follow_weights_that_others_write() {
    let _alone = alone();
    let kind = Kind::BFloat16;
    let config = DecoderConfig::qwen2(60, 32, 48, 4, 4);
    let mut model = Box::new(Llama::new(&config, (kind, Device::Cpu)).unwrap());
    let offload = OffloadConfig::default().install(&mut *model).unwrap();
    let group = vec![Group::new(trainable(&*model), 0.125)];
    let host = HostAdamWConfig { master_weights: true, ..HostAdamWConfig::default() };
    let mut optimizer = HostAdamW::new(&offload, group, AdamW::default(), host).unwrap();
    let w =
        parameters(&*model).into_iter().find(|(name, _)| name.ends_with("3.mlp.up_proj.weight")).unwrap().1;
    gradients_of(&model, 0, 1);
    optimizer.step().unwrap();
    let _ = tch::no_grad(|| w.shallow_clone().fill_(5.0));
    gradients_of(&model, 1, 1);
    optimizer.step().unwrap();
    // A step of Adam is at most about its learning rate.
    let distance = (w.detach().to_kind(Kind::Float) - 5.0).abs().max().double_value(&[]);
    assert!(distance > 0.0 && distance < 0.5, "{distance}");
    let state = optimizer.state().unwrap();
    let master = state.iter().find(|(name, _)| name.ends_with("3.mlp.up_proj.weight.master")).unwrap();
    assert!(master.1.to_kind(kind).equal(&w.detach()));
}

/// Each loads a checkpoint of the other in the middle of a training.
#[test]
fn the_state_matches_the_device_optimizers() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    for tier in [Tier::Host, Tier::File(folder.path().to_owned())] {
        state_matches(OffloadConfig { resident: vec![2], tier, ..OffloadConfig::default() });
    }
}

fn state_matches(options: OffloadConfig) {
    let case = Case { micro: 1, options, ..Case::default() };
    let model = tiny();
    let (.., first, state) = ordinary(&model, &case);
    let mut optimizer = DeviceOptimizer::new(RULE, groups(&model)).unwrap();
    optimizer.load_state(&state).unwrap();
    gradients_of(&model, 9, 1);
    optimizer.step().unwrap();

    let mut other = tiny();
    models::state_dict::load_state_dict(&*other, &first, "a checkpoint").unwrap();
    let offload = case.options.install(&mut *other).unwrap();
    let mut on_host = HostAdamW::new(&offload, groups(&other), RULE, case.host).unwrap();
    on_host.load_state(&state).unwrap();
    gradients_of(&other, 9, 1);
    on_host.step().unwrap();
    let left = |model: &Llama, state| (Vec::new(), Vec::new(), weights(model), state);
    same(&left(&model, optimizer.state()), &left(&other, on_host.state().unwrap()), &case);

    let StateBytes { host, device } = on_host.state_bytes();
    assert_eq!(host + device, optimizer.state_bytes());
    let of_layer: u64 = parameters(&*other)
        .iter()
        .filter(|(name, _)| name.starts_with("layers.0."))
        .map(|(_, tensor)| tensor.numel() as u64 * 8)
        .sum();
    assert_eq!(host, 4 * of_layer);

    let error = on_host.load_state(&[("layers.9.mlp.step".into(), Tensor::from(1i64))]).unwrap_err();
    assert!(error.to_string().contains("layers.9.mlp.step"), "{error}");
}

#[test]
fn unsupported_parameters_are_errors() {
    let _alone = alone();
    let mut model = tiny();
    let offload = OffloadConfig::default().install(&mut *model).unwrap();
    let new =
        |groups| HostAdamW::new(&offload, groups, RULE, HostAdamWConfig::default()).unwrap_err().to_string();
    let own = Group { rule: Some(Arc::new(RULE)), ..Group::new(trainable(&*model), 0.1) };
    assert!(new(vec![own]).contains("has its own rule"));
    let both =
        HostAdamWConfig { master_weights: true, stochastic_rounding: Some(1), ..HostAdamWConfig::default() };
    let error = HostAdamW::new(&offload, groups(&model), RULE, both).unwrap_err().to_string();
    assert!(error.contains("both `master_weights` and `stochastic_rounding`"), "{error}");
    let mut optimizer = HostAdamW::new(&offload, groups(&model), RULE, HostAdamWConfig::default()).unwrap();
    let step = StepSettings::default();
    for (settings, words) in [
        (StepSettings { micro_batches: 0, ..step }, "0 micro-batches"),
        (StepSettings { factor: f64::NAN, ..step }, "NaN"),
        (StepSettings { clip: Some(-1.0), ..step }, "the limit is -1"),
    ] {
        assert!(optimizer.begin(settings).unwrap_err().to_string().contains(words));
    }
    optimizer.begin(StepSettings { micro_batches: 2, ..step }).unwrap();
    gradients_of(&model, 0, 1);
    assert!(optimizer.begin(step).unwrap_err().to_string().contains("already has gradients"));
    drop(optimizer);
    // Without it, gradients are stored on the host as for any optimizer.
    gradients_of(&model, 0, 1);
    assert!(trainable(&*model).iter().all(|(_, tensor)| tensor.grad().defined()));

    let config = DecoderConfig::llama(60, 32, 48, 2, 4);
    let mut double = Llama::new(&config, (Kind::Double, Device::Cpu)).unwrap();
    let offload = OffloadConfig::default().install(&mut double).unwrap();
    let error = HostAdamW::new(&offload, groups(&double), RULE, HostAdamWConfig::default()).unwrap_err();
    assert!(error.to_string().contains("is Double"), "{error}");
    assert_eq!(FLOAT.0, Kind::Float);
}
