//! What is adapted, and how, by flags.

use clap::Args;
use lora::{LoraConfig, Names};
use serde_json::Value;

/// PEFT's `LoraConfig`; each flag is known under PEFT's name too.
#[derive(Args, Clone, Debug)]
pub(crate) struct AdapterArgs {
    /// Rank
    #[arg(long, default_value_t = 8, allow_negative_numbers = true)]
    r: i64,
    /// α: the adapter's product is scaled by α/r
    #[arg(long, alias = "lora-alpha", default_value_t = 16.0, allow_negative_numbers = true)]
    alpha: f64,
    /// Probability that an element of an adapter's input is dropped
    #[arg(long, alias = "lora-dropout", default_value_t = 0.05, allow_negative_numbers = true)]
    dropout: f64,
    /// Which projections: names or their last parts, between commas, or all-linear
    #[arg(
        long,
        alias = "target-modules",
        value_name = "NAMES",
        value_delimiter = ',',
        default_value = "q_proj,k_proj,v_proj,o_proj"
    )]
    targets: Vec<String>,
    /// Which projections: a regular expression for their whole names
    #[arg(long, value_name = "REGEX", conflicts_with = "targets")]
    target_pattern: Option<String>,
    /// Scale by α/√r (rsLoRA)
    #[arg(long, alias = "use-rslora")]
    rslora: bool,
    /// Learn the length of each row of the weights apart (DoRA)
    #[arg(long, alias = "use-dora")]
    dora: bool,
    /// How adapters begin: true, false, gaussian, pissa, olora or orthogonal
    #[arg(long, alias = "init-lora-weights", default_value = "true")]
    init: String,
}

impl AdapterArgs {
    /// The configuration, for a base of this name.
    pub(crate) fn config(&self, base: &str) -> LoraConfig {
        let targets = match (&self.target_pattern, self.targets.as_slice()) {
            (Some(pattern), _) => Names::Pattern(pattern.clone()),
            (None, [one]) if one.eq_ignore_ascii_case("all-linear") => Names::Pattern(one.clone()),
            (None, names) => Names::List(names.to_vec()),
        };
        let init = match self.init.to_lowercase().as_str() {
            "true" => Value::Bool(true),
            "false" => Value::Bool(false),
            _ => Value::String(self.init.clone()),
        };
        LoraConfig {
            r: self.r,
            lora_alpha: self.alpha,
            lora_dropout: self.dropout,
            use_rslora: self.rslora,
            use_dora: self.dora,
            init_lora_weights: init,
            target_modules: Some(targets),
            base_model_name_or_path: Some(base.to_owned()),
            ..LoraConfig::default()
        }
    }
}
