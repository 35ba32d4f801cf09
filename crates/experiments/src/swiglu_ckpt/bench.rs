//! Time and memory of a training step of a stack of SwiGLU layers, for every level.
//!
//! A step is the assignment's: forward through all layers, backward of the output's sum, gradients of the input and of
//! all weights. Baseline is libtorch's own composition of operators. One table of configurations feeds the command line,
//! the report and the tests.

use accounting::recompute::SwigluLevel;
use accounting::swiglu::{Peak, SwigluStack, accumulating_peak, peak};
use anyhow::ensure;
use kernels::matmul::compute_kind;
use kernels::physical;
use runtime::autograd::{self, Keep};
use runtime::measure::{self, Measurement, MeasurementPlan, Work};
use runtime::memory::live_bytes;
use swiglu_ckpt::{CheckpointLevel, SwigluConfig, SwigluMlp};
use tch::{Device, Kind, Tensor};

/// Sizes of a stack and its batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Configuration {
    /// Sequences.
    pub batch: i64,
    /// Tokens of each.
    pub seq: i64,
    /// Size of the residual stream.
    pub hidden: i64,
    /// Size between the projections.
    pub intermediate: i64,
    /// Number of layers.
    pub layers: i64,
}

/// A step in seconds.
pub const SMOKE: &[Configuration] = &[
    Configuration { batch: 4, seq: 64, hidden: 128, intermediate: 512, layers: 2 },
    Configuration { batch: 2, seq: 96, hidden: 192, intermediate: 520, layers: 3 },
];

/// A shape of the assignment, and the MLP of Qwen2.5-0.5B.
pub const LAPTOP: &[Configuration] = &[
    Configuration { batch: 16, seq: 128, hidden: 512, intermediate: 2048, layers: 2 },
    Configuration { batch: 1, seq: 512, hidden: 896, intermediate: 4864, layers: 2 },
];

/// The assignment's shapes that take minutes on two cores, the largest with half its batch, and the MLP of Qwen2.5-0.5B.
pub const FULL: &[Configuration] = &[
    Configuration { batch: 16, seq: 128, hidden: 512, intermediate: 2048, layers: 2 },
    Configuration { batch: 32, seq: 128, hidden: 512, intermediate: 2048, layers: 2 },
    Configuration { batch: 1, seq: 1024, hidden: 896, intermediate: 4864, layers: 2 },
    Configuration { batch: 4, seq: 512, hidden: 1024, intermediate: 4096, layers: 3 },
];

/// All of the assignment's shapes, and the MLPs of Qwen2.5-0.5B and Llama-3-8B.
pub const PAPER: &[Configuration] = &[
    Configuration { batch: 16, seq: 128, hidden: 512, intermediate: 2048, layers: 2 },
    Configuration { batch: 32, seq: 128, hidden: 512, intermediate: 2048, layers: 2 },
    Configuration { batch: 8, seq: 512, hidden: 1024, intermediate: 4096, layers: 3 },
    Configuration { batch: 16, seq: 512, hidden: 1024, intermediate: 4096, layers: 3 },
    Configuration { batch: 4, seq: 1024, hidden: 4096, intermediate: 16384, layers: 5 },
    Configuration { batch: 8, seq: 2048, hidden: 896, intermediate: 4864, layers: 4 },
    Configuration { batch: 2, seq: 8192, hidden: 4096, intermediate: 14336, layers: 2 },
];

impl Configuration {
    /// Tokens of the batch.
    pub fn tokens(&self) -> i64 {
        self.batch * self.seq
    }

    /// FLOPs of the nine products of each layer, a multiplication and an addition counted as 2; what is computed again
    /// is not counted.
    pub fn flops(&self) -> f64 {
        9.0 * 2.0 * self.tokens() as f64 * self.hidden as f64 * self.intermediate as f64 * self.layers as f64
    }

    /// Short name for tables: `8×512 H1024 F4096 L3`.
    pub fn name(&self) -> String {
        let Self { batch, seq, hidden, intermediate, layers } = self;
        format!("{batch}×{seq} H{hidden} F{intermediate} L{layers}")
    }

    /// The allocator's peak as `accounting` predicts it, where [`is_predicted`].
    ///
    /// # Errors
    /// Sizes that make no stack.
    pub fn predict(&self, variant: Variant, kind: Kind, gradients: Gradients) -> anyhow::Result<Peak> {
        let positive = |name: &str, size: i64| {
            ensure!(size > 0, "swiglu: {name} is {size}; expected at least 1");
            Ok(size.unsigned_abs())
        };
        let (level, tile_bytes) = match variant {
            Variant::Operators => (SwigluLevel::Eager, None),
            Variant::Level(CheckpointLevel::SaveAll) => (SwigluLevel::SaveAll, None),
            Variant::Level(CheckpointLevel::SaveGateUp) => (SwigluLevel::SaveGateUp, None),
            Variant::Level(CheckpointLevel::SaveOne) => (SwigluLevel::SaveOne, None),
            Variant::Level(CheckpointLevel::InputOnly) => (SwigluLevel::InputOnly, None),
            Variant::Level(CheckpointLevel::InputOnlyTiled { bytes }) => {
                (SwigluLevel::InputOnly, Some(bytes))
            }
        };
        let stack = SwigluStack {
            tokens: positive("tokens", self.tokens())?,
            hidden: positive("hidden", self.hidden)?,
            features: positive("intermediate", self.intermediate)?,
            layers: positive("layers", self.layers)?,
            element_bytes: kind.elt_size_in_bytes() as u64,
            tile_bytes,
        };
        Ok(match gradients {
            Gradients::Freed => peak(&stack, level)?,
            Gradients::Accumulated => accumulating_peak(&stack, level)?,
        })
    }
}

/// The use of a step's gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gradients {
    /// They are freed after the step.
    Freed,
    /// They are added to those of the steps before, as in the assignment's loop, which never clears them.
    Accumulated,
}

/// How the layers are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// libtorch's operators, recorded by its own graph.
    Operators,
    /// The function of `swiglu-ckpt`.
    Level(CheckpointLevel),
}

impl Variant {
    /// All that the bench compares.
    pub fn all() -> impl Iterator<Item = Self> {
        std::iter::once(Self::Operators).chain(CheckpointLevel::ALL.map(Self::Level))
    }

    /// FLOPs that run, over those of the nine products.
    pub fn executed_share(self) -> f64 {
        match self {
            Self::Operators => 1.0,
            Self::Level(level) => 1.0 + f64::from(level.recomputed_products()) / 9.0,
        }
    }
}

impl std::fmt::Display for Variant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Operators => f.write_str("operators"),
            Self::Level(level) => f.write_str(level.name()),
        }
    }
}

impl std::str::FromStr for Variant {
    type Err = swiglu_ckpt::Error;

    fn from_str(text: &str) -> swiglu_ckpt::Result<Self> {
        Ok(if text == "operators" { Self::Operators } else { Self::Level(text.parse()?) })
    }
}

/// Whether [`Configuration::predict`] speaks of this case: not where a low precision is cast up, or its weights' gradients
/// are summed over tiles in fp32.
pub fn is_predicted(variant: Variant, kind: Kind, device: Device) -> bool {
    let low = matches!(kind, Kind::BFloat16 | Kind::Half);
    let tiled = matches!(variant, Variant::Level(CheckpointLevel::InputOnlyTiled { .. }));
    compute_kind(device, kind) == kind && !(low && tiled)
}

/// The result of a case.
#[derive(Debug)]
pub struct Outcome {
    /// Seconds of `forward`, `backward` and both, per repeat.
    pub time: Measurement,
    /// Largest number of live bytes, weights and input included.
    pub peak_bytes: u64,
    /// Bytes held between forward and backward, without the stack's own input and output.
    pub held_bytes: u64,
    /// The prediction of `accounting` for both.
    pub predicted: Peak,
}

/// Measures one case, on the device of `plan`, as often as it plans.
///
/// # Errors
/// Sizes that make no stack, too little memory, a device that is not there.
pub fn measure(
    config: &Configuration,
    variant: Variant,
    kind: Kind,
    gradients: Gradients,
    plan: &MeasurementPlan,
) -> anyhow::Result<Outcome> {
    let predicted = config.predict(variant, kind, gradients)?;
    let &Configuration { batch, seq, hidden, intermediate, layers } = config;
    let device = plan.device;
    // Tensors from before have no part in the peak, and the prediction has none in the measurement.
    let before = live_bytes(device)?;
    let level = match variant {
        Variant::Operators => CheckpointLevel::SaveAll,
        Variant::Level(level) => level,
    };
    let shape = SwigluConfig { level, kind, device, ..SwigluConfig::new(hidden, intermediate) };
    let stack = (0..layers).map(|_| SwigluMlp::new(&shape)).collect::<swiglu_ckpt::Result<Vec<_>>>()?;
    let x = Tensor::f_randn([batch, seq, hidden], (kind, device))?.f_set_requires_grad(true)?;
    let output_bytes = (x.numel() * kind.elt_size_in_bytes()) as u64;
    let leaves: Vec<&Tensor> = std::iter::once(&x)
        .chain(stack.iter().flat_map(|mlp| mlp.parameters().into_iter().map(|(_, t)| t)))
        .collect();

    if gradients == Gradients::Accumulated {
        for leaf in &leaves {
            autograd::set_grad(leaf, Some(&leaf.f_zeros_like()?))?;
        }
    }

    let mut held_bytes = 0;
    let plan = MeasurementPlan { work: Some(Work::flops(config.flops())), ..plan.clone() };
    let time = measure::run(&plan, |timer| {
        let before = live_bytes(device)?;
        let mut y = x.shallow_clone();
        for mlp in &stack {
            y = match variant {
                Variant::Operators => operators(mlp, &y)?,
                Variant::Level(_) => mlp.forward(&y)?,
            };
        }
        held_bytes = live_bytes(device)? - before - output_bytes;
        timer.end("forward")?;
        let loss = y.f_sum(kind)?;
        let computed = match gradients {
            Gradients::Freed => autograd::grad(&[&loss], &[None], &leaves, Keep::default())?,
            Gradients::Accumulated => {
                loss.f_backward()?;
                Vec::new()
            }
        };
        timer.end("backward")?;
        drop(computed);
        Ok(())
    })?;
    let peak_bytes = time.memory.peak - before;
    Ok(Outcome { time, peak_bytes, held_bytes, predicted })
}

fn operators(mlp: &SwigluMlp, x: &Tensor) -> runtime::Result<Tensor> {
    let parameters = mlp.parameters();
    let [(_, gate), (_, up), (_, down)] = parameters[..] else {
        return Err(runtime::Error::invalid("swiglu bench", "the baseline needs weights stored apart"));
    };
    Ok(x.f_matmul(gate)?.f_silu()?.f_mul(&x.f_matmul(up)?)?.f_matmul(down)?)
}

/// The device's rate for this configuration's largest product in FLOP/s.
///
/// # Errors
/// Same as [`measure()`].
pub fn product_rate(config: &Configuration, kind: Kind, device: Device) -> anyhow::Result<f64> {
    let (tokens, inner, hidden) = (config.tokens(), config.intermediate, config.hidden);
    Ok(physical::gemm_rate(device, kind, tokens, inner, hidden)?.rate().unwrap_or(0.0))
}
