//! What can be wrong with mixed precision.

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate. Each says what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A constant outside its range.
    #[error("gradient scaler: `{name}` is {value}; expected {expected}")]
    Option {
        /// Which.
        name: &'static str,
        /// What came.
        value: f64,
        /// What can be.
        expected: &'static str,
    },
    /// Gradients that are divided by the scale already.
    #[error(
        "gradient scaler: the gradients of optimizer `{optimizer}` are unscaled already; unscale them once between two updates, \
         after the last micro-batch's backward"
    )]
    UnscaledTwice {
        /// Its name.
        optimizer: String,
    },
    /// Gradients that are still multiplied by the scale, or that nobody has checked.
    #[error(
        "gradient scaler: optimizer `{optimizer}` was to step before its gradients were unscaled; call `unscale_` with them \
         first, or `step`, which does it"
    )]
    NotUnscaled {
        /// Its name.
        optimizer: String,
    },
    /// A second step of one optimizer before the scale was updated.
    #[error(
        "gradient scaler: optimizer `{optimizer}` has stepped since the last update; call `update` once after all optimizers \
         have stepped"
    )]
    SteppedTwice {
        /// Its name.
        optimizer: String,
    },
    /// An update that no step came before.
    #[error(
        "gradient scaler: no optimizer has stepped since the last update; call `step` for each optimizer, then `update` once"
    )]
    NothingStepped,
    /// Master gradients of a dtype whose range is the reason for scaling.
    #[error(
        "gradient scaler: gradient {index} of optimizer `{optimizer}` is fp16; dividing it by the scale would bring back the \
         underflow that scaling prevents, master weights or not. Keep the parameters in fp32 and let autocast round them, or make \
         them bf16, which needs no scaler"
    )]
    HalfGradients {
        /// Its name.
        optimizer: String,
        /// Which of its gradients.
        index: usize,
    },
    /// Gradients that are not finite at any scale.
    #[error(
        "gradient scaler: {skipped} steps in a row had infinite or NaN gradients, the last ones at the least scale, {scale:e}; no \
         scale helps, so look for NaN in the data, the parameters or the learning rate"
    )]
    Exhausted {
        /// Steps that were left out, one after another.
        skipped: u32,
        /// The scale.
        scale: f32,
    },
    /// A static scale that is always beyond the range.
    #[error(
        "gradient scaler: {skipped} steps in a row had infinite or NaN gradients at the static scale {scale}; take a lower one, or \
         the dynamic scaler, which finds it"
    )]
    TooHigh {
        /// Steps that were left out, one after another.
        skipped: u32,
        /// The scale.
        scale: f32,
    },
    /// A state that is none of this scaler.
    #[error(
        "gradient scaler: the state {found} is not of a {expected}: {reason}; give the run the scaler it was saved with"
    )]
    State {
        /// What came.
        found: String,
        /// Which scaler.
        expected: &'static str,
        /// What does not fit.
        reason: String,
    },
    /// A dtype that autocast does not compute in.
    #[error("autocast: {found:?} is no low precision; expected Half or BFloat16")]
    Dtype {
        /// What came.
        found: tch::Kind,
    },
    /// From the runtime.
    #[error(transparent)]
    Runtime(#[from] runtime::Error),
    /// From the training.
    #[error(transparent)]
    Training(#[from] training::Error),
    /// From libtorch.
    #[error("libtorch: {0}")]
    Torch(#[from] tch::TchError),
}
