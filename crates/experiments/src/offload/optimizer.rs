//! `offload optimizer`: a training with the optimizer state on the host, and one on the device.

use std::time::Instant;

use anyhow::ensure;
use clap::Args;
use dataloading::{Tokenizer, embedded};
use models::module::{Input, LanguageModel, trainable};
use models::{DecoderConfig, Llama};
use offload::{HostAdamW, HostAdamWConfig, OffloadConfig};
use report::{Case, Metric};
use runtime::autograd::backward;
use runtime::device;
use runtime::ops::settings::{Determinism, set_determinism};
use tch::{Device, Kind, Tensor};
use training::LrSchedule;
use training::clip::{self, NonFinite};
use training::optimizer::{AdamW, DeviceOptimizer, Group, Optimizer, StepSettings, ZeroGrad};
use training::schedule::Shape;

use super::difference::largest;
use crate::driver::Bench;

const ROWS: i64 = 4;
const LENGTH: i64 = 64;

#[derive(Args)]
pub(crate) struct OptimizerArgs {
    /// Steps of a training
    #[arg(long, value_parser = clap::value_parser!(u64).range(2..))]
    steps: Option<u64>,
}

/// Requirements on an optimizer.
#[derive(Clone, Copy, Debug)]
struct Demand {
    name: &'static str,
    clip: Option<f64>,
    micro_batches: u64,
    schedule: bool,
}

const DEMANDS: [Demand; 4] = [
    Demand { name: "plain", clip: None, micro_batches: 1, schedule: false },
    Demand { name: "clipping", clip: Some(0.5), micro_batches: 1, schedule: false },
    Demand { name: "accumulation of 2", clip: None, micro_batches: 2, schedule: false },
    Demand { name: "clipping, accumulation, cosine", clip: Some(0.5), micro_batches: 2, schedule: true },
];

/// The result of a training.
struct Trained {
    losses: Vec<f64>,
    seconds: Vec<f64>,
    device_state: u64,
    host_state: u64,
    weights: Vec<Tensor>,
}

/// A small training on real text.
struct Training {
    config: DecoderConfig,
    steps: u64,
    seed: u64,
    device: Device,
    /// `[row, LENGTH + 1]`.
    rows: Vec<Tensor>,
}

pub(crate) fn run(bench: &mut Bench, arguments: &OptimizerArgs) -> anyhow::Result<()> {
    let device = bench.device;
    // Some of CUDA's kernels add in an order that changes from run to run.
    set_determinism(Determinism::Warn)?;
    let (width, layers, steps) = bench.sized([(32, 3, 4), (128, 6, 20), (128, 6, 60), (896, 12, 200)]);
    let steps = arguments.steps.unwrap_or(steps);
    let config = DecoderConfig {
        num_key_value_heads: 2,
        tie_word_embeddings: true,
        max_position_embeddings: LENGTH,
        ..DecoderConfig::qwen2(4096, width, 3 * width, layers, 4)
    };
    let most = DEMANDS.iter().map(|demand| demand.micro_batches).max().unwrap_or(1);
    let rows = rows(steps * most, device)?;
    let training = Training { config, steps, seed: bench.seed, device, rows };
    let label = |demand: &Demand| demand.name.to_owned();
    bench.each(DEMANDS, label, |bench, demand| {
        let (ordinary, host) = (training.ordinary(&demand)?, training.on_host(&demand)?);
        let case = |shows: &str, optimizer: &str| {
            Case::new().with("shows", shows).with("options", demand.name).with("optimizer", optimizer)
        };
        let curve = demand.name == DEMANDS[0].name || demand.schedule;
        for (name, trained) in [("AdamW, resident", &ordinary), ("HostAdamW, layers offloaded", &host)] {
            bench.put(&case("training", name), trained.metrics())?;
            for (step, loss) in trained.losses.iter().enumerate().filter(|_| curve) {
                let case = case("curve", name).with("step", step + 1);
                bench.put(&case, vec![Metric::exact("training_loss", "nat", *loss)])?;
            }
        }
        let compared = Case::new().with("shows", "comparison").with("options", demand.name);
        bench.put(&compared, host.against(&ordinary, device)?)
    })
}

/// Rows of the embedded encyclopedia.
fn rows(batches: u64, device: Device) -> anyhow::Result<Vec<Tensor>> {
    let folder = embedded::folder()?;
    let tokenizer = Tokenizer::from_file(&folder.join(embedded::TOKENIZER))?;
    let text = std::fs::read_to_string(folder.join(embedded::CORPUS_TRAIN))?;
    let wanted = usize::try_from(batches as i64 * ROWS * (LENGTH + 1))?;
    // A token has two characters at the least on average.
    let end = text.char_indices().nth(8 * wanted).map_or(text.len(), |(at, _)| at);
    let ids: Vec<i64> = tokenizer.encode(&text[..end])?.into_iter().map(i64::from).collect();
    ensure!(!ids.is_empty(), "the embedded corpus is empty");
    // A longer training reads it again.
    let ids: Vec<i64> = ids.iter().copied().cycle().take(wanted).collect();
    let all = Tensor::f_from_slice(&ids)?.f_view([batches as i64, ROWS, LENGTH + 1])?.f_to_device(device)?;
    (0..batches as i64).map(|batch| Ok(all.f_get(batch)?)).collect()
}

impl Training {
    fn model(&self) -> anyhow::Result<Llama> {
        runtime::random::seed(self.seed)?;
        Ok(Llama::new(&self.config, (Kind::Float, self.device))?)
    }

    fn groups(model: &Llama) -> Vec<Group> {
        Group::by_dimension(trainable(model), 3e-3, 0.1)
    }

    fn factor(&self, demand: &Demand, step: u64) -> f64 {
        let schedule =
            LrSchedule { shape: Shape::Cosine, warmup: self.steps / 10, steps: self.steps, floor: 0.1 };
        if demand.schedule { schedule.factor(step) } else { 1.0 }
    }

    /// Forward and backward of a step's micro-batches; the mean of their losses.
    fn passes(&self, model: &Llama, demand: &Demand, step: u64) -> anyhow::Result<f64> {
        let mut sum = 0.0;
        for part in 0..demand.micro_batches {
            let rows = &self.rows[(step * demand.micro_batches + part) as usize];
            let tokens = rows.f_narrow(1, 0, LENGTH)?.f_contiguous()?;
            let labels = rows.f_narrow(1, 1, LENGTH)?.f_contiguous()?;
            let loss = model.loss(&Input::new(&tokens), &labels)?.sum;
            let mean = loss.f_div_scalar((ROWS * LENGTH) as f64 * demand.micro_batches as f64)?;
            backward(&[&mean])?;
            sum += mean.f_double_value(&[])?;
        }
        Ok(sum)
    }

    fn ordinary(&self, demand: &Demand) -> anyhow::Result<Trained> {
        let model = self.model()?;
        let mut optimizer = DeviceOptimizer::new(AdamW::default(), Self::groups(&model))?;
        let (mut losses, mut seconds) = (Vec::new(), Vec::new());
        for step in 0..self.steps {
            let began = Instant::now();
            losses.push(self.passes(&model, demand, step)?);
            if let Some(limit) = demand.clip {
                clip::clip_(&optimizer.gradients()?, limit, NonFinite::Skip)?;
            }
            optimizer.set_factor(self.factor(demand, step))?;
            optimizer.step()?;
            optimizer.zero_grad(ZeroGrad::ToNone)?;
            device::synchronize(self.device)?;
            seconds.push(began.elapsed().as_secs_f64());
        }
        let device_state = optimizer.state_bytes();
        Ok(Trained { losses, seconds, device_state, host_state: 0, weights: weights(&model)? })
    }

    fn on_host(&self, demand: &Demand) -> anyhow::Result<Trained> {
        let mut model = self.model()?;
        let offload =
            OffloadConfig { device: self.device, ..OffloadConfig::default() }.install(&mut model)?;
        let host = HostAdamWConfig { overlap: true, ..HostAdamWConfig::default() };
        let mut optimizer = HostAdamW::new(&offload, Self::groups(&model), AdamW::default(), host)?;
        let (mut losses, mut seconds) = (Vec::new(), Vec::new());
        for step in 0..self.steps {
            let began = Instant::now();
            let &Demand { micro_batches, clip, .. } = demand;
            let factor = self.factor(demand, step);
            // Layers are updated within backward; to skip a step, all gradients would be needed first.
            let non_finite = NonFinite::Fail;
            optimizer.begin(StepSettings {
                micro_batches,
                factor,
                clip,
                non_finite,
                ..StepSettings::default()
            })?;
            losses.push(self.passes(&model, demand, step)?);
            optimizer.step()?;
            seconds.push(began.elapsed().as_secs_f64());
        }
        offload.synchronize()?;
        let state = optimizer.state_bytes();
        Ok(Trained {
            losses,
            seconds,
            device_state: state.device,
            host_state: state.host,
            weights: weights(&model)?,
        })
    }
}

fn weights(model: &Llama) -> anyhow::Result<Vec<Tensor>> {
    let all = models::module::parameters(model).into_iter();
    all.map(|(_, tensor)| Ok(tensor.f_detach()?.f_to_device(Device::Cpu)?)).collect()
}

impl Trained {
    fn metrics(&self) -> Vec<Metric> {
        vec![
            Metric::of_samples("step_seconds", "s", &self.seconds),
            Metric::exact("device_state_bytes", "B", self.device_state as f64),
            Metric::exact("host_state_bytes", "B", self.host_state as f64),
            Metric::exact("last_loss", "nat", self.losses.last().copied().unwrap_or(f64::NAN)),
        ]
    }

    fn against(&self, ordinary: &Self, device: Device) -> anyhow::Result<Vec<Metric>> {
        let losses = self.losses.iter().zip(&ordinary.losses).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        let weights = largest(&ordinary.weights, &self.weights)?;
        let ratios: Vec<f64> =
            self.seconds.iter().zip(&ordinary.seconds).map(|(ours, theirs)| ours / theirs).collect();
        // The step of a CPU and libtorch's fused kernel for CUDA round in other orders.
        let name = if device.is_cuda() { "weight_difference_from_cuda" } else { "weight_difference" };
        let fell = ordinary.losses.first().zip(ordinary.losses.last());
        Ok(vec![
            Metric::exact("loss_difference", "nat", losses),
            Metric::exact(name, "", weights),
            Metric::of_samples("time_ratio", "ratio", &ratios),
            Metric::exact("loss_fell_by", "nat", fell.map_or(0.0, |(first, last)| first - last)),
        ])
    }
}
