//! FLOPs per token of known models over the sequence length, and the rule of thumb beside them.

use accounting::decoder_flops::{Recomputation, Workload, rule_of_thumb, step};
use accounting::recompute::{AttentionKernel, Recompute, SwigluLevel};
use accounting::{Error, presets};
use report::{Case, Environment, Metric, Record};

use super::record;

/// FLOPs of one sequence of each of `models` at 1024 tokens and, where positions allow, at longer ones.
pub(crate) fn flops(models: &[&str], environment: &Environment) -> Result<Vec<Record>, Error> {
    let mut records = Vec::new();
    for name in models {
        let model = presets::find(name)?;
        for sequence in [1024, 4096, 16384, 65536] {
            if model.family.has_learned_positions() && sequence > model.context {
                continue;
            }
            let work = Workload { batch: 1, sequence };
            let flash = Recomputation { attention: AttentionKernel::Flash, ..Recomputation::default() };
            let full = Recomputation { checkpoint: Recompute::Full, ..flash };
            let input_only = Recomputation { swiglu: SwigluLevel::InputOnly, ..flash };
            let exact = step(&model, work, &flash)?;
            let rule = rule_of_thumb(&model, work)?;
            let dense = |choice: &Recomputation| -> Result<f64, Error> {
                Ok(step(&model, work, choice)?.recomputed.dense as f64)
            };
            let metrics = [
                Metric::exact("parameters", "count", rule.parameters as f64),
                Metric::exact("product_parameters", "count", rule.product_parameters as f64),
                Metric::exact("forward_flops", "FLOP", exact.forward.dense as f64),
                Metric::exact("forward_flops_causal", "FLOP", exact.forward.causal as f64),
                Metric::exact("backward_flops", "FLOP", exact.backward.dense as f64),
                Metric::exact("recomputed_flash_flops", "FLOP", dense(&flash)?),
                Metric::exact("recomputed_input_only_flops", "FLOP", dense(&input_only)?),
                Metric::exact("recomputed_full_flops", "FLOP", dense(&full)?),
                Metric::exact("rule_over_exact", "ratio", rule.error() + 1.0),
                Metric::exact("product_rule_over_exact", "ratio", rule.product_error() + 1.0),
            ];
            let case = Case::new().with("model", *name).with("sequence", sequence);
            records.extend(metrics.map(|metric| record("accounting-flops", &case, metric, environment)));
        }
    }
    Ok(records)
}
