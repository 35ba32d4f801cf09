//! Late streams, in every combination: results do not change by a bit. Nothing sleeps; a delayed stream spins and yields, a number of
//! times given by a seed.

use crate::support;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::support::{FLOAT, alone, compare, steps, tiny, ways};
use models::module::{Input, LanguageModel};
use models::{DecoderConfig, Llama};
use offload::{HookPoint, Method, OffloadConfig, TestHook, Tier};
use proptest::prelude::*;

const POINTS: [HookPoint; 4] = [HookPoint::Load, HookPoint::Store, HookPoint::Compute, HookPoint::Event];

/// Delays streams at some points, by up to a number of yields each.
#[derive(Debug)]
struct Delays {
    seed: u64,
    most: [u64; 4],
    visits: [AtomicU64; 4],
}

impl Delays {
    fn new(seed: u64, most: [u64; 4]) -> Arc<Self> {
        Arc::new(Self { seed, most, visits: Default::default() })
    }

    fn visits(&self) -> [u64; 4] {
        std::array::from_fn(|index| self.visits[index].load(Ordering::Relaxed))
    }
}

/// SplitMix64 (Steele et al., OOPSLA 2014).
fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl TestHook for Delays {
    fn at(&self, point: HookPoint) -> runtime::Result<()> {
        let Some(stream) = POINTS.iter().position(|other| *other == point) else { return Ok(()) };
        let visit = self.visits[stream].fetch_add(1, Ordering::Relaxed);
        let turns = mix(self.seed ^ (visit << 8) ^ stream as u64) % (self.most[stream] + 1);
        for turn in 0..turns {
            // It spins, because yielding takes no time if no other thread is ready, and a turn of other processes if one of them is.
            black_box((0..64).fold(turn, |sum, one| mix(sum ^ one)));
            if turn % 32 == 31 {
                std::thread::yield_now();
            }
        }
        Ok(())
    }
}

/// Each stream alone, all of them, and one far behind the others.
const SKEWS: [[u64; 4]; 7] = [
    [200, 0, 0, 0],
    [0, 200, 0, 0],
    [0, 0, 200, 0],
    [0, 0, 0, 200],
    [100, 100, 100, 100],
    [1000, 20, 20, 20],
    [20, 1000, 20, 20],
];

#[test]
fn late_streams_do_not_change_results() {
    let _alone = alone();
    let reference = steps(tiny(), None, 2, 2);
    for (case, most) in SKEWS.into_iter().enumerate() {
        for ring in 1..=4 {
            let test_hook = Delays::new(case as u64, most);
            let options =
                OffloadConfig { ring, test_hook: Some(test_hook.clone()), ..OffloadConfig::default() };
            let name = format!("ring {ring}, delays {most:?}");
            compare(&reference, &steps(tiny(), Some(options), 2, 2), &name);
            assert!(test_hook.visits().iter().all(|&visits| visits > 0), "{name}: {:?}", test_hook.visits());
        }
    }
}

#[test]
fn late_streams_do_not_change_results_with_layers_in_files() {
    let _alone = alone();
    let model = || {
        let model = tiny();
        models::module::freeze(&*model, r".*(weight)", true).unwrap();
        model
    };
    let folder = tempfile::tempdir().unwrap();
    let reference = steps(model(), None, 2, 2);
    for (case, most) in SKEWS.into_iter().enumerate() {
        for ring in [1, 3] {
            let test_hook = Delays::new(100 + case as u64, most);
            let tier = Tier::File(folder.path().to_owned());
            let options =
                OffloadConfig { ring, tier, test_hook: Some(test_hook.clone()), ..OffloadConfig::default() };
            let name = format!("files, ring {ring}, delays {most:?}");
            compare(&reference, &steps(model(), Some(options), 2, 2), &name);
            assert!(test_hook.visits().iter().all(|&visits| visits > 0), "{name}: {:?}", test_hook.visits());
        }
    }
}

#[test]
fn late_streams_do_not_change_results_of_one_layer_at_a_time() {
    let _alone = alone();
    let reference = steps(tiny(), None, 2, 2);
    for method in [Method::Checkpointing, Method::Function] {
        for (case, most) in SKEWS.into_iter().enumerate() {
            let test_hook = Some(Delays::new(200 + case as u64, most) as Arc<dyn TestHook>);
            let options = OffloadConfig { method, test_hook, ..OffloadConfig::default() };
            compare(&reference, &steps(tiny(), Some(options), 2, 2), &format!("{} {most:?}", method.name()));
        }
    }
}

/// Wide layers and few tokens: copying a layer takes longer than running it, so every use waits for its slot.
#[test]
fn layers_that_copy_longer_than_they_run_are_correct() {
    let _alone = alone();
    let model = || {
        runtime::random::seed(2).unwrap();
        let config = DecoderConfig { num_key_value_heads: 2, ..DecoderConfig::qwen2(60, 192, 1536, 6, 4) };
        Box::new(Llama::new(&config, FLOAT).unwrap())
    };
    let token = support::batch(60, 0).narrow(0, 0, 1).narrow(1, 0, 1);
    let reference = steps(model(), None, 2, 2);
    let logits = {
        let _no_grad = tch::no_grad_guard();
        model().logits(&Input::new(&token)).unwrap()
    };
    let folder = tempfile::tempdir().unwrap();
    for ring in 1..=4 {
        for most in [[0; 4], [1000, 0, 0, 0], [1000, 1000, 10, 10]] {
            let name = format!("ring {ring}, delays {most:?}");
            let test_hook = Some(Delays::new(ring as u64, most) as Arc<dyn TestHook>);
            let options = OffloadConfig { ring, test_hook, ..OffloadConfig::default() };
            compare(&reference, &steps(model(), Some(options.clone()), 2, 2), &name);

            for tier in [Tier::Host, Tier::File(folder.path().to_owned())] {
                let mut model = model();
                models::module::freeze(&*model, ".*", true).unwrap();
                let options = OffloadConfig { tier, ..options.clone() };
                let offload = options.install(&mut *model).unwrap();
                for pass in 0..4 {
                    let _no_grad = tch::no_grad_guard();
                    let found = model.logits(&Input::new(&token)).unwrap();
                    assert!(found.equal(&logits), "{name}, pass {pass}, {:?}", options.tier);
                }
                offload.check_on_host().unwrap();
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn random_delays_do_not_change_results(
        seed in any::<u64>(),
        most in prop::array::uniform4(prop_oneof![Just(0u64), 1u64..300, 500u64..1500]),
        ring in 1usize..5,
        micro in 1u64..4,
        way in 0usize..5,
    ) {
        let _alone = alone();
        let reference = steps(tiny(), None, 2, micro);
        let test_hook = Some(Delays::new(seed, most) as Arc<dyn TestHook>);
        let (name, options) = ways(5).swap_remove(way);
        let found = steps(tiny(), Some(OffloadConfig { ring, test_hook, ..options }), 2, micro);
        compare(&reference, &found, &format!("{name}, seed {seed}, ring {ring}, delays {most:?}"));
    }
}
