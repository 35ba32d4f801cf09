//! What is adapted, and how, by flags.

use clap::Args;
use frugal::Config;
use frugal::lora::{LoraConfig, Names};
use serde_json::Value;

use crate::program::flags::put;

/// PEFT's `LoraConfig`; each flag is known under PEFT's name too.
#[derive(Args, Clone, Debug)]
pub(crate) struct AdapterArgs {
    /// Rank [default: 8]
    #[arg(long, aliases = ["rank", "lora-r"], allow_negative_numbers = true)]
    r: Option<i64>,
    /// α: the adapter's product is scaled by α/r [default: 16]
    #[arg(long, alias = "lora-alpha", allow_negative_numbers = true)]
    alpha: Option<f64>,
    /// Dropout probability of an adapter's input [default: 0.05]
    #[arg(long, alias = "lora-dropout", allow_negative_numbers = true)]
    dropout: Option<f64>,
    /// Projections to adapt: names or their last parts, separated by commas, or all-linear [default: q_proj,k_proj,v_proj,o_proj]
    #[arg(long, alias = "target-modules", value_name = "NAMES", value_delimiter = ',')]
    targets: Option<Vec<String>>,
    /// Projections to adapt: a regular expression that matches the whole name
    #[arg(long, value_name = "REGEX", conflicts_with = "targets")]
    target_pattern: Option<String>,
    /// Scale by α/√r (rsLoRA)
    #[arg(long, alias = "use-rslora")]
    rslora: bool,
    /// Learn the magnitude of each row of the weights separately (DoRA)
    #[arg(long, alias = "use-dora")]
    dora: bool,
    /// How adapters are initialised: true, false, gaussian, pissa, olora or orthogonal [default: true]
    #[arg(long, alias = "init-lora-weights")]
    init: Option<String>,
}

impl AdapterArgs {
    /// Whether DoRA is asked for.
    pub(crate) fn is_dora(&self) -> bool {
        self.dora
    }

    /// Whether any flag was given.
    pub(crate) fn is_given(&self) -> bool {
        let Self { r, alpha, dropout, targets, target_pattern, rslora, dora, init } = self;
        r.is_some()
            || alpha.is_some()
            || dropout.is_some()
            || targets.is_some()
            || target_pattern.is_some()
            || *rslora
            || *dora
            || init.is_some()
    }

    /// `config` with what the flags say.
    pub(crate) fn apply(&self, mut config: LoraConfig) -> LoraConfig {
        put(&mut config.r, self.r);
        put(&mut config.lora_alpha, self.alpha);
        put(&mut config.lora_dropout, self.dropout);
        config.use_rslora |= self.rslora;
        config.use_dora |= self.dora;
        match (&self.target_pattern, self.targets.as_deref()) {
            (Some(pattern), _) => config.target_modules = Some(Names::Pattern(pattern.clone())),
            (None, Some([one])) if one.eq_ignore_ascii_case("all-linear") => {
                config.target_modules = Some(Names::Pattern(one.clone()));
            }
            (None, Some(names)) => {
                let names = names.iter().map(|name| name.trim().to_owned()).collect();
                config.target_modules = Some(Names::List(names));
            }
            (None, None) => {}
        }
        if let Some(init) = &self.init {
            config.init_lora_weights = match init.to_lowercase().as_str() {
                "true" => Value::Bool(true),
                "false" => Value::Bool(false),
                _ => Value::String(init.clone()),
            };
        }
        config
    }

    /// The configuration, for a base of this name.
    pub(crate) fn config(&self, base: &str) -> LoraConfig {
        let base_model_name_or_path = Some(base.to_owned());
        self.apply(LoraConfig { base_model_name_or_path, ..Config::default_adapter() })
    }
}
