//! `offload long-context`: forward and backward over one long sequence, with weights, gradients and the layers' inputs on the host.
//!
//! The device has a ring of two layers, the inputs of two, what one layer needs while it runs, and the embedding, the head and their
//! gradients. So for long sequences one layer's activations and the loss decide the peak. Nothing is updated, as in the assignment's
//! profile: fp32 master weights and moments of 8 billion parameters would take 96 GB of the host.

mod curve;

use std::sync::Arc;
use std::time::Instant;

use accounting::decoder_flops::Workload;
use accounting::memory::logits::Loss;
use accounting::offload::sizes::{self, Choices};
use accounting::offload::{Method as PaperMethod, Moment, OptimizerPlace, Setup, Start, moments, simulate};
use clap::Args;
use frugal::planning::{MachineRates, choices, widens};
use fused_ce::{Chunk, LinearCrossEntropy};
use models::init::Init;
use models::module::{Context, Input, LanguageModel, tensors, trainable};
use models::{DecoderConfig, Llama};
use offload::{Offload, OffloadConfig};
use report::{Case, Metric};
use runtime::autograd::{backward, set_grad};
use runtime::device;
use runtime::memory::Region;
use swiglu_ckpt::CheckpointLevel;
use tch::{Device, Kind, Tensor};

use super::measured_model::random_tokens;
use crate::driver::Bench;
use crate::shape::Shape;
use curve::Curve;

const KIND: Kind = Kind::BFloat16;
const RING: usize = 2;

#[derive(Args)]
pub(crate) struct LongContext {
    /// Tokens of the sequence, comma-separated [default: two lengths by scale]
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(i64).range(2..))]
    tokens: Vec<i64>,
    /// Shape of the model [default: by scale]
    #[arg(long, value_enum)]
    model: Option<ModelKind>,
    /// Implementations of the loss
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [LossKind::Plain, LossKind::Fused])]
    loss: Vec<LossKind>,
    /// The layers' MLPs: over all tokens at once, or over tiles of them (`swiglu-ckpt`)
    #[arg(long, value_enum, default_value_t = MlpKind::Whole)]
    mlp: MlpKind,
    /// Measured steps of each
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum ModelKind {
    /// Four layers of width 128
    Tiny,
    /// Four blocks of Qwen2.5-0.5B
    Blocks,
    /// Llama-3-8B, on a GPU
    #[value(name = "llama-3-8b")]
    Llama,
    /// As the Python peer: Llama-3-8B over 32,768 tokens on a GPU, else tiny
    AsPeer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum LossKind {
    /// All logits at once
    Plain,
    /// Logits of some tokens at a time
    Fused,
}

impl LossKind {
    fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Fused => "fused",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum MlpKind {
    Whole,
    Tiled,
}

impl MlpKind {
    fn name(self) -> &'static str {
        match self {
            Self::Whole => "whole",
            Self::Tiled => "tiled",
        }
    }
}

/// A model that is measured.
struct Measured {
    name: &'static str,
    config: DecoderConfig,
    /// Tokens of the sequences.
    lengths: Vec<i64>,
    /// Tokens whose logits the fused loss has at a time.
    chunk: i64,
    /// Bytes of a tile of the MLPs.
    tile: u64,
}

impl Measured {
    fn new(kind: Option<ModelKind>, bench: &Bench) -> anyhow::Result<Self> {
        use ModelKind::{AsPeer, Blocks, Llama, Tiny};
        let kind = kind.unwrap_or(bench.sized([Tiny, Blocks, Blocks, Llama]));
        let blocks = bench.sized([[256, 1024], [256, 1024], [1024, 4096], [1024, 4096]]);
        let (kind, lengths) = match (kind, bench.device.is_cuda()) {
            (AsPeer, true) => (Llama, vec![32_768]),
            (AsPeer, false) | (Tiny, _) => (Tiny, vec![64, 128]),
            (Blocks, _) => (Blocks, blocks.to_vec()),
            (Llama, _) => (Llama, vec![32_768, 131_072]),
        };
        let positions = lengths.iter().copied().max().unwrap_or(1);
        let (name, config, chunk, tile) = match kind {
            Tiny | AsPeer => ("tiny", Shape::Tiny.resized(4, 512, positions)?, 16, 1 << 14),
            Blocks => ("Qwen2.5-0.5B's blocks", Shape::Small.resized(4, 8192, positions)?, 128, 1 << 20),
            Llama => {
                let config = DecoderConfig {
                    num_key_value_heads: 8,
                    max_position_embeddings: positions,
                    ..DecoderConfig::llama(128_256, 4096, 14_336, 32, 32)
                };
                ("Llama-3-8B", config, 4096, 1 << 29)
            }
        };
        Ok(Self { name, config, lengths, chunk, tile })
    }
}

pub(crate) fn run(bench: &mut Bench, arguments: &LongContext) -> anyhow::Result<()> {
    let Measured { name, mut config, mut lengths, chunk, tile } = Measured::new(arguments.model, bench)?;
    if !arguments.tokens.is_empty() {
        lengths.clone_from(&arguments.tokens);
    }
    config.max_position_embeddings = lengths.iter().copied().fold(config.max_position_embeddings, i64::max);
    // The plain loss first: the fused one replaces its head.
    let mut losses = arguments.loss.clone();
    losses.sort_by_key(|loss| *loss as u8);
    losses.dedup();
    let cases: Vec<(LossKind, i64)> =
        losses.iter().flat_map(|loss| lengths.iter().map(|tokens| (*loss, *tokens))).collect();
    let mlp = arguments.mlp;
    let case = |(loss, tokens): (LossKind, i64)| {
        let case = Case::new().with("shows", "step").with("model", name).with("tokens", tokens);
        case.with("loss", loss.name()).with("mlp", mlp.name())
    };
    let tile = (mlp == MlpKind::Tiled).then_some(tile);
    let predicted = |one, device| Predicted::new(&config, (one, chunk), tile, device);
    if name == "Llama-3-8B" && !bench.device.is_cuda() {
        for one in cases {
            bench.put(&case(one), predicted(one, Device::Cuda(0))?.not_measured("no GPU"))?;
        }
        return Ok(());
    }
    runtime::memory::track_cpu()?;
    let mut subject = Subject::new(&config, bench.device, bench.seed)?;
    if let Some(bytes) = tile {
        CheckpointLevel::InputOnlyTiled { bytes }.install(&mut subject.model)?;
    }
    bench.each(
        cases,
        |(loss, tokens)| format!("{} loss, {tokens} tokens", loss.name()),
        |bench, one| {
            let (loss, tokens) = one;
            let predicted = predicted(one, bench.device)?;
            let free = device::memory_info(bench.device)?.free;
            if predicted.peak() > free {
                let why = format!("the peak is predicted as {} bytes, and {free} are free", predicted.peak());
                return bench.put(&case(one), predicted.not_measured(&why));
            }
            if loss == LossKind::Fused {
                let head =
                    LinearCrossEntropy { chunk: Some(Chunk::Tokens(chunk)), ..LinearCrossEntropy::default() };
                head.install(&mut subject.model)?;
            }
            let steps = subject.steps(tokens, arguments.repeats, bench.seed)?;
            bench.put(&case(one), predicted.metrics(&steps))?;
            let shown = case(one).with("shows", "curve");
            bench.put_all(subject.curve.figures(&shown))
        },
    )
}

/// The peaks of the phases of a step: of forward, of the loss (with its gradients where it is fused), and of backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Peaks([u64; 3]);

const PHASES: [&str; 3] = ["forward", "loss", "backward"];

/// A prediction of `accounting`, in bytes of the device.
struct Predicted(Peaks);

impl Predicted {
    fn new(
        config: &DecoderConfig,
        ((loss, tokens), chunk): ((LossKind, i64), i64),
        mlp_tile: Option<u64>,
        device: Device,
    ) -> anyhow::Result<Self> {
        let rates = MachineRates::NOMINAL;
        let model = accounting::Decoder::from_config(config)?;
        let work = Workload { batch: 1, sequence: tokens.unsigned_abs() };
        let chunk = chunk.min(tokens).unsigned_abs();
        let choices = Choices {
            widens: widens(KIND, device),
            inputs_on_host: true,
            flash_workspace: device.is_cuda(),
            mlp_tile,
            loss: match loss {
                LossKind::Plain => Loss::Eager,
                LossKind::Fused => Loss::LinearCrossEntropy { tokens: chunk, whole: 0 },
            },
            ..choices((KIND, device), &rates, chunk)
        };
        let mut costs = sizes::training(&model, work, &choices)?;
        // Gradients reach the host, and nothing is updated.
        costs.fixed.state_bytes = 0;
        costs.layers.iter_mut().for_each(|layer| layer.state_bytes = 0);
        let setup = Setup {
            method: PaperMethod::Overlap { ring: RING },
            resident: Vec::new(),
            optimizer: OptimizerPlace::Host,
        };
        let step = simulate(&costs, &rates.transfers, &setup, Start::Warm)?;
        let mut peaks = [0; 3];
        for footprint in moments(&costs, &setup, &step)? {
            let phase = match footprint.moment {
                Moment::Teacher | Moment::Forward(_) => 0,
                Moment::Head => 1,
                Moment::Recomputation(_) | Moment::Backward(_) | Moment::Embedding | Moment::Update => 2,
            };
            peaks[phase] = footprint.total.max(peaks[phase]);
        }
        Ok(Self(Peaks(peaks)))
    }

    fn peak(&self) -> u64 {
        let Self(Peaks(peaks)) = self;
        peaks.iter().copied().max().unwrap_or(0)
    }

    fn figures(&self) -> Vec<Metric> {
        let Self(Peaks(peaks)) = *self;
        let bytes = |name: &str, value: u64| Metric::exact(name, "B", value as f64);
        let mut metrics = vec![bytes("predicted_peak_bytes", self.peak())];
        let phases = PHASES.into_iter().zip(peaks);
        metrics.extend(phases.map(|(phase, peak)| bytes(&format!("predicted_{phase}_peak_bytes"), peak)));
        metrics
    }

    fn not_measured(&self, why: &str) -> Vec<Metric> {
        let mut metrics = self.figures();
        metrics.extend(
            [("step_seconds", "s"), ("peak_bytes", "B")]
                .map(|(name, unit)| Metric::not_measured(name, unit, why)),
        );
        metrics
    }

    fn metrics(&self, steps: &Steps) -> Vec<Metric> {
        let Steps { seconds, peaks, host_input_bytes, overlap } = steps;
        let total: Vec<f64> = seconds.iter().map(|phases| phases.iter().sum()).collect();
        let peak = peaks.0.into_iter().max().unwrap_or(0);
        let bytes = |name: &str, value: u64| Metric::exact(name, "B", value as f64);
        let mut metrics = self.figures();
        let error = (self.peak() as f64 / peak as f64 - 1.0).abs();
        metrics.extend([
            Metric::exact("prediction_error", "ratio", error),
            Metric::of_samples("step_seconds", "s", &total),
            bytes("peak_bytes", peak),
            bytes("host_input_bytes", *host_input_bytes),
            Metric::exact("overlap", "ratio", *overlap),
        ]);
        for (index, phase) in PHASES.into_iter().enumerate() {
            let samples: Vec<f64> = seconds.iter().map(|phases| phases[index]).collect();
            metrics.push(Metric::of_samples(&format!("{phase}_seconds"), "s", &samples));
            metrics.push(bytes(&format!("{phase}_peak_bytes"), peaks.0[index]));
        }
        metrics
    }
}

/// What the steps of one length and loss took.
struct Steps {
    /// By step, of each phase.
    seconds: Vec<[f64; 3]>,
    peaks: Peaks,
    host_input_bytes: u64,
    overlap: f64,
}

struct Subject {
    model: Llama,
    offload: Offload,
    curve: Arc<Curve>,
    device: Device,
    /// Live bytes before the model existed.
    before: u64,
}

impl Subject {
    fn new(config: &DecoderConfig, device: Device, seed: u64) -> anyhow::Result<Self> {
        let before = runtime::memory::live_bytes(device)?;
        let curve = Arc::new(Curve::new(device, before));
        let options = OffloadConfig {
            device,
            ring: RING,
            inputs_on_host: true,
            test_hook: Some(curve.clone()),
            ..OffloadConfig::default()
        };
        let (model, offload) = Offload::assemble(config, Init::Uninitialised, KIND, &options)?;
        runtime::random::seed(seed)?;
        fill(&model, config.initializer_range)?;
        Ok(Self { model, offload, curve, device, before })
    }

    /// Runs a step to warm up, and then some that are measured.
    fn steps(&self, tokens: i64, repeats: u32, seed: u64) -> anyhow::Result<Steps> {
        let tokens = random_tokens(self.model.vocabulary(), &[1, tokens], seed, self.device)?;
        let mut steps =
            Steps { seconds: Vec::new(), peaks: Peaks([0; 3]), host_input_bytes: 0, overlap: 0.0 };
        for number in 0..=repeats {
            self.offload.start_trace()?;
            let (seconds, peaks, host_input_bytes) = self.step(&tokens)?;
            let trace = self.offload.take_trace()?;
            trainable(&self.model).into_iter().try_for_each(|(_, tensor)| set_grad(tensor, None))?;
            if number > 0 {
                steps.seconds.push(seconds);
                steps.peaks = peaks;
                steps.host_input_bytes = host_input_bytes;
                steps.overlap = offload::overlap(&trace);
            }
        }
        Ok(steps)
    }

    /// Runs a step; returns the seconds and the peaks of its phases, and the bytes of inputs on the host at its loss.
    fn step(&self, tokens: &Tensor) -> anyhow::Result<([f64; 3], Peaks, u64)> {
        let device = self.device;
        let context = Context { training: true, ..Context::default() };
        let (mut seconds, mut peaks) = ([0.0; 3], [0; 3]);
        device::synchronize(device)?;
        self.curve.begin()?;
        let mut phase = |index: usize, work: &mut dyn FnMut() -> anyhow::Result<()>| -> anyhow::Result<()> {
            let (region, began) = (Region::start(device)?, Instant::now());
            work()?;
            device::synchronize(device)?;
            seconds[index] = began.elapsed().as_secs_f64();
            peaks[index] = region.finish()?.peak - self.before;
            self.curve.sample()?;
            Ok(())
        };
        let (mut hidden, mut loss) = (None, None);
        phase(0, &mut || {
            let input = Input { tokens, positions: None, context };
            hidden = Some(self.model.hidden(&input)?);
            Ok(())
        })?;
        let host_input_bytes = self.offload.input_bytes();
        phase(1, &mut || {
            // Only the graph has the hidden states from here on.
            let Some(hidden) = hidden.take() else { return Ok(()) };
            let sum = self.model.head().loss(&hidden, tokens, &context)?.sum;
            loss = Some(sum.f_div_scalar(tokens.numel() as f64)?);
            Ok(())
        })?;
        phase(2, &mut || {
            let Some(loss) = loss.take() else { return Ok(()) };
            Ok(backward(&[&loss])?)
        })?;
        Ok((seconds, Peaks(peaks), host_input_bytes))
    }
}

/// Fills a model's weights: normally distributed numbers, the same in every layer, so that they are drawn for one; ones in norms.
fn fill(model: &Llama, std: f64) -> anyhow::Result<()> {
    let _no_grad = tch::no_grad_guard();
    let named = tensors(model);
    let first_layer = |name: &str| {
        let (number, part) = name.strip_prefix("layers.")?.split_once('.')?;
        let first = format!("layers.0.{part}");
        (number != "0").then(|| named.iter().find(|other| other.name == first))?
    };
    for one in &named {
        let mut tensor = one.tensor.shallow_clone();
        if let Some(first) = first_layer(&one.name) {
            tensor.f_copy_(first.tensor)?;
        } else if tensor.dim() == 1 {
            let _ = tensor.f_fill_(1.0)?;
        } else {
            let _ = tensor.f_normal_(0.0, std)?;
        }
    }
    Ok(())
}
