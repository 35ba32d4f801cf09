//! The appendix: a part for each assignment, with everything that was measured on every machine.

use crate::claim::{self, CheckedClaim};
use crate::finding;
use crate::measurements::{Measurements, distinct};
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
    /// The assignment's questions with their answers.
    pub rows: Vec<Row>,
    /// Its sections.
    pub sections: Vec<Section>,
}

/// A question of an assignment with its answers.
#[derive(Clone, Debug)]
pub struct Row {
    /// The question, in Markdown.
    pub asks: String,
    /// Its answers, in Markdown.
    pub answers: Vec<String>,
    /// Whether every answer has its figures.
    pub measured: bool,
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

    /// Returns the questions that have no measurement, each with its part.
    pub fn gaps(&self) -> Vec<(&Part, &Row)> {
        let rows = self.parts.iter().flat_map(|part| part.rows.iter().map(move |row| (part, row)));
        rows.filter(|(_, row)| !row.measured).collect()
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
    let row = |row: &spec::Row| answer(specs, row, records, others);
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
                rows: part.rows.iter().map(row).collect(),
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

fn answer(specs: &Specs, row: &spec::Row, records: &[Record], others: &[OtherReport]) -> Row {
    let mut answers = Vec::new();
    let mut measured = true;
    if !row.says.is_empty() {
        answers.push(row.says.trim().to_owned());
    }
    for spec::Answer { experiment, finding } in &row.answers {
        let here = finding::render(finding, &Measurements::select(specs, experiment, records));
        let elsewhere = others.iter().flat_map(|other| {
            let sentences =
                finding::render(finding, &Measurements::select(specs, experiment, &other.records));
            let sentences = sentences.into_iter().filter(|sentence| sentence.measured);
            sentences.map(|sentence| format!("On {}: {}", other.machine_of(experiment), sentence.text))
        });
        let elsewhere: Vec<String> = elsewhere.collect();
        let anywhere = !elsewhere.is_empty() || here.iter().any(|sentence| sentence.measured);
        match anywhere {
            true => answers.extend(here.into_iter().filter(|sentence| sentence.measured).map(|s| s.text)),
            false => {
                let why = here.into_iter().next().map(|sentence| sentence.text).unwrap_or_default();
                answers.push(not_measured(specs, row, Some(experiment), &why));
            }
        }
        answers.extend(elsewhere);
        measured &= anywhere;
    }
    if row.answers.is_empty() && row.missing.is_some() {
        answers.push(not_measured(specs, row, None, ""));
        measured = false;
    }
    let named = row.answers.iter().map(|answer| &answer.experiment).chain(row.section.as_ref());
    let sections =
        distinct(named).into_iter().filter_map(|name| Some((name.clone(), specs.title(name)?.to_owned())));
    let answers = distinct(answers.into_iter());
    Row { asks: row.asks.clone(), answers, measured, sections: sections.collect(), code: row.code.clone() }
}

/// `Not measured: no GPU. Measure it with …`
fn not_measured(specs: &Specs, row: &spec::Row, experiment: Option<&String>, why: &str) -> String {
    let why = match &row.missing {
        Some(reason) => reason.trim_end_matches('.'),
        None => why.strip_suffix(')').unwrap_or(why),
    };
    let why = why.replacen("not measured (", "", 1);
    let command = row.run.clone().or_else(|| specs.command(experiment?));
    let why = if why.is_empty() { "no record" } else { &why };
    let command = command.map(|command| format!(" Measure it with `{command}`.")).unwrap_or_default();
    format!("**Not measured**: {why}.{command}")
}
