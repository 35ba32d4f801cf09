//! The appendix: a part for each assignment, with everything that was measured on every machine.

use crate::claim::{self, CheckedClaim};
use crate::record::Record;
use crate::run::RunOutcome;
use crate::section::{Section, sections};
use crate::spec::{self, Specs};

/// The report of another machine, whose folder lies within this report's.
#[derive(Clone, Debug)]
pub struct OtherReport {
    /// Its folder's name, relative to this report.
    pub folder: String,
    /// Its records.
    pub records: Vec<Record>,
}

impl OtherReport {
    /// Its GPU, its processor where it has none, or its folder where there is no record.
    fn machine(&self) -> &str {
        let named = self.records.iter().find(|record| record.environment.device != "cpu");
        named.or(self.records.first()).map_or(&self.folder, |record| record.environment.machine())
    }

    /// The GPU or the processor that its records of `experiment` are of.
    pub(crate) fn machine_of(&self, experiment: &str) -> &str {
        let record = self.records.iter().find(|record| record.experiment == experiment);
        record.map_or(self.machine(), |record| record.environment.machine())
    }
}

/// Everything that the report shows.
#[derive(Clone, Debug)]
pub struct Document {
    /// Every claim with its verdict.
    pub claims: Vec<CheckedClaim>,
    /// Each machine with the verdicts on its own records.
    pub by_machine: Vec<(String, Vec<CheckedClaim>)>,
    /// The parts, in their order.
    pub parts: Vec<Part>,
}

/// A part of the report.
#[derive(Clone, Debug)]
pub struct Part {
    /// Its anchor and file name.
    pub name: String,
    /// Heading.
    pub title: String,
    /// Its subject, in Markdown.
    pub about: String,
    /// The assignment's questions.
    pub rows: Vec<Row>,
    /// Its sections.
    pub sections: Vec<Section>,
}

/// A question of an assignment, and where its answer is.
#[derive(Clone, Debug)]
pub struct Row {
    /// The question, in Markdown.
    pub asks: String,
    /// An answer without figures, in Markdown.
    pub says: String,
    /// Why the answer is less than was asked, in Markdown.
    pub short: Option<String>,
    /// The names and headings of its sections.
    pub sections: Vec<(String, String)>,
    /// Files of the checkout.
    pub code: Vec<String>,
}

impl Document {
    /// Computes the report of `records`. `others` are the reports of other machines.
    pub fn new(specs: &Specs, records: &[Record], runs: &[RunOutcome], others: &[OtherReport]) -> Self {
        Self {
            claims: claim::check_anywhere(specs, records, runs, others),
            by_machine: by_machine(specs, records, others),
            parts: parts(specs, records, runs, others),
        }
    }

    /// Returns every section, in the order of the page.
    pub fn sections(&self) -> impl Iterator<Item = &Section> {
        self.parts.iter().flat_map(|part| &part.sections)
    }
}

/// The verdicts on the records of each machine of the page, or of all of them.
fn by_machine(specs: &Specs, records: &[Record], others: &[OtherReport]) -> Vec<(String, Vec<CheckedClaim>)> {
    let Some(front) = &specs.front else {
        let machine = records.first().map_or("measured", |record| record.environment.machine());
        return vec![(machine.to_owned(), claim::check(specs, records, &[]))];
    };
    let all: Vec<&Record> = records.iter().chain(others.iter().flat_map(|other| &other.records)).collect();
    let of = |machine: &spec::Machine| {
        let mine = all.iter().filter(|record| record.environment.machine().contains(&machine.matches));
        let mine: Vec<Record> = mine.copied().cloned().collect();
        (machine.title.clone(), claim::check(specs, &mine, &[]))
    };
    front.machines.iter().map(of).collect()
}

/// The parts; sections that none of them names stand in the last one.
fn parts(specs: &Specs, records: &[Record], runs: &[RunOutcome], others: &[OtherReport]) -> Vec<Part> {
    let mut left = sections(specs, records, runs, "");
    for other in others {
        let folder = format!("{}/", other.folder);
        for section in sections(specs, &other.records, &[], &folder).into_iter().filter(|s| s.has_records) {
            match left.iter_mut().find(|here| here.name == section.name) {
                Some(here) => here.elsewhere.push(section),
                None => left.push(section),
            }
        }
    }
    let mut parts: Vec<Part> = specs
        .parts
        .iter()
        .map(|part| {
            let take = |name: &String| {
                left.iter().position(|section| section.name == *name).map(|at| left.remove(at))
            };
            Part {
                name: part.name.clone(),
                title: part.title.clone(),
                about: part.about.clone(),
                sections: part.sections.iter().filter_map(take).collect(),
                rows: part.rows.iter().map(|one| row(specs, one)).collect(),
            }
        })
        .collect();
    match parts.last_mut() {
        Some(last) => last.sections.extend(left),
        None => parts.push(Part {
            name: "experiments".into(),
            title: "Experiments".into(),
            about: String::new(),
            rows: Vec::new(),
            sections: left,
        }),
    }
    parts
}

fn row(specs: &Specs, row: &spec::Row) -> Row {
    let sections = row.sections.iter().filter_map(|name| Some((name.clone(), specs.title(name)?.to_owned())));
    Row {
        asks: row.asks.clone(),
        says: row.says.clone(),
        short: row.short.clone(),
        sections: sections.collect(),
        code: row.code.clone(),
    }
}
