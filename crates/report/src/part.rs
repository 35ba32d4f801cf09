//! The report as it is read: an opening screen, then a part for each assignment.

use crate::claim::{self, CheckedClaim};
use crate::finding;
use crate::measurements::{Measurements, distinct};
use crate::record::Record;
use crate::run::RunOutcome;
use crate::section::{Section, environments, main_environment, sections};
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

    /// Returns its page.
    pub fn page(&self) -> String {
        format!("{}/index.html", self.folder)
    }
}

/// Everything that the report shows.
#[derive(Clone, Debug)]
pub struct Document {
    /// The first screen; `None` where no crate registers one.
    pub opening: Option<Opening>,
    /// Every claim with its verdict.
    pub claims: Vec<CheckedClaim>,
    /// The newest setting of the machine that most records are of.
    pub machine: Option<String>,
    /// The machines and revisions of the records.
    pub environments: Vec<String>,
    /// The machines of other reports, each with its page.
    pub others: Vec<(String, String)>,
    /// The parts, in their order.
    pub parts: Vec<Part>,
}

/// The first screen.
#[derive(Clone, Debug)]
pub struct Opening {
    /// Description of the project, in Markdown.
    pub about: String,
    /// The figures that stand first.
    pub headlines: Vec<Headline>,
}

/// A claim's figure, ready to be drawn.
#[derive(Clone, Debug)]
pub struct Headline {
    /// Name of the figure.
    pub title: String,
    /// The claim with its verdict.
    pub claim: CheckedClaim,
    /// The value that counts as 1.
    pub baseline: Option<String>,
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
        let claims = claim::check_anywhere(specs, records, runs, others);
        let opening = specs.opening.as_ref().map(|opening| Opening {
            about: opening.about.clone(),
            headlines: opening.headlines.iter().filter_map(|one| headline(one, &claims)).collect(),
        });
        Self {
            opening,
            claims,
            machine: main_environment(records),
            environments: environments(records),
            others: others.iter().map(|other| (other.machine().to_owned(), other.page())).collect(),
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

fn headline(spec: &spec::Headline, claims: &[CheckedClaim]) -> Option<Headline> {
    let claim = claims.iter().find(|checked| checked.claim.name == spec.claim)?.clone();
    Some(Headline { title: spec.title.clone(), claim, baseline: spec.baseline.clone() })
}

/// The parts; sections that none of them names stand in the last one.
fn parts(specs: &Specs, records: &[Record], runs: &[RunOutcome], others: &[OtherReport]) -> Vec<Part> {
    let mut left = sections(specs, records, runs);
    for section in &mut left {
        let has = |other: &&OtherReport| other.records.iter().any(|record| record.experiment == section.name);
        let machine = |other: &OtherReport| other.machine_of(&section.name).to_owned();
        let pages = others.iter().filter(has).map(|other| (machine(other), other.page()));
        section.elsewhere = pages.collect();
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
