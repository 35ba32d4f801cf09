//! A section of the report: the tables, plots and findings of an experiment, and the machines and days of its records.

use std::collections::BTreeMap;

use crate::environment::Environment;
use crate::finding;
use crate::measurements::{Measurements, distinct};
use crate::plot;
use crate::record::Record;
use crate::run::{RunOutcome, RunState};
use crate::spec::{self, Specs};
use crate::table::Table;

/// A section of the report.
#[derive(Clone, Debug)]
pub struct Section {
    /// The experiment's name.
    pub name: String,
    /// Heading.
    pub title: String,
    /// Description, in Markdown.
    pub about: String,
    /// Tables that have records.
    pub tables: Vec<Table>,
    /// Plots that have records.
    pub plots: Vec<DrawnPlot>,
    /// Findings as sentences.
    pub findings: Vec<String>,
    /// The command that runs the experiment again; empty for one that no crate registers.
    pub command: String,
    /// The machines and revisions of its records, each once.
    pub environments: Vec<String>,
    /// The state of its run; `None` if it did not run.
    pub run: Option<RunState>,
    /// Whether it has records.
    pub has_records: bool,
    /// The machine of its records.
    pub machine: String,
    /// The folder of its files relative to the page: empty, or `h200/`.
    pub folder: String,
    /// The same section of the other reports that have records of it.
    pub elsewhere: Vec<Section>,
}

/// A plot that was drawn.
#[derive(Clone, Debug)]
pub struct DrawnPlot {
    /// Caption.
    pub title: String,
    /// Its file, relative to the report's folder.
    pub file: String,
    /// The SVG document.
    pub svg: String,
    /// Width and height of the document.
    pub size: (f64, f64),
    /// The trace of a timeline: its file, relative to the report's folder, and its text.
    pub trace: Option<(String, String)>,
}

impl Section {
    /// Returns its CSV file, relative to the page. An experiment that no crate registers may have any name, so characters other than letters, digits,
    /// `-` and `_` become `_`.
    pub fn csv_file(&self) -> String {
        let plain = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '-' | '_') { c } else { '_' };
        self.folder.clone() + &self.name.chars().map(plain).collect::<String>() + ".csv"
    }

    /// Describes the run: `done in 12.0 s`, `failed: …`, `skipped: …`; without a run, whether there are records.
    pub fn run_words(&self) -> String {
        match &self.run {
            Some(state @ RunState::Done { .. }) => format!("done in {}", state.detail()),
            Some(state) => format!("{}: {}", state.word(), state.detail()),
            None if self.has_records => "records from an earlier run".into(),
            None => "not run".into(),
        }
    }
}

/// Returns a section for each experiment, then for each comparison, then for each experiment that has records but is not registered.
/// `folder` is where its files are, relative to the page.
pub fn sections(specs: &Specs, records: &[Record], runs: &[RunOutcome], folder: &str) -> Vec<Section> {
    let build = |name: &str, title: &str, about: &str, views: Views, command: String| {
        let measured = Measurements::select(specs, name, records);
        let run = runs.iter().find(|run| run.experiment == name).map(|run| run.state.clone());
        let mut built = section((name, folder), title, about, &views, &measured, run);
        built.command = command;
        built
    };
    let mut sections = Vec::new();
    for e in &specs.experiments {
        let views = Views { tables: &e.tables, plots: &e.plots, findings: &e.findings };
        let command = format!("cargo xtask run-all --only {}", e.name);
        sections.push(build(&e.name, &e.title, &e.about, views, command));
    }
    for c in &specs.comparisons {
        let views = Views { tables: &c.tables, plots: &c.plots, findings: &c.findings };
        let command = format!("cargo xtask compare --only {}", c.name);
        sections.push(build(&c.name, &c.title, &c.about, views, command));
    }
    for name in distinct(records.iter().map(|record| &record.experiment)) {
        if specs.experiment(name).is_none() && specs.comparison(name).is_none() {
            let about = "No crate registers this experiment; the table shows all its records.";
            sections.push(build(name, name, about, Views::default(), String::new()));
        }
    }
    sections
}

/// The specifications of a section's tables, plots and findings.
#[derive(Default)]
struct Views<'a> {
    tables: &'a [spec::Table],
    plots: &'a [spec::Plot],
    findings: &'a [spec::Finding],
}

/// Builds a section from the records of its experiment. Tables and plots without records are left out.
fn section(
    (name, folder): (&str, &str),
    title: &str,
    about: &str,
    views: &Views,
    measured: &Measurements,
    run: Option<RunState>,
) -> Section {
    let has_records = !measured.records().is_empty();
    let all_measurements = [spec::Table { title: "All measurements".into(), ..spec::Table::default() }];
    let tables = if views.tables.is_empty() { &all_measurements } else { views.tables };
    let draw = |spec: &spec::Plot| {
        let file = format!("{folder}plots/{name}-{}.svg", spec.name);
        let svg = plot::draw(spec, measured)?;
        let trace = plot::trace(spec, measured)
            .map(|text| (format!("{folder}traces/{name}-{}.json", spec.name), text));
        Some(DrawnPlot { title: spec.title.clone(), file, size: plot::size(&svg), svg, trace })
    };
    Section {
        name: name.into(),
        title: title.into(),
        about: about.into(),
        tables: tables.iter().filter_map(|table| Table::build(table, measured)).collect(),
        plots: views.plots.iter().filter_map(draw).collect(),
        // A finding about cases that this run does not have is left out.
        findings: views
            .findings
            .iter()
            .filter(|finding| has_records && measured.cases().any(|case| finding.of.matches(case)))
            .flat_map(|finding| finding::sentences(finding, measured))
            .collect(),
        command: String::new(),
        environments: environments(measured.records()),
        run,
        has_records,
        machine: measured.records().first().map_or("", |record| record.environment.machine()).to_owned(),
        folder: folder.into(),
        elsewhere: Vec::new(),
    }
}

/// Returns each machine and revision once, with the days of its first and last record.
fn environments(records: &[Record]) -> Vec<String> {
    let mut order = Vec::new();
    let mut days: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    for Record { environment, .. } in records {
        let machine = describe(environment);
        let time = environment.unix_time;
        let span = days.entry(machine.clone()).or_insert_with(|| {
            order.push(machine);
            (time, time)
        });
        *span = (span.0.min(time), span.1.max(time));
    }
    let line = |machine: &String| {
        let (first, last) = (day(days[machine].0), day(days[machine].1));
        if first == last { format!("{machine}, {first}") } else { format!("{machine}, {first} to {last}") }
    };
    order.iter().map(line).collect()
}

/// Describes an environment without its day: device, threads, memory, scale, implementations, libtorch and revision.
fn describe(e: &Environment) -> String {
    let mut parts = vec![if e.device == "cpu" { e.cpu.clone() } else { format!("{} ({})", e.device, e.cpu) }];
    parts.push(format!("{} thread{}", e.threads, if e.threads == 1 { "" } else { "s" }));
    if e.memory_bytes > 0 {
        parts.push(crate::unit::human(e.memory_bytes as f64, "B"));
    }
    match e.scale.as_deref() {
        Some("smoke") => {
            parts.push("scale smoke (a check in an unoptimized build, not a measurement)".into())
        }
        Some("laptop") => parts.push("scale laptop (shortened; `--scale full` runs larger sizes)".into()),
        Some(scale) => parts.push(format!("scale {scale}")),
        None => {}
    }
    if let Some(implementations) = &e.implementations {
        // Records have the short form of `kernels::processor`: `bf16 in fp32`.
        parts.push(implementations.replace(" in fp32", " products computed in fp32"));
    }
    if let Some(torch) = &e.torch {
        parts.push(format!("libtorch {torch}"));
    }
    if !e.revision.is_empty() {
        parts.push(format!("revision {}", e.revision));
    }
    parts.join(", ")
}

/// Formats the UTC day of a Unix time: `2026-11-21`.
pub(crate) fn day(unix_time: u64) -> String {
    // Days to civil date in the proleptic Gregorian calendar (H. Hinnant, "chrono-compatible low-level date
    // algorithms"); years start in March so that the leap day is the last.
    let days = (unix_time / 86_400).min(100_000_000) as i64 + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year_of_era + i64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::day;

    #[test]
    fn days_of_known_times() {
        for (time, expected) in [
            (0, "1970-01-01"),
            (951_782_400, "2000-02-29"),
            (951_868_800, "2000-03-01"),
            (1_795_248_000, "2026-11-21"),
            (4_107_542_399, "2100-02-28"),
            (4_107_542_400, "2100-03-01"),
        ] {
            assert_eq!(day(time), expected);
        }
        assert!(day(u64::MAX).len() >= 10, "a time beyond every calendar is no panic");
    }
}
