//! Properties of every model and plan.

use accounting::decoder_flops::{Recomputation, Workload, step};
use accounting::estimate::{Moment, Part, TrainingPlan, estimate};
use accounting::fit::{Limit, largest_batch, largest_model, longest_sequence, scaled, template_size};
use accounting::memory::host::OnHost;
use accounting::memory::logits::Loss;
use accounting::memory::optimizer::{Optimizer, StepKernel};
use accounting::memory::recipe::Recipe;
use accounting::memory::total;
use accounting::memory::zero::{Sharding, ZeroStage, model_states};
use accounting::model::{Family, Shape, has_modelled_activations};
use accounting::recompute::{AttentionKernel, NormKernel, Recompute, SwigluLevel};
use accounting::{Decoder, Dtype};
use proptest::prelude::*;
use proptest::sample::select;

fn models() -> impl Strategy<Value = Decoder> {
    let sizes = (1u64..2000, 1u64..6, 1u64..5, 1u64..4, 1u64..40, 1u64..300);
    let families: Vec<Family> =
        Family::ALL.into_iter().filter(|family| has_modelled_activations(*family)).collect();
    (select(families), sizes, any::<[bool; 3]>()).prop_map(
        |(family, (vocabulary, layers, kv_heads, group, head_dim, feed_forward), flags)| {
            let grouped = family.is_swiglu();
            let heads = if grouped { kv_heads * group } else { kv_heads };
            let hidden = heads * head_dim;
            let like = family == Family::Gpt2Like;
            Decoder::new(Shape {
                family,
                vocabulary,
                context: 512,
                embedding: if like { hidden + 3 } else { hidden },
                hidden,
                layers,
                heads,
                kv_heads,
                head_dim,
                feed_forward,
                tied: flags[0] && !like,
                attention_bias: flags[1],
                mlp_bias: flags[2],
            })
            .unwrap()
        },
    )
}

fn plans() -> impl Strategy<Value = TrainingPlan> {
    let work = (1u64..20, 1u64..400).prop_map(|(batch, sequence)| Workload { batch, sequence });
    let recomputation =
        (select(&AttentionKernel::ALL[..]), select(&Recompute::ALL[..]), select(&SwigluLevel::ALL[..]))
            .prop_map(|(attention, checkpoint, swiglu)| Recomputation { attention, checkpoint, swiglu });
    let loss = (select(&Loss::NAMES[..]), 1u64..1000)
        .prop_map(|(name, tokens)| Loss::from_name(name, tokens).unwrap());
    let states = (
        select(&Recipe::ALL[..]),
        select(&Optimizer::ALL[..]),
        select(&StepKernel::ALL[..]),
        select(&ZeroStage::ALL[..]),
        1u64..9,
    );
    (work, recomputation, loss, states, any::<[bool; 7]>()).prop_map(
        |(work, recomputation, loss, (recipe, optimizer, step, stage, devices), flags)| TrainingPlan {
            work,
            recipe,
            optimizer,
            step,
            recomputation,
            norm: NormKernel::ALL[usize::from(flags[2]) + usize::from(flags[2] && flags[3])],
            dropout: flags[0],
            loss,
            sharding: Sharding::new(stage, devices).unwrap(),
            accumulate: flags[1],
            host: OnHost {
                parameters: flags[3],
                gradients: flags[4],
                optimizer: flags[5],
                block_inputs: flags[6] && recomputation.checkpoint == Recompute::Full,
            },
            ..TrainingPlan::default()
        },
    )
}

fn peak(model: &Decoder, plan: &TrainingPlan) -> u64 {
    estimate(model, plan).unwrap().peak().total
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn parts_sum_to_the_total(model in models(), plan in plans()) {
        let estimate = estimate(&model, &plan).unwrap();
        for budget in &estimate.moments {
            prop_assert_eq!(budget.parts.iter().sum::<u64>(), budget.total);
            prop_assert!(budget.total <= estimate.peak().total);
            prop_assert_eq!(budget.bytes(Part::Parameters), estimate.states.parameters);
            prop_assert_eq!(budget.bytes(Part::OptimizerState), estimate.states.optimizer);
        }
        let listed: u64 = model.parameter_tensors().unwrap().iter().map(|t| t.elements().unwrap()).sum();
        prop_assert_eq!(listed, model.parameters().unwrap());
        let blocks = if plan.host.block_inputs { 1 } else { model.layers };
        let kept = total(&estimate.block).unwrap() * blocks + total(&estimate.outside_blocks).unwrap();
        prop_assert_eq!(estimate.moments[0].bytes(Part::Activations), kept);
    }

    #[test]
    fn more_work_never_reduces_bytes(model in models(), plan in plans()) {
        let before = peak(&model, &plan);
        for more in [
            Workload { batch: plan.work.batch + 1, ..plan.work },
            Workload { sequence: plan.work.sequence + 1, ..plan.work },
        ] {
            let after = peak(&model, &TrainingPlan { work: more, ..plan });
            prop_assert!(after >= before);
            let flops = |work| step(&model, work, &plan.recomputation).unwrap().hardware().unwrap();
            prop_assert!(flops(more).dense > flops(plan.work).dense);
            prop_assert!(flops(more).causal > flops(plan.work).causal);
        }
        let deeper = Decoder::new(Shape { layers: model.layers + 1, ..(*model).clone() }).unwrap();
        prop_assert!(peak(&deeper, &plan) >= before);
        let larger = scaled(&model, template_size(&model) + 1).unwrap();
        prop_assert!(peak(&larger, &plan) >= before);
    }

    #[test]
    fn recomputation_reduces_bytes_and_increases_flops(model in models(), plan in plans()) {
        let with = |checkpoint, swiglu| {
            let recomputation = Recomputation { checkpoint, swiglu, ..plan.recomputation };
            let host = OnHost { block_inputs: false, ..plan.host };
            let kept = estimate(&model, &TrainingPlan { recomputation, host, ..plan }).unwrap();
            let flops = step(&model, plan.work, &recomputation).unwrap();
            (total(&kept.block).unwrap(), flops.recomputed.dense)
        };
        let mut choices: Vec<_> = SwigluLevel::ALL.map(|level| with(Recompute::None, level)).into();
        prop_assert!(choices.is_sorted_by(|a, b| a.0 >= b.0 && a.1 <= b.1));
        choices = Recompute::ALL.map(|choice| with(choice, plan.recomputation.swiglu)).into();
        prop_assert!(choices.is_sorted_by(|a, b| a.0 >= b.0));
        prop_assert!(choices[2].1 >= choices[0].1);
    }

    /// Offloaded tensors leave the device at every moment, except for buffers, and are all on the host.
    #[test]
    fn offloaded_bytes_move_from_device_to_host(model in models(), plan in plans()) {
        let on_device = estimate(&model, &TrainingPlan { host: OnHost::default(), ..plan }).unwrap();
        let on_host = estimate(&model, &plan).unwrap();
        prop_assert_eq!(on_device.host_bytes, 0);
        let states = on_host.states.total().unwrap();
        let inputs = if plan.host.block_inputs { model.layers * total(&on_host.block).unwrap() } else { 0 };
        prop_assert_eq!(states + on_host.host_bytes, on_device.states.total().unwrap() + inputs);
        for part in Part::ALL {
            let (with, without) = (on_host.largest(part), on_device.largest(part));
            let passing = (part == Part::Temporaries && plan.host != OnHost::default())
                || (part == Part::Activations && model.layers == 1);
            prop_assert!(with <= without || passing, "{part:?}: {with} against {without}");
            prop_assert!(on_host.peak().bytes(part) <= with);
        }
    }

    /// A loss with chunks of one token has the logits of one token, plus the matrix and the hidden states.
    #[test]
    fn chunked_logits_never_exceed_all_logits(model in models(), plan in plans()) {
        let at_loss = |loss| {
            let estimate = estimate(&model, &TrainingPlan { loss, ..plan }).unwrap();
            (estimate.at(Moment::Loss).bytes(Part::Logits), estimate.largest(Part::OptimizerState))
        };
        let matrix = model.vocabulary * model.hidden;
        let (eager, optimizer) = at_loss(Loss::Eager);
        for name in &Loss::NAMES[1..] {
            let (bytes, same) = at_loss(Loss::from_name(name, 1).unwrap());
            let tokens = plan.work.tokens().unwrap();
            let beside = 4 * (tokens * model.hidden + matrix);
            prop_assert!(bytes <= eager.div_ceil(tokens) + beside, "{name}: {bytes} of {eager}");
            prop_assert_eq!(same, optimizer);
        }
    }

    #[test]
    fn causal_flops_are_between_half_and_all_of_dense(model in models(), plan in plans()) {
        let flops = step(&model, plan.work, &plan.recomputation).unwrap();
        prop_assert!(flops.forward.causal <= flops.forward.dense);
        prop_assert!(2 * flops.forward.causal > flops.forward.dense);
        prop_assert_eq!(flops.backward.dense, 2 * flops.forward.dense);
        prop_assert_eq!(flops.backward.causal, 2 * flops.forward.causal);
    }

    #[test]
    fn each_zero_stage_keeps_at_most_as_much_as_the_previous(model in models(), plan in plans()) {
        let states = |stage, devices| {
            let sharding = Sharding::new(stage, devices).unwrap();
            model_states(&model, &plan.recipe, plan.optimizer, sharding).unwrap().total().unwrap()
        };
        for devices in 1..9 {
            let by_stage = ZeroStage::ALL.map(|stage| states(stage, devices));
            prop_assert!(by_stage.is_sorted_by(|a, b| a >= b));
            // Divided once: all shares sum to the whole, except for rounding up.
            let whole = states(ZeroStage::Zero, 1);
            prop_assert!(by_stage[3] * devices >= whole);
            prop_assert!((by_stage[3] - devices.min(1)) * devices <= whole + 32 * devices * devices);
        }
    }

    #[test]
    fn inverse_answers_are_exact(model in models(), plan in plans(), slack in 0u64..5_000_000) {
        let available = peak(&model, &plan) + slack;
        let batch = largest_batch(&model, &plan, available).unwrap();
        let at = |batch| TrainingPlan { work: Workload { batch, ..plan.work }, ..plan };
        prop_assert!(batch.largest >= plan.work.batch && peak(&model, &at(batch.largest)) == batch.peak);
        prop_assert!(batch.peak <= available && peak(&model, &at(batch.largest + 1)) > available);

        let sequence = longest_sequence(&model, &plan, available).unwrap();
        let at = |sequence| TrainingPlan { work: Workload { sequence, ..plan.work }, ..plan };
        prop_assert!(sequence.peak <= available && sequence.largest >= plan.work.sequence);
        match sequence.limit {
            Limit::Positions => prop_assert_eq!(sequence.largest, model.context),
            Limit::Memory => prop_assert!(peak(&model, &at(sequence.largest + 1)) > available),
        }

        let found = largest_model(&model, &plan, available).unwrap();
        prop_assert!(found.peak <= available && peak(&found.largest, &plan) == found.peak);
        prop_assert!(found.largest.parameters().unwrap() >= model.parameters().unwrap());
    }

    #[test]
    fn no_configuration_causes_a_panic(text in "\\PC{0,200}", value in any::<i64>()) {
        let path = std::path::Path::new("config.json");
        let _ = accounting::config::parse(path, &text);
        let config = format!(
            r#"{{"model_type": "qwen2", "vocab_size": {value}, "hidden_size": {value}, "num_hidden_layers": {value},
            "num_attention_heads": 1, "intermediate_size": {value}}}"#
        );
        if let Ok(model) = accounting::config::parse(path, &config) {
            let _ = estimate(&model, &TrainingPlan::default());
            let _ = step(&model, TrainingPlan::default().work, &Recomputation::default());
        }
    }

    #[test]
    fn quantities_never_panic(text in "\\PC{0,30}") {
        let _ = accounting::quantity::parse_bytes(&text);
        let _ = accounting::quantity::parse_count(&text);
    }

    #[test]
    fn rounding_to_a_dtype_is_idempotent(value in any::<f64>()) {
        for dtype in Dtype::ALL {
            let once = dtype.store(value);
            let twice = dtype.store(once);
            prop_assert!(once.to_bits() == twice.to_bits() || (once.is_nan() && twice.is_nan()));
        }
    }
}
