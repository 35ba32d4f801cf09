//! The plan of least recomputation, compared with all assignments in all orders.

use accounting::Error;
use accounting::activation_plan::{LayerChoice, LayerCost, least_recomputation, peak_bytes};
use expect_test::expect;
use proptest::prelude::*;

fn cost(held: u64, transient: u64, seconds: u64) -> LayerCost {
    LayerCost {
        held_bytes: held,
        host_bytes: held / 3,
        recompute_seconds: seconds as f64,
        transient_bytes: transient,
    }
}

fn numbered(costs: &[LayerCost]) -> Vec<LayerChoice<usize>> {
    costs.iter().enumerate().map(|(of, cost)| LayerChoice { of, cost: *cost }).collect()
}

/// Every sequence of `layers` choices: (seconds, peak).
fn all_plans(layers: u32, costs: &[LayerCost]) -> Vec<(u64, u64)> {
    let plan = |mut number: usize| {
        let mut chosen = Vec::new();
        for _ in 0..layers {
            chosen.push(costs[number % costs.len()]);
            number /= costs.len();
        }
        let seconds: f64 = chosen.iter().map(|cost| cost.recompute_seconds).sum();
        (seconds as u64, peak_bytes(chosen).unwrap())
    };
    (0..costs.len().pow(layers)).map(plan).collect()
}

fn random_costs(choices: impl Into<prop::collection::SizeRange>) -> impl Strategy<Value = Vec<LayerCost>> {
    let one =
        (0u64..40, 0u64..60, 0u64..12).prop_map(|(held, transient, seconds)| cost(held, transient, seconds));
    prop::collection::vec(one, choices)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_plan_is_optimal_over_all_orders(
        layers in 1u32..6,
        costs in random_costs(1..5),
        budget in 0u64..250,
    ) {
        let all = all_plans(layers, &costs);
        let best = all.iter().filter(|(_, peak)| *peak <= budget).min();
        match (least_recomputation(layers as usize, &numbered(&costs), budget), best) {
            (Ok(plan), Some(&(seconds, peak))) => {
                prop_assert_eq!((plan.recompute_seconds, plan.peak_bytes), (seconds as f64, peak));
                let chosen: Vec<LayerCost> = plan.layers.iter().map(|&index| costs[index]).collect();
                prop_assert_eq!(chosen.len(), layers as usize);
                prop_assert_eq!(plan.host_bytes, chosen.iter().map(|cost| cost.host_bytes).sum::<u64>());
                prop_assert_eq!(chosen.iter().map(|cost| cost.recompute_seconds).sum::<f64>(), seconds as f64);
                prop_assert_eq!(peak_bytes(chosen).unwrap(), peak);
            }
            (Err(Error::NoPlanFits { needed, .. }), None) => {
                prop_assert_eq!(Some(needed), all.iter().map(|(_, peak)| *peak).min());
            }
            (found, best) => prop_assert!(false, "{found:?} where all plans give {best:?}"),
        }
    }

    #[test]
    fn a_larger_budget_never_recomputes_more(
        layers in 1usize..90,
        costs in random_costs(1..6),
        budget in 0u64..3000,
        more in 0u64..500,
    ) {
        let choices = numbered(&costs);
        match (least_recomputation(layers, &choices, budget), least_recomputation(layers, &choices, budget + more)) {
            (Ok(small), Ok(large)) => {
                prop_assert!(large.recompute_seconds <= small.recompute_seconds);
                prop_assert!(small.peak_bytes <= budget && large.peak_bytes <= budget + more);
            }
            (Ok(_), Err(error)) => prop_assert!(false, "{error}"),
            (Err(Error::NoPlanFits { needed, .. }), _) => {
                prop_assert!(needed > budget);
                prop_assert!(least_recomputation(layers, &choices, needed).is_ok());
                prop_assert!(least_recomputation(layers, &choices, needed - 1).is_err());
            }
            (Err(error), _) => prop_assert!(false, "{error}"),
        }
    }

    /// The recomputed bytes are those that were not kept: at the last layer both take the same.
    #[test]
    fn the_last_layer_is_not_recomputed_unnecessarily(
        layers in 1usize..40,
        (input, inside, gradients) in (1u64..50, 1u64..50, 0u64..20),
        slack in 0u64..2000,
    ) {
        let keep = cost(input + inside, gradients, 0);
        let again = cost(input, inside + gradients, 1);
        let choices = [LayerChoice { of: "keep", cost: keep }, LayerChoice { of: "again", cost: again }];
        let least = layers as u64 * input + inside + gradients;
        prop_assert!(least_recomputation(layers, &choices, least - 1).is_err());
        let plan = least_recomputation(layers, &choices, least + slack).unwrap();
        prop_assert_eq!(plan.layers.last(), Some(&"keep"));
        let kept = 1 + (slack / inside).min(layers as u64 - 1);
        prop_assert_eq!(plan.recompute_seconds, (layers as u64 - kept) as f64);
    }
}

/// Eighty layers under ten choices whose costs have nothing in common; a wrong search of all plans would not end.
#[test]
fn eighty_layers_of_ten_choices_are_planned() {
    let mut costs = Vec::new();
    for level in 0..10u64 {
        // From all kept to nothing kept: convex in bytes, and never on one line.
        let held = 1_000_000_007 - 97_003_001 * level - 13 * level * level;
        let seconds = 0.001 * (level as f64).powf(1.37);
        let transient_bytes = 100_000_000 + 97_003_001 * level;
        costs.push(LayerCost {
            held_bytes: held,
            host_bytes: 0,
            recompute_seconds: seconds,
            transient_bytes,
        });
    }
    let choices = numbered(&costs);
    let mut last = f64::INFINITY;
    for budget in [13_000_000_000, 30_000_000_000, 55_000_000_001, 79_000_000_000, 90_000_000_000] {
        let plan = least_recomputation(80, &choices, budget).unwrap();
        assert!(plan.peak_bytes <= budget && plan.recompute_seconds < last, "{plan:?}");
        last = plan.recompute_seconds;
    }
    assert_eq!(last, 0.0);
}

#[test]
fn invalid_questions_are_refused() {
    let words = |layers, costs: &[LayerCost], budget| {
        least_recomputation(layers, &numbered(costs), budget).unwrap_err().to_string()
    };
    let plain = cost(1000, 500, 1);
    expect!["no plan for 3 layers fits 3.42 KiB: the least takes 3.42 KiB (3500 bytes); give that budget, fewer tokens, or a choice that holds less"]
        .assert_eq(&words(3, &[plain], 3499));
    expect!["layers of a plan is 0; give a number of at least 1"].assert_eq(&words(0, &[plain], 1));
    expect!["choices of a layer is 0; give a number of at least 1"].assert_eq(&words(3, &[], 1));
    for seconds in [f64::NAN, -1.0, f64::INFINITY, 1e10] {
        let text = words(3, &[LayerCost { recompute_seconds: seconds, ..plain }], 1);
        assert!(text.starts_with(&format!("a layer's recomputation in seconds is {seconds}")), "{text}");
    }
    assert!(words(2, &[cost(1 << 63, 0, 0)], 1).contains("does not fit in 64 bits"));
    assert!(words(2, &[cost(u64::MAX / 2, 0, 0), cost(0, u64::MAX, 0)], 1).contains("64 bits"));
}

/// Bytes and seconds on one line: no plan beats another in both, so an exact search would visit all of them.
#[test]
fn eighty_layers_of_collinear_costs_are_planned() {
    let held = [1_073_741_789u64, 871_234_567, 640_320_001, 420_000_037, 199_999_991, 31_415_927];
    let line = |held: u64| LayerCost {
        held_bytes: held,
        host_bytes: 0,
        recompute_seconds: (1_073_741_789 - held) as f64 * 1e-11,
        transient_bytes: 50_000_000 + 1_073_741_789 - held,
    };
    let choices = numbered(&held.map(line));
    for share in [4, 40, 70] {
        let budget = share * held[0] + 1_200_000_000;
        let plan = least_recomputation(80, &choices, budget).unwrap();
        assert!(plan.peak_bytes <= budget);
        // With divisible layers, a plan would use all of the budget except the smallest transient.
        let divisible = (80 * held[0] - (budget - 50_000_000)) as f64 * 1e-11;
        let one_layer = choices[5].cost.recompute_seconds;
        assert!(
            plan.recompute_seconds < divisible + 1.5 * one_layer,
            "{} {divisible}",
            plan.recompute_seconds
        );
    }
}
