//! The ways to run a forward pass, side by side.

use accounting::offload::Direction;
use accounting::quantity::{bytes_text, grouped};
use report::unit::human;
use serde_json::json;

use super::variants::{Variant, streaming, variants};
use super::{Conditions, StepArgs, entries, head, hiding_json, nothing_fits};
use crate::common_flags::Common;
use crate::output::{print_line, print_lines};

/// The variants of a step, and the fastest that fits.
struct Comparison {
    variants: Vec<Variant>,
    chosen: Option<usize>,
    /// Tokens from which on loads hide behind compute, for each pass.
    hiding: Vec<(Direction, u64)>,
}

/// Prints the ways to run a step of inference.
///
/// # Errors
/// A model whose activations are not predicted; nothing that fits.
pub(super) fn run(common: &Common, arguments: &StepArgs, conditions: &Conditions) -> anyhow::Result<()> {
    let comparison = compare(arguments, conditions)?;
    if common.json {
        print_line(&comparison.json(arguments, conditions)?);
    } else {
        let lines = comparison.lines(arguments, conditions)?;
        print_lines(lines.iter().map(|(name, text)| (name.as_str(), text.as_str())));
    }
    match comparison.chosen {
        Some(_) => Ok(()),
        None => Err(nothing_fits(
            arguments,
            conditions,
            comparison.variants.iter().map(|variant| (variant.peak, 0)),
        )),
    }
}

fn compare(arguments: &StepArgs, conditions: &Conditions) -> anyhow::Result<Comparison> {
    let Conditions { planned, machine, memory, on_cpu, .. } = conditions;
    let costs = arguments.costs(planned, machine)?;
    let variants = variants(&costs, &machine.transfers, *memory, planned.tier, *on_cpu)?;
    let hiding = arguments.tokens_that_hide_loads(planned, machine, variants.last())?;
    let fitting = (0..variants.len()).filter(|&number| variants[number].peak <= memory.device);
    let chosen = fitting.min_by(|&a, &b| variants[a].step.seconds.total_cmp(&variants[b].step.seconds));
    Ok(Comparison { variants, chosen, hiding })
}

impl Comparison {
    fn chosen(&self) -> Option<&Variant> {
        self.chosen.map(|number| &self.variants[number])
    }

    fn json(&self, arguments: &StepArgs, conditions: &Conditions) -> anyhow::Result<serde_json::Value> {
        let mut plan = conditions.json(arguments)?;
        let variants = self.variants.iter().map(|variant| variant.json(conditions.memory.device)).collect();
        plan.extend(entries([
            ("ranks", json!(1)),
            ("variants", variants),
            ("chosen", json!(self.chosen().map(|variant| variant.name.as_str()))),
            ("tokens_that_hide_loads", hiding_json(&self.hiding)),
        ]));
        Ok(plan.into())
    }

    fn lines(&self, arguments: &StepArgs, conditions: &Conditions) -> anyhow::Result<Vec<(String, String)>> {
        let blank = || (String::new(), String::new());
        let mut lines = head(arguments, conditions)?;
        lines.push(blank());
        let table = self.variants.iter().enumerate();
        lines.extend(table.map(|(number, variant)| self.line(number, variant, conditions.memory.device)));
        if let Some(shown) = self.chosen().or(self.variants.last()) {
            lines.push(blank());
            lines.extend(self.peak(shown));
            let flags = if shown.flags.is_empty() { "none are needed" } else { &shown.flags };
            lines.push(("flags of generate".into(), flags.to_owned()));
        }
        Ok(lines)
    }

    /// A variant with its peak and its time.
    fn line(&self, number: usize, variant: &Variant, available: u64) -> (String, String) {
        let fits = match variant.peak.checked_sub(available) {
            None | Some(0) => "fits".to_owned(),
            Some(excess) => format!("{} too much", bytes_text(excess)),
        };
        let mark = if self.chosen == Some(number) { "; the fastest that fits" } else { "" };
        let seconds = human(variant.step.seconds, "s");
        let text = format!("peak {}, {seconds} a step, {fits}{mark}", bytes_text(variant.peak));
        (variant.name.clone(), text)
    }

    /// The parts at the peak of a variant, and its transfers.
    fn peak(&self, shown: &Variant) -> Vec<(String, String)> {
        let device = &shown.step.device;
        let mut lines = vec![("at the peak".to_owned(), device.moment.to_string())];
        lines.extend(device.parts.iter().map(|part| (format!("  {}", part.name), bytes_text(part.bytes))));
        if let Some(plan) = &shown.plan {
            lines.extend(streaming(plan));
            lines.extend(self.hiding.iter().map(|(pass, tokens)| {
                (format!("tokens that hide loads, {}", pass.name()), grouped((*tokens).into()))
            }));
        }
        lines
    }
}
