//! Analyses where the time of training steps goes, from a recorded trace.
//!
//! [`runtime::profile::Trace::save`] writes a trace: operators, ranges, allocations, and on CUDA kernels and copies, each with
//! start and duration. Ranges give it structure: `step` around each step, and inside it `data`, `forward`, `backward`, `clip`
//! and `optimizer`; `load` around the work of loader threads, `tokenize` around tokenizing.
//!
//! - [`Profile`] reads the file;
//! - [`Composition`] is the median step: its parts, operators, bytes, copies and idle time;
//! - [`Diagnosis`] lists inefficiencies, each with evidence, cost and remedy;
//! - [`Comparison`] explains which parts made one composition faster than another.
//!
//! ```
//! use runtime::profile::{Trace, range};
//! use trace::{Composition, Diagnosis, TrainingFacts, Phase, Profile};
//! use tch::{Kind, Tensor, kind::FLOAT_CPU};
//!
//! let w = Tensor::randn([64, 64], FLOAT_CPU).set_requires_grad(true);
//! let trace = Trace::start(Default::default())?;
//! for _ in 0..3 {
//!     let _step = range("step");
//!     let loss = {
//!         let _forward = range("forward");
//!         Tensor::ones([128, 64], FLOAT_CPU).matmul(&w).sum(Kind::Float)
//!     };
//!     let _backward = range("backward");
//!     loss.backward();
//!     let _ = loss.double_value(&[]); // waits for the device in each step
//! }
//! let folder = tempfile::tempdir()?;
//! let path = folder.path().join("trace.json");
//! trace.save(&path)?;
//!
//! let profile = Profile::read(&path)?;
//! let composition = Composition::of(&profile)?;
//! assert_eq!(composition.steps.len(), 3);
//! assert!(composition.phase(Phase::Forward).seconds > 0.0);
//! let diagnosis = Diagnosis::of(&profile, &TrainingFacts::default())?;
//! assert!(diagnosis.finding("host synchronisation").is_some());
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
