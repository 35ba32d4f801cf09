//! Errors of mixed precision.

/// A result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate. Each message names the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option outside its range.
    #[error("gradient scaler: `{name}` is {value}; expected {expected}")]
    Option {
        /// Name of the option.
        name: &'static str,
        /// Its value.
        value: f64,
        /// The valid values.
        expected: &'static str,
    },
    /// The gradients of an optimizer were unscaled twice between two updates.
    #[error(
        "gradient scaler: the gradients of optimizer `{optimizer}` are unscaled already; call `unscale_` once between two \
         updates, after the backward pass of the last micro-batch"
    )]
    UnscaledTwice {
        /// Name of the optimizer.
        optimizer: String,
    },
    /// An optimizer stepped before its gradients were unscaled and checked.
    #[error(
        "gradient scaler: the gradients of optimizer `{optimizer}` are not unscaled; call `unscale_` before the optimizer steps, \
         or `step`, which does both"
    )]
    NotUnscaled {
        /// Name of the optimizer.
        optimizer: String,
    },
    /// An optimizer stepped twice between two updates.
    #[error(
        "gradient scaler: optimizer `{optimizer}` has stepped since the last update; call `update` once after all optimizers \
         have stepped"
    )]
    SteppedTwice {
        /// Name of the optimizer.
        optimizer: String,
    },
    /// An update before any optimizer has stepped.
    #[error(
        "gradient scaler: no optimizer has stepped since the last update; call `step` for each optimizer, then `update` once"
    )]
    NothingStepped,
    /// Gradients in fp16, which cannot be unscaled without underflow.
    #[error(
        "gradient scaler: gradient {index} of optimizer `{optimizer}` is fp16; dividing it by the scale would bring back the \
         underflow that scaling prevents, with or without master weights. Keep the parameters in fp32 and let autocast cast them, \
         or use bf16 parameters, which need no scaler"
    )]
    HalfGradients {
        /// Name of the optimizer.
        optimizer: String,
        /// Index of the gradient.
        index: usize,
    },
    /// Gradients that overflow even at the minimum scale.
    #[error(
        "gradient scaler: {skipped} steps in a row had infinite or NaN gradients, the last ones at the minimum scale, {scale:e}; \
         no scale helps, so check the data and the parameters for NaN and lower the learning rate"
    )]
    Exhausted {
        /// Steps skipped in a row.
        skipped: u32,
        /// The scale.
        scale: f32,
    },
    /// A static scale at which every step overflows.
    #[error(
        "gradient scaler: {skipped} steps in a row had infinite or NaN gradients at the static scale {scale}; use a lower scale \
         or the dynamic scaler"
    )]
    TooHigh {
        /// Steps skipped in a row.
        skipped: u32,
        /// The scale.
        scale: f32,
    },
    /// The state of another scaler.
    #[error(
        "gradient scaler: the state {found} does not load into a {expected}: {reason}; use the scaler that the run was saved with"
    )]
    State {
        /// The state.
        found: String,
        /// The scaler.
        expected: &'static str,
        /// The part that does not fit.
        reason: String,
    },
    /// A dtype that autocast does not support.
    #[error("autocast: {found:?} is not a low-precision dtype; expected Half or BFloat16")]
    Dtype {
        /// The dtype.
        found: tch::Kind,
    },
    /// An error of `runtime`.
    #[error(transparent)]
    Runtime(#[from] runtime::Error),
    /// An error of `training`.
    #[error(transparent)]
    Training(#[from] training::Error),
    /// An error of libtorch.
    #[error("libtorch: {0}")]
    Torch(#[from] tch::TchError),
}
