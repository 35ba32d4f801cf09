//! The ways to run a training step of one process, and the fastest that fits.

use accounting::activation_plan::LayerPlan;
use accounting::candidates::{Allowed, Batch, Candidate, Job, Layers, OffloadedLayers, Placement, Tier};
use accounting::lora::LowRank;
use accounting::offload::sizes::Choices;
use accounting::offload::{Budget, Condition, Direction, MOST_PLANNED_SLOTS, OptimizerPlace, least_tokens};
use accounting::quantity::{bytes_text, grouped};
use frugal::config::{OffloadTier, TrainingConfig};
use frugal::planning::{self, MachineRates};
use report::unit::human;
use serde_json::json;
use tch::Device;

use super::super::super::Common;
use super::super::super::output::{print_line, print_lines, print_text};
use super::super::super::run_plan::{Columns, candidates_json, candidates_table};
use super::{PlannedStep, StepArgs, Work, blank, head, nothing_fits};

/// Prints the ways to run the step.
///
/// # Errors
/// A model whose activations are not predicted; nothing that fits.
pub(super) fn run(
    common: &Common,
    arguments: &StepArgs,
    planned: &PlannedStep,
    machine: &MachineRates,
    budget: Budget,
) -> anyhow::Result<()> {
    let &PlannedStep { ref model, work, kind, device, tier, weights, .. } = planned;
    let full = arguments.method == Work::Full;
    let on_cpu = device == Device::Cpu && arguments.hardware.is_none();
    let batch = Batch { work, labelled: None };
    let job = Job {
        model: model.clone(),
        lora: (!full).then(|| LowRank { on_cpu, ..arguments.lora(device) }),
        choices: Choices {
            packs: on_cpu,
            widens: on_cpu && planning::widens(kind, device),
            ..planning::choices(kind, machine, arguments.loss_chunk)
        },
        largest: vec![batch],
        mean: batch,
        evaluation: None,
        accumulation: arguments.accumulation.unwrap_or(TrainingConfig::default().accumulation as u64),
        clips: true,
        rates: machine.transfers,
        file_load: machine.transfers.load,
        file_optimizer: machine.transfers.host_optimizer,
        on_cpu,
    };
    // In host memory a CPU's layers take what they took before.
    let offloads = !(on_cpu && tier == OffloadTier::Host) || arguments.offload.is_some();
    let offloaded = OffloadedLayers {
        tiers: vec![if tier == OffloadTier::Host { Tier::Host } else { Tier::File }],
        most_slots: MOST_PLANNED_SLOTS,
        resident: None,
        keep: None,
        optimizer: if full { OptimizerPlace::Host } else { OptimizerPlace::Device },
    };
    let layers = arguments.offload.is_none().then_some(Layers::Any);
    let allowed = Allowed { layers, offloaded: offloads.then_some(offloaded), splits: true, rows: None };
    let found = job.search(&allowed, budget)?;
    let columns = Columns { is_timed: true, epoch: None };
    let chosen = found.chosen();
    let shown = chosen.or_else(|| found.least());
    let hiding = shown.map_or(Ok(Vec::new()), |shown| tokens_that_hide_loads(&job, shown, full))?;
    if common.json {
        print_line(&json!({
            "model": arguments.model.name(),
            "model_bytes": weights,
            "parameters": model.parameters()?,
            "budget": budget.device,
            "flops": machine.flops,
            "memory_rate": machine.bandwidth,
            "link_rate": machine.transfers.load,
            "ranks": 1,
            "variants": candidates_json(&found, columns),
            "chosen": chosen.map(Candidate::name),
            "flags": shown.map(|shown| flags(shown, job.model.layers as usize)),
            "with_more_memory": found.faster().map(Candidate::name),
            "with_less_memory": found.cheaper().map(Candidate::name),
            "tokens_that_hide_loads": hiding.iter()
                .map(|(pass, tokens)| json!({ "pass": pass.name(), "tokens": tokens })).collect::<Vec<_>>(),
        }));
    } else {
        let mut lines = head(planned, machine, arguments.hardware.map_or("measured", |gpu| gpu.name))?;
        lines[1] = ("budget for tensors".to_owned(), bytes_text(budget.device));
        print(&lines);
        print_text(&format!("\n{}\n", candidates_table(&found, columns, &|tensors| tensors)));
        let mut lines = Vec::new();
        if let Some(shown) = shown {
            lines.push(("at the peak".to_owned(), shown.peak.moment.to_string()));
            let parts = shown.peak.parts.iter();
            lines.extend(parts.map(|part| (format!("  {}", part.name), bytes_text(part.bytes))));
            if shown.host_bytes > 0 {
                lines.push(("in host memory".into(), bytes_text(shown.host_bytes)));
            }
            lines.extend(hiding.iter().map(|(pass, tokens)| {
                (format!("tokens that hide loads, {}", pass.name()), grouped((*tokens).into()))
            }));
            let other = |one: &Candidate| {
                format!("{}: {}, {} a step", bytes_text(one.peak.total), one.name(), human(one.seconds, "s"))
            };
            lines.extend(found.faster().map(|faster| ("more memory".to_owned(), other(faster))));
            lines.extend(found.cheaper().map(|cheaper| ("less memory".to_owned(), other(cheaper))));
            lines.push(("flags of finetune".into(), flags(shown, job.model.layers as usize)));
        }
        lines.retain(|line| *line != blank());
        print(&lines);
    }
    match chosen {
        Some(_) => Ok(()),
        None => Err(nothing_fits(budget, found.least().map(Candidate::device_bytes))),
    }
}

fn print(lines: &[(String, String)]) {
    print_lines(lines.iter().map(|(name, text)| (name.as_str(), text.as_str())));
}

/// The flags of a training that runs in this way.
fn flags(candidate: &Candidate, layers: usize) -> String {
    let mut flags = Vec::new();
    match &candidate.placement {
        Placement::Resident(layers) => {
            let mixed = layers.iter().any(|kept| *kept != layers[0]);
            match layers.first() {
                Some(LayerPlan::KeepAll) if !mixed => {}
                Some(LayerPlan::RecomputeAll) if !mixed => flags.push("--activations recompute".to_owned()),
                // Found again under the same budget.
                _ => flags.push("--budget BYTES".to_owned()),
            }
        }
        Placement::Offloaded { tier, ring, resident, keep, optimizer } => {
            let tier = if *tier == Tier::Host { "host" } else { "file" };
            flags.push(format!("--offload {tier} --ring {ring}"));
            if !resident.is_empty() {
                let layers: Vec<String> = resident.iter().map(ToString::to_string).collect();
                flags.push(format!("--resident {}", layers.join(",")));
            }
            match keep.len() {
                0 => flags.push("--activations recompute".to_owned()),
                kept if kept == layers => flags.push("--activations keep".to_owned()),
                _ => flags.push(format!("--set 'offload.keep={}'", format!("{keep:?}").replace(' ', ""))),
            }
            if *optimizer == OptimizerPlace::Host {
                flags.push("--optimizer-on host".to_owned());
            }
        }
    }
    flags.extend(candidate.rows.map(|rows| format!("--rows-at-once {rows}")));
    if flags.is_empty() { "none are needed".to_owned() } else { flags.join(" ") }
}

/// Tokens of a pass from which on loads hide behind compute, for each pass; none without offloaded layers.
fn tokens_that_hide_loads(
    job: &Job,
    candidate: &Candidate,
    full: bool,
) -> anyhow::Result<Vec<(Direction, u64)>> {
    let Placement::Offloaded { resident, .. } = &candidate.placement else { return Ok(Vec::new()) };
    let backward = if full { Direction::Backward } else { Direction::FrozenBackward };
    let condition = Condition {
        flops: job.choices.flops,
        link: job.rates.load,
        bytes_per_parameter: job.choices.recipe.parameters.storage_bits() as f64 / 8.0,
        resident_share: resident.len() as f64 / job.model.layers.max(1) as f64,
    };
    let of = |pass: Direction| Ok((pass, least_tokens(&condition, pass)?));
    [Direction::Forward, backward].into_iter().map(of).collect()
}
