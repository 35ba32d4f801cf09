//! `training growth`: how time and memory of a step grow with what it works on.

use fused_ce::{Chunk, LinearCrossEntropy};
use lora::LoraConfig;
use models::module::{Context, Input, LanguageModel, trainable};
use models::{DecoderConfig, Llama};
use report::{Case, Metric};
use runtime::measure::{self, MeasurementPlan};
use runtime::memory::live_bytes;
use tch::{Kind, Tensor};
use training::optimizer::{AdamW, DeviceOptimizer, Group, ZeroGrad};

use crate::driver::Bench;

/// Bytes of logits that exist at a time: those of 64 tokens of the largest vocabulary.
const CHUNK: u64 = 32 << 20;

/// The sizes of a step.
#[derive(Clone, Copy)]
struct Sizes {
    rows: i64,
    length: i64,
    layers: i64,
    vocabulary: i64,
    adapters: i64,
}

impl Sizes {
    /// The sizes that do not grow. At scale smoke tokens and vocabulary are an eighth.
    fn base(part: i64) -> Self {
        Self { rows: 4, length: 128 / part, layers: 4, vocabulary: 8192 / part, adapters: 1 }
    }
}

/// Each size, how it is set, and its first value; each value is twice the one before.
type Axis = (&'static str, fn(&mut Sizes, i64), i64);

fn axes(part: i64) -> [Axis; 5] {
    [
        ("rows", |sizes, value| sizes.rows = value, 2),
        // A single row, so that the number of token pairs grows with the square of its length.
        ("tokens of one row", |sizes, value| (sizes.rows, sizes.length) = (1, value), 256 / part),
        ("layers", |sizes, value| sizes.layers = value, 2),
        ("vocabulary", |sizes, value| sizes.vocabulary = value, 8192 / part),
        ("active adapters", |sizes, value| sizes.adapters = value, 1),
    ]
}

pub(crate) fn run(bench: &mut Bench) -> anyhow::Result<()> {
    let device = bench.device;
    runtime::memory::track_cpu()?;
    let (doublings, repeats, part) = bench.sized([(2_u32, 1, 8), (4, 3, 1), (5, 7, 1), (5, 7, 1)]);
    let axes = axes(part);
    bench.expect(axes.len() * doublings as usize);
    for (axis, set, first) in axes {
        let (mut seconds, mut bytes) = (Vec::new(), Vec::new());
        for doubling in 0..doublings {
            let value = first << doubling;
            bench.message(&format!("{axis}: {value}"));
            let mut sizes = Sizes::base(part);
            set(&mut sizes, value);
            let plan = MeasurementPlan { warmup: 1, repeats, ..MeasurementPlan::new(device) };
            let measured = step(&sizes, &plan, bench.seed)?;
            seconds.push(measured.0.median());
            bytes.push(measured.1);
            let times = f64::from(1u32 << doubling);
            let metrics = vec![
                Metric::of_samples("step_seconds", "s", &measured.0.samples),
                Metric::exact("peak_above_bytes", "B", measured.1),
                Metric::exact("time_ratio", "ratio", measured.0.median() / seconds[0]),
                Metric::exact("memory_ratio", "ratio", measured.1 / bytes[0]),
            ];
            let case = Case::new().with("grows", axis).with("times", times).with("value", value);
            bench.put(&case, metrics)?;
            bench.step();
        }
        let metrics = vec![
            Metric::exact("time_exponent", "ratio", slope(&seconds)),
            Metric::exact("memory_exponent", "ratio", slope(&bytes)),
        ];
        bench.put(&Case::new().with("grows", axis), metrics)?;
    }
    Ok(())
}

/// The exponent of the power of the size that fits the values best, each of twice the size of the one before: the least squares of their
/// logarithms.
fn slope(values: &[f64]) -> f64 {
    let logarithms: Vec<f64> = values.iter().map(|value| value.log2()).collect();
    let middle = (values.len() as f64 - 1.0) / 2.0;
    let places = (0..values.len()).map(|place| place as f64 - middle);
    let squares: f64 = places.clone().map(|place| place * place).sum();
    places.zip(&logarithms).map(|(place, logarithm)| place * logarithm).sum::<f64>() / squares
}

/// Seconds of steps, and the bytes of their peak above what the model, the adapters and the optimizer hold.
fn step(sizes: &Sizes, plan: &MeasurementPlan, seed: u64) -> anyhow::Result<(measure::Samples, f64)> {
    let Sizes { rows, length, layers, vocabulary, adapters } = *sizes;
    runtime::random::seed(seed)?;
    let config = DecoderConfig {
        num_key_value_heads: 2,
        max_position_embeddings: length,
        ..DecoderConfig::qwen2(vocabulary, 256, 768, layers, 4)
    };
    let device = plan.device;
    let mut model = Llama::new(&config, (Kind::Float, device))?;
    let chunk = Some(Chunk::Budget(CHUNK));
    LinearCrossEntropy { chunk, ..LinearCrossEntropy::default() }.install(&mut model)?;
    let lora = LoraConfig {
        r: 8,
        target_modules: Some(["q_proj", "k_proj", "v_proj", "o_proj"].into()),
        seed,
        ..LoraConfig::default()
    };
    let mut all = lora.install(&mut model)?;
    for adapter in 1..adapters {
        all.add(&mut model, &format!("adapter{adapter}"), &lora)?;
    }
    let names = all.names();
    all.set_active(&names.iter().map(String::as_str).collect::<Vec<_>>())?;
    let parameters: Vec<(String, Tensor)> =
        trainable(&model).into_iter().map(|(name, tensor)| (name, tensor.shallow_clone())).collect();
    let mut optimizer = DeviceOptimizer::new(AdamW::default(), vec![Group::new(parameters, 1e-4)])?;
    let tokens = Tensor::f_randint(vocabulary, [rows, length], (Kind::Int64, device))?;
    let mut one = |timer: &mut measure::PhaseTimer| -> anyhow::Result<()> {
        let input = Input {
            tokens: &tokens,
            positions: None,
            context: Context { training: true, ..Context::default() },
        };
        let loss = model.loss(&input, &tokens)?.sum.f_div_scalar((rows * length) as f64)?;
        runtime::autograd::backward(&[&loss])?;
        optimizer.step()?;
        optimizer.zero_grad(ZeroGrad::ToNone)?;
        Ok(timer.end("step")?)
    };
    let mut before = 0;
    let measured = measure::run(plan, |timer| {
        // The optimizer's state exists from the first step on.
        let result = one(timer).map_err(|error| runtime::Error::Other(error.into()));
        before = live_bytes(device)?;
        result
    })?;
    Ok((measured.time, measured.memory.peak as f64 - before as f64))
}
