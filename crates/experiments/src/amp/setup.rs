//! The low-precision set-ups that are compared.

use std::fmt;

use amp::{Autocast, DynamicGradScaler, DynamicOptions, StaticGradScaler};
use anyhow::Result;
use runtime::matmul::compute_kind;
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
    /// Everything in fp16, the optimizer's arithmetic too, and no scaling
    PureFp16,
    /// fp16 weights and gradients, an optimizer that computes in fp32, no scaling
    Fp16Weights,
    /// fp32 weights, fp16 products, no scaling
    Unscaled,
    /// fp32 weights, fp16 products, one scale
    Static,
    /// fp32 weights, fp16 products, a scale that follows the gradients, with PyTorch's constants
    Dynamic,
    /// The same with a scale that begins too high and grows often
    Restless,
    /// The same, and steps that overflow are tried again at a lower scale
    Retry,
    /// fp32 weights, bf16 products, no scaling
    Bf16,
    /// fp32 weights, fp8 linear layers, other products in bf16, no scaling
    Fp8,
}

/// The constants of the scalers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scales {
    /// The static one's scale.
    pub fixed: f32,
    /// How the dynamic one's moves.
    pub dynamic: DynamicOptions,
    /// How it moves where it is restless.
    pub restless: DynamicOptions,
}

/// What a set-up gives to a training.
#[derive(Debug)]
pub(crate) struct Parts {
    /// The dtype of the model's tensors.
    pub weights: Kind,
    /// What its products are computed in; `None`: fp32.
    pub autocast: Option<Autocast>,
    /// What scales the loss.
    pub scaler: Box<dyn GradScaler>,
}

impl Setup {
    /// All of them.
    pub(crate) const ALL: [Self; 10] = [
        Self::Fp32,
        Self::PureFp16,
        Self::Fp16Weights,
        Self::Unscaled,
        Self::Static,
        Self::Dynamic,
        Self::Restless,
        Self::Retry,
        Self::Bf16,
        Self::Fp8,
    ];

    /// The parts, new.
    ///
    /// # Errors
    /// [`amp::Error::Option`] for constants that are none.
    pub(crate) fn parts(self, scales: &Scales) -> Result<Parts> {
        let scaler: Box<dyn GradScaler> = match self {
            Self::Static => Box::new(StaticGradScaler::new(scales.fixed)?),
            Self::Dynamic => Box::new(DynamicGradScaler::new(scales.dynamic)?),
            Self::Restless | Self::Retry => Box::new(DynamicGradScaler::new(scales.restless)?),
            _ => Box::new(NoScaler),
        };
        let autocast = match self {
            Self::Fp32 => None,
            Self::PureFp16 | Self::Fp16Weights => Some(Autocast::pure(Kind::Half)?),
            Self::Unscaled | Self::Static | Self::Dynamic | Self::Restless | Self::Retry => {
                Some(Autocast::new(Kind::Half)?)
            }
            Self::Bf16 => Some(Autocast::new(Kind::BFloat16)?),
            Self::Fp8 => Some(Autocast::fp8()),
        };
        let weights =
            if matches!(self, Self::PureFp16 | Self::Fp16Weights) { Kind::Half } else { Kind::Float };
        Ok(Parts { weights, autocast, scaler })
    }

    /// What becomes of steps that overflow.
    pub(crate) fn overflow(self) -> Overflow {
        if self == Self::Retry { Overflow::Retry { most: 40 } } else { Overflow::Skip }
    }

    /// Adam over `parameters`.
    ///
    /// # Errors
    /// Those of [`DeviceOptimizer::new`].
    pub(crate) fn adam(self, parameters: Group) -> Result<DeviceOptimizer> {
        Ok(match self {
            Self::PureFp16 => DeviceOptimizer::new(Fp16Adam(Adam::default()), vec![parameters])?,
            _ => DeviceOptimizer::new(Adam::default(), vec![parameters])?,
        })
    }

    /// What a device multiplies in for it: "fp16", or "fp16 rounded, fp32 products" where it has none.
    pub(crate) fn products(self, device: Device) -> String {
        let native = |kind| compute_kind(device, kind) == kind;
        let of = |name: &str, native| {
            if native { name.to_owned() } else { format!("{name} operands, multiplied in fp32") }
        };
        match self {
            Self::Fp32 => "fp32".to_owned(),
            Self::Bf16 => of("bf16", native(Kind::BFloat16)),
            Self::Fp8 => of("fp8", device.is_cuda()),
            _ => of("fp16", native(Kind::Half)),
        }
    }
}

impl fmt::Display for Setup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fp32 => "fp32",
            Self::PureFp16 => "pure fp16",
            Self::Fp16Weights => "fp16 weights",
            Self::Unscaled => "fp16, no scaler",
            Self::Static => "fp16, static scaler",
            Self::Dynamic => "fp16, dynamic scaler",
            Self::Restless => "fp16, fast-growing scaler",
            Self::Retry => "fp16, fast-growing, retried",
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
        })
    }
}
