//! Mixed precision by hand: loss scalers and autocast.

mod error;
pub mod scaler;

pub use error::{Error, Result};
pub use scaler::dynamic_scale::{DynamicOptions, DynamicRule, DynamicScale};
pub use scaler::static_scale::StaticRule;
pub use scaler::{DynamicGradScaler, ScaleRule, Scaler, StaticGradScaler};
