//! Schedules compared with manual ones, and properties of every schedule and plan.

use accounting::Error;
use accounting::offload::{
    AvailableMemory, Fixed, Kept, Layer, MOST_PLANNED_SLOTS, Method, Moment, Operation, OptimizerPlace,
    Rates, Setup, SimulatedStep, Span, Start, StepCosts, StreamKind, WorkingMemory, interleaved, plan,
    simulate,
};
use expect_test::{Expect, expect};
use proptest::prelude::*;

/// A load takes a second, a store half of one.
const RATES: Rates = Rates { load: 1000.0, store: 2000.0, host_optimizer: 100.0, device_optimizer: 1000.0 };

fn layer(forward_seconds: f64) -> Layer {
    Layer { slot_bytes: 1000, forward_seconds, backward_seconds: 2.0 * forward_seconds, ..Layer::default() }
}

fn trained(forward_seconds: f64) -> Layer {
    Layer {
        trainable_bytes: 1000,
        gradient_bytes: 1000,
        state_bytes: 4000,
        trainable: 100,
        ..layer(forward_seconds)
    }
}

fn step_costs(layers: Vec<Layer>, training: bool) -> StepCosts {
    // At the largest moment of a backward, all gradients of the layer exist.
    let gradients = layers.iter().map(|layer| layer.gradient_bytes).max().unwrap_or(0);
    let working = WorkingMemory {
        input_bytes: 10,
        forward_bytes: 100,
        recomputation_bytes: 300,
        backward_bytes: 300 + gradients,
        head_bytes: 200,
        ..WorkingMemory::default()
    };
    StepCosts { layers, fixed: Fixed { weight_bytes: 500, ..Fixed::default() }, working, training }
}

fn setup(method: Method, resident: &[usize], optimizer: OptimizerPlace) -> Setup {
    Setup { method, resident: resident.to_vec(), optimizer }
}

fn overlap(ring: usize) -> Setup {
    setup(Method::Overlap { ring }, &[], OptimizerPlace::Host)
}

fn run(costs: &StepCosts, setup: &Setup, start: Start) -> SimulatedStep {
    simulate(costs, &RATES, setup, start).unwrap()
}

/// Formats every span as `work layer start-end`, with a line for each stream.
fn check(step: &SimulatedStep, expected: Expect) {
    let mut text = String::new();
    for lane in StreamKind::ALL {
        let spans: Vec<String> = step.spans.iter().filter(|span| span.stream == lane).map(show).collect();
        if !spans.is_empty() {
            text += &format!("{}: {}\n", lane.name(), spans.join(", "));
        }
    }
    text += &format!("{} s, {} s idle, {} B\n", step.seconds, step.idle_seconds, step.device.total);
    expected.assert_eq(&text);
}

fn show(span: &Span) -> String {
    let layer = span.layer.map_or(String::new(), |layer| format!(" {layer}"));
    format!("{}{layer} {}-{}", span.operation.name(), span.start, span.end)
}

#[test]
fn one_at_a_time_overlaps_nothing() {
    let step = run(
        &step_costs(vec![layer(2.0); 3], false),
        &setup(Method::OneAtATime, &[], OptimizerPlace::Host),
        Start::Warm,
    );
    check(
        &step,
        expect![[r#"
            compute: forward 0 1-3, forward 1 4-6, forward 2 7-9
            load: weights 0 0-1, weights 1 3-4, weights 2 6-7
            9 s, 3 s idle, 1610 B
        "#]],
    );
    let costs = step_costs(vec![trained(2.0); 2], true);
    check(
        &run(&costs, &setup(Method::OneAtATime, &[], OptimizerPlace::Host), Start::Warm),
        expect![[r#"
        compute: forward 0 1-3, forward 1 4-6, backward 1 7-11, backward 0 13.5-17.5
        load: weights 0 0-1, weights 1 3-4, weights 1 6-7, weights 0 12.5-13.5
        store: gradients 1 11-11.5, gradients 0 17.5-18
        host: step 1 11.5-12.5, step 0 18-19
        19 s, 7 s idle, 2820 B
    "#]],
    );
}

#[test]
fn only_the_first_load_delays_when_compute_is_longer() {
    let step = run(&step_costs(vec![layer(2.0); 4], false), &overlap(2), Start::Cold);
    check(
        &step,
        expect![[r#"
        compute: forward 0 1-3, forward 1 3-5, forward 2 5-7, forward 3 7-9
        load: weights 0 0-1, weights 1 1-2, weights 2 3-4, weights 3 5-6, weights 0 7-8
        9 s, 1 s idle, 2700 B
    "#]],
    );
    // The next step's first layer is loaded while the last one computes.
    check(
        &run(&step_costs(vec![layer(2.0); 4], false), &overlap(2), Start::Warm),
        expect![[r#"
        compute: forward 0 0-2, forward 1 2-4, forward 2 4-6, forward 3 6-8
        load: weights 1 0-1, weights 2 2-3, weights 3 4-5, weights 0 6-7
        8 s, 0 s idle, 2700 B
    "#]],
    );
}

#[test]
fn a_ring_of_one_slot_waits_for_every_load() {
    check(
        &run(&step_costs(vec![layer(2.0); 3], false), &overlap(1), Start::Warm),
        expect![[r#"
        compute: forward 0 1-3, forward 1 4-6, forward 2 7-9
        load: weights 0 0-1, weights 1 3-4, weights 2 6-7
        9 s, 3 s idle, 1700 B
    "#]],
    );
}

#[test]
fn layers_stay_loaded_between_forward_and_backward() {
    let step = run(&step_costs(vec![layer(1.0); 5], true), &overlap(3), Start::Warm);
    check(
        &step,
        expect![[r#"
        compute: forward 0 0-1, forward 1 1-2, forward 2 2-3, forward 3 3-4, forward 4 4-5, backward 4 5-7, backward 3 7-9, backward 2 9-11, backward 1 11-13, backward 0 13-15
        load: weights 3 1-2, weights 4 2-3, weights 1 7-8, weights 0 9-10
        15 s, 0 s idle, 3850 B
    "#]],
    );
    assert_eq!(step.load_bytes, 2 * 2 * 1000);
}

#[test]
fn gradients_are_stored_during_compute_and_updated_layers_are_reloaded() {
    let costs = step_costs(vec![trained(1.0); 3], true);
    let host = run(&costs, &overlap(2), Start::Warm);
    check(
        &host,
        expect![[r#"
            compute: forward 0 1-2, forward 1 2-3, forward 2 3-4, backward 2 4-6, backward 1 6-8, backward 0 8-10
            load: weights 0 0-1, weights 1 1-2, weights 2 2-3, weights 0 6-7
            store: gradients 2 6-6.5, gradients 1 8-8.5, gradients 0 10-10.5
            host: step 2 6.5-7.5, step 1 8.5-9.5, step 0 10.5-11.5
            11.5 s, 2.5 s idle, 3830 B
        "#]],
    );
    assert_eq!((host.load_bytes, host.store_bytes), (4000, 3000));
    assert_eq!(host.host_bytes, 3000 + 12000 + 1000);
    let device = run(&costs, &setup(Method::Overlap { ring: 2 }, &[], OptimizerPlace::Device), Start::Warm);
    check(
        &device,
        expect![[r#"
        compute: forward 0 0-1, forward 1 1-2, forward 2 2-3, backward 2 3-5, step 2 5-5.100000000000001, backward 1 5.100000000000001-7.100000000000001, step 1 7.100000000000001-7.200000000000003, backward 0 7.200000000000003-9.200000000000003, step 0 9.200000000000003-9.300000000000004
        load: weights 2 1-2, weights 0 5.600000000000001-6.600000000000001
        store: weights 2 5.100000000000001-5.600000000000001, weights 1 7.200000000000003-7.700000000000003, weights 0 9.300000000000004-9.800000000000004
        9.800000000000004 s, 0.5 s idle, 15830 B
    "#]],
    );
    assert_eq!(device.host_bytes, 3000);
}

#[test]
fn the_layer_needed_last_is_evicted() {
    // Two slots are enough for the stream; the others keep what they have, and a step loads less.
    let slow = step_costs(vec![layer(0.25); 5], false);
    let bytes = |ring| run(&slow, &overlap(ring), Start::Warm).load_bytes;
    assert_eq!([1, 2, 3, 4, 5].map(bytes), [5000, 5000, 4000, 3000, 0]);
}

#[test]
fn both_ways_to_make_every_layer_resident_agree() {
    let costs = step_costs(vec![layer(1.0); 3], true);
    let kept = Kept { bytes: 50, forward_bytes: 60, backward_bytes: 70 };
    let with_kept =
        StepCosts { working: WorkingMemory { kept: Some(kept), ..costs.working }, ..costs.clone() };
    let of = |recompute| setup(Method::Resident { recompute }, &[], OptimizerPlace::Device);
    check(
        &run(&with_kept, &of(false), Start::Warm),
        expect![[r#"
        compute: forward 0 0-1, forward 1 1-2, forward 2 2-3, backward 2 3-4, backward 1 4-5, backward 0 5-6
        6 s, 0 s idle, 3850 B
    "#]],
    );
    check(
        &run(&costs, &of(true), Start::Warm),
        expect![[r#"
        compute: forward 0 0-1, forward 1 1-2, forward 2 2-3, backward 2 3-5, backward 1 5-7, backward 0 7-9
        9 s, 0 s idle, 3830 B
    "#]],
    );
    expect!["training without recomputation needs `WorkingMemory::kept`; set it, or recompute"]
        .assert_eq(&simulate(&costs, &RATES, &of(false), Start::Warm).unwrap_err().to_string());
}

#[test]
fn a_device_optimizer_holds_all_gradients() {
    let costs = step_costs(vec![trained(1.0); 3], true);
    let resident =
        run(&costs, &setup(Method::Resident { recompute: true }, &[], OptimizerPlace::Device), Start::Warm);
    assert_eq!(resident.device.moment, Moment::Backward(0));
    // The last layer's own gradients are among the working bytes.
    assert_eq!(resident.device.bytes("layer gradients"), 2000);
    // Expected: 500 fixed, 3 × 1000 of weights and of gradients, 3 × 4000 of state, one input, the backward.
    assert_eq!(resident.device.total, 500 + 3000 + 3000 + 12000 + 10 + 300);
    let fused =
        run(&costs, &setup(Method::Overlap { ring: 1 }, &[0, 1, 2], OptimizerPlace::Device), Start::Warm);
    assert_eq!(fused.device.bytes("layer gradients"), 0);
    assert_eq!(fused.load_bytes + fused.store_bytes, 0);
}

#[test]
fn invalid_values_are_refused() {
    let costs = step_costs(vec![layer(1.0); 3], false);
    let message = |costs: &StepCosts, rates: Rates, setup: &Setup| {
        simulate(costs, &rates, setup, Start::Warm).unwrap_err().to_string()
    };
    let resident = |resident: &[usize]| setup(Method::Overlap { ring: 2 }, resident, OptimizerPlace::Host);
    let slow = StepCosts { layers: vec![layer(f64::NAN)], ..costs.clone() };
    let large =
        StepCosts { layers: vec![Layer { slot_bytes: u64::MAX, ..Layer::default() }; 2], ..costs.clone() };
    let text = [
        message(&StepCosts { layers: vec![], ..costs.clone() }, RATES, &overlap(2)),
        message(&costs, Rates { load: 0.0, ..RATES }, &overlap(2)),
        message(&slow, RATES, &overlap(2)),
        message(&costs, RATES, &overlap(9)),
        message(&costs, RATES, &resident(&[1, 1])),
        message(&costs, RATES, &resident(&[3])),
        message(&large, RATES, &overlap(2)),
    ];
    expect![[r#"
        layers of a step is 0; give a number of at least 1
        a rate is 0, outside the positive numbers; give bytes per second of the link and numbers per second of the optimizer, as measured
        a layer's time in seconds is NaN, outside 0 to 1e9; give seconds as measured, or FLOPs by a positive rate
        the number of slots of the ring is 9, outside 1 to 8; give 1 (no prefetch) to 8
        resident layers [1, 1] of 3 layers; name each layer once, in rising order, from 0 on
        resident layers [3] of 3 layers; name each layer once, in rising order, from 0 on
        bytes of the ring: 2 × 18446744073709551615 does not fit in 64 bits; give smaller sizes"#]].assert_eq(&text.join("\n"));
}

#[test]
fn a_budget_too_small_is_an_error_with_the_smallest_that_fits() {
    let costs = step_costs(vec![trained(1.0); 4], true);
    let message =
        |device, host| plan(&costs, &RATES, AvailableMemory { device, host }).unwrap_err().to_string();
    expect![[r#"
        no offloading of 4 layers fits 1.95 KiB of the device: the least takes 2.77 KiB (2840 bytes: working memory 1.27 KiB, ring 1000 B, fixed weights 500 B, layer inputs 40 B); give that budget, fewer tokens or a lower precision
        no offloading of 4 layers fits 19.5 KiB of the device and 1000 B of the host: the least takes 21.3 KiB (21840 bytes: optimizer state 15.6 KiB, resident layers 2.93 KiB, working memory 1.27 KiB, ring 1000 B, fixed weights 500 B, layer inputs 40 B); give that budget, fewer tokens or a lower precision"#]].assert_eq(&format!("{}\n{}", message(2000, None), message(20_000, Some(1000))));
    let Err(Error::NoOffloadFits { needed, .. }) =
        plan(&costs, &RATES, AvailableMemory { device: 0, host: None })
    else {
        panic!("a budget of nothing")
    };
    let fits = |device| plan(&costs, &RATES, AvailableMemory { device, host: None });
    assert!(fits(needed).is_ok() && fits(needed - 1).is_err());
}

#[test]
fn a_plan_prints_as_lines() {
    let found =
        plan(&step_costs(vec![trained(1.0); 6], true), &RATES, AvailableMemory { device: 8000, host: None })
            .unwrap();
    expect![[r#"
        resident layers            0 of 6
        slots of the ring          2
        optimizer                  host
        fixed weights              500 (500 B)
        ring                       2,000 (1.95 KiB)
        layer inputs               60 (60 B)
        working memory             1,300 (1.27 KiB)
        peak, backward of layer 5  3,860 (3.77 KiB)
        device budget              8,000 (7.81 KiB)
        host                       31,000 (30.3 KiB)
        loaded per step            10,000 (9.77 KiB)
        stored per step            6,000 (5.86 KiB)
        step                       20.500 s
        compute waits              2.500 s
        step, all resident         18.600 s
        share of resident speed    0.907
    "#]]
    .assert_eq(&found.to_string());
}

#[test]
fn resident_layers_are_interleaved() {
    for count in 1..40 {
        for stay in 0..=count {
            let layers = interleaved(count, stay);
            assert_eq!(layers.len(), stay);
            let gaps: Vec<usize> = layers.windows(2).map(|pair| pair[1] - pair[0]).collect();
            let (least, most) = (gaps.iter().min(), gaps.iter().max());
            assert!(most.zip(least).is_none_or(|(most, least)| most - least <= 1), "{layers:?} of {count}");
        }
    }
}

fn any_costs() -> impl Strategy<Value = StepCosts> {
    let one =
        (1u64..3000, 0u32..20, 0u32..20, any::<bool>()).prop_map(|(bytes, forward, backward, learns)| {
            Layer {
                slot_bytes: bytes,
                trainable_bytes: if learns { bytes / 2 } else { 0 },
                gradient_bytes: if learns { bytes / 2 } else { 0 },
                state_bytes: if learns { 2 * bytes } else { 0 },
                trainable: if learns { bytes } else { 0 },
                // Quarters, so that sums are exact.
                forward_seconds: f64::from(forward) / 4.0,
                backward_seconds: f64::from(forward + backward) / 4.0,
                reducing_bytes: 0,
                kept: None,
            }
        });
    (prop::collection::vec(one, 1..9), any::<bool>(), 0u32..4).prop_map(|(layers, training, head)| {
        let mut costs = step_costs(layers, training);
        costs.fixed.seconds = f64::from(head);
        costs
    })
}

fn methods() -> impl Strategy<Value = Method> {
    prop_oneof![
        Just(Method::Resident { recompute: true }),
        Just(Method::OneAtATime),
        (1usize..9).prop_map(|ring| Method::Overlap { ring }),
    ]
}

fn setups(count: usize) -> impl Strategy<Value = Setup> {
    (methods(), prop::collection::vec(any::<bool>(), count), any::<bool>()).prop_map(
        |(method, stays, host)| Setup {
            method,
            resident: (0..stays.len()).filter(|layer| stays[*layer]).collect(),
            optimizer: if host { OptimizerPlace::Host } else { OptimizerPlace::Device },
        },
    )
}

fn rates() -> impl Strategy<Value = Rates> {
    [1u32..50, 1u32..50, 1u32..50, 1u32..50].prop_map(|[load, store, host, device]| Rates {
        load: f64::from(load) * 64.0,
        store: f64::from(store) * 64.0,
        host_optimizer: f64::from(host) * 64.0,
        device_optimizer: f64::from(device) * 64.0,
    })
}

/// Returns how many layers can be on the device at once, besides resident ones.
fn slots(setup: &Setup) -> usize {
    match setup.method {
        Method::Resident { .. } => 0,
        Method::OneAtATime => 1,
        Method::Overlap { ring } => ring,
    }
}

/// A layer's stay in a slot: from the start of its load to its last use.
fn stays(step: &SimulatedStep) -> Vec<(f64, f64)> {
    let mut stays: Vec<(usize, f64, f64)> = Vec::new();
    let uses = [
        (StreamKind::Compute, Operation::Forward),
        (StreamKind::Compute, Operation::Backward),
        (StreamKind::Compute, Operation::Step),
        (StreamKind::Store, Operation::Weights),
    ];
    let mut spans = step.spans.clone();
    spans.sort_by(|a, b| a.start.total_cmp(&b.start).then(a.end.total_cmp(&b.end)));
    for span in &spans {
        let Some(layer) = span.layer else { continue };
        if span.stream == StreamKind::Load {
            stays.push((layer, span.start, span.end));
        }
        let stay = stays.iter_mut().rev().find(|stay| stay.0 == layer);
        if let Some(stay) = stay.filter(|_| uses.contains(&(span.stream, span.operation))) {
            stay.2 = span.end;
        }
    }
    stays.into_iter().map(|(_, from, until)| (from, until)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_stream_runs_one_span_at_a_time_and_layers_compute_after_their_load(
        (costs, setup) in any_costs().prop_flat_map(|costs| { let count = costs.layers.len(); (Just(costs), setups(count)) }),
        rates in rates(),
        warm in any::<bool>(),
    ) {
        let start = if warm { Start::Warm } else { Start::Cold };
        let step = simulate(&costs, &rates, &setup, start).unwrap();
        for lane in StreamKind::ALL {
            let spans: Vec<&Span> = step.spans.iter().filter(|span| span.stream == lane).collect();
            prop_assert!(spans.iter().all(|span| 0.0 <= span.start && span.start <= span.end && span.end <= step.seconds));
            prop_assert!(spans.windows(2).all(|pair| pair[0].end <= pair[1].start));
        }
        let compute: f64 = costs.layers.iter().map(|layer| layer.forward_seconds + if costs.training { layer.backward_seconds } else { 0.0 }).sum();
        prop_assert!(step.seconds >= (compute + costs.fixed.seconds) * (1.0 - 1e-12));
        prop_assert!((0.0..=1.0 + 1e-9).contains(&step.overlap()));
        for load in step.spans.iter().filter(|span| span.stream == StreamKind::Load && span.bytes > 0) {
            let uses = step.spans.iter().filter(|span| span.stream == StreamKind::Compute && span.layer == load.layer);
            // It is not used while it is loaded.
            prop_assert!(uses.clone().all(|span| span.end <= load.start || span.start >= load.end));
        }
        if matches!(setup.method, Method::OneAtATime) {
            let busy: f64 = StreamKind::ALL.map(|lane| step.busy(lane)).into_iter().sum();
            prop_assert!((busy - step.seconds).abs() <= 1e-9 * step.seconds);
        }
    }

    #[test]
    fn layers_on_the_device_never_exceed_slots(
        (costs, setup) in any_costs().prop_flat_map(|costs| { let count = costs.layers.len(); (Just(costs), setups(count)) }),
        rates in rates(),
    ) {
        let setup = Setup { resident: vec![], ..setup };
        let cold = simulate(&costs, &rates, &setup, Start::Cold).unwrap();
        if !matches!(setup.method, Method::Resident { .. }) {
            let stays = stays(&cold);
            for (moment, _) in &stays {
                let there = stays.iter().filter(|(from, until)| from <= moment && moment < until).count();
                prop_assert!(there <= slots(&setup), "{there} layers at {moment}: {:?}", cold.spans);
            }
        }
    }

    #[test]
    fn loads_are_none_if_resident_and_at_most_two_per_layer(costs in any_costs(), rates in rates(), ring in 1usize..5) {
        let bytes = |stay| {
            let resident = interleaved(costs.layers.len(), stay);
            let frozen = StepCosts {
                layers: costs.layers.iter().map(|layer| Layer { trainable: 0, ..*layer }).collect(),
                ..costs.clone()
            };
            let setup = Setup { method: Method::Overlap { ring }, resident, optimizer: OptimizerPlace::Host };
            simulate(&frozen, &rates, &setup, Start::Warm).unwrap().load_bytes
        };
        prop_assert_eq!(bytes(costs.layers.len()), 0);
        prop_assert!(bytes(0) <= 2 * costs.layer_bytes().unwrap());
    }

    #[test]
    fn the_plan_equals_brute_force(
        costs in any_costs(),
        rates in rates(),
        device in 0u64..40_000,
        host in prop::option::of(0u64..60_000),
    ) {
        let budget = AvailableMemory { device, host };
        let mut best: Option<f64> = None;
        let mut least = u64::MAX;
        for optimizer in [OptimizerPlace::Device, OptimizerPlace::Host] {
            for stay in 0..=costs.layers.len() {
                for ring in 1..=MOST_PLANNED_SLOTS {
                    let resident = interleaved(costs.layers.len(), stay);
                    let setup = Setup { method: Method::Overlap { ring }, resident, optimizer };
                    let step = simulate(&costs, &rates, &setup, Start::Warm).unwrap();
                    if host.is_none_or(|host| step.host_bytes <= host) {
                        least = least.min(step.device.total);
                        if step.device.total <= device {
                            best = Some(best.map_or(step.seconds, |best| best.min(step.seconds)));
                        }
                    }
                }
            }
        }
        match (plan(&costs, &rates, budget), best) {
            (Ok(found), Some(best)) => {
                prop_assert_eq!(found.step.seconds, best);
                prop_assert!(found.step.device.total <= device);
                prop_assert!(host.is_none_or(|host| found.step.host_bytes <= host));
                // More memory is never slower.
                let roomier = plan(&costs, &rates, AvailableMemory { device: device + device / 3, host }).unwrap();
                prop_assert!(roomier.step.seconds <= best);
            }
            (Err(Error::NoOffloadFits { needed, .. }), None) => {
                prop_assert!(needed > device);
                prop_assert_eq!(needed, least);
            }
            (found, best) => prop_assert!(false, "{found:?} beside {best:?}"),
        }
    }
}
