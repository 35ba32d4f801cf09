//! The ways to run a forward pass, or a training step over several ranks, side by side.

use accounting::offload::Direction;
use accounting::quantity::{bytes_text, grouped};
use report::unit::human;
use serde_json::json;

use super::variants::{Variant, streaming, variants};
use super::{Conditions, StepArgs, entries, head, hiding_json, nothing_fits, ranks};
use crate::common_flags::Common;
use crate::output::{print_line, print_lines};

/// The last line of a plan over GPUs, in place of flags.
const ON_GPUS: &str = "ranks on GPUs have never run, so this is a prediction of the method; FRUGAL_TRY_NCCL=1 before `frugal launch` tries it";

/// The variants of a step, and the fastest that fits.
struct Comparison {
    variants: Vec<Variant>,
    chosen: Option<usize>,
    /// Tokens from which on loads hide behind compute, for each pass.
    hiding: Vec<(Direction, u64)>,
    /// Tokens of a rank's step.
    tokens: u64,
    ranks: u64,
    /// Micro-batches that the ranks take at a time.
    taken: u64,
}

/// Prints the ways to run a step of inference, or over several ranks.
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
    let ranks = arguments.ranks.ranks;
    let taken = ranks / arguments.ranks.sequence_parallel_size;
    let costs = arguments.costs(planned, machine, 1)?;
    let mut variants = variants(&costs, &machine.transfers, *memory, planned.tier, *on_cpu)?;
    let hiding = arguments.tokens_that_hide_loads(planned, machine, variants.last())?;
    if ranks > 1 {
        // The step of one rank alone comes last.
        let alone = std::mem::take(&mut variants);
        variants = ranks::variants(arguments, planned, machine)?;
        variants.extend(alone);
    }
    let tokens = planned.work.tokens()?;
    let rate = |variant: &Variant| {
        tokens as f64 * if variant.ranks.is_some() { taken as f64 } else { 1.0 } / variant.step.seconds
    };
    let chosen = (0..variants.len())
        .filter(|&number| variants[number].peak <= memory.device)
        .max_by(|&a, &b| rate(&variants[a]).total_cmp(&rate(&variants[b])));
    Ok(Comparison { variants, chosen, hiding, tokens, ranks, taken })
}

impl Comparison {
    fn chosen(&self) -> Option<&Variant> {
        self.chosen.map(|number| &self.variants[number])
    }

    fn json(&self, arguments: &StepArgs, conditions: &Conditions) -> anyhow::Result<serde_json::Value> {
        let mut plan = conditions.json(arguments)?;
        let variants = self.variants.iter().map(|variant| variant.json(conditions.memory.device)).collect();
        plan.extend(entries([
            ("ranks", json!(self.ranks)),
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
            lines.push(self.flags(shown, arguments, conditions));
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
        let over = match &variant.ranks {
            Some(over) => format!(
                " of {} tokens, bound by {}",
                grouped(u128::from(self.tokens) * u128::from(self.taken)),
                over.bound.name()
            ),
            None if self.ranks > 1 => format!(" of {} tokens", grouped(self.tokens.into())),
            None => String::new(),
        };
        let seconds = human(variant.step.seconds, "s");
        let text = format!("peak {}, {seconds} a step{over}, {fits}{mark}", bytes_text(variant.peak));
        (variant.name.clone(), text)
    }

    /// The parts at the peak of a variant, and its transfers.
    fn peak(&self, shown: &Variant) -> Vec<(String, String)> {
        let device = &shown.step.device;
        let mut lines = vec![("at the peak".to_owned(), device.moment.to_string())];
        lines.extend(device.parts.iter().map(|part| (format!("  {}", part.name), bytes_text(part.bytes))));
        if let Some(over) = &shown.ranks {
            lines.push(("sent by a rank".into(), bytes_text(over.sent_bytes)));
            lines.push(("waits for other ranks".into(), human(over.exposed, "s")));
        }
        if let Some(plan) = &shown.plan {
            lines.extend(streaming(plan));
            lines.extend(self.hiding.iter().map(|(pass, tokens)| {
                (format!("tokens that hide loads, {}", pass.name()), grouped((*tokens).into()))
            }));
        }
        lines
    }

    fn flags(&self, shown: &Variant, arguments: &StepArgs, conditions: &Conditions) -> (String, String) {
        if self.ranks > 1 && !conditions.on_cpu {
            return ("to run it".into(), ON_GPUS.to_owned());
        }
        let command = if arguments.is_inference() { "generate" } else { "finetune" };
        let flags = if shown.flags.is_empty() { "none are needed" } else { &shown.flags };
        (format!("flags of {command}"), flags.to_owned())
    }
}
