//! `cargo xtask report`, and the last step of every measuring verb: writes the pages, prints the claims and the path.

mod pdf;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use report::{OtherReport, Record, RunOutcome, Specs};
use serde::{Deserialize, Serialize};

use crate::stamp::{self, Stamp};
use crate::workspace::Workspace;

/// The folder of the report, and the run to compare with.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Show what changed since the run whose report is in DIR
    #[arg(long, value_name = "DIR")]
    against: Option<PathBuf>,
    /// Folder of the report; its records are read from DIR/records
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Also print the page as report.pdf, with a Chromium found on PATH
    #[arg(long)]
    pdf: bool,
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    let folder = Folder::new(workspace, args.out.as_deref())?;
    let specs = Specs::load(&workspace.root)?;
    if let Some(against) = &args.against {
        let old = read_records(&records_of(against))?;
        println!("{}", report::against::compare(&specs, &old, &folder.read()?).markdown());
    }
    folder.finish(&specs)?;
    if args.pdf {
        println!("printed: {}", pdf::print(&folder.out.join("index.html"))?.display());
    }
    Ok(())
}

/// The records of a report's folder, or of a folder that holds records itself.
fn records_of(folder: &Path) -> PathBuf {
    let records = folder.join("records");
    if records.is_dir() { records } else { folder.to_owned() }
}

/// The folder of one report.
///
/// `records/` holds what is shown and belongs to the project; `.run/` holds logs, stamps and unfinished records.
#[derive(Debug)]
pub(crate) struct Folder {
    pub(crate) out: PathBuf,
}

impl Folder {
    pub(crate) fn new(workspace: &Workspace, out: Option<&Path>) -> Result<Self> {
        let out = match out {
            None => workspace.reports(),
            Some(out) => {
                std::path::absolute(out).with_context(|| format!("{} is not a usable path", out.display()))?
            }
        };
        Ok(Self { out })
    }

    /// Creates the folder.
    pub(crate) fn create(&self) -> Result<()> {
        for folder in [self.run(), self.records()] {
            std::fs::create_dir_all(&folder).with_context(|| {
                format!("cannot create {}; give --out a folder that you may write", folder.display())
            })?;
        }
        Ok(())
    }

    pub(crate) fn run(&self) -> PathBuf {
        self.out.join(".run")
    }

    pub(crate) fn records(&self) -> PathBuf {
        self.out.join("records")
    }

    pub(crate) fn log(&self, experiment: &str) -> PathBuf {
        self.run().join(format!("{experiment}.log"))
    }

    /// The log, emptied for a new run.
    pub(crate) fn fresh_log(&self, experiment: &str) -> Result<PathBuf> {
        let log = self.log(experiment);
        std::fs::File::create(&log).with_context(|| format!("cannot write the log {}", log.display()))?;
        Ok(log)
    }

    /// The file for the records of a run of this process. An experiment outlives a process that was killed, and goes on writing to the
    /// file of that one.
    pub(crate) fn unfinished_records(&self, experiment: &str) -> PathBuf {
        self.run().join(format!("{experiment}.{}.jsonl", std::process::id()))
    }

    /// The records of the last complete run.
    fn finished_records(&self, experiment: &str) -> PathBuf {
        self.run().join(format!("{experiment}.jsonl"))
    }

    /// Removes what runs of earlier processes left unfinished.
    pub(crate) fn forget_unfinished(&self, experiment: &str) -> Result<()> {
        let run = self.run();
        let entries = std::fs::read_dir(&run).with_context(|| format!("cannot read {}", run.display()))?;
        for path in entries.flatten().map(|entry| entry.path()) {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let number = name.strip_prefix(experiment).and_then(|rest| rest.strip_prefix('.'));
            let number = number.and_then(|rest| rest.strip_suffix(".jsonl"));
            // A comparison has another file for each side.
            let number = number.map(|rest| {
                ["ours.", "peer."].iter().find_map(|side| rest.strip_prefix(side)).unwrap_or(rest)
            });
            if number.is_some_and(|number| number.parse::<u32>().is_ok()) {
                std::fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
            }
        }
        Ok(())
    }

    /// Replaces the records with those of the run that this process has completed.
    pub(crate) fn publish(&self, experiment: &str) -> Result<()> {
        let (from, to) = (self.unfinished_records(experiment), self.finished_records(experiment));
        // An experiment may have had nothing to measure here.
        if !from.exists() {
            std::fs::File::create(&from).with_context(|| format!("cannot write {}", from.display()))?;
        }
        std::fs::rename(&from, &to).with_context(|| format!("cannot rename {}", from.display()))?;
        self.publish_again(experiment)
    }

    /// Shows the rounds that a run of this process has so far. Fewer rounds than needed never replace the records of a run before.
    pub(crate) fn publish_rounds(&self, experiment: &str, rounds: Rounds) -> Result<()> {
        let shown = self.records().join(format!("{experiment}.jsonl"));
        let text = serde_json::to_vec(&rounds).context("a count is plain data")?;
        stamp::replace(&self.rounds_of(experiment), &text)?;
        if rounds.are_enough() || rounds.fresh {
            let from = self.unfinished_records(experiment);
            stamp::replace(&shown, report::record::lines(&report::read_records(&from)?).as_bytes())?;
        }
        Ok(())
    }

    /// Whether `experiment` has no records yet.
    pub(crate) fn is_fresh(&self, experiment: &str) -> bool {
        !self.records().join(format!("{experiment}.jsonl")).exists()
    }

    fn rounds_of(&self, experiment: &str) -> PathBuf {
        self.run().join(format!("{experiment}.rounds"))
    }

    /// The rounds that the last run of a comparison came to; `None` if it came to none.
    pub(crate) fn rounds(&self, experiment: &str) -> Option<Rounds> {
        serde_json::from_slice(&std::fs::read(self.rounds_of(experiment)).ok()?).ok()
    }

    /// Forgets how far the last run came.
    pub(crate) fn forget_rounds(&self, experiment: &str) {
        // Where there is none, there is nothing to forget.
        let _ = std::fs::remove_file(self.rounds_of(experiment));
    }

    /// What a run has recorded so far; its last line may be torn.
    fn unfinished(&self, experiment: &str, run: u32) -> String {
        let path = self.run().join(format!("{experiment}.{run}.jsonl"));
        std::fs::read_to_string(path).unwrap_or_default()
    }

    /// Returns whether a run has recorded a figure.
    pub(crate) fn has_unfinished(&self, experiment: &str, run: u32) -> bool {
        self.unfinished(experiment, run).contains('\n')
    }

    /// Shows what a run that was ended had recorded, where nothing is shown yet. Returns the number of records; a last line that was
    /// torn is left out.
    pub(crate) fn publish_unfinished(&self, experiment: &str, run: u32) -> Result<usize> {
        let text = self.unfinished(experiment, run);
        let whole = &text[..text.rfind('\n').map_or(0, |end| end + 1)];
        let records = whole.lines().count();
        if records > 0 && self.is_fresh(experiment) {
            stamp::replace(&self.records().join(format!("{experiment}.jsonl")), whole.as_bytes())?;
        }
        Ok(records)
    }

    /// Replaces the records with those of the last complete run.
    pub(crate) fn publish_again(&self, experiment: &str) -> Result<()> {
        let records = report::read_records(&self.finished_records(experiment))?;
        let lines = report::record::lines(&records);
        stamp::replace(&self.records().join(format!("{experiment}.jsonl")), lines.as_bytes())
    }

    /// Every record that is shown.
    fn read(&self) -> Result<Vec<Record>> {
        read_records(&self.records())
    }

    /// The records of other machines: of folders within this one.
    fn others(&self) -> Result<Vec<OtherReport>> {
        let entries =
            std::fs::read_dir(&self.out).with_context(|| format!("cannot read {}", self.out.display()))?;
        let mut folders: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        folders.retain(|folder| folder.join("records").is_dir());
        folders.sort();
        let other = |folder: String| {
            let records = read_records(&self.out.join(&folder).join("records"))?;
            Ok(OtherReport { folder, records })
        };
        let within =
            folders.iter().filter_map(|folder| Some(folder.file_name()?.to_string_lossy().into_owned()));
        within.map(other).collect()
    }

    /// Writes the pages, prints the claims, and last the path of the page.
    pub(crate) fn finish(&self, specs: &Specs) -> Result<()> {
        let runs: Vec<RunOutcome> =
            Stamp::read_all(&self.run()).into_iter().map(|stamp| stamp.outcome).collect();
        let written = report::site::write(specs, &self.read()?, &runs, &self.others()?, &self.out)?;
        for claim in &written.claims {
            println!("{claim}");
        }
        if let Some(first) = written.problems.first() {
            println!(
                "the page lacks {} figures or sentences without a record here, such as {first}",
                written.problems.len()
            );
        }
        println!("report: {}", written.page.display());
        Ok(())
    }
}

/// How many rounds of a comparison are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Rounds {
    pub(crate) done: u64,
    pub(crate) total: u64,
    /// From which number on they count.
    pub(crate) needed: u64,
    /// Whether there were no records when the run began.
    pub(crate) fresh: bool,
}

impl Rounds {
    pub(crate) fn are_enough(self) -> bool {
        self.done >= self.needed
    }
}

/// The records of every file in `folder`, in the order of the files' names.
fn read_records(folder: &Path) -> Result<Vec<Record>> {
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            bail!("there are no records in {}; run `cargo xtask run-all`", folder.display())
        }
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", folder.display())),
    };
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "jsonl"));
    files.sort();
    let mut records = Vec::new();
    for file in files {
        records.extend(report::read_records(&file)?);
    }
    Ok(records)
}
