//! What a measurement is, and how it becomes CSV, Markdown, SVG and one HTML page.
//!
//! A program appends [`Record`]s to a file. Its crate's `experiments.toml` ([`Specs`]) says which tables, plots and
//! findings to make of them, and which claims they must bear out. [`site::write`] makes the report of both. Every
//! figure in it is a function of records; none is typed.

pub mod against;
pub mod claim;
pub mod cli;
pub mod comparison;
pub mod environment;
pub mod filter;
pub mod finding;
pub mod markdown;
pub mod measurements;
pub mod page;
pub mod plot;
pub mod progress;
pub mod prose;
pub mod record;
pub mod run;
pub mod section;
pub mod site;
pub mod spec;
pub mod statistics;
pub mod table;
pub mod tidy_csv;
pub mod unit;

pub use claim::{CheckedClaim, Verdict};
pub use environment::Environment;
pub use filter::Filter;
pub use measurements::Measurements;
pub use progress::Progress;
pub use record::{Case, Metric, Record, RecordWriter, RecordsError, read_records};
pub use run::{RunOutcome, RunState};
pub use spec::{SpecError, Specs};
