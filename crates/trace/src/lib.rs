//! Analyses where the time of training steps goes, from a recorded trace.
//!
//! `runtime::profile::Trace::save` writes a trace: operators, ranges, allocations, and on CUDA kernels and copies, each with
//! start and duration. Ranges give it structure: `step` around each step, and inside it `data`, `forward`, `backward`, `clip`
//! and `optimizer`; `load` around the work of loader threads, `tokenize` around tokenizing.
//!
//! - [`Profile`] reads the file;
//! - [`Composition`] is the median step: its parts, operators, bytes, copies and idle time;
//! - [`Diagnosis`] lists inefficiencies, each with evidence, cost and remedy;
//! - [`Comparison`] explains which parts made one composition faster than another.
//!
//! ```
//! use trace::{Composition, Diagnosis, Phase, Profile, TrainingFacts};
//!
//! // Two steps, in microseconds: 60 of 100 are the forward.
//! let events = [0, 100].map(|at| {
//!     format!(
//!         r#"{{"ph": "X", "cat": "user_annotation", "name": "step", "tid": 1, "ts": {at}, "dur": 100}},
//!         {{"ph": "X", "cat": "user_annotation", "name": "forward", "tid": 1, "ts": {at}, "dur": 60}},
//!         {{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "tid": 1, "ts": {at}, "dur": 60}}"#
//!     )
//! });
//! let folder = tempfile::tempdir()?;
//! let path = folder.path().join("trace.json");
//! std::fs::write(&path, format!(r#"{{"traceEvents": [{}]}}"#, events.join(",")))?;
//!
//! let profile = Profile::read(&path)?;
//! let composition = Composition::new(&profile)?;
//! assert_eq!(composition.steps.len(), 2);
//! assert!((composition.phase(Phase::Forward).seconds - 60e-6).abs() < 1e-9);
//! let diagnosis = Diagnosis::new(&profile, &TrainingFacts::default())?;
//! println!("{composition}\n{diagnosis}");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod compare;
mod composition;
mod diagnose;
mod error;
mod quantity;
mod timeline;
mod trace_file;

pub use compare::{Change, Comparison};
pub use composition::{Composition, Copies, DeviceTime, OperatorTime, Phase, PhaseTime, StepTimes};
pub use diagnose::{Diagnosis, Finding, TrainingFacts};
pub use error::ProfileError;
pub use trace_file::{DeviceEvent, DeviceWork, Dims, Input, Memory, Operator, Profile, RangeEvent};
