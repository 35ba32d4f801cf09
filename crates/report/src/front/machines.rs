//! The records of each machine, and the values that they give.

use std::collections::HashMap;

use crate::estimate::{self, Estimate};
use crate::filter::Filter;
use crate::measurements::{distinct, newest};
use crate::plot::escape;
use crate::record::{Case, Record};
use crate::section::day;
use crate::spec::{Machine, Measure};

/// The machines of the page.
#[derive(Debug)]
pub struct Machines(pub(super) Vec<MachineRecords>);

/// The newest records of one machine, by experiment.
#[derive(Debug)]
pub(super) struct MachineRecords {
    pub(super) machine: Machine,
    records: HashMap<String, Vec<Record>>,
}

impl Machines {
    /// Divides `records` among `machines`; where none of them has a record, among the machines that the records name.
    pub fn new(machines: &[Machine], records: &[&Record]) -> Self {
        let name = |record: &&Record| record.environment.machine().to_owned();
        let known = |name: &String| machines.iter().any(|machine| name.contains(&machine.matches));
        let names = distinct(records.iter().map(name));
        let others = names.iter().take(3).map(|name| Machine {
            name: name.clone(),
            title: name.clone(),
            matches: name.clone(),
        });
        let all: Vec<Machine> = if names.iter().any(known) { machines.to_vec() } else { others.collect() };
        let of = |machine: Machine| {
            let mine = newest(
                records.iter().filter(|r| r.environment.machine().contains(&machine.matches)).copied(),
            );
            let mut by_experiment: HashMap<String, Vec<Record>> = HashMap::new();
            for record in mine {
                by_experiment.entry(record.experiment.clone()).or_default().push(record);
            }
            MachineRecords { machine, records: by_experiment }
        };
        Self(all.into_iter().map(of).collect())
    }

    pub(super) fn get(&self, name: &str) -> Option<&MachineRecords> {
        self.0.iter().find(|machine| machine.machine.name == name)
    }

    /// The heading of a machine.
    pub(super) fn title(&self, name: &str) -> String {
        self.get(name).map_or_else(|| name.to_owned(), |machine| machine.machine.title.clone())
    }

    pub(super) fn experiment<'a>(&'a self, measure: &Measure) -> Result<Vec<&'a Record>, String> {
        let machine = measure.machine.as_ref().ok_or("the value names no machine")?;
        let experiment = measure.experiment.as_ref().ok_or("the value names no experiment")?;
        let records = self.get(machine).and_then(|machine| machine.records.get(experiment));
        records
            .map(|all| all.iter().collect())
            .ok_or_else(|| format!("no record of {experiment} on {machine}"))
    }

    /// The value of `measure`, or one for each of its groups.
    pub(super) fn values(&self, measure: &Measure) -> Result<Vec<Estimate>, String> {
        let records = self.experiment(measure)?;
        let metric = measure.metric.as_ref().ok_or("the value names no metric")?;
        let one = |of: &Filter, against: Option<&Filter>| match against {
            Some(against) => estimate::effect(&records, metric, of, against),
            None => estimate::value(&records, metric, of),
        };
        if measure.over.is_empty() {
            return Ok(vec![one(&measure.case(), measure.baseline().as_ref())?]);
        }
        let takes = |record: &&&Record| {
            record.metric.name == *metric
                && record.metric.value.is_some()
                && measure.case().matches(&record.case)
        };
        let groups =
            distinct(records.iter().filter(takes).filter_map(|record| record.case.project(&measure.over)));
        let all: Vec<Estimate> = groups
            .into_iter()
            .filter_map(|group| {
                let narrowed = measure.and(&Measure { of: Filter(group), ..Measure::default() });
                one(&narrowed.case(), narrowed.baseline().as_ref()).ok()
            })
            .collect();
        if all.is_empty() { Err(format!("no record of {metric}")) } else { Ok(all) }
    }

    /// The one value of `measure`.
    pub(super) fn value(&self, measure: &Measure) -> Result<Estimate, String> {
        self.values(measure).map(|mut all| all.remove(0))
    }

    /// The points of a line: `metric` over the case key `x`.
    pub(super) fn line(&self, measure: &Measure, x: &str) -> Result<Vec<(f64, f64)>, String> {
        let records = self.experiment(measure)?;
        let metric = measure.metric.as_ref().ok_or("the line names no metric")?;
        let at = |record: &&&Record| record.metric.name == *metric && measure.case().matches(&record.case);
        let mut places: Vec<f64> =
            distinct(records.iter().filter(at).filter_map(|record| record.case.get(x).and_then(number)));
        places.sort_by(f64::total_cmp);
        let mut points = Vec::new();
        for place in places {
            let here: Vec<&Record> = records
                .iter()
                .filter(|record| record.case.get(x).and_then(number) == Some(place))
                .copied()
                .collect();
            let value = match measure.baseline() {
                Some(against) => estimate::effect(&here, metric, &measure.case(), &against),
                None => estimate::value(&here, metric, &measure.case()),
            };
            points.extend(value.ok().map(|value| (place, value.value)));
        }
        if points.is_empty() { Err(format!("no record of {metric} over {x}")) } else { Ok(points) }
    }

    /// Whether the records of one machine have more than one revision.
    pub(super) fn several_revisions(&self) -> bool {
        self.0.iter().any(|machine| machine.revisions().len() > 1)
    }

    /// One line on what measured `experiments` on the given machines.
    pub(super) fn line_of(&self, used: &[(String, String)]) -> String {
        let of = |machine: &MachineRecords| {
            let names = used
                .iter()
                .filter(|(name, _)| *name == machine.machine.name)
                .map(|(_, experiment)| experiment);
            let mine: Vec<&Record> = names.filter_map(|name| machine.records.get(name)).flatten().collect();
            let days = mine.iter().map(|r| r.environment.unix_time);
            let revisions =
                distinct(mine.iter().map(|r| r.environment.revision.clone()).filter(|r| !r.is_empty()));
            let revisions = if revisions.is_empty() { "no revision".into() } else { revisions.join(", ") };
            Some(format!("{} {revisions} {}", machine.machine.title, day(days.max()?)))
        };
        self.0.iter().filter_map(of).collect::<Vec<_>>().join(" · ")
    }

    /// What each machine is, and how many revisions its records have.
    pub(super) fn table(&self) -> String {
        let row = |machine: &MachineRecords| {
            let all: Vec<&Record> = machine.records.values().flatten().collect();
            let days = || all.iter().map(|record| record.environment.unix_time);
            let cpus = {
                let mut names = distinct(all.iter().map(|r| r.environment.cpu.clone()));
                names.sort();
                let threads =
                    all.iter().filter(|r| r.environment.device == "cpu").map(|r| r.environment.threads).max();
                names.join("; ") + &threads.map(|threads| format!(", {threads} threads")).unwrap_or_default()
            };
            let torch = {
                let mut versions = distinct(all.iter().filter_map(|r| r.environment.torch.clone()));
                versions.sort();
                versions.join(", ")
            };
            let from = all
                .first()
                .map_or("", |record| if record.environment.device == "cpu" { "" } else { "host: " });
            format!(
                "<tr><td>{}</td><td>{from}{}</td><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{} to {}</td></tr>\n",
                escape(&machine.machine.title),
                escape(&cpus),
                escape(&torch),
                all.len(),
                machine.revisions().len(),
                day(days().min().unwrap_or_default()),
                day(days().max().unwrap_or_default())
            )
        };
        format!(
            "<div class=\"sheet\"><table>\n<thead><tr><th>machine</th><th>processor</th><th>libtorch</th><th class=\"n\">records</th><th class=\"n\">revisions</th><th class=\"n\">measured</th></tr></thead>\n<tbody>\n{}</tbody></table></div>\n",
            self.0.iter().map(row).collect::<String>()
        )
    }
}

impl MachineRecords {
    fn revisions(&self) -> Vec<&str> {
        let mut all: Vec<&str> =
            self.records.values().flatten().map(|record| record.environment.revision.as_str()).collect();
        all.sort_unstable();
        all.dedup();
        all
    }
}

fn number(value: &serde_json::Value) -> Option<f64> {
    value.as_f64().or_else(|| value.as_str()?.replace(',', "").parse().ok())
}

/// The case of a filter in words.
pub(super) fn describe(filter: &Filter) -> String {
    Case::describe(&filter.0)
}
