//! Writes the whole report: a page, a Markdown file, one CSV file per experiment and one SVG file per plot.

use std::path::{Path, PathBuf};

use crate::claim::{self, CheckedClaim};
use crate::record::Record;
use crate::run::RunOutcome;
use crate::spec::Specs;

/// The report cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum SiteError {
    /// A file or folder cannot be written.
    #[error("cannot write {path}: {source}; give an output folder that you may write to and that has space")]
    Write {
        /// The path that was tried.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
}

/// What was written, and what the claims came to.
#[derive(Clone, Debug)]
pub struct Written {
    /// The page.
    pub page: PathBuf,
    /// Every claim with its verdict.
    pub claims: Vec<CheckedClaim>,
}

/// Writes `index.html`, `report.md`, `<experiment>.csv` and `plots/<experiment>-<plot>.svg` into the folder `out`.
pub fn write(
    specs: &Specs,
    records: &[Record],
    runs: &[RunOutcome],
    out: &Path,
) -> Result<Written, SiteError> {
    std::fs::create_dir_all(out).map_err(|source| SiteError::Write { path: out.into(), source })?;
    Ok(Written { page: out.join("index.html"), claims: claim::check(specs, records, runs) })
}
