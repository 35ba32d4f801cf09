//! Steps with each injected inefficiency on and off, and all of them on and off: time, composition, diagnosis.

use std::path::Path;
use std::time::Instant;

use anyhow::Result;
use training::profile::{Composition, Diagnosis};

use super::injected_slowdowns::Inefficiency;
use super::setup::{Common, Setup};
use crate::corpus::Corpus;

/// How much is measured.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Effort {
    /// Steps before the measured ones.
    pub warmup: u64,
    /// Steps that are timed as one: on CUDA several, so that the host runs ahead of the device as it does in a training.
    pub turn: u64,
    /// Measured turns of each setup.
    pub turns: u64,
    /// Steps under the profiler.
    pub traced: u64,
}

/// Some steps, timed as one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Turn {
    /// Seconds per step.
    pub step: f64,
    /// Seconds per token that was learned from; what pads does not count.
    pub token: f64,
}

impl Turn {
    /// Runs and times `steps` steps; the device is idle at the beginning and at the end.
    ///
    /// # Errors
    /// Those of the setup.
    pub(crate) fn of(setup: &mut Setup, steps: u64) -> Result<Self> {
        let start = Instant::now();
        // The losses are read at the end, which waits for the device.
        let records = setup.run(steps)?;
        let seconds = start.elapsed().as_secs_f64();
        let tokens: usize = records.iter().map(|record| record.tokens).sum();
        Ok(Self { step: seconds / steps as f64, token: seconds / tokens.max(1) as f64 })
    }
}

/// Two setups that were run in turns, so that a drift of the machine is in both.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pair {
    /// With the inefficiency.
    pub on: Vec<Turn>,
    /// Without.
    pub off: Vec<Turn>,
}

impl Pair {
    /// Seconds per token with, over seconds per token without, of each pair of turns.
    pub(crate) fn slowdown(&self) -> Vec<f64> {
        self.on.iter().zip(&self.off).map(|(on, off)| on.token / off.token).collect()
    }
}

/// Measures `on` against `off` in turns.
///
/// # Errors
/// Those of the setups.
pub(crate) fn measure_pair(on: &mut Setup, off: &mut Setup, effort: Effort) -> Result<Pair> {
    on.run(effort.warmup)?;
    off.run(effort.warmup)?;
    let mut pair = Pair::default();
    for _ in 0..effort.turns {
        pair.on.push(Turn::of(on, effort.turn)?);
        pair.off.push(Turn::of(off, effort.turn)?);
    }
    Ok(pair)
}

/// What a profile of a setup shows.
///
/// # Errors
/// Those of the setup and of the profiler.
pub(crate) fn profile(setup: &mut Setup, effort: Effort, trace: &Path) -> Result<(Composition, Diagnosis)> {
    let (profile, facts) = setup.trace(effort.traced, trace)?;
    Ok((Composition::of(&profile)?, Diagnosis::of(&profile, &facts)?))
}

/// A stage on the way from all inefficiencies to none.
#[derive(Debug, Clone)]
pub(crate) struct Stage {
    /// What this stage has repaired, `None` for the beginning.
    pub repaired: Option<Inefficiency>,
    /// This stage's turns.
    pub turns: Vec<Turn>,
    /// Tokens per second over those of the stage before, of each pair of turns; none at the beginning.
    pub speedups: Vec<f64>,
    /// Largest number of live bytes beyond what was there before.
    pub peak_bytes: u64,
}

/// The way from all inefficiencies to none.
#[derive(Debug, Clone)]
pub(crate) struct Repairs {
    /// In the order of [`Inefficiency::ALL`], those that concern the device.
    pub stages: Vec<Stage>,
    /// Tokens per second of the last stage over those of the first, of each pair of turns.
    pub total: Vec<f64>,
    /// The same over those of the stage that has only its batches repaired: what all others gave.
    pub beyond_batching: Vec<f64>,
}

/// Steps in which a stage's peak is measured, before it is timed.
const PEAK_STEPS: u64 = 4;

/// Repairs one inefficiency after another, in the order of [`Inefficiency::ALL`]. Each stage is measured in turns with the
/// one before, so that a drift of the machine is in both.
///
/// # Errors
/// Those of the setups.
pub(crate) fn repair(
    corpus: &Corpus,
    common: &Common,
    effort: Effort,
    mut each: impl FnMut(&str),
) -> Result<Repairs> {
    let way: Vec<Inefficiency> =
        Inefficiency::ALL.into_iter().filter(|inefficiency| inefficiency.concerns(common.device)).collect();
    let with = |left: usize| -> Result<Setup> {
        Setup::new(corpus, &way[way.len() - left..].iter().copied().collect(), common)
    };
    let peak = |left: usize| -> Result<u64> {
        let region = runtime::memory::Region::start(common.device)?;
        let mut setup = with(left)?;
        setup.run(PEAK_STEPS)?;
        drop(setup);
        Ok(region.finish()?.peak_above_start())
    };
    let all = way.len();
    let mut stages = Vec::new();
    for (number, &repaired) in way.iter().enumerate() {
        let left = all - number;
        each(repaired.name());
        let pair = measure_pair(&mut with(left)?, &mut with(left - 1)?, effort)?;
        let speedups = pair.slowdown();
        if number == 0 {
            let peak_bytes = peak(left)?;
            stages.push(Stage { repaired: None, turns: pair.on, speedups: Vec::new(), peak_bytes });
        }
        let peak_bytes = peak(left - 1)?;
        stages.push(Stage { repaired: Some(repaired), turns: pair.off, speedups, peak_bytes });
    }
    each("all, against none");
    let total = measure_pair(&mut with(all)?, &mut with(0)?, effort)?.slowdown();
    each("all, against batches only");
    let beyond_batching = measure_pair(&mut with(all - 1)?, &mut with(0)?, effort)?.slowdown();
    Ok(Repairs { stages, total, beyond_batching })
}

/// The detector that is made for an inefficiency. `None`: its cost is a plain part of the model, which no profile can tell
/// from what is wanted.
pub(crate) fn detector(inefficiency: Inefficiency) -> Option<&'static str> {
    Some(match inefficiency {
        Inefficiency::PadToMax => "padding",
        Inefficiency::TokenizePerItem => "tokenizing in the step",
        Inefficiency::NoWorkers => "waiting for data",
        Inefficiency::Unpinned => "pageable copies",
        Inefficiency::OddWidth => "odd widths",
        Inefficiency::UnusedProjection => "unused parameters",
        Inefficiency::ExplicitAttention => "attention by softmax",
        Inefficiency::MaskPerForward => "mask in each forward",
        Inefficiency::IndexedLoss => "boolean indexing",
        Inefficiency::AccuracyEachStep => return None,
        Inefficiency::HostReads => "host synchronisation",
        Inefficiency::ZeroedGradients => "zeroed gradients",
        Inefficiency::UnfusedOptimizer => "unfused optimizer",
    })
}
