//! `lora step`: a training step on a real model's shape, of adapters or of all weights, measured and predicted.

mod captured;

use accounting::candidates::{Batch, Job, Placement};
use accounting::decoder_flops::Workload;
use accounting::lora::LowRank;
use accounting::memory::logits::Loss;
use accounting::offload::sizes::Choices;
use accounting::recompute::NormKernel;
use anyhow::Context;
use clap::{Args, ValueEnum};
use fused_ce::{Chunk, LinearCrossEntropy};
use kernels::nf4::Scales;
use kernels::physical;
use kernels::quantized::blocks;
use lora::LoraConfig;
use models::module::{Context as Pass, IGNORE_INDEX, Input, LanguageModel, trainable};
use report::measurements::IMPLEMENTATION_KEY;
use report::{Case, Metric};
use runtime::device::{reset_resident_peak, resident_memory};
use runtime::measure::{MeasurementPlan, Work, run as measure};
use runtime::profile::Counter;
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};
use training::activations::{Activations, LayerPlan};
use training::optimizer::{AdamW, DeviceOptimizer, Group, ZeroGrad};

use self::captured::Captured;
use crate::driver::Bench;
use crate::dtype;
use crate::gpu_busy;
use crate::shape::Shape;

/// The activations that a step keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Method {
    /// All that backward needs
    Keep,
    /// The inputs of blocks; a block runs again for its backward
    Recompute,
}

/// The parameters that a step updates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Trained {
    /// Adapters on q, k, v and o
    Adapters,
    /// All weights, which must be fp32 or bf16
    All,
}

impl Method {
    fn name(self) -> &'static str {
        match self {
            Self::Keep => "keep",
            Self::Recompute => "recompute",
        }
    }

    /// The plan of each layer.
    fn plan(self) -> LayerPlan {
        match self {
            Self::Keep => LayerPlan::KeepAll,
            Self::Recompute => LayerPlan::RecomputeAll,
        }
    }
}

impl Trained {
    fn name(self) -> &'static str {
        match self {
            Self::Adapters => "adapters",
            Self::All => "all weights",
        }
    }
}

#[derive(Args)]
pub(crate) struct Step {
    /// qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-7b, tiny, narrow (24 layers of width 32), a config.json, or a GGUF file, whose weights are
    /// read [default: by scale]
    #[arg(long)]
    shape: Option<Shape>,
    /// Rows of a batch
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(i64).range(1..))]
    batch: i64,
    /// Tokens of a row
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(i64).range(2..))]
    sequence: i64,
    /// Share of a row's tokens, at its end, that have a label
    #[arg(long, default_value_t = 0.5)]
    answers: f64,
    /// Dtypes of the base: fp32, bf16, fp16, nf4, gguf (the blocks of a GGUF file)
    #[arg(long, value_delimiter = ',', default_value = "fp32", value_parser = dtype::parse_base)]
    dtype: Vec<Kind>,
    /// Activations that a step keeps for backward
    #[arg(long, value_enum, value_delimiter = ',', default_value = "recompute,keep")]
    methods: Vec<Method>,
    /// Parameters that a step updates
    #[arg(long, value_enum, value_delimiter = ',', default_value = "adapters")]
    train: Vec<Trained>,
    /// Rank of the adapters
    #[arg(long, default_value_t = 8)]
    rank: i64,
    /// Measured steps
    #[arg(long, default_value_t = 2)]
    repeats: usize,
    /// Measure in turns with it the step that a CUDA graph repeats, as trainings do; on a CPU the recorder repeats it, whose time says nothing
    #[arg(long)]
    capture: bool,
}

pub(crate) fn run(bench: &mut Bench, arguments: &Step) -> anyhow::Result<()> {
    let weights = |kind: &Kind| matches!(kind, Kind::Float | Kind::BFloat16);
    anyhow::ensure!(
        !arguments.train.contains(&Trained::All) || arguments.dtype.iter().all(weights),
        "--train all takes --dtype fp32 and bf16 only"
    );
    let device = bench.device;
    runtime::memory::track_cpu()?;
    // Before the first product, when they are distinguishable from other memory.
    runtime::device::product_workspaces(device)?;
    let shape = arguments.shape.clone().unwrap_or_else(|| Shape::at_scale(bench.scale));
    let rows = arguments.batch * arguments.sequence;
    let config = shape.config()?;
    let limit_of = |kind: Kind| -> anyhow::Result<f64> {
        // Products of NF4 weights are those of their tiles: in fp32 on a CPU, in bf16 on a GPU.
        let kind = match device {
            Device::Cpu => Kind::Float,
            _ if Scales::of(kind).is_some() => Kind::BFloat16,
            _ => kind,
        };
        let rate = physical::gemm_rate(device, kind, rows, config.intermediate_size, config.hidden_size)?;
        rate.rate().context("the rate of a product")
    };
    let models =
        || arguments.train.iter().flat_map(|&train| arguments.dtype.iter().map(move |&kind| (train, kind)));
    bench.expect(models().count() * arguments.methods.len());
    bench.expect_turns(models().count() * arguments.methods.len());
    for (train, kind) in models() {
        bench.message(&format!("{} in {}: drawing weights", shape.name(), dtype::name(kind)));
        runtime::random::seed(bench.seed)?;
        let mut limit = None;
        let mut prepared = Prepared::new(&shape, arguments, train, bench.seed, (kind, device))?;
        for &method in &arguments.methods {
            bench.message(&format!("{} in {}, {}", shape.name(), dtype::name(kind), method.name()));
            let flops = prepared.warm_up(method)?;
            // Both exist while they are measured in turns.
            let mut captured = None;
            if arguments.capture {
                let before = runtime::memory::live_bytes(device)?;
                let other = Prepared::new(&shape, arguments, train, bench.seed, (kind, device))?;
                captured = Some(Captured::new(other, method, before)?);
            }
            let held = captured.as_ref().map_or(0, Captured::live);
            // The bytes of a file's blocks are not those of the shape.
            let predicted = match kind {
                blocks::KIND => None,
                _ => {
                    Some(predict(&shape, (method, train), arguments, prepared.labelled, (kind, device))?
                        as f64)
                }
            };
            let implementations =
                if arguments.capture { captured::implementations(device) } else { [None, None] };
            let [captured_case, case] = implementations
                .map(|implementation| case(&shape, arguments, (train, kind, method), implementation));
            bench.rounds(|bench| {
                // Measured in this program's turn, when no other computes.
                let limit = match limit {
                    Some(limit) => limit,
                    None => *limit.insert(limit_of(kind)?),
                };
                if let Some(captured) = &mut captured {
                    bench.put(&captured_case, captured.measure(arguments, limit, flops)?)?;
                }
                let mut figures = prepared.measure(arguments, (limit, flops), held)?;
                let peak = figures.iter().find(|figure| figure.name == "peak_bytes");
                let peak = peak.and_then(|peak| peak.value);
                figures.extend(predicted.map(|bytes| Metric::exact("predicted_peak_bytes", "B", bytes)));
                figures.extend(predicted.zip(peak).map(|(bytes, peak)| {
                    Metric::exact("prediction_error", "ratio", (bytes / peak - 1.0).abs())
                }));
                bench.put(&case, figures)
            })?;
            bench.put(&case, vec![gpu_busy::measure(device, || prepared.step())?])?;
            if let Some(captured) = &mut captured {
                bench.put(&captured_case, vec![gpu_busy::measure(device, || captured.step().map(drop))?])?;
            }
            bench.step();
        }
    }
    Ok(())
}

/// The case of a step of the implementation, where records name one.
fn case(
    shape: &Shape,
    arguments: &Step,
    (train, kind, method): (Trained, Kind, Method),
    implementation: Option<&'static str>,
) -> Case {
    let case = match implementation {
        Some(name) => Case::new().with(IMPLEMENTATION_KEY, name),
        None => Case::new(),
    };
    let case = case
        .with("shape", shape.name())
        .with("method", method.name())
        .with("dtype", dtype::name(kind))
        .with("batch", arguments.batch)
        .with("sequence", arguments.sequence);
    if arguments.train.len() > 1 { case.with("trained", train.name()) } else { case }
}

/// Tokens whose logits exist at a time: 128 MiB of them in fp32.
fn chunk(shape: &Shape) -> anyhow::Result<i64> {
    Ok(((128 << 20) / (4 * shape.config()?.vocab_size)).max(1))
}

/// The predicted peak of such a step.
fn predict(
    shape: &Shape,
    (method, train): (Method, Trained),
    arguments: &Step,
    labelled: i64,
    (kind, device): (Kind, Device),
) -> anyhow::Result<u64> {
    let on_cpu = device == Device::Cpu;
    let size = |n: i64| u64::try_from(n).context("a size below 0");
    let choices = Choices {
        recipe: frugal::planning::recipe(kind),
        norm: NormKernel::Output,
        loss: Loss::LinearCrossEntropy { tokens: size(chunk(shape)?.min(labelled))?, whole: 0 },
        product_workspaces: runtime::device::product_workspaces(device)?,
        ..Choices::default()
    };
    let lora = match train {
        Trained::Adapters => Some(LowRank { rank: size(arguments.rank)?, on_cpu, ..LowRank::default() }),
        Trained::All => None,
    };
    let work = Workload { batch: size(arguments.batch)?, sequence: size(arguments.sequence)? };
    let batch = Batch::new(work, Some(size(labelled)?));
    let model = accounting::Decoder::from_config(&shape.config()?)?;
    let layers = size(shape.config()?.num_hidden_layers)?;
    let rates = frugal::planning::MachineRates::NOMINAL.transfers;
    let job = Job { on_cpu, ..Job::new(model, lora, choices, batch, rates) };
    let plan = vec![method.plan(); usize::try_from(layers)?];
    Ok(job.evaluate(Placement::Resident(plan), None)?.peak.total)
}

/// A model, the optimizer of what is trained, and a batch.
struct Prepared {
    model: Box<dyn LanguageModel>,
    optimizer: DeviceOptimizer,
    switches: Activations,
    layers: usize,
    tokens: Tensor,
    labels: Tensor,
    labelled: i64,
    device: Device,
}

impl Prepared {
    fn new(
        shape: &Shape,
        arguments: &Step,
        train: Trained,
        seed: u64,
        options: (Kind, Device),
    ) -> anyhow::Result<Self> {
        let mut model = Box::new(shape.model(options.0, options.1)?);
        let chunk = Some(Chunk::Tokens(chunk(shape)?));
        LinearCrossEntropy { chunk, ..LinearCrossEntropy::default() }.install(&mut *model)?;
        let layers = model.decoder_config().num_hidden_layers as usize;
        let vocabulary = model.vocabulary();
        if train == Trained::Adapters {
            let lora = LoraConfig {
                r: arguments.rank,
                lora_alpha: 16.0,
                target_modules: Some(["q_proj", "k_proj", "v_proj", "o_proj"].into()),
                ..LoraConfig::default()
            };
            LoraConfig { seed, ..lora.clone() }.install(&mut *model)?;
        }
        let switches = Activations::install(&mut *model, &vec![LayerPlan::KeepAll; layers])?;
        let parameters: Vec<(String, Tensor)> =
            trainable(&*model).into_iter().map(|(name, tensor)| (name, tensor.shallow_clone())).collect();
        let optimizer = DeviceOptimizer::new(AdamW::default(), vec![Group::new(parameters, 1e-4)])?;

        let size = [arguments.batch, arguments.sequence];
        let mut generator = Generator::new(seed)?;
        let drawn = generator.uniform(&size, (0.0, vocabulary as f64), (Kind::Double, Device::Cpu))?;
        let tokens = drawn.f_floor()?.f_to_kind(Kind::Int64)?.f_to_device(options.1)?;
        let answers =
            ((arguments.sequence as f64 * arguments.answers).round() as i64).clamp(1, arguments.sequence);
        let labels = tokens.f_detach_copy()?;
        let _ = labels.f_narrow(1, 0, arguments.sequence - answers)?.f_fill_(IGNORE_INDEX)?;
        let labelled = arguments.batch * answers;
        Ok(Self { model, optimizer, switches, layers, tokens, labels, labelled, device: options.1 })
    }

    fn forward(&self) -> anyhow::Result<Tensor> {
        let context = Pass { training: true, ..Pass::default() };
        let input = Input { tokens: &self.tokens, positions: None, context };
        Ok(self.model.loss(&input, &self.labels)?.sum.f_div_scalar(self.labelled as f64)?)
    }

    /// Runs the first steps of a method and returns the floating-point operations of one.
    fn warm_up(&mut self, method: Method) -> anyhow::Result<f64> {
        self.switches.change(&vec![method.plan(); self.layers])?;
        // The first step fills caches and the optimizer's state, and is counted.
        let counter = Counter::start()?;
        runtime::autograd::backward(&[&self.forward()?])?;
        let flops = counter.finish()?.total.flops.dense as f64;
        self.optimizer.step()?;
        self.optimizer.zero_grad(ZeroGrad::ToNone)?;
        if self.device.is_cuda() {
            // Kernels are compiled and chosen.
            self.step()?;
        }
        Ok(flops)
    }

    fn step(&mut self) -> anyhow::Result<()> {
        runtime::autograd::backward(&[&self.forward()?])?;
        self.optimizer.step()?;
        Ok(self.optimizer.zero_grad(ZeroGrad::ToNone)?)
    }

    /// Figures of one round, in which `held` bytes are another step's.
    fn measure(
        &mut self,
        arguments: &Step,
        (limit, flops): (f64, f64),
        held: u64,
    ) -> anyhow::Result<Vec<Metric>> {
        let tokens = (arguments.batch * arguments.sequence) as f64;
        reset_resident_peak()?;
        let plan = MeasurementPlan {
            warmup: 0,
            repeats: arguments.repeats,
            work: Some(Work::tokens(tokens)),
            ..MeasurementPlan::new(self.device)
        };
        let measured = measure(&plan, |timer| {
            let loss = self.forward().map_err(|error| runtime::Error::Other(error.into()))?;
            timer.end("forward")?;
            runtime::autograd::backward(&[&loss])?;
            timer.end("backward")?;
            self.optimizer.step()?;
            self.optimizer.zero_grad(ZeroGrad::ToNone)?;
            timer.end("optimizer")
        })?;
        let resident = resident_memory()?.peak;
        let seconds = &measured.time.samples;
        let rates: Vec<f64> = seconds.iter().map(|seconds| tokens / seconds).collect();
        let phase = |phase: &str| measured.phase(phase).map_or(&[][..], |samples| &samples.samples);
        Ok(vec![
            Metric::of_samples("step_seconds", "s", seconds),
            Metric::of_samples("forward_seconds", "s", phase("forward")),
            Metric::of_samples("backward_seconds", "s", phase("backward")),
            Metric::of_samples("tokens_per_second", "tokens/s", &rates),
            Metric::exact("limit_tokens_per_second", "tokens/s", limit * tokens / flops),
            Metric::exact("flops", "FLOP", flops),
            Metric::exact("peak_bytes", "B", measured.memory.peak.saturating_sub(held) as f64),
            Metric::exact("process_bytes", "B", resident as f64),
        ])
    }
}
