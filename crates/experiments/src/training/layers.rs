//! `training layers`: forward and backward through decoder layers of a Llama, for a comparison with another program.

use models::module::{Input, LanguageModel};
use models::{DecoderConfig, Llama};
use report::{Case, Metric};
use runtime::autograd::{Keep, backward_with};
use runtime::device::synchronize;
use runtime::measure::{self, MeasurementPlan, black_box};
use runtime::memory::Region;
use swiglu_ckpt::CheckpointLevel;
use tch::{Device, Kind, Tensor};

use crate::driver::Bench;
use crate::dtype;
use crate::gpu_busy;

/// The vocabulary is small, since the layers are what is measured.
const VOCABULARY: i64 = 256;

#[derive(clap::Args)]
pub(crate) struct Layers {
    /// Tokens of the one row; default: 8192 on CUDA, 512 on a CPU
    #[arg(long)]
    tokens: Option<i64>,
    /// HIDDEN,INTERMEDIATE,HEADS,KV_HEADS; default: Llama-3-8B's on CUDA, Qwen2.5-0.5B's on a CPU
    #[arg(long, value_delimiter = ',')]
    shape: Option<Vec<i64>>,
    /// Layers
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(i64).range(1..))]
    layers: i64,
    /// Dtypes of the weights; default: bf16 on CUDA, fp32 on a CPU
    #[arg(long, value_delimiter = ',', value_parser = dtype::parse)]
    dtype: Option<Vec<Kind>>,
    /// Measured steps of a round
    #[arg(long, default_value_t = 10)]
    repeats: usize,
}

/// How the layers are computed.
#[derive(Clone, Copy, Debug)]
enum Variant {
    Plain,
    /// Recomputes the MLP's activations in backward.
    Recomputed,
}

pub(crate) fn run(bench: &mut Bench, arguments: &Layers) -> anyhow::Result<()> {
    let device = bench.device;
    runtime::memory::track_cpu()?;
    let variants = [("plain", Variant::Plain), ("MLP recomputed", Variant::Recomputed)];
    // The dtype that a decoder is trained in on the device.
    let usual = if device.is_cuda() { Kind::BFloat16 } else { Kind::Float };
    let kinds = arguments.dtype.clone().unwrap_or(vec![usual]);
    bench.expect_turns(kinds.len());
    let label = |kind: &Kind| dtype::name(*kind).to_owned();
    bench.each(kinds, label, |bench, kind| {
        // Both variants are measured in each round.
        let mut prepared = Vec::new();
        for (name, variant) in variants {
            prepared.push((name, Prepared::new(arguments, variant, device, kind)?));
        }
        bench.rounds(|bench| {
            prepared.iter().try_for_each(|(name, one)| {
                bench.put(&one.case.clone().with("variant", *name), one.measure(arguments.repeats)?)
            })
        })?;
        prepared.iter().try_for_each(|(name, one)| {
            let busy = gpu_busy::measure(device, || one.step())?;
            bench.put(&one.case.clone().with("variant", *name), vec![busy])
        })
    })
}

/// A model, a row of tokens, and the gradient that backward begins with.
struct Prepared {
    model: Llama,
    row: Tensor,
    upstream: Tensor,
    device: Device,
    case: Case,
}

impl Prepared {
    fn new(arguments: &Layers, variant: Variant, device: Device, kind: Kind) -> anyhow::Result<Self> {
        // The sizes: of the device, or of the flags.
        let (tokens, shape) = match device {
            Device::Cpu => (512, [896, 4864, 14, 2]),
            _ => (8192, [4096, 14_336, 32, 8]),
        };
        let tokens = arguments.tokens.unwrap_or(tokens);
        let shape = arguments.shape.as_deref().unwrap_or(&shape);
        let &[hidden, intermediate, heads, key_value_heads] = shape else {
            anyhow::bail!("--shape has {} sizes; expected HIDDEN,INTERMEDIATE,HEADS,KV_HEADS", shape.len());
        };
        let config = DecoderConfig {
            num_key_value_heads: key_value_heads,
            max_position_embeddings: tokens,
            ..DecoderConfig::llama(VOCABULARY, hidden, intermediate, arguments.layers, heads)
        };
        let mut model = Llama::new(&config, (kind, device))?;
        if let Variant::Recomputed = variant {
            CheckpointLevel::SaveGateUp.install(&mut model)?;
        }
        let row = Tensor::f_randint(VOCABULARY, [1, tokens], (Kind::Int64, device))?;
        let upstream = Tensor::f_randn([1, tokens, hidden], (kind, device))?;
        let case = Case::new()
            .with("dtype", dtype::name(kind))
            .with("tokens", tokens)
            .with("hidden", hidden)
            .with("layers", arguments.layers);
        let prepared = Self { model, row, upstream, device, case };
        for _ in 0..2 {
            prepared.step()?;
        }
        Ok(prepared)
    }

    fn zero(&self) -> runtime::Result<()> {
        models::module::trainable(&self.model)
            .iter()
            .try_for_each(|(_, tensor)| runtime::autograd::set_grad(tensor, None))
    }

    fn step(&self) -> anyhow::Result<()> {
        let y = self.model.hidden(&Input::new(&self.row))?;
        backward_with(&[&y], &[Some(&self.upstream)], Keep::default())?;
        Ok(self.zero()?)
    }

    /// Figures of one round: time, and then the peak of one more step.
    fn measure(&self, repeats: usize) -> anyhow::Result<Vec<Metric>> {
        let plan =
            MeasurementPlan { warmup: 0, repeats, budget: Some(60.0), ..MeasurementPlan::new(self.device) };
        let measured = measure::run(&plan, |timer| {
            let y = self.model.hidden(&Input::new(&self.row))?;
            timer.end("forward")?;
            backward_with(&[&y], &[Some(&self.upstream)], Keep::default())?;
            timer.end("backward")?;
            self.zero()
        })?;
        let region = Region::start(self.device)?;
        let y = black_box(self.model.hidden(&Input::new(&self.row))?);
        backward_with(&[&y], &[Some(&self.upstream)], Keep::default())?;
        drop(y);
        synchronize(self.device)?;
        let peak = region.finish()?.peak_above_start();
        self.zero()?;
        // Medians of both phases and of their sum come from the same repeats.
        let seconds =
            |phase: &str| measured.phase(phase).map(|samples| samples.samples.clone()).unwrap_or_default();
        let (forward, backward) = (seconds("forward"), seconds("backward"));
        let step: Vec<f64> =
            forward.iter().zip(&backward).map(|(forward, backward)| forward + backward).collect();
        Ok(vec![
            Metric::of_samples("forward_seconds", "s", &forward),
            Metric::of_samples("backward_seconds", "s", &backward),
            Metric::of_samples("step_seconds", "s", &step),
            Metric::exact("peak_above_bytes", "B", peak as f64),
        ])
    }
}
