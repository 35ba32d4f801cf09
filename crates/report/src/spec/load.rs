//! Reads the files that register experiments and checks them against each other.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::{Measure, Specs};

/// The folder of a workspace whose `.toml` files register experiments, one for each crate that is measured. Its folder
/// `parts` has the report's parts, and `articles` its articles, in the order of the files' names.
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
        /// The mistake.
        message: String,
    },
    /// Two entries have one name.
    #[error("{path}:{line}: the {what} `{name}` is registered already, in {first}; rename one of the two")]
    Duplicate {
        /// The later file.
        path: PathBuf,
        /// Line number of the later entry, from 1.
        line: usize,
        /// `experiment`, `claim`, `plot`, `part`, `article`, or a part's `section`.
        what: &'static str,
        /// The name that both have.
        name: String,
        /// The earlier file.
        first: PathBuf,
    },
    /// A claim, a part or an article names what no crate registers.
    #[error("{path}:{line}: {by} is about the {what} `{name}`, which no crate registers; known: {known}")]
    Unknown {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// What names it.
        by: String,
        /// `experiment` or `part`.
        what: &'static str,
        /// The name.
        name: String,
        /// The names that there are.
        known: String,
    },
    /// The front of the page is given twice.
    #[error("{path}:1: the front of the page is registered already; remove one of the two")]
    SecondFront {
        /// The later file.
        path: PathBuf,
    },
}

impl Specs {
    /// Reads every file in [`FOLDER`] under `root`, in the order of their names, then those of its folders `parts` and `articles`.
    pub fn load(root: &Path) -> Result<Self, SpecError> {
        let folder = root.join(FOLDER);
        let mut files = toml_files(&folder)?;
        for inner in ["parts", "articles"].map(|inner| folder.join(inner)) {
            if inner.is_dir() {
                files.extend(toml_files(&inner)?);
            }
        }
        Self::load_files(&files)
    }

    /// Reads the given files, in the given order.
    pub fn load_files(files: &[PathBuf]) -> Result<Self, SpecError> {
        let mut all = Self::default();
        let mut names = Names::default();
        let mut references = Vec::new();
        for path in files {
            let text = std::fs::read_to_string(path)
                .map_err(|cause| SpecError::Read { path: path.clone(), cause })?;
            let specs: Self = toml::from_str(&text).map_err(|error| SpecError::Parse {
                path: path.clone(),
                line: error.span().map_or(1, |span| line_at(&text, span.start)),
                message: error.message().trim().replace('\n', ", "),
            })?;
            names.add_all(path, &text, &specs)?;
            references.extend(specs.references(path, &text));
            all.experiments.extend(specs.experiments);
            all.claims.extend(specs.claims);
            all.comparisons.extend(specs.comparisons);
            all.parts.extend(specs.parts);
            all.articles.extend(specs.articles);
            if let Some(front) = specs.front
                && all.front.replace(front).is_some()
            {
                return Err(SpecError::SecondFront { path: path.clone() });
            }
        }
        match references.into_iter().find(|reference| !reference.is_known(&all)) {
            None => Ok(all),
            Some(Reference { path, line, by, what, name }) => {
                Err(SpecError::Unknown { path, line, by, what, name, known: all.known_names(what) })
            }
        }
    }

    /// Every name that an entry gives of another.
    fn references(&self, path: &Path, text: &str) -> Vec<Reference> {
        let refer = |line: usize, by: String, what: &'static str, name: &str| Reference {
            path: path.to_owned(),
            line,
            by,
            what,
            name: name.to_owned(),
        };
        let mut all = Vec::new();
        for claim in &self.claims {
            let by = format!("the claim `{}`", claim.name);
            all.push(refer(line_of(text, &claim.name), by, "experiment", &claim.experiment));
        }
        for part in &self.parts {
            let line = line_of(text, &part.name);
            let named = part.rows.iter().flat_map(|row| &row.sections);
            for name in part.sections.iter().chain(named) {
                let line = line_with(text, &format!("\"{name}\"")).unwrap_or(line);
                all.push(refer(line, format!("the part `{}`", part.name), "experiment", name));
            }
        }
        let mut measures: Vec<(String, &Measure)> = Vec::new();
        for article in &self.articles {
            let by = format!("the article `{}`", article.name);
            all.push(refer(line_of(text, &article.name), by.clone(), "part", &article.part));
            measures.extend(article.measures().into_iter().map(|measure| (by.clone(), measure)));
        }
        let front = self.front.iter().flat_map(|front| front.measures());
        measures.extend(front.map(|measure| ("the front of the page".to_owned(), measure)));
        for (by, measure) in measures {
            if let Some(name) = &measure.experiment {
                let line = line_with(text, &format!("\"{name}\"")).unwrap_or(1);
                all.push(refer(line, by, "experiment", name));
            }
        }
        all
    }

    fn known_names(&self, what: &str) -> String {
        let names: Vec<_> = match what {
            "part" => self.parts.iter().map(|part| format!("`{}`", part.name)).collect(),
            _ => {
                let experiments = self.experiments.iter().map(|e| &e.name);
                experiments
                    .chain(self.comparisons.iter().map(|c| &c.name))
                    .map(|n| format!("`{n}`"))
                    .collect()
            }
        };
        if names.is_empty() { "none".into() } else { names.join(", ") }
    }
}

/// A name that one entry gives of another.
struct Reference {
    path: PathBuf,
    line: usize,
    by: String,
    what: &'static str,
    name: String,
}

impl Reference {
    fn is_known(&self, all: &Specs) -> bool {
        match self.what {
            "part" => all.parts.iter().any(|part| part.name == self.name),
            _ => all.has(&self.name),
        }
    }
}

fn toml_files(folder: &Path) -> Result<Vec<PathBuf>, SpecError> {
    let read = |cause| SpecError::Read { path: folder.to_owned(), cause };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(read)? {
        let file = entry.map_err(read)?.path();
        if file.extension().is_some_and(|extension| extension == "toml") {
            files.push(file);
        }
    }
    files.sort();
    Ok(files)
}

/// Where each name was first registered.
#[derive(Default)]
struct Names(BTreeMap<(&'static str, String), PathBuf>);

impl Names {
    fn add_all(&mut self, path: &Path, text: &str, specs: &Specs) -> Result<(), SpecError> {
        let experiments = specs.experiments.iter().map(|e| (&e.name, &e.plots));
        let comparisons = specs.comparisons.iter().map(|c| (&c.name, &c.plots));
        for (name, plots) in experiments.chain(comparisons) {
            self.add(path, text, "experiment", name, name)?;
            for plot in plots {
                self.add(path, text, "plot", &plot.name, &format!("{name}-{}", plot.name))?;
            }
        }
        for claim in &specs.claims {
            self.add(path, text, "claim", &claim.name, &claim.name)?;
        }
        for article in &specs.articles {
            self.add(path, text, "article", &article.name, &article.name)?;
        }
        for part in &specs.parts {
            self.add(path, text, "part", &part.name, &part.name)?;
            for section in &part.sections {
                self.add(path, text, "section", section, section)?;
            }
        }
        Ok(())
    }

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

/// The last line that contains `words`.
fn line_with(text: &str, words: &str) -> Option<usize> {
    text.lines().enumerate().filter(|(_, line)| line.contains(words)).last().map(|(index, _)| index + 1)
}

fn line_at(text: &str, offset: usize) -> usize {
    1 + text.bytes().take(offset).filter(|&byte| byte == b'\n').count()
}
