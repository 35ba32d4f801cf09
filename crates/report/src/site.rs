//! Writes the whole report: a page, Markdown files, one CSV file per experiment and one SVG file per plot.

use std::path::{Path, PathBuf};

use crate::claim::CheckedClaim;
use crate::comparison;
use crate::measurements::newest;
use crate::part::{Document, OtherReport};
use crate::record::Record;
use crate::run::RunOutcome;
use crate::spec::Specs;
use crate::{markdown, page, tidy_csv};
use files::atomic_write;

/// The report cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum SiteError {
    /// A file or folder cannot be written.
    #[error("cannot write {path}: {cause}; give an output folder that you may write to and that has space")]
    Write {
        /// The path that was tried.
        path: PathBuf,
        /// The error of the operating system.
        cause: std::io::Error,
    },
}

/// The written files and the checked claims.
#[derive(Clone, Debug)]
pub struct Written {
    /// The page.
    pub page: PathBuf,
    /// Every file, in the order of writing.
    pub files: Vec<PathBuf>,
    /// Every claim with its verdict.
    pub claims: Vec<CheckedClaim>,
}

/// Writes `index.html`, `report.md` with a `part-<name>.md` for each part, `<experiment>.csv` and `plots/<experiment>-<plot>.svg`, and a
/// timeline's `traces/<experiment>-<plot>.json`, into the folder `out`, which is created if missing. Files of the same names are replaced,
/// others stay. `others` are reports of other machines, in folders within `out`, whose figures are shown beside.
pub fn write(
    specs: &Specs,
    records: &[Record],
    runs: &[RunOutcome],
    others: &[OtherReport],
    out: &Path,
) -> Result<Written, SiteError> {
    let records = newest(records);
    let document = Document::new(specs, &records, runs, others);
    let mut folder = Folder { out, files: Vec::new() };
    for section in document.sections() {
        for plot in &section.plots {
            folder.write(&plot.file, &plot.svg)?;
            if let Some((file, text)) = &plot.trace {
                folder.write(file, text)?;
            }
        }
        let mut mine: Vec<_> = records.iter().filter(|r| r.experiment == section.name).cloned().collect();
        if let Some(comparison) = specs.comparison(&section.name) {
            mine.extend(comparison::ratios(comparison, &mine));
        }
        if !mine.is_empty() {
            folder.write(&section.csv_file(), &tidy_csv::write(&mine))?;
        }
    }
    for (name, text) in markdown::files(&document) {
        folder.write(&name, &text)?;
    }
    let page = folder.write("index.html", &page::html(&document))?;
    Ok(Written { page, files: folder.files, claims: document.claims })
}

struct Folder<'a> {
    out: &'a Path,
    files: Vec<PathBuf>,
}

impl Folder<'_> {
    fn write(&mut self, name: &str, text: &str) -> Result<PathBuf, SiteError> {
        let path = self.out.join(name);
        let folder = path.parent().unwrap_or(self.out);
        let written =
            std::fs::create_dir_all(folder).and_then(|()| atomic_write::unsynced(&path, text.as_bytes()));
        written.map_err(|cause| SiteError::Write { path: path.clone(), cause })?;
        self.files.push(path.clone());
        Ok(path)
    }
}
