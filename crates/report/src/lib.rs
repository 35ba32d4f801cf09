//! What a measurement is, and how it becomes CSV, Markdown, SVG and one HTML page.

pub mod cli;
pub mod environment;
pub mod progress;
pub mod record;
pub mod statistics;

pub use environment::Environment;
pub use progress::Progress;
pub use record::{Case, Metric, Record, RecordWriter, RecordsError, read_records};
