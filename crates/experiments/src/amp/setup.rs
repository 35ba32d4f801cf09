//! The low-precision set-ups that are compared.

use std::fmt;

use amp::autocast::fp8_linear;
use amp::{Autocast, DynamicGradScaler, DynamicScalerConfig, StaticGradScaler};
use anyhow::Result;
use kernels::matmul::compute_kind;
use tch::{Device, Kind};
use training::optimizer::{Adam, DeviceOptimizer, Group};
use training::scaler::{GradScaler, NoScaler};
use training::trainer::Overflow;

use super::fp16_adam::Fp16Adam;

/// A way to train.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Setup {
    /// Everything in fp32
    Fp32,
    /// fp32 weights, bf16 products, no scaling
    Bf16,
    /// Everything in fp16, the optimizer's arithmetic too, and no scaling
    PureFp16,
    /// fp16 weights and gradients, an optimizer that computes in fp32, no scaling
    Fp16Weights,
    /// fp32 weights, fp16 products, no scaling
    Unscaled,
    /// fp32 weights, fp16 products, one scale that lets gradients underflow
    StaticLow,
    /// fp32 weights, fp16 products, one scale inside the usable range
    Static,
    /// fp32 weights, fp16 products, one scale at which gradients overflow
    StaticHigh,
    /// fp32 weights, fp16 products, a scale that begins inside the usable range and grows a few times in the training
    Dynamic,
    /// A dynamic scale that begins where the static one is too low, and grows often until it is PyTorch's initial scale
    DynamicLow,
    /// A dynamic scale that begins where the static one is too high
    DynamicHigh,
    /// A dynamic scale that grows every few steps, so that many steps overflow and are skipped
    Restless,
    /// The same, and steps that overflow are tried again at a lower scale
    Retry,
    /// fp32 weights, fp8 linear layers, other products in bf16, no scaling
    Fp8,
}

/// The constants of the scalers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scales {
    /// Static scales: too low, inside the usable range, too high. The dynamic scales begin there.
    pub initial: [f32; 3],
    /// Steps between growths of the dynamic scale that fits the training.
    pub interval: u32,
    /// Steps between growths of the restless one, and of the one that begins too low.
    pub short_interval: u32,
}

impl Scales {
    /// Scales that fit a training of so many steps: the scale grows eight times, the restless one a hundred times.
    pub(crate) fn fitting(steps: u64) -> Self {
        let interval = |growths: u64| u32::try_from((steps / growths).max(2)).unwrap_or(u32::MAX);
        Self {
            initial: [2f32.powi(-8), 65_536.0, 2f32.powi(24)],
            interval: interval(8),
            short_interval: interval(100),
        }
    }

    fn dynamic(&self, initial: usize, growth_interval: u32) -> DynamicScalerConfig {
        DynamicScalerConfig { init_scale: self.initial[initial], growth_interval, ..Default::default() }
    }
}

/// The parts of a training that a setup decides.
#[derive(Debug)]
pub(crate) struct Parts {
    /// The dtype of the model's tensors.
    pub weights: Kind,
    /// The dtype of products; `None`: fp32.
    pub autocast: Option<Autocast>,
    /// The loss scaler.
    pub scaler: Box<dyn GradScaler>,
}

impl Setup {
    /// All of them.
    pub(crate) const ALL: [Self; 14] = [
        Self::Fp32,
        Self::Bf16,
        Self::PureFp16,
        Self::Fp16Weights,
        Self::Unscaled,
        Self::StaticLow,
        Self::Static,
        Self::StaticHigh,
        Self::Dynamic,
        Self::DynamicLow,
        Self::DynamicHigh,
        Self::Restless,
        Self::Retry,
        Self::Fp8,
    ];

    /// The dynamic scalers, each with the static one that has its initial scale.
    pub(crate) const DYNAMIC: [(Self, Self); 5] = [
        (Self::Dynamic, Self::Static),
        (Self::DynamicLow, Self::StaticLow),
        (Self::DynamicHigh, Self::StaticHigh),
        (Self::Restless, Self::Static),
        (Self::Retry, Self::Static),
    ];

    /// The parts, new.
    ///
    /// # Errors
    /// Invalid constants.
    pub(crate) fn parts(self, scales: &Scales) -> Result<Parts> {
        let [low, right, high] = scales.initial;
        let dynamic =
            |options| -> Result<Box<dyn GradScaler>> { Ok(Box::new(DynamicGradScaler::new(options)?)) };
        let scaler: Box<dyn GradScaler> = match self {
            Self::StaticLow => Box::new(StaticGradScaler::new(low)?),
            Self::Static => Box::new(StaticGradScaler::new(right)?),
            Self::StaticHigh => Box::new(StaticGradScaler::new(high)?),
            Self::Dynamic => dynamic(scales.dynamic(1, scales.interval))?,
            Self::DynamicLow => {
                dynamic(DynamicScalerConfig { max_scale: right, ..scales.dynamic(0, scales.short_interval) })?
            }
            Self::DynamicHigh => dynamic(scales.dynamic(2, scales.interval))?,
            Self::Restless | Self::Retry => dynamic(scales.dynamic(1, scales.short_interval))?,
            Self::Fp32 | Self::Bf16 | Self::PureFp16 | Self::Fp16Weights | Self::Unscaled | Self::Fp8 => {
                Box::new(NoScaler)
            }
        };
        let autocast = match self {
            Self::Fp32 => None,
            Self::PureFp16 | Self::Fp16Weights => Some(Autocast::pure(Kind::Half)?),
            Self::Bf16 => Some(Autocast::new(Kind::BFloat16)?),
            Self::Fp8 => Some(Autocast::fp8()),
            _ => Some(Autocast::new(Kind::Half)?),
        };
        let weights =
            if matches!(self, Self::PureFp16 | Self::Fp16Weights) { Kind::Half } else { Kind::Float };
        Ok(Parts { weights, autocast, scaler })
    }

    /// The treatment of steps that overflow.
    pub(crate) fn overflow(self) -> Overflow {
        if self == Self::Retry { Overflow::Retry { most: 40 } } else { Overflow::Skip }
    }

    /// Adam over `parameters`.
    ///
    /// # Errors
    /// Errors of [`DeviceOptimizer::new`].
    pub(crate) fn adam(self, parameters: Group) -> Result<DeviceOptimizer> {
        Ok(match self {
            Self::PureFp16 => DeviceOptimizer::new(Fp16Adam(Adam::default()), vec![parameters])?,
            _ => DeviceOptimizer::new(Adam::default(), vec![parameters])?,
        })
    }

    /// The dtype in which a device multiplies: "fp16", or "fp16 operands, multiplied in fp32" if it has no products of that dtype.
    pub(crate) fn products(self, device: Device) -> String {
        let (name, multiplied) = (self.dtype(), self.multiplied(device));
        if name == multiplied {
            name.to_owned()
        } else {
            format!("{name} operands, multiplied in {multiplied}")
        }
    }

    /// The reason for the time of its gradient on a device, beside the same gradient in fp32.
    pub(crate) fn reason(self, device: Device) -> String {
        let (name, multiplied) = (self.dtype(), self.multiplied(device));
        let products = match self {
            Self::Fp32 => return "the baseline".into(),
            _ if name == multiplied => {
                format!("the device multiplies {name} itself, so products and operands take less")
            }
            Self::Fp8 => format!(
                "the device has no fp8 products: fp8 operands are cast to bf16 and multiplied in {multiplied}, so nothing is gained \
                 over bf16"
            ),
            _ => format!(
                "the device has no {name} products: operands are cast to fp32 and results rounded to {name} around each fp32 \
                 product, so nothing is gained in it"
            ),
        };
        let rest = match self {
            Self::PureFp16 | Self::Fp16Weights => {
                "weights and activations are fp16, so norms and additions move half the bytes and no weight is cast"
            }
            Self::Fp8 => "each operand is scaled by its largest element first, a pass more",
            Self::Bf16 | Self::Unscaled => "weights are cast once in each step",
            _ => "weights are cast once in each step, and gradients are unscaled and checked",
        };
        format!("{products}; {rest}")
    }

    /// The dtype of the device's instructions for the products.
    fn multiplied(self, device: Device) -> &'static str {
        let kind = match self {
            Self::Fp32 => Kind::Float,
            Self::Bf16 => compute_kind(device, Kind::BFloat16),
            Self::Fp8 => fp8_linear::product_kind(device),
            _ => compute_kind(device, Kind::Half),
        };
        match kind {
            Kind::Float8e4m3fn => "fp8",
            Kind::BFloat16 => "bf16",
            Kind::Half => "fp16",
            _ => "fp32",
        }
    }

    fn dtype(self) -> &'static str {
        match self {
            Self::Fp32 => "fp32",
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
            _ => "fp16",
        }
    }
}

impl fmt::Display for Setup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fp32 => "fp32",
            Self::Bf16 => "bf16",
            Self::PureFp16 => "pure fp16",
            Self::Fp16Weights => "fp16 weights",
            Self::Unscaled => "fp16, no scaler",
            Self::StaticLow => "fp16, static, too low",
            Self::Static => "fp16, static",
            Self::StaticHigh => "fp16, static, too high",
            Self::Dynamic => "fp16, dynamic",
            Self::DynamicLow => "fp16, dynamic from too low",
            Self::DynamicHigh => "fp16, dynamic from too high",
            Self::Restless => "fp16, restless",
            Self::Retry => "fp16, restless, retried",
            Self::Fp8 => "fp8",
        })
    }
}
