//! The time and memory of one gradient in each set-up, on a model wide enough that products dominate.

use std::path::Path;
use std::time::Instant;

use amp::Autocast;
use anyhow::Result;
use models::Gpt2LikeConfig;
use models::module::{LanguageModel, trainable};
use runtime::memory::Region;
use runtime::profile::{Counter, Trace, TraceConfig, range};
use tch::{Device, Tensor};
use trace::{Composition, Profile};
use training::accumulation::{MicroBatches, fetch, forward};
use training::batches::Synthetic;

use super::setup::{Parts, Scales, Setup};
use super::training::gpt2_like;

/// Sizes.
#[derive(Debug, Clone)]
pub(crate) struct Sizes {
    /// The model.
    pub model: Gpt2LikeConfig,
    /// Rows of the batch, each as long as the model allows.
    pub rows: usize,
    /// Where.
    pub device: Device,
    /// Seed of weights and data.
    pub seed: u64,
}

/// A model that computes the gradient of one batch again and again.
#[derive(Debug)]
pub(crate) struct Gradient {
    model: Box<dyn LanguageModel>,
    parts: Parts,
    batch: MicroBatches,
}

/// The cost of a gradient.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Cost {
    /// Seconds of forward.
    pub forward: f64,
    /// Seconds of backward, from the scaled loss.
    pub backward: f64,
    /// Seconds of dividing by the scale and checking, with the norm.
    pub unscale: f64,
    /// The most bytes that were live, gradients among them, beyond the model.
    pub peak_bytes: u64,
}

/// Thread seconds of one gradient by the kind of operator, from the profiler.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct OperatorSeconds {
    /// Matrix products, with the casts inside them.
    pub products: f64,
    /// Copies of tensors to another dtype or layout.
    pub copies: f64,
    /// Everything else: attention, norms, activations, additions, the loss.
    pub rest: f64,
}

impl OperatorSeconds {
    fn new(composition: &Composition) -> Self {
        let mut seconds = Self::default();
        for operator in &composition.operators {
            let name = operator.name.as_str();
            let is = |names: &[&str]| names.iter().any(|wanted| name.contains(wanted));
            let kind = if is(&["mm", "matmul", "matvec", "linear", "product"]) && !is(&["scaled_dot_product"])
            {
                &mut seconds.products
            } else if is(&["copy", "cast", "quantize"]) {
                &mut seconds.copies
            } else {
                &mut seconds.rest
            };
            *kind += operator.seconds;
        }
        seconds
    }
}

impl Gradient {
    /// The model and its batch.
    ///
    /// # Errors
    /// Errors of the model and of the scaler.
    pub(crate) fn new(setup: Setup, sizes: &Sizes, scales: &Scales) -> Result<Self> {
        let &Sizes { ref model, rows, device, seed } = sizes;
        runtime::random::seed(seed)?;
        let parts = setup.parts(scales)?;
        let mut data = Synthetic {
            seed,
            vocabulary: model.vocab_size,
            rows,
            length: model.max_length as usize,
            noise: 1,
            batches: None,
            device,
            position: 0,
        };
        let batch =
            fetch(&mut data, 1)?.ok_or_else(|| training::Error::config("rows", "0; expected at least 1"))?;
        Ok(Self { model: gpt2_like(model, model.vocab_size, parts.weights, device)?, parts, batch })
    }

    /// Computes the gradient once under the profiler, whose trace is written to `path`.
    ///
    /// # Errors
    /// Errors of [`Gradient::compute`] and of the profiler.
    pub(crate) fn profile(&mut self, path: &Path) -> Result<OperatorSeconds> {
        let trace = Trace::start(TraceConfig { cuda: false, shapes: false, memory: false })?;
        {
            let _step = range("step");
            self.compute()?;
        }
        trace.save(path)?;
        Ok(OperatorSeconds::new(&Composition::new(&Profile::read(path)?)?))
    }

    /// Computes the gradient once and returns the operators that multiply, by their share of the FLOPs: "aten::_scaled_mm 97 %, …".
    ///
    /// # Errors
    /// Errors of [`Gradient::compute`] and of the counter.
    pub(crate) fn multiplied(&mut self) -> Result<String> {
        let counter = Counter::start()?;
        self.compute()?;
        let counts = counter.finish()?;
        let total = counts.total.flops.dense.max(1) as f64;
        let operators = counts.by_op.iter().filter(|operator| operator.total.flops.dense > 0);
        let shares = operators.map(|operator| {
            format!("{} {:.1} %", operator.name, 100.0 * operator.total.flops.dense as f64 / total)
        });
        Ok(shares.collect::<Vec<String>>().join(", "))
    }

    /// Computes the gradient once, and lets it go.
    ///
    /// # Errors
    /// Errors of the model and of the scaler.
    pub(crate) fn compute(&mut self) -> Result<Cost> {
        let device = self.batch.batches[0].tokens.device();
        let region = Region::start(device)?;
        let started = Instant::now();
        let _within = self.parts.autocast.as_ref().map(Autocast::enter);
        let sum = forward(&*self.model, &self.batch.batches[0], true, false)?.sum;
        let loss = self.parts.scaler.scale(&sum.f_div_scalar(self.batch.denominator())?)?;
        runtime::device::synchronize(device)?;
        let forward = started.elapsed().as_secs_f64();
        runtime::autograd::backward(&[&loss])?;
        runtime::device::synchronize(device)?;
        let backward = started.elapsed().as_secs_f64() - forward;
        let parameters = trainable(&*self.model);
        let grads: Vec<Tensor> =
            parameters.iter().map(|(_, parameter)| parameter.grad()).filter(Tensor::defined).collect();
        let _ = self.parts.scaler.unscale_(&grads, true)?;
        self.parts.scaler.update(false)?;
        runtime::device::synchronize(device)?;
        let unscale = started.elapsed().as_secs_f64() - forward - backward;
        let peak_bytes = region.finish()?.peak_above_start();
        drop(grads);
        for (_, parameter) in parameters {
            runtime::autograd::set_grad(parameter, None)?;
        }
        Ok(Cost { forward, backward, unscale, peak_bytes })
    }
}
