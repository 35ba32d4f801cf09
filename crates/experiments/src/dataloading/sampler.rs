//! Time to make a balanced sampler, and to choose a batch.

use dataloading::Result;
use dataloading::balanced_batch_sampler::{BalancedBatchSampler, BalancedConfig, Operations};
use dataloading::permutation::Permutation;
use dataloading::random_batch_sampler::BatchSampler;
use dataloading::samples::Samples;
use report::{Case, Metric};

use super::packing::Sizes;
use super::synthetic::text_lengths;
use super::{repeats, seconds};
use crate::driver::Bench;

/// Largest differences in length.
const GAPS: [usize; 3] = [0, 20, 640];

/// Lengths alone.
struct Lengths(Vec<u32>);

impl Samples for Lengths {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn length(&self, index: usize) -> usize {
        self.0[index] as usize
    }

    fn read(&self, index: usize, out: &mut Vec<u32>) -> Result<()> {
        out.resize(out.len() + self.length(index), 0);
        Ok(())
    }
}

/// Measures the permutation and every gap on every number of samples.
pub(crate) fn run(bench: &mut Bench, sizes: &Sizes) -> anyhow::Result<()> {
    const ALL: [usize; 5] = [1_000, 10_000, 100_000, 1_000_000, 10_000_000];
    let sizes = sizes.or(bench.sized([&ALL[..3], &ALL[2..4], &ALL[2..], &ALL[2..]]));
    let label = |size: &usize| format!("{size} samples");
    bench.each(sizes, label, |bench, size| {
        let case = Case::new().with("samples", size);
        bench.put(&case, vec![permutation(size, bench)])?;
        for k in GAPS {
            let metrics = measure(size, k, bench)?;
            bench.put(&case.clone().with("k", k), metrics)?;
        }
        Ok(())
    })
}

/// Measures one size and one `k`, with batches of 32 and lengths of text.
fn measure(n: usize, k: usize, bench: &Bench) -> Result<Vec<Metric>> {
    let seed = bench.seed;
    const BATCHES: usize = 1000;
    let lengths = Lengths(text_lengths(n, seed));
    let options = BalancedConfig { k, seed, ..BalancedConfig::default() };
    let construction = seconds(repeats(bench).min(5), || BalancedBatchSampler::new(&lengths, &options));
    let sampler = BalancedBatchSampler::new(&lengths, &options)?;
    let batches = sampler.batches(0);
    // Batches of 32 alone: short ones do less.
    let mut chosen = Vec::new();
    let mut done = Operations::default();
    let (mut full, mut gap) = (0, 0);
    for index in (0..batches).step_by((batches / BATCHES).max(1)) {
        let of_batch = sampler.choose_counted(0, index, &mut chosen)?;
        let length = |sample: &u32| lengths.length(*sample as usize).min(options.max_length);
        gap = gap
            .max(chosen.iter().map(length).max().unwrap_or(0) - chosen.iter().map(length).min().unwrap_or(0));
        if chosen.len() == 32 {
            full += 1;
            done.comparisons += of_batch.comparisons;
            done.lookups += of_batch.lookups;
            done.passes += of_batch.passes;
        }
    }
    let choosing = seconds(repeats(bench), || {
        for index in (0..batches).step_by((batches / BATCHES).max(1)) {
            sampler.choose(0, index, &mut chosen)?;
        }
        Ok::<_, dataloading::Error>(())
    });
    let measured = batches.div_ceil((batches / BATCHES).max(1)) as f64;
    let per_batch: Vec<f64> = choosing.iter().map(|seconds| seconds / measured).collect();
    // Without a full batch nothing was done.
    let full = f64::from(full).max(1.0);
    Ok(vec![
        Metric::of_samples("construction_seconds", "s", &construction),
        Metric::of_samples("batch_seconds", "s", &per_batch),
        Metric::exact("comparisons_per_batch", "", done.comparisons as f64 / full),
        Metric::exact("lookups_per_batch", "", done.lookups as f64 / full),
        Metric::exact("passes_per_batch", "", done.passes as f64 / full),
        Metric::exact("largest_gap", "count", gap as f64),
        Metric::exact("gap_beyond_k", "count", gap.saturating_sub(k) as f64),
    ])
}

/// Measures one element of a shuffled order of `n`, at scattered indices.
fn permutation(n: usize, bench: &Bench) -> Metric {
    const CALLS: u64 = 1 << 20;
    let (len, order) = (n as u64, Permutation::new(n as u64, bench.seed, 0, 0));
    let times = seconds(repeats(bench), || {
        // A stride without a common factor with powers of ten: no index repeats before all were used.
        (0..CALLS).map(|call| order.at(call * 7919 % len)).fold(0, u64::wrapping_add)
    });
    let per_call: Vec<f64> = times.iter().map(|seconds| seconds / CALLS as f64).collect();
    Metric::of_samples("permutation_seconds", "s", &per_call)
}
