//! Steps with each injected inefficiency on and off, and all of them on and off: time, composition, diagnosis.

use std::path::Path;
use std::time::Instant;

use anyhow::Result;
use trace::{Composition, Diagnosis};

use super::injected_slowdowns::Inefficiency;
use super::setup::Setup;

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
    /// Errors of the setup.
    pub(crate) fn measure(setup: &mut Setup, steps: u64) -> Result<Self> {
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
    /// Turns with the inefficiency.
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
/// Errors of the setups.
pub(crate) fn measure_pair(on: &mut Setup, off: &mut Setup, effort: Effort) -> Result<Pair> {
    on.run(effort.warmup)?;
    off.run(effort.warmup)?;
    let mut pair = Pair::default();
    for _ in 0..effort.turns {
        pair.on.push(Turn::measure(on, effort.turn)?);
        pair.off.push(Turn::measure(off, effort.turn)?);
    }
    Ok(pair)
}

/// Profiles a setup.
///
/// # Errors
/// Errors of the setup and of the profiler.
pub(crate) fn profile(setup: &mut Setup, effort: Effort, trace: &Path) -> Result<(Composition, Diagnosis)> {
    let (profile, facts) = setup.trace(effort.traced, trace)?;
    Ok((Composition::new(&profile)?, Diagnosis::new(&profile, &facts)?))
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
