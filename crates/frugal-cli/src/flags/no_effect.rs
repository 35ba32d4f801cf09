//! Notes of settings that a person gave and that change nothing, or hardly mean what they say.

use frugal::Config;
use frugal::config::{MasterWeights, OptimizerRule};
use frugal::lora::{BiasTraining, LoraConfig};
use frugal::models::DecoderConfig;
use frugal::planning;
use tch::Kind;

use crate::common_flags::Common;
use crate::flags::flags_of;

/// The key of how 16-bit weights take small updates.
const MASTER_WEIGHTS: &str = "optimizer.master_weights";
/// The learning rate from which on rules that divide by the gradient's size change weights by more than their own size.
const LARGE_RATE: f64 = 1.0;

/// Says what of the optimizer's settings changes nothing for weights in `kind`, or cannot be meant.
pub(crate) fn note_optimizer(common: &Common, config: &Config, kind: Kind) {
    let optimizer = &config.optimizer;
    let trains_fp32 = match &config.adapter {
        None => !planning::trains_half(config, kind),
        // Adapters are in fp32; modules that are trained beside them are in the dtype of the weights.
        Some(adapter) => adapter.bias == BiasTraining::None && adapter.modules_to_save.is_none(),
    };
    let is_for_half = matches!(optimizer.master_weights, MasterWeights::Always | MasterWeights::Stochastic);
    if trains_fp32 && is_for_half && common.asked.has(MASTER_WEIGHTS) {
        common.note(&format!(
            "note: {} changes nothing: what is trained is in fp32, which takes small updates as it is",
            name(MASTER_WEIGHTS)
        ));
    }
    let rule = match optimizer.rule {
        OptimizerRule::RmsProp => "RMSProp",
        OptimizerRule::Adam => "Adam",
        OptimizerRule::AdamW => "AdamW",
        OptimizerRule::AdamW8bit => "8-bit AdamW",
        OptimizerRule::Lion => "Lion",
        OptimizerRule::Adafactor => "Adafactor",
        OptimizerRule::Muon => "Muon",
        OptimizerRule::Sgd | OptimizerRule::Momentum | OptimizerRule::Nesterov | OptimizerRule::AdaGrad => {
            return;
        }
    };
    if optimizer.lr > LARGE_RATE {
        common.note(&format!(
                "note: {} is {}, which is very large: a step of {rule} changes each weight by about the learning rate; usual are 1e-5 to \
                 1e-3",
                name("optimizer.lr"),
                optimizer.lr
            ),
        );
    }
}

/// Says which alternatives of the pattern of targets match none of a model's projections.
///
/// # Errors
/// An invalid pattern.
pub(crate) fn note_pattern(
    common: &Common,
    adapter: &LoraConfig,
    model: &DecoderConfig,
) -> anyhow::Result<()> {
    for unmatched in adapter.unmatched_alternatives(model)? {
        let nearest = unmatched.nearest.map_or_else(String::new, |name| format!("; did you mean `{name}`?"));
        common.note(&format!(
                "note: `target_modules` (--target-pattern): with its alternative `{}` the pattern matches none of the model's projections{nearest}",
                unmatched.alternative
            ),
        );
    }
    Ok(())
}

/// A key with its flag.
fn name(key: &str) -> String {
    flags_of(key).next().map_or_else(|| format!("`{key}`"), |flag| format!("`{key}` ({flag})"))
}
