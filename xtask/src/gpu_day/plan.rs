//! The plans of a day, from `gpu_day.toml`.

use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

/// The command of a part.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Work {
    /// `frugal doctor`: driver, device, measured rates.
    Doctor,
    /// The tests whose name contains one of these.
    Tests(Vec<String>),
    /// The tests of the kernels under `compute-sanitizer`.
    Sanitizer,
    /// An experiment, with its claims.
    Experiment,
    /// A comparison with PyTorch and its libraries.
    Comparison,
}

impl Work {
    /// Whether it measures times.
    pub(super) fn is_timed(&self) -> bool {
        matches!(self, Self::Doctor | Self::Experiment | Self::Comparison)
    }
}

/// A part. An experiment or a comparison has the name that it has in the report, or gives it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Part {
    pub(super) name: String,
    pub(super) work: Work,
    /// The experiment or the comparison, where the part has another name.
    #[serde(default)]
    pub(super) of: Option<String>,
    /// The dtype that a comparison measures, in place of all of them.
    #[serde(default)]
    pub(super) dtype: Option<String>,
    /// Deadline in seconds.
    pub(super) seconds: u64,
    /// The background work whose result it uses.
    #[serde(default)]
    pub(super) waits_for: Option<String>,
}

impl Part {
    /// The name of its experiment or comparison.
    pub(super) fn subject(&self) -> &str {
        self.of.as_ref().unwrap_or(&self.name)
    }
}

/// Work that begins with the day, on other cores than the parts: the peer of a comparison compiles.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct BackgroundWork {
    pub(super) name: String,
    /// The comparison whose peer compiles.
    pub(super) compiles: String,
    /// The dtype that it compiles, in place of all of them.
    #[serde(default)]
    pub(super) dtype: Option<String>,
    /// Deadline in seconds from the beginning of the day.
    pub(super) seconds: u64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Listed {
    name: String,
    /// What it is for, in a line.
    about: String,
    minutes: f64,
    parts: Vec<String>,
    #[serde(default)]
    background: Vec<String>,
}

/// All parts, and the plans that order some of them.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Plans {
    #[serde(rename = "part")]
    parts: Vec<Part>,
    #[serde(rename = "background", default)]
    background: Vec<BackgroundWork>,
    #[serde(rename = "plan")]
    plans: Vec<Listed>,
}

/// The parts of a plan in their order.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) minutes: f64,
    pub(super) parts: Vec<Part>,
    pub(super) background: Vec<BackgroundWork>,
}

impl Plans {
    /// Reads the plans of `path`, or those of this program.
    pub(super) fn read(path: Option<&Path>) -> Result<Self> {
        let text = match path {
            None => include_str!("../gpu_day.toml").to_owned(),
            Some(path) => {
                std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?
            }
        };
        let plans: Self = toml::from_str(&text).context("the plans of a GPU day")?;
        for plan in &plans.plans {
            plans.plan(plan)?;
        }
        Ok(plans)
    }

    /// Returns the plan `name`, or the parts of it that `only` names.
    pub(super) fn select(&self, name: &str, only: &[String]) -> Result<Plan> {
        let Some(listed) = self.plans.iter().find(|plan| plan.name == name) else {
            let names: Vec<&str> = self.plans.iter().map(|plan| &*plan.name).collect();
            bail!("there is no plan `{name}`; there are: {}, and `help`", names.join(", "));
        };
        let mut plan = self.plan(listed)?;
        if let Some(unknown) = only.iter().find(|name| plan.parts.iter().all(|part| part.name != **name)) {
            bail!("there is no part `{unknown}`; there are: {}", listed.parts.join(", "));
        }
        if !only.is_empty() {
            plan.parts.retain(|part| only.contains(&part.name));
            // What nobody waits for is not started.
            plan.background
                .retain(|work| plan.parts.iter().any(|part| part.waits_for.as_ref() == Some(&work.name)));
        }
        Ok(plan)
    }

    fn plan(&self, listed: &Listed) -> Result<Plan> {
        let by = &listed.name;
        let part = |name: &String| {
            let part = self.parts.iter().find(|part| part.name == *name).cloned();
            part.with_context(|| format!("the plan {by} names the part {name}, which is not defined"))
        };
        let work = |name: &String| {
            let work = self.background.iter().find(|work| work.name == *name).cloned();
            work.with_context(|| {
                format!("the plan {by} names the background work {name}, which is not defined")
            })
        };
        Ok(Plan {
            minutes: listed.minutes,
            parts: listed.parts.iter().map(part).collect::<Result<_>>()?,
            background: listed.background.iter().map(work).collect::<Result<_>>()?,
        })
    }

    /// Lists every plan: its parts with their deadlines, the sum, and the minutes.
    pub(super) fn help(&self) -> String {
        let lines = |listed: &Listed| {
            let plan = self.plan(listed).expect("all plans were checked when they were read");
            let mut text = format!("{}: {}\n", listed.name, listed.about);
            for work in &plan.background {
                text += &format!("  {:>5} s  {} (in the background)\n", work.seconds, work.name);
            }
            for part in &plan.parts {
                let waits = part.waits_for.as_ref().map(|name| format!(" (after {name})"));
                text += &format!("  {:>5} s  {}{}\n", part.seconds, part.name, waits.unwrap_or_default());
            }
            text + &format!("  {:>5} s  in all, within {} min", plan.seconds(), listed.minutes)
        };
        self.plans.iter().map(lines).collect::<Vec<_>>().join("\n\n")
    }
}

impl Plan {
    /// The sum of the parts' deadlines.
    fn seconds(&self) -> u64 {
        self.parts.iter().map(|part| part.seconds).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> Plans {
        Plans::read(None).unwrap()
    }

    #[test]
    fn every_measured_part_is_an_experiment_or_a_comparison() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let specs = report::Specs::load(root).unwrap();
        let is_comparison = |name: &str| specs.comparisons.iter().any(|c| c.name == name);
        let plans = own();
        for part in &plans.parts {
            let known = match part.work {
                Work::Experiment => specs.experiments.iter().any(|e| e.name == part.subject()),
                Work::Comparison => is_comparison(part.subject()),
                _ => true,
            };
            assert!(known, "{}", part.name);
        }
        for work in &plans.background {
            assert!(is_comparison(&work.compiles), "{}", work.name);
        }
    }

    #[test]
    fn the_deadlines_of_a_plan_fit_its_minutes() {
        let plans = own();
        for listed in &plans.plans {
            let plan = plans.select(&listed.name, &[]).unwrap();
            assert!(
                plan.seconds() as f64 <= 60.0 * plan.minutes,
                "{}: the deadlines are {} s, its minutes {}",
                listed.name,
                plan.seconds(),
                plan.minutes
            );
        }
        // A run on a lent machine takes ten minutes at most.
        assert!(plans.select("next", &[]).unwrap().minutes <= 10.0);
    }

    #[test]
    fn a_part_waits_for_background_work_of_its_plan() {
        let plans = own();
        for listed in &plans.plans {
            let plan = plans.select(&listed.name, &[]).unwrap();
            for name in plan.parts.iter().filter_map(|part| part.waits_for.as_ref()) {
                assert!(plan.background.iter().any(|work| work.name == *name), "{}: {name}", listed.name);
            }
        }
    }

    #[test]
    fn parts_are_selected_by_name_and_unknown_names_are_refused() {
        let plans = own();
        let only = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
            plans.select("next", &names)
        };
        let doctor = only(&["doctor"]).unwrap();
        assert_eq!(doctor.parts.len(), 1);
        assert!(doctor.background.is_empty(), "nobody waits for it");
        assert!(only(&["docter"]).unwrap_err().to_string().starts_with("there is no part `docter`"));
        let unknown = plans.select("tomorrow", &[]).unwrap_err().to_string();
        assert!(unknown.starts_with("there is no plan `tomorrow`; there are: next, "), "{unknown}");
    }

    #[test]
    fn nccl_is_tested() {
        let plan = own().select("next", &[]).unwrap();
        let nccl = |part: &Part| matches!(&part.work, Work::Tests(names) if names.contains(&"nccl".into()));
        assert!(plan.parts.iter().any(nccl));
    }
}
