//! The inverse questions: the largest batch, the longest row and the largest model whose step fits a budget.
//!
//! A case fits if one of its candidates does ([`candidates`](crate::candidates)). The least bytes of a candidate grow with the batch, the row
//! and the model (but for a loss in chunks, which are smaller where one more begins), so a bisection finds an answer `n`: a step at `n`
//! fits, a step at `n + 1` does not. A case whose bytes exceed 64 bits does not fit either.
//!
//! "The largest model" needs a rule of growth. Here everything but the vocabulary, the context and the head size
//! grows by the same factor `n / q` over a template, where `q` is its number of layers (or of key-value heads, if
//! there are more): GPT-2 small (12 layers, 12 heads, 768 wide) at `n = 25` has 25 layers, 25 heads and is 1600 wide.

use crate::candidates::{Allowed, Batch, Candidate, Job, Layers, OffloadedLayers};
use crate::decoder_flops::Workload;
use crate::exact::product;
use crate::model::{Decoder, ExpertSizes, Family, LinearSizes, Sizes, WindowedLayers};
use crate::offload::AvailableMemory;
use crate::quantity::bytes_text;
use crate::{Error, exact};

/// Why the next larger case does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// It exceeds the memory.
    Memory,
    /// It exceeds the model's positions.
    Positions,
    /// It has more layers than are searched.
    Layers,
}

/// The largest case that fits.
#[derive(Clone, Debug, PartialEq)]
pub struct Fit<T> {
    /// The case.
    pub largest: T,
    /// The fastest way to run its step within the budget.
    pub candidate: Candidate,
    /// The limit.
    pub limit: Limit,
}

/// Returns the largest batch whose rows, as long as those of `job`, go through the model at once.
///
/// # Errors
/// Nothing fits; as [`Job::search`].
pub fn largest_batch(job: &Job, allowed: &Allowed, budget: AvailableMemory) -> Result<Fit<u64>, Error> {
    let Workload { sequence, .. } = job.widest().work;
    let at_once = Allowed { splits: false, rows: None, ..allowed.clone() };
    let sized = |batch| Ok(with_work(job, Workload { batch, sequence }));
    search("batch", (&at_once, job.model.layers), budget, (job.widest().work.batch, u64::MAX), sized)
}

/// Returns the most positions of a row in batches of as many rows as `job` has. The model's positions are a limit too.
///
/// # Errors
/// As [`largest_batch`].
pub fn longest_row(job: &Job, allowed: &Allowed, budget: AvailableMemory) -> Result<Fit<u64>, Error> {
    let Workload { batch, .. } = job.widest().work;
    let sized = |sequence| Ok(with_work(job, Workload { batch, sequence }));
    search("row", (allowed, job.model.layers), budget, (job.widest().work.sequence, job.model.context), sized)
}

/// Returns the largest model of the proportions of `job`'s. Plans and lists of layers in `allowed` are stretched to its layers.
///
/// # Errors
/// As [`largest_batch`].
pub fn largest_model(job: &Job, allowed: &Allowed, budget: AvailableMemory) -> Result<Fit<Decoder>, Error> {
    let template = &job.model;
    let sized = |n| Ok(Job { model: scaled(template, n)?, ..job.clone() });
    let highest = (MOST_LAYERS / template.layers).max(1).saturating_mul(template_size(template));
    let fit = search("model", (allowed, template.layers), budget, (template_size(template), highest), sized)?;
    let limit = if fit.limit == Limit::Memory { Limit::Memory } else { Limit::Layers };
    Ok(Fit { largest: scaled(template, fit.largest)?, candidate: fit.candidate, limit })
}

/// Layers beyond which no model is searched.
const MOST_LAYERS: u64 = 512;

fn with_work(job: &Job, work: Workload) -> Job {
    let batch = Batch::new(work, None);
    Job { largest: vec![batch], mean: batch, ..job.clone() }
}

/// Stretches `allowed` from a model of `from` layers to one of `to`: layer i is as layer ⌊i·from/to⌋ was.
fn stretched(allowed: &Allowed, from: u64, to: u64) -> Allowed {
    let (from, to) = (from as usize, to as usize);
    let source = |layer: usize| layer * from / to;
    let chosen = |list: &Option<Vec<usize>>| {
        list.as_ref().map(|list| (0..to).filter(|layer| list.contains(&source(*layer))).collect())
    };
    let layers = allowed.layers.as_ref().map(|layers| match layers {
        Layers::Only(plan) if plan.len() == from => {
            Layers::Only((0..to).map(|layer| plan[source(layer)]).collect())
        }
        other => other.clone(),
    });
    let offloaded = allowed.offloaded.as_ref().map(|offloaded| OffloadedLayers {
        resident: chosen(&offloaded.resident),
        keep: chosen(&offloaded.keep),
        ..offloaded.clone()
    });
    Allowed { layers, offloaded, ..allowed.clone() }
}

/// Returns the largest `n` up to `highest` at which a step fits, from `start` if one fits there. What is allowed is for a model of so many
/// layers.
fn search(
    what: &'static str,
    (allowed, layers): (&Allowed, u64),
    budget: AvailableMemory,
    (start, highest): (u64, u64),
    sized: impl Fn(u64) -> Result<Job, Error>,
) -> Result<Fit<u64>, Error> {
    let least = |n| -> Result<u64, Error> {
        let job = sized(n)?;
        let candidates = job.smallest(&stretched(allowed, layers, job.model.layers))?;
        let on_host = |one: &&Candidate| budget.host.is_none_or(|host| one.host_bytes <= host);
        let bytes = candidates.iter().filter(on_host).map(Candidate::device_bytes).min();
        let of_host = |bytes: Option<u64>| format!("{} of host memory", bytes_text(bytes.unwrap_or(0)));
        bytes.ok_or_else(|| Error::NothingFits {
            what,
            needed: of_host(candidates.iter().map(|one| one.host_bytes).min()),
            available: of_host(budget.host),
        })
    };
    let ways = |n| {
        let job = sized(n)?;
        job.search(&stretched(allowed, layers, job.model.layers), budget)
    };
    let fits = |n| match ways(n) {
        Ok(ways) => Ok(ways.chosen().is_some()),
        Err(Error::Overflow { .. }) => Ok(false),
        Err(error) => Err(error),
    };
    // A bound from below, by the smallest candidates alone, which need no search. Bytes jump down where the loss begins another chunk, so
    // the start may fit though the bound is smaller.
    let starts = start <= highest && fits(start)?;
    let mut largest = match bisect(what, budget.device, highest, least) {
        Err(Error::NothingFits { .. }) if starts => start,
        bound => bound?.max(if starts { start } else { 0 }),
    };
    // Mixed plans fit a little more than the smallest candidates: search in full from there on.
    if largest < highest {
        let exceeds = |more: u64| Ok(u64::from(!fits(largest.saturating_add(more))?));
        largest += match bisect(what, 0, highest - largest, exceeds) {
            Err(Error::NothingFits { .. }) => 0,
            more => more?,
        };
    }
    let limit = if largest == highest { Limit::Positions } else { Limit::Memory };
    let ways = ways(largest)?;
    // The smallest ways are among those that are searched.
    let candidate = ways.chosen().or_else(|| ways.least()).cloned();
    Ok(Fit { largest, candidate: candidate.ok_or(Error::Zero { what: "ways to run a step" })?, limit })
}

/// Returns the `q` of the family rule: the size at which [`scaled`] returns `template` itself.
pub fn template_size(template: &Decoder) -> u64 {
    template.layers.max(template.kv_heads)
}

/// Returns the model of `template`'s proportions at size `n` of [`template_size`]. Layers and key-value heads are
/// rounded to nearest (at least 1), widths up; the ratio of heads to key-value heads stays.
pub fn scaled(template: &Decoder, n: u64) -> Result<Decoder, Error> {
    const WHAT: &str = "a size of the scaled model";
    let q = template_size(template);
    let up = |size: u64| Ok::<_, Error>(product(WHAT, &[size, n])?.div_ceil(q));
    let nearest =
        |size: u64| Ok::<_, Error>((exact::sum(WHAT, [product(WHAT, &[size, n])?, q / 2])? / q).max(1));
    let kv_heads = nearest(template.kv_heads)?;
    let heads = product(WHAT, &[template.heads / template.kv_heads, kv_heads])?;
    let hidden = if template.family.is_rotary() {
        up(template.hidden)?
    } else {
        // The heads fill the hidden size exactly.
        product(WHAT, &[heads, template.head_dim])?
    };
    let layers = nearest(template.layers)?;
    // The same part of the layers has a window, experts or linear attention.
    let part = |of: u64| Ok::<_, Error>(product(WHAT, &[of, layers])? / template.layers);
    let windowed =
        |windows: WindowedLayers| Ok::<_, Error>(WindowedLayers { layers: part(windows.layers)?, ..windows });
    let experts = |experts: ExpertSizes| {
        let (layers, feed_forward) = (part(experts.layers)?, up(experts.feed_forward)?);
        let shared = up(experts.shared)?;
        Ok::<_, Error>((layers > 0).then_some(ExpertSizes { layers, feed_forward, shared, ..experts }))
    };
    let linear = |linear: LinearSizes| {
        let layers = part(linear.layers)?;
        Ok::<_, Error>((layers > 0).then_some(LinearSizes { layers, ..linear }))
    };
    Decoder::new(Sizes {
        hidden,
        embedding: if template.family == Family::Gpt2Like { up(template.embedding)? } else { hidden },
        layers,
        heads,
        kv_heads,
        feed_forward: up(template.feed_forward)?,
        windows: template.windows.map(windowed).transpose()?,
        experts: template.experts.map(experts).transpose()?.flatten(),
        linear: template.linear.map(linear).transpose()?.flatten(),
        ..**template
    })
}

/// Returns the largest `n` in `1..=highest` with `cost(n) <= available`, where `cost` never decreases.
///
/// # Errors
/// Not even 1 fits: [`Error::NothingFits`], with `what`; errors of `cost`, except that a number that overflows does not fit.
pub fn bisect(
    what: &'static str,
    available: u64,
    highest: u64,
    cost: impl Fn(u64) -> Result<u64, Error>,
) -> Result<u64, Error> {
    let cost_or_overflow = |n| match cost(n) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(Error::Overflow { .. }) => Ok(None),
        Err(error) => Err(error),
    };
    let fits = |n| Ok::<_, Error>(cost_or_overflow(n)?.is_some_and(|bytes| bytes <= available));
    if !fits(1)? {
        let needed = cost_or_overflow(1)?.map_or("more than 2^64 bytes".into(), bytes_text);
        return Err(Error::NothingFits { what, needed, available: bytes_text(available) });
    }
    // Double until the next number does not fit, then halve the interval.
    let (mut low, mut high) = (1, None);
    while high.is_none() && low < highest {
        let next = low.saturating_mul(2).min(highest);
        if fits(next)? { low = next } else { high = Some(next) }
    }
    let mut high = high.unwrap_or(low);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if fits(middle)? { low = middle } else { high = middle }
    }
    Ok(low)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets;

    #[test]
    fn the_search_finds_the_largest_that_fits() {
        for limit in [1, 2, 3, 7, 8, 9, 1000, 1 << 40] {
            let largest = bisect("batch", limit * 10, u64::MAX, |n| product("cost", &[n, 10])).unwrap();
            assert_eq!(largest, limit);
        }
        assert_eq!(bisect("sequence", 1 << 40, 1000, Ok).unwrap(), 1000);
        let error = bisect("batch", 9, u64::MAX, |n| product("cost", &[n, 10])).unwrap_err().to_string();
        assert!(
            error.starts_with("no batch fits: the smallest needs 10 B and the device has 9 B;"),
            "{error}"
        );
    }

    #[test]
    fn scaling_a_family_reproduces_its_members() {
        let small = presets::find("gpt2").unwrap();
        assert_eq!(scaled(&small, 12).unwrap(), small);
        let llama = presets::find("llama-3-8b").unwrap();
        assert_eq!(scaled(&llama, 32).unwrap(), llama);
        let double = scaled(&llama, 64).unwrap();
        assert_eq!((double.hidden, double.layers, double.heads), (8192, 64, 64));
        for name in presets::names() {
            let model = presets::find(name).unwrap();
            assert_eq!(scaled(&model, template_size(&model)).unwrap(), model, "{name}");
            let sizes: Vec<u64> =
                (1..100).map(|n| scaled(&model, n).unwrap().parameters().unwrap()).collect();
            assert!(sizes.is_sorted(), "{name}");
        }
    }
}
