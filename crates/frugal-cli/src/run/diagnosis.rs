//! A few steps under the profiler, in the middle of a training.

use std::fs::File;
use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::Args;
use frugal::training::step_tracing::{Loading, TracedSteps, trace};
use frugal::training::trainer::StopReason;
use frugal::training::{Batches, Trainer};
use serde_json::json;
use trace::{Composition, Diagnosis};

use crate::common_flags::Common;
use crate::folder::output_file::{OutputFile, OutputFlag};
use crate::output::print_line;

/// Steps before the traced ones: the first ones allocate memory that later ones reuse.
const WARMUP: u64 = 3;
/// Steps that are traced.
const TRACED: u64 = 3;

/// The file of a trace.
const TRACE: OutputFlag = OutputFlag { name: "--trace", overwrite: None };

#[derive(Args, Clone, Debug, Default)]
pub(crate) struct DiagnosisArgs {
    /// Trace three steps after the first three, and report bottlenecks
    #[arg(long)]
    diagnose: bool,
    /// Write the trace of --diagnose to FILE, for ui.perfetto.dev
    #[arg(long, value_name = "FILE", requires = "diagnose")]
    trace: Option<PathBuf>,
}

/// A diagnosis that was asked for.
pub(crate) struct Diagnose {
    trace: Option<OutputFile>,
}

impl DiagnosisArgs {
    /// Returns the diagnosis that is asked for, with its file.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub(crate) fn diagnosis(&self) -> anyhow::Result<Option<Diagnose>> {
        let trace = self.trace.as_deref().map(|path| OutputFile::new(path, &TRACE, &[])).transpose()?;
        Ok(self.diagnose.then_some(Diagnose { trace }))
    }
}

impl Diagnose {
    /// Refuses a diagnosis over ranks.
    ///
    /// # Errors
    /// More than one process.
    pub(crate) fn check(common: &Common, diagnosis: Option<&Self>) -> anyhow::Result<()> {
        if common.ranks.is_some() && diagnosis.is_some() {
            bail!(
                "--diagnose works in one process only; leave it out, or start the training without a launcher"
            );
        }
        Ok(())
    }
}

/// Trains some steps, traces some more, and reports their composition and bottlenecks.
///
/// # Errors
/// Any error of the training and of the profiler; a file that cannot be written.
pub(crate) fn diagnose(
    trainer: &mut Trainer,
    train: &mut dyn Batches,
    mut validation: Option<&mut dyn Batches>,
    loading: Loading,
    diagnosis: &Diagnose,
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
    if let Some(file) = &diagnosis.trace {
        file.write(|out| std::io::copy(&mut File::open(&scratch)?, out).map(drop))?;
    }
    let (composition, diagnosis) = (Composition::new(&profile)?, Diagnosis::new(&profile, &facts)?);
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
