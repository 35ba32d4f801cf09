//! Properties of every model and plan.

use accounting::Decoder;
use accounting::candidates::{Allowed, Batch, Job};
use accounting::decoder_flops::{Recomputation, Workload, step};
use accounting::fit::{Limit, largest_batch, largest_model, longest_row, scaled, template_size};
use accounting::lora::LowRank;
use accounting::memory::logits::Loss;
use accounting::memory::optimizer::Optimizer;
use accounting::memory::recipe::Recipe;
use accounting::memory::zero::ZeroStage;
use accounting::model::{Family, Sizes, has_modelled_passes};
use accounting::offload::sizes::Choices;
use accounting::offload::{AvailableMemory, Rates};
use accounting::recompute::{AttentionKernel, Recompute, SwigluLevel};
use accounting::textbook::{self, OnHost, PARTS, memory, model_states};
use proptest::prelude::*;
use proptest::sample::select;

fn models() -> impl Strategy<Value = Decoder> {
    let sizes = (1u64..2000, 1u64..6, 1u64..5, 1u64..4, 1u64..40, 1u64..300);
    let families = vec![Family::Gpt2, Family::Qwen2, Family::Llama, Family::Mistral, Family::SmolLm3];
    (select(families), sizes, any::<[bool; 3]>()).prop_map(
        |(family, (vocabulary, layers, kv_heads, group, head_dim, feed_forward), flags)| {
            let grouped = family.is_swiglu();
            let heads = if grouped { kv_heads * group } else { kv_heads };
            let hidden = heads * head_dim;
            Decoder::new(Sizes {
                family,
                vocabulary,
                context: 512,
                embedding: hidden,
                hidden,
                layers,
                heads,
                kv_heads,
                head_dim,
                feed_forward,
                tied: flags[0],
                attention_bias: flags[1],
                mlp_bias: flags[2],
                experts: None,
                linear: None,
                windows: None,
                gemma4: None,
            })
            .unwrap()
        },
    )
}

fn steps() -> impl Strategy<Value = textbook::Step> {
    let work = (1u64..20, 1u64..400).prop_map(|(batch, sequence)| Workload { batch, sequence });
    let recomputation =
        (select(&AttentionKernel::ALL[..]), select(&Recompute::ALL[..]), select(&SwigluLevel::ALL[..]))
            .prop_map(|(attention, checkpoint, swiglu)| Recomputation { attention, checkpoint, swiglu });
    let loss = (select(&Loss::NAMES[..]), 1u64..1000)
        .prop_map(|(name, tokens)| Loss::from_name(name, tokens).unwrap());
    let states =
        (select(&Recipe::ALL[..]), select(&Optimizer::ALL[..]), select(&ZeroStage::ALL[..]), 1u64..9);
    (work, recomputation, loss, states, any::<[bool; 6]>()).prop_map(
        |(work, recomputation, loss, (recipe, optimizer, stage, devices), flags)| textbook::Step {
            work,
            recipe,
            optimizer,
            fused_optimizer: flags[0],
            recomputation,
            loss,
            stage,
            devices,
            accumulate: flags[1],
            host: OnHost {
                parameters: flags[2],
                gradients: flags[3],
                optimizer: flags[4],
                block_inputs: flags[5] && recomputation.checkpoint == Recompute::Full,
            },
        },
    )
}

fn peak(model: &Decoder, step: &textbook::Step) -> u64 {
    memory(model, step).unwrap().peak().total
}

/// Trainings of adapters or of all weights by this project's own functions.
fn jobs() -> impl Strategy<Value = Job> {
    let is_predicted = |model: &Decoder| has_modelled_passes(model.family);
    let models = models().prop_filter("its passes are not modelled", is_predicted);
    (models, 1u64..6, 1u64..200, any::<[bool; 3]>()).prop_map(|(model, batch, sequence, flags)| {
        let batch = Batch::new(Workload { batch, sequence }, None);
        let rates = Rates { load: 25e9, store: 25e9, host_optimizer: 2e9, device_optimizer: 35e9 };
        let lora = flags[0].then(LowRank::default);
        let choices = Choices {
            recipe: if flags[1] { Recipe::FP32 } else { Recipe::BF16 },
            loss: Loss::LinearCrossEntropy { tokens: 64, whole: 0 },
            ..Choices::default()
        };
        Job { on_cpu: flags[2], ..Job::new(model, lora, choices, batch, rates) }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10, failure_persistence: None, ..ProptestConfig::default() })]

    /// A step at the answer fits; one at the next number does not.
    #[test]
    fn inverse_answers_are_exact(job in jobs(), slack in 0u64..500_000) {
        let allowed = Allowed { splits: false, ..Allowed::default() };
        let within = |device| AvailableMemory { device, host: None };
        let least = |job: &Job| {
            let found = job.search(&allowed, within(0)).unwrap();
            found.least().unwrap().device_bytes()
        };
        let Workload { batch, sequence } = job.mean.work;
        let sized = |batch, sequence| {
            let batch = Batch::new(Workload { batch, sequence }, None);
            Job { largest: vec![batch], mean: batch, ..job.clone() }
        };
        let budget = within(least(&job) + slack);

        let rows = largest_batch(&job, &allowed, budget).unwrap();
        prop_assert!(rows.largest >= batch && rows.candidate.device_bytes() <= budget.device);
        prop_assert!(least(&sized(rows.largest + 1, sequence)) > budget.device);

        let row = longest_row(&job, &allowed, budget).unwrap();
        prop_assert!(row.largest >= sequence && row.candidate.device_bytes() <= budget.device);
        match row.limit {
            Limit::Memory => prop_assert!(least(&sized(batch, row.largest + 1)) > budget.device),
            _ => prop_assert_eq!(row.largest, job.model.context),
        }

        // With layers in host memory, it has hundreds of them.
        let resident = Allowed { offloaded: None, ..allowed.clone() };
        let smallest = job.search(&resident, budget).unwrap().least().unwrap().device_bytes();
        let budget = within(budget.device.max(smallest));
        let model = largest_model(&job, &resident, budget).unwrap();
        prop_assert!(model.candidate.device_bytes() <= budget.device);
        prop_assert!(model.largest.parameters().unwrap() >= job.model.parameters().unwrap());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn parts_sum_to_the_total(model in models(), step in steps()) {
        let memory = memory(&model, &step).unwrap();
        for moment in &memory.moments {
            prop_assert_eq!(moment.parts.iter().map(|part| part.bytes).sum::<u64>(), moment.total);
            prop_assert!(moment.total <= memory.peak().total);
            prop_assert_eq!(moment.bytes("parameters"), memory.moments[0].bytes("parameters"));
        }
        let listed: u64 = model.parameter_tensors().unwrap().iter().map(|t| t.elements().unwrap()).sum();
        prop_assert_eq!(listed, model.parameters().unwrap());
    }

    #[test]
    fn more_work_never_reduces_bytes(model in models(), one in steps()) {
        let before = peak(&model, &one);
        for more in [
            Workload { batch: one.work.batch + 1, ..one.work },
            Workload { sequence: one.work.sequence + 1, ..one.work },
        ] {
            let after = peak(&model, &textbook::Step { work: more, ..one });
            prop_assert!(after >= before);
            let flops = |work| step(&model, work, &one.recomputation).unwrap().hardware().unwrap();
            prop_assert!(flops(more).dense > flops(one.work).dense);
            prop_assert!(flops(more).causal > flops(one.work).causal);
        }
        let deeper = Decoder::new(Sizes { layers: model.layers + 1, ..*model }).unwrap();
        prop_assert!(peak(&deeper, &one) >= before);
        let larger = scaled(&model, template_size(&model) + 1).unwrap();
        prop_assert!(peak(&larger, &one) >= before);
    }

    #[test]
    fn recomputation_reduces_bytes_and_increases_flops(model in models(), one in steps()) {
        let with = |checkpoint, swiglu| {
            let recomputation = Recomputation { checkpoint, swiglu, ..one.recomputation };
            let host = OnHost { block_inputs: false, ..one.host };
            let kept = memory(&model, &textbook::Step { recomputation, host, ..one }).unwrap();
            let flops = step(&model, one.work, &recomputation).unwrap();
            (kept.moments[0].bytes("activations"), flops.recomputed.dense)
        };
        let mut choices: Vec<_> = SwigluLevel::ALL.map(|level| with(Recompute::None, level)).into();
        prop_assert!(choices.is_sorted_by(|a, b| a.0 >= b.0 && a.1 <= b.1));
        choices = Recompute::ALL.map(|choice| with(choice, one.recomputation.swiglu)).into();
        prop_assert!(choices.is_sorted_by(|a, b| a.0 >= b.0));
        prop_assert!(choices[2].1 >= choices[0].1);
    }

    /// Offloaded tensors leave the device at every moment, except for buffers, and are all on the host.
    #[test]
    fn offloaded_bytes_move_from_device_to_host(model in models(), one in steps()) {
        let on_device = memory(&model, &textbook::Step { host: OnHost::default(), ..one }).unwrap();
        let on_host = memory(&model, &one).unwrap();
        prop_assert_eq!(on_device.host_bytes, 0);
        let all = model_states(&model, &one).unwrap();
        let mut expected = 0;
        for (is_on_host, bytes) in [
            (one.host.parameters, all.parameters),
            (one.host.gradients, all.gradients),
            (one.host.optimizer, all.master + all.optimizer),
        ] {
            expected += if is_on_host { bytes } else { 0 };
        }
        prop_assert!(on_host.host_bytes >= expected);
        prop_assert!(one.host.block_inputs || on_host.host_bytes == expected);
        for part in PARTS {
            let (with, without) = (on_host.largest(part), on_device.largest(part));
            let passing = (part == "temporaries" && one.host != OnHost::default())
                || (part == "activations" && model.layers == 1);
            prop_assert!(with <= without || passing, "{part}: {with} against {without}");
            prop_assert!(on_host.peak().bytes(part) <= with);
        }
    }

    /// A loss with chunks of one token has the logits of one token, plus the matrix and the hidden states.
    #[test]
    fn chunked_logits_never_exceed_all_logits(model in models(), one in steps()) {
        let at_loss = |loss| {
            let memory = memory(&model, &textbook::Step { loss, ..one }).unwrap();
            (memory.moments[0].bytes("logits and loss"), memory.largest("optimizer state"))
        };
        let matrix = model.vocabulary * model.hidden;
        let (eager, optimizer) = at_loss(Loss::Eager);
        for name in &Loss::NAMES[1..] {
            let (bytes, same) = at_loss(Loss::from_name(name, 1).unwrap());
            let tokens = one.work.tokens().unwrap();
            let beside = 4 * (tokens * model.hidden + matrix);
            prop_assert!(bytes <= eager.div_ceil(tokens) + beside, "{name}: {bytes} of {eager}");
            prop_assert_eq!(same, optimizer);
        }
    }

    #[test]
    fn causal_flops_are_between_half_and_all_of_dense(model in models(), one in steps()) {
        let flops = step(&model, one.work, &one.recomputation).unwrap();
        prop_assert!(flops.forward.causal <= flops.forward.dense);
        prop_assert!(2 * flops.forward.causal > flops.forward.dense);
        prop_assert_eq!(flops.backward.dense, 2 * flops.forward.dense);
        prop_assert_eq!(flops.backward.causal, 2 * flops.forward.causal);
    }

    #[test]
    fn each_zero_stage_keeps_at_most_as_much_as_the_previous(model in models(), one in steps()) {
        let states = |stage, devices| {
            model_states(&model, &textbook::Step { stage, devices, ..one }).unwrap().total().unwrap()
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
    fn no_configuration_causes_a_panic(text in "\\PC{0,200}", value in any::<i64>()) {
        let path = std::path::Path::new("config.json");
        let _ = Decoder::parse(path, &text);
        let config = format!(
            r#"{{"model_type": "qwen2", "vocab_size": {value}, "hidden_size": {value}, "num_hidden_layers": {value},
            "num_attention_heads": 1, "intermediate_size": {value}}}"#
        );
        if let Ok(model) = Decoder::parse(path, &config) {
            let _ = memory(&model, &textbook::Step::default());
            let _ = step(&model, textbook::Step::default().work, &Recomputation::default());
        }
    }

    #[test]
    fn quantities_never_panic(text in "\\PC{0,30}") {
        let _ = accounting::quantity::parse_bytes(&text);
        let _ = accounting::quantity::parse_count(&text);
    }
}
