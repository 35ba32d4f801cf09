//! Writes the whole report: a page, its appendix, an index in Markdown, one CSV file per experiment and one SVG file per plot.

use std::path::{Path, PathBuf};

use crate::claim::CheckedClaim;
use crate::comparison;
use crate::measurements::newest;
use crate::part::{Document, OtherReport};
use crate::record::Record;
use crate::run::RunOutcome;
use crate::section::Section;
use crate::spec::Specs;
use crate::{front, markdown, page, tidy_csv};
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
    /// What the page's articles ask for and no record has.
    pub problems: Vec<String>,
}

/// Writes `index.html`, `appendix/<part>.html`, `report.md`, `claims.md`, `<experiment>.csv`, `plots/<experiment>-<plot>.svg`, and a
/// timeline's `traces/<experiment>-<plot>.json`, into the folder `out`, which is created if missing. Files of the same names are replaced,
/// others stay. `others` are the records of other machines, in folders within `out`, which get their CSV files, plots and traces there.
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
        folder.section(specs, section, &records)?;
        for other in &section.elsewhere {
            let theirs = others.iter().find(|one| other.folder.strip_suffix('/') == Some(&one.folder));
            folder.section(specs, other, theirs.map_or(&[][..], |one| &one.records))?;
        }
    }
    let all: Vec<&Record> = records.iter().chain(others.iter().flat_map(|other| &other.records)).collect();
    let front = front::build(specs, &all);
    for (name, text) in markdown::files(front.as_ref(), &document) {
        folder.write(&name, &text)?;
    }
    for (name, text) in page::appendix(&document) {
        folder.write(&name, &text)?;
    }
    let page = folder.write("index.html", &page::html(front.as_ref(), &document))?;
    let problems = front.map(|front| front.problems).unwrap_or_default();
    Ok(Written { page, files: folder.files, claims: document.claims, problems })
}

struct Folder<'a> {
    out: &'a Path,
    files: Vec<PathBuf>,
}

impl Folder<'_> {
    /// Writes the plots, traces and the CSV file of a section from its machine's records.
    fn section(&mut self, specs: &Specs, section: &Section, records: &[Record]) -> Result<(), SiteError> {
        for plot in &section.plots {
            self.write(&plot.file, &plot.svg)?;
            if let Some((file, text)) = &plot.trace {
                self.write(file, text)?;
            }
        }
        let mut mine = newest(records.iter().filter(|r| r.experiment == section.name));
        if let Some(comparison) = specs.comparison(&section.name) {
            mine.extend(comparison::ratios(comparison, &mine));
        }
        if !mine.is_empty() {
            self.write(&section.csv_file(), &tidy_csv::write(&mine))?;
        }
        Ok(())
    }

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
