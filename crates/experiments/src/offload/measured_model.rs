//! A model, offloaded or not, with tokens to read.

use std::time::Instant;

use fused_ce::{Chunk, LinearCrossEntropy};
use models::init::Init;
use models::module::{Context, Input, LanguageModel, trainable};
use models::{DecoderConfig, Llama};
use offload::{Offload, OffloadConfig};
use runtime::autograd::{backward, set_grad};
use runtime::device;
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

/// Tokens whose logits exist at a time in training.
pub(crate) const HEAD_TOKENS: i64 = 256;

/// Seconds of the two passes of a training step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Passes {
    pub(crate) forward: f64,
    pub(crate) backward: f64,
}

impl Passes {
    pub(crate) fn total(self) -> f64 {
        self.forward + self.backward
    }
}

/// A model with tokens to read.
pub(crate) struct MeasuredModel {
    pub(crate) model: Llama,
    pub(crate) offload: Option<Offload>,
    pub(crate) tokens: Tensor,
    pub(crate) device: Device,
}

impl MeasuredModel {
    /// A model with random weights, its layers offloaded if `options` are given, that reads one row of tokens. Its training head
    /// holds the logits of [`HEAD_TOKENS`] tokens at a time.
    ///
    /// # Errors
    /// Too little memory; what `options` ask for and cannot have.
    pub(crate) fn new(
        config: &DecoderConfig,
        (kind, device): (Kind, Device),
        options: Option<&OffloadConfig>,
        (tokens, seed): (i64, u64),
    ) -> anyhow::Result<Self> {
        runtime::random::seed(seed)?;
        let (mut model, offload) = match options {
            None => (Llama::new(config, (kind, device))?, None),
            Some(options) => {
                let init = Init::Normal { std: config.initializer_range };
                let (model, offload) = Offload::assemble(config, init, kind, options)?;
                (model, Some(offload))
            }
        };
        let chunk = Some(Chunk::Tokens(HEAD_TOKENS));
        LinearCrossEntropy { chunk, ..LinearCrossEntropy::default() }.install(&mut model)?;
        let tokens = random_tokens(config.vocab_size, &[1, tokens], seed, device)?;
        Ok(Self { model, offload, tokens, device })
    }

    /// Reads all tokens, and gives the last one's logits. Returns the seconds.
    ///
    /// # Errors
    /// Errors of the model.
    pub(crate) fn infer(&self) -> anyhow::Result<f64> {
        let _no_grad = tch::no_grad_guard();
        device::synchronize(self.device)?;
        let began = Instant::now();
        let hidden = self.model.hidden(&Input::new(&self.tokens))?;
        let last = hidden.f_narrow(1, self.tokens.size()[1] - 1, 1)?;
        drop(hidden);
        let _logits = self.model.head().logits(&last, &Context::default())?;
        device::synchronize(self.device)?;
        Ok(began.elapsed().as_secs_f64())
    }

    /// Computes gradients, which stay.
    ///
    /// # Errors
    /// Errors of the model.
    pub(crate) fn gradients(&self) -> anyhow::Result<Passes> {
        device::synchronize(self.device)?;
        let began = Instant::now();
        let context = Context { training: true, ..Context::default() };
        let loss =
            self.model.loss(&Input { tokens: &self.tokens, positions: None, context }, &self.tokens)?;
        let mean = loss.sum.f_div_scalar(self.tokens.numel() as f64)?;
        drop(loss);
        device::synchronize(self.device)?;
        let forward = began.elapsed().as_secs_f64();
        backward(&[&mean])?;
        device::synchronize(self.device)?;
        Ok(Passes { forward, backward: began.elapsed().as_secs_f64() - forward })
    }

    /// Drops the gradients.
    ///
    /// # Errors
    /// Errors of libtorch.
    pub(crate) fn drop_gradients(&self) -> anyhow::Result<()> {
        for (_, tensor) in trainable(&self.model) {
            set_grad(tensor, None)?;
        }
        Ok(())
    }

    /// The trained parameters, for an optimizer.
    pub(crate) fn parameters(&self) -> Vec<(String, Tensor)> {
        trainable(&self.model).into_iter().map(|(name, tensor)| (name, tensor.shallow_clone())).collect()
    }
}

/// Returns random tokens, the same for one seed.
///
/// # Errors
/// A shape beyond memory.
pub(crate) fn random_tokens(
    vocabulary: i64,
    shape: &[i64],
    seed: u64,
    device: Device,
) -> anyhow::Result<Tensor> {
    let drawn =
        Generator::new(seed)?.uniform(shape, (0.0, vocabulary as f64), (Kind::Double, Device::Cpu))?;
    let tokens = drawn.f_floor()?.f_to_kind(Kind::Int64)?.f_clamp(0, vocabulary - 1)?;
    Ok(tokens.f_to_device(device)?)
}
