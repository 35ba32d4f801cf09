//! Turns records of measurements into CSV, Markdown, SVG and one HTML page.
//!
//! A program appends [`Record`]s to a file. Its registration ([`Specs`]) defines the tables, plots and findings to make of them, and
//! the claims to check. [`site::write`] makes the report from both: one page of articles ([`front`]) and an appendix. Every figure in
//! it is computed from records; none is typed by hand.
//!
//! ```
//! use report::{Case, Environment, Metric, Record, Specs, claim, site};
//!
//! let specs: Specs = toml::from_str(r#"
//!     [[experiment]]
//!     name = "copy"
//!     title = "Copying a tensor"
//!     about = "How fast bytes move."
//!
//!     [[experiment.finding]]
//!     per = ["size"]
//!     of = { to = "pinned" }
//!     against = { to = "pageable" }
//!     text = "size {size}: a pinned copy takes {less:copy_seconds} time"
//!
//!     [[claim]]
//!     name = "copy/pinned-time"
//!     what = "a pinned copy takes a millisecond at most"
//!     experiment = "copy"
//!     metric = "copy_seconds"
//!     case = { to = "pinned" }
//!     op = "<="
//!     limit = 1e-3
//!     run = "cargo xtask run-all --only copy"
//! "#)?;
//! let record = |to: &str, samples: &[f64]| Record {
//!     experiment: "copy".into(),
//!     case: Case::new().with("size", 4096).with("to", to),
//!     metric: Metric::of_samples("copy_seconds", "s", samples),
//!     environment: Environment::detect("cpu", None),
//! };
//! let records = [record("pageable", &[1.9e-3, 2.0e-3, 2.1e-3]), record("pinned", &[0.8e-3])];
//!
//! let claims = claim::check(&specs, &records, &[]);
//! assert_eq!(claims[0].to_string(), "claim copy/pinned-time 0.80 ms <= 1.00 ms holds");
//!
//! let folder = tempfile::tempdir()?;
//! site::write(&specs, &records, &[], &[], folder.path())?;
//! let page = std::fs::read_to_string(folder.path().join("appendix/experiments.html"))?;
//! assert!(page.contains("size 4096: a pinned copy takes 60.0 % less time"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `examples/sample.toml` shows every field of a file of experiments; `cargo run -p report --example sample` renders its page from
//! invented records.

pub mod against;
pub mod claim;
pub mod cli;
pub mod comparison;
pub mod environment;
pub mod estimate;
pub mod filter;
pub mod finding;
pub mod front;
pub mod markdown;
mod math;
pub mod measurements;
pub mod page;
pub mod part;
pub mod plot;
pub mod progress;
pub mod prose;
pub mod record;
pub mod run;
pub mod section;
pub mod sink;
pub mod site;
pub mod spec;
pub mod statistics;
pub mod table;
pub mod tidy_csv;
pub mod turns;
pub mod unit;

pub use claim::{CheckedClaim, Verdict};
pub use environment::Environment;
pub use filter::Filter;
pub use measurements::Measurements;
pub use part::{Document, OtherReport};
pub use progress::Progress;
pub use record::{Case, Metric, Record, RecordWriter, RecordsError, read_records};
pub use run::{RunOutcome, RunState};
pub use sink::Sink;
pub use spec::{SpecError, Specs};
