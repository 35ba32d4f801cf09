//! Mixed precision by hand: loss scalers and autocast.

pub mod autocast;
mod error;
pub mod scaler;

pub use autocast::Autocast;
pub use autocast::cast_cache::CastStatistics;
pub use error::{Error, Result};
pub use scaler::dynamic_scale::{DynamicOptions, DynamicRule, DynamicScale};
pub use scaler::static_scale::StaticRule;
pub use scaler::{DynamicGradScaler, ScaleRule, Scaler, StaticGradScaler};
