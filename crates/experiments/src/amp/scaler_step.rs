//! The overhead of a loss scaler in an optimizer step.
//!
//! The same fused AdamW over the same parameters and gradients steps without a scaler, then with each: unscale, step, update.
//! The variants take turns, step by step. The scale stays 1, so that the gradients are the same in every step; each variant still
//! multiplies by it.

use std::time::Instant;

use amp::{DeviceScaler, DynamicGradScaler, DynamicRule, DynamicScalerConfig};
use anyhow::Result;
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};
use training::optimizer::{AdamW, DeviceOptimizer, Group};

/// Columns of each matrix, and elements of each vector.
const WIDTH: i64 = 768;

/// Parameters as a decoder has them: as many vectors `[768]` as matrices `[rows, 768]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Size {
    /// Tensors, half of them vectors.
    pub tensors: i64,
    /// Rows of each matrix.
    pub rows: i64,
}

/// 24.6 million parameters in 148 tensors, and a million in 16.
pub(crate) const SIZES: [Size; 2] = [Size { tensors: 148, rows: 432 }, Size { tensors: 16, rows: 162 }];

impl Size {
    /// Elements of all tensors.
    pub(crate) fn parameters(&self) -> i64 {
        self.tensors / 2 * WIDTH * (self.rows + 1)
    }

    fn optimizer(&self, device: Device) -> Result<DeviceOptimizer> {
        let mut generator = Generator::new(1)?;
        let mut parameters = Vec::new();
        for index in 0..self.tensors {
            let size = if index % 2 == 0 { vec![self.rows, WIDTH] } else { vec![WIDTH] };
            let mut draw = || -> Result<Tensor> {
                Ok(generator.normal(&size, (Kind::Float, Device::Cpu))?.f_to_device(device)?)
            };
            let parameter = draw()?.f_set_requires_grad(true)?;
            runtime::autograd::set_grad(&parameter, Some(&draw()?))?;
            parameters.push((format!("w{index}"), parameter));
        }
        Ok(DeviceOptimizer::new(AdamW::default(), vec![Group::new(parameters, 1e-4)])?)
    }
}

/// Seconds of each round.
#[derive(Debug, Clone, Default)]
pub(crate) struct Overhead {
    /// The optimizer's step by itself.
    pub plain: Vec<f64>,
    /// Seconds with a scaler that decides on the host.
    pub host: Vec<f64>,
    /// Seconds with a scaler that decides on the device.
    pub device: Vec<f64>,
    /// Dividing and checking the gradients alone.
    pub unscale: Vec<f64>,
}

impl Overhead {
    /// Seconds that `scaled` took beyond the plain step of the same round.
    pub(crate) fn beyond_plain(&self, scaled: &[f64]) -> Vec<f64> {
        scaled.iter().zip(&self.plain).map(|(scaled, plain)| scaled - plain).collect()
    }
}

/// Measures `rounds` rounds of all ways in turns, after two that are not counted.
///
/// # Errors
/// Errors of libtorch.
pub(crate) fn run(size: Size, rounds: usize, device: Device) -> Result<Overhead> {
    const WARMUP: usize = 2;
    let mut optimizer = size.optimizer(device)?;
    let options =
        DynamicScalerConfig { init_scale: 1.0, growth_interval: u32::MAX, ..DynamicScalerConfig::default() };
    let mut on_host = DynamicGradScaler::new(options)?;
    let mut on_device = DeviceScaler::new(DynamicRule::new(options)?, device)?;
    let one = Tensor::f_ones([1], (Kind::Float, device))?;
    let mut overhead = Overhead::default();
    let timed = |part: &mut dyn FnMut() -> Result<()>| -> Result<f64> {
        let start = Instant::now();
        part()?;
        runtime::device::synchronize(device)?;
        Ok(start.elapsed().as_secs_f64())
    };
    for round in 0..WARMUP + rounds {
        let plain = timed(&mut || Ok(optimizer.step()?))?;
        let host = timed(&mut || {
            on_host.unscale_("all", &optimizer.gradients()?, false)?;
            on_host.step("all", &mut optimizer)?;
            Ok(on_host.update().map(drop)?)
        })?;
        let unscale = timed(&mut || {
            kernels::gradients::unscale_(&optimizer.gradients()?, &one, false)?;
            Ok(())
        })?;
        let decided_there = timed(&mut || {
            on_device.unscale_("all", &optimizer.gradients()?, false)?;
            on_device.step("all", &mut optimizer)?;
            Ok(on_device.update()?)
        })?;
        // Takes up on the host what the device did, which is no part of the plain step that comes next.
        optimizer.step()?;
        if round >= WARMUP {
            overhead.plain.push(plain);
            overhead.host.push(host);
            overhead.device.push(decided_there);
            overhead.unscale.push(unscale);
        }
    }
    Ok(overhead)
}
