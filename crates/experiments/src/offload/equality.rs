//! `offload equality`: the assignment's comparisons of logits and of gradients (`compare_grads`), over whole models.

use std::slice;

use clap::Args;
use models::DecoderConfig;
use models::Llama;
use models::module::{Context, Input, LanguageModel, parameters, trainable};
use offload::{Method, OffloadConfig};
use report::cli::Scale;
use report::{Case, Metric};
use runtime::autograd::{backward, set_grad};
use runtime::ops::settings::{Determinism, set_determinism};
use tch::{Device, Kind, Tensor};
use training::optimizer::{AdamW, DeviceOptimizer, Group, ZeroGrad};

use super::difference::largest;
use crate::driver::Bench;
use crate::shape::Shape;

/// "Hello, world!" by Qwen2's tokenizer.
const TOKENS: [i64; 4] = [9707, 11, 1879, 0];
/// The methods that can train.
const METHODS: [Method; 3] = [Method::Checkpointing, Method::Function, Method::Overlap];

#[derive(Args)]
pub(crate) struct Equality {
    /// Layers of Qwen2.5-0.5B that are trained
    #[arg(long, value_parser = clap::value_parser!(i64).range(1..))]
    layers: Option<i64>,
    /// Training steps
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
}

/// The result of a training.
struct Left {
    losses: Vec<f64>,
    /// Gradients of the last step.
    gradients: Vec<Tensor>,
    weights: Vec<Tensor>,
}

pub(crate) fn run(bench: &mut Bench, arguments: &Equality) -> anyhow::Result<()> {
    let device = bench.device;
    // Some of CUDA's kernels add in an order that changes from run to run.
    set_determinism(Determinism::Warn)?;
    let (shape, layers, vocabulary) = bench.sized([
        (Shape::Tiny, 4, 512),
        (Shape::Small, 4, 8192),
        (Shape::Small, 5, 151_936),
        (Shape::Small, 24, 151_936),
    ]);
    let layers = arguments.layers.unwrap_or(layers);
    let config = shape.resized(layers, vocabulary, 4096)?;
    // Inference holds the weights alone, so all layers fit.
    let all = if bench.scale == Scale::Full { shape.resized(24, vocabulary, 4096)? } else { config.clone() };
    bench.message("logits without offload");
    let expected = logits(&all, None, bench.seed, device)?;
    let label = |method: &Method| method.name().to_owned();
    bench.each(Method::ALL, label, |bench, method| {
        let options = OffloadConfig { device, method, ..OffloadConfig::default() };
        let actual = logits(&all, Some(&options), bench.seed, device)?;
        let case = Case::new().with("inference_layers", all.num_hidden_layers).with("method", method.name());
        let metrics = vec![
            Metric::exact("logits_difference", "", largest(slice::from_ref(&expected), &[actual])?),
            Metric::exact("largest_logit", "", expected.f_abs()?.f_max()?.f_double_value(&[])?),
            Metric::exact("compared_logits", "count", expected.numel() as f64),
        ];
        bench.put(&case, metrics)
    })?;
    bench.message("training without offload");
    let reference = train(&config, None, bench.seed, arguments.steps, device)?.into_host()?;
    bench.each(METHODS, label, |bench, method| {
        let options = OffloadConfig { device, method, ..OffloadConfig::default() };
        let left = train(&config, Some(&options), bench.seed, arguments.steps, device)?;
        let case = Case::new().with("layers", layers).with("method", method.name());
        bench.put(&case, reference.against(&left)?)
    })
}

/// The logits of every token, on the host.
fn logits(
    config: &DecoderConfig,
    options: Option<&OffloadConfig>,
    seed: u64,
    device: Device,
) -> anyhow::Result<Tensor> {
    runtime::random::seed(seed)?;
    let mut model = Llama::new(config, (Kind::Float, device))?;
    let _offload = options.map(|options| options.install(&mut model)).transpose()?;
    let _no_grad = tch::no_grad_guard();
    let hidden = model.hidden(&Input::new(&tokens(config, device)?))?;
    Ok(model.head().logits(&hidden, &Context::default())?.f_to_device(Device::Cpu)?)
}

/// Returns `[1, 4]` token ids.
fn tokens(config: &DecoderConfig, device: Device) -> anyhow::Result<Tensor> {
    let tokens = Tensor::from_slice(&TOKENS.map(|token| token % config.vocab_size));
    Ok(tokens.f_view([1, 4])?.f_to_device(device)?)
}

fn train(
    config: &DecoderConfig,
    options: Option<&OffloadConfig>,
    seed: u64,
    steps: u32,
    device: Device,
) -> anyhow::Result<Left> {
    runtime::random::seed(seed)?;
    let mut model = Llama::new(config, (Kind::Float, device))?;
    let offload = options.map(|options| options.install(&mut model)).transpose()?;
    let on_host = if offload.is_some() { OnHost::default() } else { OnHost::new(&model)? };
    let group = Group::new(on_host.stepped(&model), 1e-3);
    let mut optimizer = DeviceOptimizer::new(AdamW::default(), vec![group])?;
    let tokens = tokens(config, device)?;
    let mut losses = Vec::new();
    for step in 0..steps {
        optimizer.zero_grad(ZeroGrad::ToNone)?;
        on_host.zero_grad()?;
        let loss = model.loss(&Input::new(&tokens), &tokens)?.sum;
        backward(&[&loss])?;
        losses.push(loss.f_double_value(&[])?);
        if let Some(offload) = &offload {
            offload.check_on_host()?;
        }
        if step + 1 < steps {
            on_host.step(&mut optimizer)?;
        }
    }
    // The gradients of the last step, before it changes the weights, are what remains of them.
    let gradients =
        trainable(&model).into_iter().map(|(_, tensor)| tensor.f_grad()).collect::<Result<_, _>>()?;
    on_host.step(&mut optimizer)?;
    drop(optimizer);
    let weights = parameters(&model)
        .into_iter()
        .map(|(_, tensor)| Ok(tensor.f_detach()?))
        .collect::<anyhow::Result<_>>()?;
    Ok(Left { losses, gradients, weights })
}

/// Copies on the host of the layers of a model on a GPU, which the optimizer steps in their place: offloaded layers are stepped
/// there, and the fused AdamW of a CPU and that of CUDA round in other orders.
#[derive(Default)]
struct OnHost(Vec<Pair>);

struct Pair {
    name: String,
    device: Tensor,
    host: Tensor,
}

impl OnHost {
    fn new(model: &Llama) -> anyhow::Result<Self> {
        let mut pairs = Vec::new();
        for (name, tensor) in trainable(model) {
            if name.contains("layers.") && tensor.device().is_cuda() {
                let host = tensor.f_detach()?.f_to_device(Device::Cpu)?.f_set_requires_grad(true)?;
                pairs.push(Pair { name, device: tensor.shallow_clone(), host });
            }
        }
        Ok(Self(pairs))
    }

    /// The tensors that the optimizer steps.
    fn stepped<'a>(&'a self, model: &'a Llama) -> Vec<(String, &'a Tensor)> {
        let copy = |name: &str| self.0.iter().find(|pair| pair.name == name).map(|pair| &pair.host);
        let all = trainable(model).into_iter();
        all.map(|(name, tensor)| {
            let stepped = copy(&name).unwrap_or(tensor);
            (name, stepped)
        })
        .collect()
    }

    fn zero_grad(&self) -> anyhow::Result<()> {
        self.0.iter().try_for_each(|pair| Ok(set_grad(&pair.device, None)?))
    }

    fn step(&self, optimizer: &mut DeviceOptimizer) -> anyhow::Result<()> {
        for Pair { device, host, .. } in &self.0 {
            set_grad(host, Some(&device.f_grad()?.f_to_device(Device::Cpu)?))?;
        }
        optimizer.step()?;
        for Pair { device, host, .. } in &self.0 {
            device.f_detach()?.f_copy_(&host.f_detach()?)?;
        }
        Ok(())
    }
}

impl Left {
    /// The same on the host.
    fn into_host(self) -> anyhow::Result<Self> {
        let host = |tensors: Vec<Tensor>| {
            tensors.iter().map(|tensor| tensor.f_to_device(Device::Cpu)).collect::<Result<_, _>>()
        };
        Ok(Self { gradients: host(self.gradients)?, weights: host(self.weights)?, ..self })
    }

    fn against(&self, other: &Self) -> anyhow::Result<Vec<Metric>> {
        let losses = self.losses.iter().zip(&other.losses).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        let gradients = largest(&self.gradients, &other.gradients)?;
        let weights = largest(&self.weights, &other.weights)?;
        let moved = self.losses.first().zip(self.losses.last()).map_or(0.0, |(first, last)| first - last);
        Ok(vec![
            Metric::exact("largest_difference", "", losses.max(gradients).max(weights)),
            Metric::exact("loss_difference", "", losses),
            Metric::exact("gradient_difference", "", gradients),
            Metric::exact("weight_difference", "", weights),
            Metric::exact("loss_fell_by", "nat", moved),
            Metric::exact(
                "compared_numbers",
                "count",
                self.weights.iter().map(|tensor| tensor.numel() as f64).sum(),
            ),
        ])
    }
}
