//! Failures are reported, leave the model unchanged, and the next step works.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

use crate::support::{alone, assert_intact, assert_same, batch, gradients_of, snapshot, tiny, ways};
use expect_test::{Expect, expect};
use models::Llama;
use models::module::{Input, LanguageModel, freeze, trainable};
use offload::{HookPoint, Method, Offload, OffloadConfig, TestHook};
use runtime::autograd::{Keep, backward, grad, set_grad};
use tch::{Kind, Tensor};
use training::layer_source::{LayerRegion, LayerSource};

/// Breaks a stream once, at a given visit of a point.
#[derive(Debug)]
struct Breaks {
    at: HookPoint,
    before: AtomicI64,
    panics: bool,
}

impl TestHook for Breaks {
    fn at(&self, point: HookPoint) -> runtime::Result<()> {
        if point != self.at || self.before.fetch_sub(1, Ordering::Relaxed) != 0 {
            return Ok(());
        }
        assert!(!self.panics, "the stream was killed");
        Err(runtime::Error::Other("the link is gone".into()))
    }
}

fn clear(model: &Llama) {
    trainable(model).into_iter().for_each(|(_, tensor)| set_grad(tensor, None).unwrap());
}

/// Breaks a first step and, at the second of the numbers, a later one, when the order is known; and looks at what is left.
fn check(method: Method, (at, before, panics): (HookPoint, [i64; 2], bool), expected: Expect) {
    let _alone = alone();
    let case = format!("{} {at:?} {before:?}", method.name());
    let tokens = batch(60, 7);
    let reference = gradients_of(&*tiny(), &tokens);
    for warm in [false, true] {
        let mut model = tiny();
        let test_hook = Arc::new(Breaks { at, before: AtomicI64::new(i64::MAX), panics });
        let options =
            OffloadConfig { method, test_hook: Some(test_hook.clone()), ..OffloadConfig::default() };
        let offload = options.install(&mut *model).unwrap();
        if warm {
            assert_same(&reference, &gradients_of(&*model, &tokens), &case);
        }
        let intact = snapshot(&*model);
        test_hook.before.store(before[usize::from(warm)], Ordering::Relaxed);

        let step = || -> Result<(), Box<dyn std::error::Error>> {
            let loss = model.loss(&Input::new(&tokens), &tokens)?.sum;
            Ok(backward(&[&loss])?)
        };
        let error = step().expect_err(&case).to_string();
        // Which layer it was depends on which ones were loaded.
        if !warm {
            expected.assert_eq(&error);
        }
        assert!(error.contains(if panics { "the stream was killed" } else { "the link is gone" }), "{error}");
        assert_intact(&intact, &*model, &case);
        offload.check_on_host().unwrap();

        clear(&model);
        for _ in 0..2 {
            assert_same(&reference, &gradients_of(&*model, &tokens), &case);
            offload.check_on_host().unwrap();
        }
        offload.synchronize().unwrap();
    }
}

#[test]
fn a_panic_of_the_prefetch_thread_is_an_error() {
    check(
        Method::Overlap,
        (HookPoint::Load, [1, 1], true),
        expect![
            "offload: loading of `layers.1` failed: work on the stream failed: panicked: the stream was killed; the model on the host is unchanged"
        ],
    );
}

/// A GPU stream fails when it is called, on the computing thread.
#[test]
fn a_load_that_cannot_be_queued_is_an_error() {
    for panics in [false, true] {
        let _alone = alone();
        let tokens = batch(60, 7);
        let reference = gradients_of(&*tiny(), &tokens);
        for ring in 1..=5 {
            for before in 0..10 {
                let mut model = tiny();
                let test_hook =
                    Arc::new(Breaks { at: HookPoint::Queue, before: AtomicI64::new(before), panics });
                let options =
                    OffloadConfig { ring, test_hook: Some(test_hook.clone()), ..OffloadConfig::default() };
                let offload = options.install(&mut *model).unwrap();
                let step = || -> Result<(), Box<dyn std::error::Error>> {
                    let loss = model.loss(&Input::new(&tokens), &tokens)?.sum;
                    Ok(backward(&[&loss])?)
                };
                let step = std::panic::catch_unwind(std::panic::AssertUnwindSafe(step));
                if let Ok(Err(error)) = &step {
                    let words = if panics { "the stream was killed" } else { "the link is gone" };
                    assert!(error.to_string().contains(words), "{error}");
                }
                test_hook.before.store(i64::MAX, Ordering::Relaxed);
                let case = format!("ring {ring}, load {before}, {panics}");
                // The missing layers are loaded again, and all slots are available.
                offload.check_on_host().unwrap();
                clear(&model);
                for _ in 0..2 {
                    assert_same(&reference, &gradients_of(&*model, &tokens), &case);
                }
            }
        }
    }
    check(
        Method::Overlap,
        (HookPoint::Queue, [2, 2], false),
        expect![
            "offload: loading of `layers.2` failed: the link is gone; the model on the host is unchanged"
        ],
    );
    check(
        Method::Overlap,
        (HookPoint::Queue, [5, 2], false),
        expect![
            "backward of `OverlapOffloadFunction`: offload: loading of `layers.1` failed: the link is gone; the model on the host is unchanged"
        ],
    );
}

/// Breaks the first store, and then a load.
#[derive(Debug)]
struct BreaksTwice {
    stores: AtomicI64,
    loads: AtomicI64,
}

impl TestHook for BreaksTwice {
    fn at(&self, point: HookPoint) -> runtime::Result<()> {
        let before = match point {
            HookPoint::Store => &self.stores,
            HookPoint::Load => &self.loads,
            _ => return Ok(()),
        };
        match before.fetch_sub(1, Ordering::Relaxed) {
            0 => Err(runtime::Error::Other("the link is gone".into())),
            _ => Ok(()),
        }
    }
}

#[test]
fn gradients_that_cannot_be_stored_before_a_load_that_fails() {
    let _alone = alone();
    let tokens = batch(60, 7);
    let reference = gradients_of(&*tiny(), &tokens);
    for (method, loads) in [(Method::Overlap, 5), (Method::Function, 8)] {
        let mut model = tiny();
        let test_hook = Arc::new(BreaksTwice { stores: AtomicI64::new(0), loads: AtomicI64::new(loads) });
        let options = OffloadConfig { method, test_hook: Some(test_hook), ..OffloadConfig::default() };
        let offload = options.install(&mut *model).unwrap();
        let loss = model.loss(&Input::new(&tokens), &tokens).unwrap().sum;
        let error = backward(&[&loss]).unwrap_err().to_string();
        assert!(error.contains("loading of"), "{error}");
        for (name, tensor) in trainable(&*model).iter().filter(|(name, _)| name.starts_with("layers.")) {
            assert!(
                !tensor.grad().defined(),
                "{}: {name} has a gradient that was never stored",
                method.name()
            );
        }
        clear(&model);
        assert_same(&reference, &gradients_of(&*model, &tokens), method.name());
        offload.synchronize().unwrap();
    }
}

#[test]
fn a_failed_load_in_forward_is_an_error() {
    check(
        Method::Overlap,
        (HookPoint::Load, [2, 2], false),
        expect![
            "offload: loading of `layers.2` failed: work on the stream failed: the link is gone; the model on the host is unchanged"
        ],
    );
    check(
        Method::Function,
        (HookPoint::Load, [2, 2], false),
        expect![
            "offload: loading of `layers.2` failed: the link is gone; the model on the host is unchanged"
        ],
    );
    check(
        Method::Checkpointing,
        (HookPoint::Load, [2, 2], false),
        expect![
            "offload: loading of `layers.2` failed: the link is gone; the model on the host is unchanged"
        ],
    );
}

#[test]
fn a_failed_load_in_backward_is_an_error() {
    check(
        Method::Overlap,
        (HookPoint::Load, [5, 3], false),
        expect![
            "backward of `OverlapOffloadFunction`: offload: loading of `layers.1` failed: work on the stream failed: the link is gone; the model on the host is unchanged"
        ],
    );
    check(
        Method::Function,
        (HookPoint::Load, [6, 6], false),
        expect![
            "backward of `OffloadFunction`: offload: loading of `layers.3` failed: the link is gone; the model on the host is unchanged"
        ],
    );
    check(
        Method::Checkpointing,
        (HookPoint::Load, [6, 6], false),
        expect![
            "backward of `checkpoint`: offload: loading of `layers.3` failed: the link is gone; the model on the host is unchanged"
        ],
    );
}

#[test]
fn gradients_that_cannot_be_stored_are_an_error() {
    check(
        Method::Overlap,
        (HookPoint::Store, [1, 1], false),
        expect![
            "at the end of backward: work on the stream failed: offload: storing the gradients of `layers.3` failed: the link is gone; the model on the host is unchanged"
        ],
    );
    check(
        Method::Overlap,
        (HookPoint::Store, [4, 4], true),
        expect!["at the end of backward: work on the stream failed: panicked: the stream was killed"],
    );
    check(
        Method::Function,
        (HookPoint::Store, [1, 1], false),
        expect![
            "at the end of backward: work on the stream failed: offload: storing the gradients of `layers.3` failed: the link is gone; the model on the host is unchanged"
        ],
    );
    check(
        Method::Checkpointing,
        (HookPoint::Store, [1, 1], false),
        expect![
            "backward of `checkpoint`: backward of `Fetch`: offload: storing the gradients of `layers.4` failed: the link is gone; the model on the host is unchanged"
        ],
    );
}

#[test]
fn a_failing_layer_is_an_error() {
    check(Method::Overlap, (HookPoint::Compute, [3, 3], false), expect!["the link is gone"]);
    check(
        Method::Overlap,
        (HookPoint::Compute, [6, 6], false),
        expect!["backward of `OverlapOffloadFunction`: the link is gone"],
    );
    check(
        Method::Function,
        (HookPoint::Compute, [6, 6], false),
        expect!["backward of `OffloadFunction`: the link is gone"],
    );
    check(
        Method::Checkpointing,
        (HookPoint::Compute, [6, 6], false),
        expect!["backward of `checkpoint`: the link is gone"],
    );
}

#[test]
fn a_failing_event_is_an_error() {
    check(
        Method::Overlap,
        (HookPoint::Event, [4, 4], false),
        expect![
            "offload: loading of `layers.2` failed: the link is gone; the model on the host is unchanged"
        ],
    );
    check(
        Method::Overlap,
        (HookPoint::Event, [12, 12], false),
        expect![
            "backward of `OverlapOffloadFunction`: offload: loading of `layers.3` failed: the link is gone; the model on the host is unchanged"
        ],
    );
}

fn refused(result: Result<Offload, offload::Error>, expected: Expect) {
    expected.assert_eq(&result.unwrap_err().to_string());
}

#[test]
fn invalid_options_are_refused() {
    let _alone = alone();
    let mut model = tiny();
    let tokens = batch(60, 7);
    let reference = gradients_of(&*model, &tokens);
    let intact = snapshot(&*model);
    refused(
        OffloadConfig { ring: 0, ..OffloadConfig::default() }.install(&mut *model),
        expect!["offload: ring: 0 slots; expected at least 1, or 3 for full overlap"],
    );
    refused(
        OffloadConfig { resident: vec![1, 5], ..OffloadConfig::default() }.install(&mut *model),
        expect!["offload: resident layers: block 5 does not exist; this model has 5 (0 to 4)"],
    );
    assert_intact(&intact, &*model, "refused options");
    assert_same(&reference, &gradients_of(&*model, &tokens), "refused options");
}

/// A source that holds every region, until one take fails.
#[derive(Debug)]
struct Shelf {
    regions: Mutex<Vec<Tensor>>,
    fails_at: usize,
}

impl LayerSource for Shelf {
    fn takes(&self, _: bool) -> bool {
        true
    }

    fn take(&self, region: &LayerRegion<'_>) -> training::Result<usize> {
        let mut regions = self.regions.lock().unwrap();
        if regions.len() == self.fails_at {
            return Err(runtime::Error::invalid("shelf", "it is full").into());
        }
        regions.push(region.values.copy());
        Ok(regions.len() - 1)
    }

    fn load(&self, region: usize, target: &Tensor) -> runtime::Result<()> {
        let values = self.regions.lock().unwrap()[region].f_view_dtype(Kind::Uint8)?;
        target.shallow_clone().f_copy_(&values)?;
        Ok(())
    }

    fn deliver(&self, _: usize, _: Vec<(usize, Tensor)>, _: bool) -> training::Result<()> {
        Ok(())
    }
}

/// Layers have two regions, of trained and of frozen tensors: the second one of the first layer fails, or of the second.
#[test]
fn a_layer_that_is_offloaded_in_part_gets_its_values_back() {
    let _alone = alone();
    for fails_at in [0, 1, 3] {
        let mut model = tiny();
        freeze(&*model, ".*mlp.*", true).unwrap();
        let tokens = batch(60, 7);
        let logits = |model: &Llama| {
            let input = Input::new(&tokens);
            tch::no_grad(|| model.hidden(&input).unwrap())
        };
        let (intact, expected) = (snapshot(&*model), logits(&model));
        let shelf = Arc::new(Shelf { regions: Mutex::default(), fails_at });
        let options = OffloadConfig { source: Some(shelf.clone()), ..OffloadConfig::default() };
        let error = options.install(&mut *model).unwrap_err().to_string();
        assert!(error.contains("it is full"), "{error}");
        assert_eq!(logits(&model), expected, "failed at {fails_at}");
        if fails_at < 2 {
            assert_intact(&intact, &*model, "failed in the first layer");
        }
    }
}

#[test]
fn the_first_method_is_for_inference_only() {
    let _alone = alone();
    let (mut model, tokens) = (tiny(), batch(60, 7));
    let logits = {
        let _no_grad = tch::no_grad_guard();
        model.logits(&Input::new(&tokens)).unwrap()
    };
    let offload =
        OffloadConfig { method: Method::OneLayer, ..OffloadConfig::default() }.install(&mut *model).unwrap();
    let error = model.loss(&Input::new(&tokens), &tokens).unwrap_err().to_string();
    expect!["offload: method: `layers.0` is offloaded for inference, but gradients are recorded; use Method::Overlap, or disable gradients"].assert_eq(&error);
    offload.check_on_host().unwrap();
    let _no_grad = tch::no_grad_guard();
    assert!(model.logits(&Input::new(&tokens)).unwrap().equal(&logits));
}

/// Gradients of chosen inputs: gradients of layers would be delivered although they were not requested.
#[test]
fn gradients_of_chosen_inputs_are_refused() {
    let _alone = alone();
    let tokens = batch(60, 7);
    let reference = gradients_of(&*tiny(), &tokens);
    for (method, expected) in [
        (
            Method::Checkpointing,
            expect![
                "backward of `checkpoint`: checkpoint: gradients of chosen inputs were asked for, but the segment may hold weights that only an ordinary backward reaches; call autograd::backward and read .grad()"
            ],
        ),
        (
            Method::Function,
            expect![
                "backward of `OffloadFunction`: offload: gradients of chosen inputs were asked for, but the segment may hold weights that only an ordinary backward reaches; call autograd::backward and read .grad()"
            ],
        ),
        (
            Method::Overlap,
            expect![
                "backward of `OverlapOffloadFunction`: offload: gradients of chosen inputs were asked for, but the segment may hold weights that only an ordinary backward reaches; call autograd::backward and read .grad()"
            ],
        ),
    ] {
        let mut model = tiny();
        let offload = OffloadConfig { method, ..OffloadConfig::default() }.install(&mut *model).unwrap();
        let loss = model.loss(&Input::new(&tokens), &tokens).unwrap().sum;
        let embedding = trainable(&*model)[0].1.shallow_clone();
        let error = grad(&[&loss], &[None], &[&embedding], Keep::default()).unwrap_err().to_string();
        expected.assert_eq(&error);
        for (name, tensor) in trainable(&*model) {
            assert!(!tensor.grad().defined(), "{}: {name} has a gradient", method.name());
        }
        offload.check_on_host().unwrap();
        assert_same(&reference, &gradients_of(&*model, &tokens), method.name());
    }
}

#[test]
fn a_graph_cannot_be_used_twice() {
    let _alone = alone();
    let tokens = batch(60, 7);
    let reference = gradients_of(&*tiny(), &tokens);
    for (name, options) in ways(5) {
        let mut model = tiny();
        let offload = options.install(&mut *model).unwrap();
        let loss = model.loss(&Input::new(&tokens), &tokens).unwrap().sum;
        backward(&[&loss]).unwrap();
        let gradients: Vec<Tensor> =
            trainable(&*model).into_iter().map(|(_, tensor)| tensor.grad().copy()).collect();
        let error = backward(&[&loss]).unwrap_err().to_string();
        assert!(error.contains("backward through the graph a second time"), "{name}: {error}");
        for (gradient, (tensor_name, tensor)) in gradients.iter().zip(trainable(&*model)) {
            assert!(gradient.equal(&tensor.grad()), "{name}: {tensor_name}");
        }
        offload.check_on_host().unwrap();
        clear(&model);
        assert_same(&reference, &gradients_of(&*model, &tokens), &name);
    }
}

#[test]
fn layers_that_cannot_keep_their_activations_are_refused() {
    let _alone = alone();
    let error = |options: OffloadConfig| options.install(&mut *tiny()).unwrap_err().to_string();
    expect!["offload: keep: Function runs every layer again in backward; take Method::Overlap"].assert_eq(
        &error(OffloadConfig { method: Method::Function, keep: vec![0], ..OffloadConfig::default() }),
    );
    expect!["offload: keep: block 5 does not exist; this model has 5 (0 to 4)"]
        .assert_eq(&error(OffloadConfig { keep: vec![1, 5], ..OffloadConfig::default() }));
}

/// Between a forward and its backward.
#[test]
fn a_layer_that_keeps_its_activations_must_not_change() {
    let _alone = alone();
    let tokens = batch(60, 7);
    let mut model = tiny();
    let _offload =
        OffloadConfig { keep: (0..5).collect(), ..OffloadConfig::default() }.install(&mut *model).unwrap();
    let loss = model.loss(&Input::new(&tokens), &tokens).unwrap().sum;
    {
        let _no_grad = tch::no_grad_guard();
        let (_, weight) =
            trainable(&*model).into_iter().find(|(name, _)| name.starts_with("layers.2.")).unwrap();
        let _ = weight.shallow_clone().f_mul_scalar_(2.0).unwrap();
    }
    let error = backward(&[&loss]).unwrap_err().to_string();
    assert!(
        error.contains("was written, or given other memory, between a forward and its backward"),
        "{error}"
    );
}
