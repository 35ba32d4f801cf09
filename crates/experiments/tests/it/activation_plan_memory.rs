//! Peak memory falls as predicted for each plan from one layer. The counts are the whole process's, so no
//! other test may run at the same time.

use experiments::training::activation_plan::{NamedPlan, Outcome, Stack};
use tch::Device;
use training::activations::LayerPlan;

fn within(measured: u64, expected: u64, share: f64) -> bool {
    (measured as f64 / expected as f64 - 1.0).abs() <= share
}

#[test]
fn the_peak_of_every_plan_is_the_one_predicted() {
    let base = Stack {
        rows: 4,
        length: 64,
        hidden: 64,
        heads: 2,
        layers: 6,
        vocabulary: 96,
        dropout: 0.0,
        device: Device::Cpu,
        seed: 3,
    };
    for stack in [
        base.clone(),
        Stack { dropout: 0.1, layers: 5, ..base.clone() },
        Stack { vocabulary: 1500, layers: 4, ..base },
    ] {
        let predictor = stack.step_predictor(1).unwrap();
        let layers = stack.layers as usize;
        let mut plans = stack.plans(&predictor).unwrap();
        let mixed = LayerPlan::ALL.iter().cycle().take(layers).copied().collect();
        plans.push(NamedPlan { name: "mixed".into(), plan: mixed, budget: None });
        let outcomes =
            stack.bench(stack.layers).unwrap().run(&stack, &predictor, plans, [1, 1], |_| ()).unwrap();
        for outcome in &outcomes {
            let Outcome { plan, predictor, peak_bytes, host_bytes, .. } = outcome;
            assert!(within(predictor.peak_bytes, *peak_bytes, 0.05), "{outcome:?}: {stack:?}");
            assert_eq!(*host_bytes, predictor.host_bytes, "{}", plan.name);
            let offloaded = plan.plan.iter().filter(|plan| **plan == LayerPlan::Offload).count() as u64;
            let input = (stack.rows * stack.length * stack.hidden * 4) as u64;
            assert_eq!(*host_bytes, offloaded * input, "{}", plan.name);
            if let Some(budget) = plan.budget {
                assert!(*peak_bytes <= budget + budget / 20, "{}: {peak_bytes} of {budget}", plan.name);
            }
        }
        let peak = |name: &str| outcomes.iter().find(|outcome| outcome.plan.name == name).unwrap().peak_bytes;
        let uniform: Vec<u64> = LayerPlan::ALL.iter().map(|plan| peak(plan.name())).collect();
        let [all, elementwise, mlp, attention, input, offload] = uniform[..] else { panic!("{uniform:?}") };
        for selective in [elementwise, mlp, attention] {
            assert!(all > selective && selective > input, "{uniform:?}");
        }
        assert!(input > offload, "{uniform:?}");
    }
}
