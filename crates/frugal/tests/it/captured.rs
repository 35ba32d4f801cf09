//! Each technique in steps that a recorder repeats in the place of a CUDA graph: the bits are those of the loop's own steps, or the step
//! is refused with the reason.

use std::fmt::Write;
use std::sync::{Arc, Barrier, Mutex};

use expect_test::expect;
use frugal::config::Dtype;
use frugal::models::module;
use frugal::planning::capture_refusal;
use frugal::runtime::device::graph::OperatorsOnly;
use frugal::training::masked_rows::{Layout, MaskedBatches};
use frugal::training::observer::{Observer, StepRecord};
use frugal::{Config, Recipe};
use tch::{Device, Tensor};

use crate::pairs::{base, prepare, rows};
use crate::techniques::{Family, TECHNIQUES};

const STEPS: u64 = 8;

#[derive(Clone, Default)]
struct Figures(Arc<Mutex<Vec<[u64; 2]>>>);

impl Observer for Figures {
    fn on_step(&mut self, record: &StepRecord) -> frugal::training::Result<()> {
        let norm = record.gradient_norm.unwrap_or(0.0);
        self.0.lock().unwrap().push([record.loss.to_bits(), norm.to_bits()]);
        Ok(())
    }
}

struct Outcome {
    figures: Vec<[u64; 2]>,
    weights: Vec<Tensor>,
    replays: u64,
}

fn run(family: Family, config: &Config, captured: bool) -> Result<Outcome, String> {
    trained(family, config, captured, || {})
}

/// Calls `ready` between the preparation and the first step.
fn trained(family: Family, config: &Config, captured: bool, ready: impl FnOnce()) -> Result<Outcome, String> {
    let _operators = OperatorsOnly::enter();
    let text = |error: &dyn std::error::Error| error.to_string();
    frugal::runtime::random::seed(1).unwrap();
    let recipe = Recipe::new(config).map_err(|error| text(&error))?;
    let prepared = prepare(&recipe, family).map_err(|error| text(&error))?;
    let layout = Layout {
        batch: config.training.batch,
        // Of few shapes, which are captured.
        arrangement: config.data.packing.into(),
        shuffle: Some(1),
        ..Layout::default()
    };
    // With weights of examples, which are an input of the graph.
    let mut data = MaskedBatches::new(rows(true), layout, Device::Cpu).map_err(|error| text(&error))?;
    let (mut trainer, _handles) = prepared.trainer(STEPS).map_err(|error| text(&error))?;
    let figures = Figures::default();
    trainer.observers.push(Box::new(figures.clone()));
    if captured {
        trainer.record_steps();
    }
    ready();
    trainer.run(&mut data, None).map_err(|error| text(&error))?;
    let weights = module::tensors(trainer.model.as_ref());
    let weights = weights.iter().map(|named| named.tensor.detach().nan_to_num(1e9, None, None)).collect();
    let figures = figures.0.lock().unwrap().clone();
    Ok(Outcome { figures, weights, replays: trainer.replays() })
}

/// Returns a line about a training with and without a recorder.
fn compared(family: Family, config: &Config) -> String {
    // What is said before there is a model is what the trainer says.
    let expected = capture_refusal(config, false, Device::Cuda(0));
    let recorded = match run(family, config, true) {
        Ok(recorded) => recorded,
        Err(error) => {
            if let Some(reason) = error.strip_prefix("captured steps: ") {
                assert_eq!(expected.as_deref(), Some(reason));
            }
            return format!("refused: {error}");
        }
    };
    assert_eq!(expected, None);
    let own = run(family, config, false).unwrap();
    let same = own.figures == recorded.figures && own.weights == recorded.weights;
    format!(
        "{} of {STEPS} steps repeated, {}",
        recorded.replays,
        if same { "the same bits" } else { "OTHER BITS" }
    )
}

#[test]
fn every_technique_has_its_bits_in_repeated_steps_or_is_refused() {
    let mut lines = String::new();
    let mut check = |name: &str, set: &dyn Fn(&mut Config)| {
        let mut config = base();
        set(&mut config);
        writeln!(lines, "{name}: {}", compared(Family::Llama, &config)).unwrap();
    };
    check("none", &|_| {});
    for technique in &TECHNIQUES {
        check(technique.name, &|config| (technique.set)(config, Family::Llama));
    }
    let lora = TECHNIQUES.iter().find(|technique| technique.name == "LoRA").unwrap();
    let named = |name: &str| TECHNIQUES.iter().find(|technique| technique.name == name).unwrap();
    let with = |config: &mut Config, dropout: f64, others: &[&str]| {
        (lora.set)(config, Family::Llama);
        if let Some(adapter) = &mut config.adapter {
            adapter.lora_dropout = dropout;
        }
        others.iter().for_each(|other| (named(other).set)(config, Family::Llama));
    };
    check("LoRA with dropout", &|config| with(config, 0.2, &[]));
    check("LoRA with dropout, recompute layers", &|config| with(config, 0.2, &["recompute layers"]));
    check("LoRA with dropout, fused loss, bf16, packing", &|config| {
        with(config, 0.2, &["fused loss", "bf16", "packing"]);
    });
    check("LoRA over NF4 with dropout", &|config| {
        with(config, 0.2, &["fused loss"]);
        config.model.dtype = Some(Dtype::Nf4);
    });
    check("LoRA over blocks with dropout", &|config| {
        with(config, 0.2, &["fused loss"]);
        config.model.dtype = Some(Dtype::Gguf);
    });
    expect![[r#"
        none: 5 of 8 steps repeated, the same bits
        LoRA: 5 of 8 steps repeated, the same bits
        DoRA: 5 of 8 steps repeated, the same bits
        LoRA and rows of tokens: 5 of 8 steps repeated, the same bits
        LoRA on the embedding: 5 of 8 steps repeated, the same bits
        fused loss: 5 of 8 steps repeated, the same bits
        fused loss, gradients in backward: 5 of 8 steps repeated, the same bits
        recompute layers: 5 of 8 steps repeated, the same bits
        recompute elementwise: 5 of 8 steps repeated, the same bits
        recompute MLPs: 5 of 8 steps repeated, the same bits
        recompute attention: 5 of 8 steps repeated, the same bits
        offload inputs: refused: captured steps: activations are offloaded by a worker of the host
        recompute every second layer: 5 of 8 steps repeated, the same bits
        keep activations: 5 of 8 steps repeated, the same bits
        activation plan: 5 of 8 steps repeated, the same bits
        MLP level input-only: 5 of 8 steps repeated, the same bits
        MLP level save-one: 5 of 8 steps repeated, the same bits
        MLP level input-only-tiled: 5 of 8 steps repeated, the same bits
        offload, overlap: refused: captured steps: layers are offloaded, so their addresses change
        offload, function: refused: captured steps: layers are offloaded, so their addresses change
        offload, checkpointing: refused: captured steps: layers are offloaded, so their addresses change
        offload, a resident layer: refused: captured steps: layers are offloaded, so their addresses change
        offload to files: refused: `offload.tier = "file"` with full fine-tuning and `optimizer.place = "device"` cannot be combined: the optimizer's state of trained layers in files is in files, too; use `optimizer.place = "host"`, train an adapter, or use `offload.tier = "host"`
        layers and optimizer in files: refused: captured steps: layers are offloaded, so their addresses change
        bf16: 5 of 8 steps repeated, the same bits
        fp16: 5 of 8 steps repeated, the same bits
        fp8: 5 of 8 steps repeated, the same bits
        optimizer on the host: refused: `optimizer.place = "host"` and weights on the device cannot be combined: the update on the host is that of offloaded layers; add `offload`, or use `optimizer.place = "device"`
        accumulation: 1 of 8 steps repeated, the same bits
        fewer rows at a time: 5 of 8 steps repeated, the same bits
        no clipping: 5 of 8 steps repeated, the same bits
        a frozen layer: 5 of 8 steps repeated, the same bits
        noise of embeddings: refused: captured steps: the noise of embeddings (NEFTune) depends on lengths that the host knows
        weights of examples: 5 of 8 steps repeated, the same bits
        packing: 5 of 8 steps repeated, the same bits
        padded rows: 5 of 8 steps repeated, the same bits
        LoRA with dropout: 5 of 8 steps repeated, the same bits
        LoRA with dropout, recompute layers: 5 of 8 steps repeated, the same bits
        LoRA with dropout, fused loss, bf16, packing: 5 of 8 steps repeated, the same bits
        LoRA over NF4 with dropout: 5 of 8 steps repeated, the same bits
        LoRA over blocks with dropout: refused: captured step: a kernel computes outside libtorch's dispatcher (the kernel that began last: `runtime::stochastic_rounding`), which a recording cannot repeat
    "#]].assert_eq(&lines);
}

/// Layers that share keys take several tensors and return several, also where they run again in backward.
#[test]
fn steps_of_a_gemma_4_have_their_bits_in_repeated_steps_or_are_refused() {
    let mut lines = String::new();
    let mut check = |name: &str, dropout: f64, set: &dyn Fn(&mut Config)| {
        let mut config = base();
        set(&mut config);
        if let Some(adapter) = &mut config.adapter {
            adapter.lora_dropout = dropout;
        }
        writeln!(lines, "{name}: {}", compared(Family::Gemma4, &config)).unwrap();
    };
    let set = |config: &mut Config, names: &[&str]| {
        for technique in TECHNIQUES.iter().filter(|technique| names.contains(&technique.name)) {
            (technique.set)(config, Family::Gemma4);
        }
    };
    check("none", 0.0, &|_| {});
    for technique in &TECHNIQUES {
        check(technique.name, 0.0, &|config| (technique.set)(config, Family::Gemma4));
    }
    check("LoRA with dropout", 0.2, &|config| set(config, &["LoRA"]));
    check("LoRA with dropout, recompute layers", 0.2, &|config| set(config, &["LoRA", "recompute layers"]));
    check("LoRA with dropout, fused loss, bf16, packing", 0.2, &|config| {
        set(config, &["LoRA", "fused loss", "bf16", "packing"]);
    });
    expect![[r#"
        none: 5 of 8 steps repeated, the same bits
        LoRA: 5 of 8 steps repeated, the same bits
        DoRA: 5 of 8 steps repeated, the same bits
        LoRA and rows of tokens: 5 of 8 steps repeated, the same bits
        LoRA on the embedding: 5 of 8 steps repeated, the same bits
        fused loss: 5 of 8 steps repeated, the same bits
        fused loss, gradients in backward: 5 of 8 steps repeated, the same bits
        recompute layers: 5 of 8 steps repeated, the same bits
        recompute elementwise: 5 of 8 steps repeated, the same bits
        recompute MLPs: 5 of 8 steps repeated, the same bits
        recompute attention: 5 of 8 steps repeated, the same bits
        offload inputs: refused: captured steps: activations are offloaded by a worker of the host
        recompute every second layer: 5 of 8 steps repeated, the same bits
        keep activations: 5 of 8 steps repeated, the same bits
        activation plan: 5 of 8 steps repeated, the same bits
        MLP level input-only: refused: the MLP `layers.0.mlp` has a GELU as its gate, and only SwiGLU's backward is written by hand; take an activation plan (LayerPlan::RecomputeMlp) instead
        MLP level save-one: refused: the MLP `layers.0.mlp` has a GELU as its gate, and only SwiGLU's backward is written by hand; take an activation plan (LayerPlan::RecomputeMlp) instead
        MLP level input-only-tiled: refused: the MLP `layers.0.mlp` has a GELU as its gate, and only SwiGLU's backward is written by hand; take an activation plan (LayerPlan::RecomputeMlp) instead
        offload, overlap: refused: captured steps: layers are offloaded, so their addresses change
        offload, function: refused: captured steps: layers are offloaded, so their addresses change
        offload, checkpointing: refused: captured steps: layers are offloaded, so their addresses change
        offload, a resident layer: refused: captured steps: layers are offloaded, so their addresses change
        offload to files: refused: `offload.tier = "file"` with full fine-tuning and `optimizer.place = "device"` cannot be combined: the optimizer's state of trained layers in files is in files, too; use `optimizer.place = "host"`, train an adapter, or use `offload.tier = "host"`
        layers and optimizer in files: refused: captured steps: layers are offloaded, so their addresses change
        bf16: 5 of 8 steps repeated, the same bits
        fp16: 5 of 8 steps repeated, the same bits
        fp8: 5 of 8 steps repeated, the same bits
        optimizer on the host: refused: `optimizer.place = "host"` and weights on the device cannot be combined: the update on the host is that of offloaded layers; add `offload`, or use `optimizer.place = "device"`
        accumulation: 1 of 8 steps repeated, the same bits
        fewer rows at a time: 5 of 8 steps repeated, the same bits
        no clipping: 5 of 8 steps repeated, the same bits
        a frozen layer: 5 of 8 steps repeated, the same bits
        noise of embeddings: refused: captured steps: the noise of embeddings (NEFTune) depends on lengths that the host knows
        weights of examples: 5 of 8 steps repeated, the same bits
        packing: 5 of 8 steps repeated, the same bits
        padded rows: 5 of 8 steps repeated, the same bits
        LoRA with dropout: 5 of 8 steps repeated, the same bits
        LoRA with dropout, recompute layers: 5 of 8 steps repeated, the same bits
        LoRA with dropout, fused loss, bf16, packing: 5 of 8 steps repeated, the same bits
    "#]].assert_eq(&lines);
}

/// Dropout draws the seeds of its own training's step, on whichever thread that runs.
#[test]
fn two_trainings_on_two_threads_have_the_bits_of_each_alone() {
    let mut config = base();
    let lora = TECHNIQUES.iter().find(|technique| technique.name == "LoRA").unwrap();
    (lora.set)(&mut config, Family::Llama);
    config.adapter.as_mut().unwrap().lora_dropout = 0.3;
    let config = &config;
    // Steps draw nothing from the generator that all threads share, whose state is a part of their seeds.
    let seeded = || frugal::runtime::random::seed(9).unwrap();
    let alone = [true, false].map(|captured| trained(Family::Llama, config, captured, seeded).unwrap());
    let (preparing, both) = (&Mutex::new(()), &Barrier::new(2));
    let together = std::thread::scope(|scope| {
        let threads = [true, false].map(|captured| {
            scope.spawn(move || {
                let turn = preparing.lock().unwrap();
                let outcome = trained(Family::Llama, config, captured, || {
                    drop(turn);
                    both.wait();
                    if captured {
                        seeded();
                    }
                    both.wait();
                });
                outcome.unwrap()
            })
        });
        threads.map(|thread| thread.join().unwrap())
    });
    for (alone, together) in alone.iter().zip(&together) {
        assert_eq!(alone.figures, together.figures);
        assert_eq!(alone.weights, together.weights);
        assert_eq!(alone.replays, together.replays);
    }
    assert_eq!(alone[0].figures, alone[1].figures);
}
