//! The inverse questions: the largest batch, the longest sequence and the largest model that fit a device.
//!
//! The peak of an [`estimate`] never falls when the batch, the sequence or the model grows, so a bisection finds the exact
//! answer `n`: the peak at `n` fits, the peak at `n + 1` does not. A case whose bytes exceed 64 bits does not fit either.
//!
//! "The largest model" needs a rule for what grows. Here everything but the vocabulary, the context and the head size
//! grows by the same factor `n / q` over a template, where `q` is its number of layers (or of key-value heads, if
//! there are more): GPT-2 small (12 layers, 12 heads, 768 wide) at `n = 25` has 25 layers, 25 heads and is 1600 wide.

use crate::estimate::{TrainingPlan, estimate};
use crate::exact::product;
use crate::model::{Decoder, Family, Shape, Windows};
use crate::quantity::bytes_text;
use crate::{Error, exact};

/// Why the next larger case does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// It exceeds the memory.
    Memory,
    /// It exceeds the model's position vectors.
    Positions,
}

/// The largest case that fits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fit<T> {
    /// The case.
    pub largest: T,
    /// Its peak in bytes.
    pub peak: u64,
    /// The limit.
    pub limit: Limit,
}

/// Returns the largest batch of `plan`'s sequence length that fits `available` bytes.
pub fn largest_batch(model: &Decoder, plan: &TrainingPlan, available: u64) -> Result<Fit<u64>, Error> {
    search("batch", available, u64::MAX, |batch| {
        let mut plan = *plan;
        plan.work.batch = batch;
        Ok(estimate(model, &plan)?.peak().total)
    })
}

/// Returns the longest sequence in batches of `plan`'s size that fits `available` bytes. Learned positions are a limit too.
pub fn longest_sequence(model: &Decoder, plan: &TrainingPlan, available: u64) -> Result<Fit<u64>, Error> {
    let positions = if model.family.has_learned_positions() { model.context } else { u64::MAX };
    search("sequence", available, positions, |sequence| {
        let mut plan = *plan;
        plan.work.sequence = sequence;
        Ok(estimate(model, &plan)?.peak().total)
    })
}

/// Returns the largest model of `template`'s proportions that fits `available` bytes.
pub fn largest_model(template: &Decoder, plan: &TrainingPlan, available: u64) -> Result<Fit<Decoder>, Error> {
    let found =
        search("model", available, u64::MAX, |n| Ok(estimate(&scaled(template, n)?, plan)?.peak().total))?;
    Ok(Fit { largest: scaled(template, found.largest)?, peak: found.peak, limit: found.limit })
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
    let hidden = match template.family {
        // Their heads fill the hidden size exactly.
        Family::Gpt2 | Family::Gpt2Like => product(WHAT, &[heads, template.head_dim])?,
        _ => up(template.hidden)?,
    };
    let model = Decoder::new(Shape {
        hidden,
        embedding: if template.family == Family::Gpt2Like { up(template.embedding)? } else { hidden },
        layers: nearest(template.layers)?,
        heads,
        kv_heads,
        feed_forward: up(template.feed_forward)?,
        ..(**template).clone()
    })?;
    match template.windows() {
        // The same part of the layers.
        Some(windows) => {
            let layers = product(WHAT, &[windows.layers, model.layers])? / template.layers;
            model.with_windows(Windows { layers, ..windows })
        }
        None => Ok(model),
    }
}

/// Returns the largest `n` in `1..=highest` with `cost(n) <= available`, where `cost` never decreases.
fn search(
    what: &'static str,
    available: u64,
    highest: u64,
    cost: impl Fn(u64) -> Result<u64, Error>,
) -> Result<Fit<u64>, Error> {
    let cost_or_overflow = |n| match cost(n) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(Error::Overflow { .. }) => Ok(None),
        Err(error) => Err(error),
    };
    let fits = |n| Ok::<_, Error>(cost_or_overflow(n)?.filter(|bytes| *bytes <= available));
    let Some(mut peak) = fits(1)? else {
        let needed = cost_or_overflow(1)?.map_or("more than 2^64 bytes".into(), bytes_text);
        return Err(Error::NothingFits { what, needed, available: bytes_text(available) });
    };
    let mut low = 1;
    let mut high = None;
    while high.is_none() && low < highest {
        let next = low.saturating_mul(2).min(highest);
        match fits(next)? {
            Some(bytes) => (low, peak) = (next, bytes),
            None => high = Some(next),
        }
    }
    let Some(mut high) = high else { return Ok(Fit { largest: low, peak, limit: Limit::Positions }) };
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        match fits(middle)? {
            Some(bytes) => (low, peak) = (middle, bytes),
            None => high = middle,
        }
    }
    Ok(Fit { largest: low, peak, limit: Limit::Memory })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets;

    #[test]
    fn the_search_finds_the_largest_that_fits() {
        for limit in [1, 2, 3, 7, 8, 9, 1000, 1 << 40] {
            let fit = search("batch", limit * 10, u64::MAX, |n| product("cost", &[n, 10])).unwrap();
            assert_eq!((fit.largest, fit.peak, fit.limit), (limit, limit * 10, Limit::Memory));
        }
        let capped = search("sequence", 1 << 40, 1000, Ok).unwrap();
        assert_eq!((capped.largest, capped.limit), (1000, Limit::Positions));
        let error = search("batch", 9, u64::MAX, |n| product("cost", &[n, 10])).unwrap_err().to_string();
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
        for (name, _) in presets::ALL {
            let model = presets::find(name).unwrap();
            assert_eq!(scaled(&model, template_size(&model)).unwrap(), model, "{name}");
            let sizes: Vec<u64> =
                (1..100).map(|n| scaled(&model, n).unwrap().parameters().unwrap()).collect();
            assert!(sizes.is_sorted(), "{name}");
        }
    }
}
