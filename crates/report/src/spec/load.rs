//! Reads the files that register experiments and checks them against each other.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::Specs;

/// The folder of a workspace whose `.toml` files register experiments, one for each crate that is measured.
pub const FOLDER: &str = "crates/experiments/experiments";

/// A file of experiments that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// The folder or file cannot be read.
    #[error(
        "cannot read {path}: {cause}; run from a checkout of the project, or give a folder with crates/experiments/ in it"
    )]
    Read {
        /// The path that was tried.
        path: PathBuf,
        /// The error of the operating system.
        cause: std::io::Error,
    },
    /// The file is not TOML, or has a field or value that is not known.
    #[error(
        "{path}:{line}: {message}; correct the line (the documentation of `report::spec` lists every field)"
    )]
    Parse {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// What is wrong with it.
        message: String,
    },
    /// Two entries have one name.
    #[error("{path}:{line}: the {what} `{name}` is registered already, in {first}; rename one of the two")]
    Duplicate {
        /// The later file.
        path: PathBuf,
        /// Line number of the later entry, from 1.
        line: usize,
        /// `experiment`, `claim` or `plot`.
        what: &'static str,
        /// The name that both have.
        name: String,
        /// The earlier file.
        first: PathBuf,
    },
    /// A claim names an experiment that no crate registers.
    #[error(
        "{path}:{line}: the claim `{claim}` is about the experiment `{experiment}`, which no crate registers; known: {known}"
    )]
    UnknownExperiment {
        /// The file.
        path: PathBuf,
        /// Line number of the claim, from 1.
        line: usize,
        /// The claim's name.
        claim: String,
        /// The experiment that it names.
        experiment: String,
        /// The experiments and comparisons that there are.
        known: String,
    },
}

impl Specs {
    /// Reads every file in [`FOLDER`] under `root`, in the order of their names.
    pub fn load(root: &Path) -> Result<Self, SpecError> {
        let folder = root.join(FOLDER);
        let read = |cause| SpecError::Read { path: folder.clone(), cause };
        let mut files = Vec::new();
        for entry in std::fs::read_dir(&folder).map_err(read)? {
            let file = entry.map_err(read)?.path();
            if file.extension().is_some_and(|extension| extension == "toml") {
                files.push(file);
            }
        }
        files.sort();
        Self::load_files(&files)
    }

    /// Reads the given files, in the given order.
    pub fn load_files(files: &[PathBuf]) -> Result<Self, SpecError> {
        let mut all = Self::default();
        let mut names = Names::default();
        let mut claimed = Vec::new();
        for path in files {
            let text = std::fs::read_to_string(path)
                .map_err(|cause| SpecError::Read { path: path.clone(), cause })?;
            let specs: Self = toml::from_str(&text).map_err(|error| SpecError::Parse {
                path: path.clone(),
                line: error.span().map_or(1, |span| line_at(&text, span.start)),
                message: error.message().trim().replace('\n', ", "),
            })?;
            let experiments = specs.experiments.iter().map(|e| (&e.name, &e.plots));
            let comparisons = specs.comparisons.iter().map(|c| (&c.name, &c.plots));
            for (name, plots) in experiments.chain(comparisons) {
                names.add(path, &text, "experiment", name, name)?;
                for plot in plots {
                    names.add(path, &text, "plot", &plot.name, &format!("{name}-{}", plot.name))?;
                }
            }
            for claim in &specs.claims {
                names.add(path, &text, "claim", &claim.name, &claim.name)?;
                claimed.push((
                    path,
                    line_of(&text, &claim.name),
                    claim.name.clone(),
                    claim.experiment.clone(),
                ));
            }
            all.experiments.extend(specs.experiments);
            all.claims.extend(specs.claims);
            all.comparisons.extend(specs.comparisons);
        }
        for (path, line, claim, experiment) in claimed {
            if all.experiment(&experiment).is_none() && all.comparison(&experiment).is_none() {
                let known = all.known_names();
                return Err(SpecError::UnknownExperiment {
                    path: path.clone(),
                    line,
                    claim,
                    experiment,
                    known,
                });
            }
        }
        Ok(all)
    }

    fn known_names(&self) -> String {
        let experiments = self.experiments.iter().map(|e| &e.name);
        let names: Vec<_> =
            experiments.chain(self.comparisons.iter().map(|c| &c.name)).map(|n| format!("`{n}`")).collect();
        if names.is_empty() { "none".into() } else { names.join(", ") }
    }
}

/// Where each name was first registered.
#[derive(Default)]
struct Names(BTreeMap<(&'static str, String), PathBuf>);

impl Names {
    fn add(
        &mut self,
        path: &Path,
        text: &str,
        what: &'static str,
        name: &str,
        key: &str,
    ) -> Result<(), SpecError> {
        match self.0.insert((what, key.to_owned()), path.to_owned()) {
            None => Ok(()),
            Some(first) => {
                let line = line_of(text, name);
                Err(SpecError::Duplicate { path: path.to_owned(), line, what, name: name.to_owned(), first })
            }
        }
    }
}

/// The last line that gives `name`: of two entries with one name, the later is the one to rename.
fn line_of(text: &str, name: &str) -> usize {
    let gives = |line: &str| {
        line.trim_start().strip_prefix("name").is_some_and(|rest| {
            rest.trim_start().strip_prefix('=').is_some_and(|rest| rest.contains(&format!("\"{name}\"")))
        })
    };
    text.lines().enumerate().filter(|(_, line)| gives(line)).last().map_or(1, |(index, _)| index + 1)
}

fn line_at(text: &str, offset: usize) -> usize {
    1 + text.bytes().take(offset).filter(|&byte| byte == b'\n').count()
}
