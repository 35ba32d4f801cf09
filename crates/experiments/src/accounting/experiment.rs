//! `accounting experiment`: computes the records of the report's sections about accounting, in milliseconds and with the same result on
//! every machine.

use accounting::presets;
use clap::ValueEnum;
use report::cli::{CommonArgs, Scale};
use report::{Environment, Progress, Record, Sink};

use super::sections;

#[derive(clap::Args)]
pub(crate) struct Experiment {
    /// Only these sections
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAME,…")]
    only: Vec<Section>,
}

/// A section of the report.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Section {
    Published,
    Dtypes,
    Flops,
    Estimate,
    Fit,
    Time,
    LongContext,
    OffloadCondition,
    Scale,
    Sequence,
}

impl Section {
    /// Returns the experiment's name in the records.
    fn experiment(self) -> String {
        let name = self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
        // The subject of these two is a technique, not the crate `accounting`.
        match self {
            Self::LongContext | Self::OffloadCondition => name,
            _ => format!("accounting-{name}"),
        }
    }

    /// Returns the scale of its records; `None` if the records are the same at every scale.
    fn scale(self, scale: Scale) -> Option<Scale> {
        matches!(self, Self::Flops | Self::Fit).then_some(scale)
    }
}

/// Presets of [`Section::Flops`] and [`Section::Fit`] in a smoke run.
const SMOKE_MODELS: [&str; 2] = ["gpt2", "qwen2.5-0.5b"];
/// Presets of [`Section::Flops`]; the scale `paper` has all presets.
const MODELS: [&str; 6] = ["gpt2", "cs336-small", "cs336-xl", "qwen2.5-0.5b", "llama-3-8b", "llama-3-70b"];
/// GPUs of [`Section::Fit`], in a smoke run and else.
const SMOKE_DEVICES: [&str; 1] = ["rtx4090"];
const DEVICES: [&str; 4] = ["t4", "rtx4090", "h100", "b200"];

pub(crate) fn run(common: &CommonArgs, scale: Scale, arguments: &Experiment) -> anyhow::Result<()> {
    let environment = &Environment::detect("cpu", None);
    let all: Vec<&str> = presets::names().collect();
    let models: &[&str] = match scale {
        Scale::Smoke => &SMOKE_MODELS,
        Scale::Laptop | Scale::Full => &MODELS,
        Scale::Paper => &all,
    };
    let (fit_models, devices): (&[&str], &[&str]) = match scale {
        Scale::Smoke => (&SMOKE_MODELS, &SMOKE_DEVICES),
        _ => (&["gpt2", "qwen2.5-0.5b", "llama-3-8b"], &DEVICES),
    };
    let is_selected = |section: &Section| arguments.only.is_empty() || arguments.only.contains(section);
    let sections: Vec<Section> = Section::value_variants().iter().copied().filter(is_selected).collect();
    let mut progress = Progress::new(sections.len() as u64);
    for section in sections {
        progress.message(&section.experiment());
        let mut sink = Sink::new(common, environment.clone(), section.scale(scale))?;
        let records = match section {
            Section::Published => sections::published(environment)?,
            Section::Dtypes => sections::dtypes(environment)?,
            Section::Flops => sections::flops(models, environment)?,
            Section::Estimate => sections::estimates(environment)?,
            Section::Fit => sections::fits(fit_models, devices, environment)?,
            Section::Time => sections::times(environment)?,
            Section::LongContext => sections::long_context(environment)?,
            Section::OffloadCondition => sections::offload_condition(environment)?,
            Section::Scale => sections::scale(environment)?,
            Section::Sequence => sections::divided_rows(environment)?,
        };
        for Record { experiment, case, metric, .. } in records {
            sink.put(&experiment, &case, vec![metric])?;
        }
        progress.step();
    }
    Ok(())
}
