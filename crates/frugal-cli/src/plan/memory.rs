//! `frugal plan memory`: the parts of the way to run a step that `frugal plan` chooses.

use accounting::memory::Item;
use accounting::offload::{Footprint, Moment};
use accounting::quantity::{bytes_text, count_text, grouped};
use serde_json::{Map, Value, json};

use super::Answer;
use super::step::{StepArgs, Ways, bytes, nothing_fits, training_ways};
use super::table::{rule, table};
use crate::common_flags::Common;

#[derive(clap::Args)]
pub(crate) struct Memory {
    #[command(flatten)]
    step: StepArgs,
    /// List the tensors that a layer keeps too
    #[arg(long)]
    list: bool,
}

const BAR_WIDTH: usize = 80;

impl Memory {
    pub(crate) fn answer(&self, common: &Common) -> anyhow::Result<Answer> {
        let (conditions, ways) = training_ways(common, &self.step)?;
        let planned = &conditions.planned;
        let Ways { job, result, .. } = &ways;
        // Where nothing fits, what takes the least.
        let Some(candidate) = result.chosen().or_else(|| result.least()) else {
            anyhow::bail!("there is no way to run this step; leave out a flag that forbids one");
        };
        let parameters = planned.model.parameters()?;
        let available = result.budget.device;
        let moments = largest_of_each(job.moments(candidate)?);
        let kept = job.kept_tensors(candidate)?;
        let name = self.step.model.name();
        let plan = format!("{}: {}", planned.work_text(), candidate.name());

        let mut text =
            format!("{name}, {} parameters ({})\n", grouped(parameters.into()), count_text(parameters));
        text += &format!("{plan}\n\n{}", parts_table(&moments, candidate.peak.moment));
        text += &format!("\n{}\n{}", bar(&candidate.peak, available), verdict(&candidate.peak, available));
        if candidate.host_bytes > 0 {
            text += &format!("in host memory: {}\n", bytes_text(candidate.host_bytes));
        }
        if self.list {
            let rows: Vec<Vec<String>> =
                kept.iter().map(|item| vec![item.name.to_owned(), bytes_text(item.bytes)]).collect();
            text += &format!("\n{}", table(&["kept by a layer that keeps everything", "bytes"], &rows));
        }
        text += "\nNot counted: the program and its libraries (on a GPU the CUDA context), and the allocator's \
                 fragmentation.\n";

        let bytes_of = |items: &[Item]| -> Map<String, Value> {
            items.iter().map(|item| (item.name.to_owned(), item.bytes.into())).collect()
        };
        let moments = moments.iter().map(|one| {
            json!({
                "moment": one.moment.to_string(), "parts": bytes_of(&one.parts), "total_bytes": one.total,
            })
        });
        let json = json!({
            "model": name,
            "plan": plan,
            "parameters": parameters,
            "peak_bytes": candidate.peak.total,
            "peak_moment": candidate.peak.moment.to_string(),
            "host_bytes": candidate.host_bytes,
            "available_bytes": available,
            "fits": result.fits(candidate),
            "moments": moments.collect::<Vec<_>>(),
            "kept_by_a_layer": kept.iter()
                .map(|item| json!({"name": item.name, "bytes": item.bytes})).collect::<Vec<_>>(),
        });
        let failure = match result.chosen() {
            Some(_) => None,
            None => Some(nothing_fits(&self.step, &conditions, bytes(result))),
        };
        Ok(Answer { text, json, failure })
    }
}

/// A kind of moment, for the head of a column.
fn kind(moment: Moment) -> &'static str {
    match moment {
        Moment::Teacher => "teacher",
        Moment::Forward(_) => "forward",
        Moment::Head => "head",
        Moment::Recomputation(_) => "recomputation",
        Moment::Backward(_) => "backward",
        Moment::Embedding => "embedding",
        Moment::Update => "optimizer step",
    }
}

/// The first of the largest moments of each kind, in the order of the step.
fn largest_of_each(moments: Vec<Footprint>) -> Vec<Footprint> {
    let mut largest: Vec<Footprint> = Vec::new();
    for moment in moments {
        match largest.iter_mut().find(|one| kind(one.moment) == kind(moment.moment)) {
            Some(one) if moment.total > one.total => *one = moment,
            Some(_) => {}
            None => largest.push(moment),
        }
    }
    largest
}

/// The names of all parts, in the order in which they appear.
fn part_names(moments: &[Footprint]) -> Vec<&'static str> {
    let mut names = Vec::new();
    for item in moments.iter().flat_map(|moment| &moment.parts) {
        if !names.contains(&item.name) {
            names.push(item.name);
        }
    }
    names
}

fn parts_table(moments: &[Footprint], peak: Moment) -> String {
    let heads = moments.iter().map(|one| {
        let mark = if one.moment == peak { " *" } else { "" };
        kind(one.moment).to_owned() + mark
    });
    let heads: Vec<String> = std::iter::once("part".to_owned()).chain(heads).collect();
    let shown = |bytes: u64| if bytes == 0 { "–".into() } else { bytes_text(bytes) };
    let row = |name: &'static str| {
        let cells = moments.iter().map(|one| shown(one.bytes(name)));
        std::iter::once(name.to_owned()).chain(cells).collect()
    };
    let mut rows: Vec<Vec<String>> = part_names(moments).into_iter().map(row).collect();
    rows.push(rule());
    let totals = moments.iter().map(|one| bytes_text(one.total));
    rows.push(std::iter::once("total".to_owned()).chain(totals).collect());
    table(&heads.iter().map(String::as_str).collect::<Vec<_>>(), &rows)
}

/// A bar of the parts at the peak, each by its first letter, as long as the budget or the peak.
fn bar(peak: &Footprint, available: u64) -> String {
    let all = u128::from(available.max(peak.total).max(1));
    let (mut filled, mut bytes, mut text) = (0, 0u128, String::new());
    for part in &peak.parts {
        bytes += u128::from(part.bytes);
        let end = ((bytes * BAR_WIDTH as u128 + all / 2) / all) as usize;
        let letter = part.name.chars().next().unwrap_or(' ');
        text.extend(std::iter::repeat_n(letter, end - filled));
        filled = end;
    }
    text.extend(std::iter::repeat_n('·', BAR_WIDTH - filled));
    format!("[{text}]")
}

fn verdict(peak: &Footprint, available: u64) -> String {
    let share = 100.0 * peak.total as f64 / available.max(1) as f64;
    let fits = if peak.total <= available { "fits" } else { "does NOT fit" };
    format!(
        "* peak: {} in the {}, {share:.1} % of the {} for tensors: {fits}\n",
        bytes_text(peak.total),
        peak.moment,
        bytes_text(available)
    )
}
