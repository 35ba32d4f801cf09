//! The adapted projections of a fine-tuning, by the names of its model.

use frugal::Config;
use frugal::models::DecoderConfig;

use crate::common_flags::Common;

/// The key of what is adapted.
const TARGETS: &str = "adapter.target_modules";

/// The configuration with the default targets by the names that they have in a model whose projections are fused (Phi-3).
pub(super) fn with_own_targets(common: &Common, config: &Config, model: &DecoderConfig) -> Config {
    let mut config = config.clone();
    let is_fused = model.projections().iter().any(|(name, _)| name.ends_with(".qkv_proj"));
    let default = Config::default_adapter().target_modules;
    if let Some(adapter) = &mut config.adapter
        && is_fused
        && adapter.target_modules == default
        && !common.origins.has(TARGETS)
    {
        adapter.target_modules = Some(["qkv_proj", "o_proj"].into());
        common.note("adapts qkv_proj and o_proj, as this model calls the projections of its attention");
    }
    config
}
