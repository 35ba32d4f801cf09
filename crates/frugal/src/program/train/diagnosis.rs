//! A few steps under the profiler, in the middle of a training.

use std::fs::File;

use anyhow::Context;
use frugal::training::profile::{Composition, Diagnosis};
use frugal::training::step_tracing::{Loading, TracedSteps, trace};
use frugal::training::trainer::StopReason;
use frugal::training::{Batches, Trainer};
use serde_json::json;

use crate::program::folder::output_file::OutputFile;
use crate::program::output::print_line;

/// Steps before the traced ones: the first ones allocate memory that later ones reuse.
const WARMUP: u64 = 3;
/// Steps that are traced.
const TRACED: u64 = 3;

/// Trains some steps, traces some more, and reports their composition and bottlenecks.
pub(super) fn diagnose(
    trainer: &mut Trainer,
    train: &mut dyn Batches,
    mut validation: Option<&mut dyn Batches>,
    loading: Loading,
    trace_file: Option<&OutputFile>,
    as_json: bool,
) -> anyhow::Result<()> {
    let scratch = tempfile::tempdir().context("making a folder for the trace")?;
    let scratch = scratch.path().join("trace.json");
    let start = trainer.step();
    let traced = if start + WARMUP + TRACED > trainer.options.steps {
        None
    } else {
        // A mutable reference is used twice only through a new borrow.
        let lent = validation.as_mut().map(|validation| &mut **validation as &mut dyn Batches);
        match trainer.advance(start + WARMUP, train, lent)? {
            StopReason::Completed => trace(trainer, train, validation, TRACED, loading, &scratch)?,
            StopReason::OutOfData | StopReason::Interrupted | StopReason::StoppedEarly => None,
        }
    };
    let Some(TracedSteps { profile, facts }) = traced else {
        let needed = WARMUP + TRACED;
        let warning =
            format!("nothing was diagnosed: that needs {needed} steps, and the training ends before");
        return Ok(trainer.warn(&warning)?);
    };
    if let Some(file) = trace_file {
        file.write(|out| std::io::copy(&mut File::open(&scratch)?, out).map(drop))?;
    }
    let (composition, diagnosis) = (Composition::of(&profile)?, Diagnosis::of(&profile, &facts)?);
    trainer.note(&format!("{composition}\n{diagnosis}"))?;
    if as_json {
        let findings = diagnosis.findings.iter().map(|finding| {
            json!({
                "name": finding.name,
                "evidence": finding.evidence,
                "share": finding.share,
                "remedy": finding.remedy,
            })
        });
        let findings: Vec<_> = findings.collect();
        print_line(&json!({ "diagnosis": findings, "step_seconds": diagnosis.step_seconds }));
    }
    Ok(())
}
