//! The adapted projections of a fine-tuning, by the names of its model.

use frugal::Config;
use frugal::models::DecoderConfig;

use crate::common_flags::Common;

/// The key of what is adapted.
const TARGETS: &str = "adapter.target_modules";

/// The configuration with the default targets by the names that they have in a model whose projections are fused (Phi-3), and also those of
/// linear attention in a model that has some (Qwen3.5).
pub(super) fn with_own_targets(common: &Common, config: &Config, model: &DecoderConfig) -> Config {
    let mut config = config.clone();
    let default = Config::default_adapter().target_modules;
    let Some(adapter) = &mut config.adapter else { return config };
    if adapter.target_modules != default || common.origins.has(TARGETS) {
        return config;
    }
    if model.projections().iter().any(|(name, _)| name.ends_with(".qkv_proj")) {
        adapter.target_modules = Some(["qkv_proj", "o_proj"].into());
        common.note("adapts qkv_proj and o_proj, as this model calls the projections of its attention");
    } else if model.linear_layers() > 0 {
        let names = ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj"];
        adapter.target_modules = Some(names.into());
        common.note(&format!(
            "adapts in_proj_qkv, in_proj_z and out_proj, too: {} of {} layers have linear attention, which calls its projections so",
            model.linear_layers(),
            model.num_hidden_layers
        ));
    }
    config
}
