//! `frugal data`: fine-tuning data as a model sees it.

mod check;
mod findings;
mod show;
mod stats;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use anyhow::bail;
use clap::{Args, Subcommand, ValueEnum as _};
use frugal::companion_files::CompanionFiles;
use frugal::config::{DataConfig, DataFormat, MixtureSource};
use frugal::dataloading::records::Splits;
use frugal::rows::{self, Counts, Found, RowEncoder};
use frugal::training::masked_rows::MaskedRow;

use crate::common_flags::Common;
use crate::flags::Flags;
use crate::flags::hub::HubArgs;
use crate::flags::rows::{encoder, flags_of_rows, found, found_text, note_template};
use crate::flags::table::ROWS;
use crate::flags::tokenizer::Ends;
use crate::folder::run_model::{Target, WhichArgs};
use crate::output::problems::Problems;
use crate::output::shell_command::shell_word;

#[derive(Args)]
pub(crate) struct Data {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Print rows, with the tokens that count in the loss highlighted
    Show(show::Show),
    /// Count rows and tokens, and measure lengths
    Stats(stats::Stats),
    /// List every record that is wrong, by its line
    Check(check::Check),
}

pub(crate) fn run(common: &Common, arguments: &Data) -> anyhow::Result<()> {
    match &arguments.command {
        Command::Show(arguments) => show::run(common, arguments),
        Command::Stats(arguments) => stats::run(common, arguments),
        Command::Check(arguments) => check::run(common, arguments),
    }
}

/// Data, and the model that reads them.
#[derive(Args)]
struct SourceArgs {
    /// A file of records, a text file, or a folder with train.*; `stats` takes several, each with its weight in a mixture: a.jsonl=0.7 b.jsonl=0.3
    #[arg(value_name = "DATA", required = true)]
    data: Vec<String>,
    /// The model that reads it: a folder in Hugging Face's layout, a name on the hub, or the output folder of a training
    #[arg(long, value_name = "NAME_OR_FOLDER")]
    model: String,
    #[command(flatten)]
    hub: HubArgs,
    /// The split of a folder
    #[arg(long, value_enum, default_value_t)]
    split: Split,
    #[command(flatten)]
    rows: Flags<ROWS>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
enum Split {
    #[default]
    Train,
    Validation,
    Test,
}

/// Opened data.
struct Source {
    data: DataConfig,
    files: Vec<PathBuf>,
    found: Found,
    encoder: RowEncoder,
    problems: frugal::tasks::gsm8k::Encoder,
    /// The command that lists its wrong records.
    check: String,
}

/// The result of each record: its place, and its rows or its error.
type Each<'a> =
    dyn FnMut(&str, frugal::Result<(Vec<MaskedRow>, Counts)>) -> anyhow::Result<ControlFlow<()>> + 'a;

impl SourceArgs {
    /// Opens the only source.
    fn open(&self, common: &Common) -> anyhow::Result<Source> {
        match &self.data[..] {
            [path] => self.open_at(common, path),
            _ => bail!("{} sources; give one at a time (`frugal data stats` takes several)", self.data.len()),
        }
    }

    /// The sources of a mixture, each with its weight; `None` for one without.
    fn mixture(&self) -> anyhow::Result<Option<Vec<MixtureSource>>> {
        if let [path] = &self.data[..]
            && (Path::new(path).exists() || !path.contains('='))
        {
            return Ok(None);
        }
        let sources = self.data.iter().map(|text| text.parse().map_err(anyhow::Error::msg));
        sources.collect::<anyhow::Result<_>>().map(Some)
    }

    fn open_at(&self, common: &Common, path: &str) -> anyhow::Result<Source> {
        let mut target = Target::find(&self.model, WhichArgs::default())?;
        // Rows are made as in the training, but for the format, which belongs to its data.
        let mut data = DataConfig {
            source: path.to_owned(),
            mixture: Vec::new(),
            format: DataFormat::default(),
            ..target.data.take().unwrap_or_default()
        };
        let before = data.clone();
        data = self.rows.data(&data)?;
        let check = self.check_command(path, &flags_of_rows(&data, &before));
        let splits = Splits::find(Path::new(path))?;
        let found = found(&splits, &data)?;
        common.note(&found_text(&found, &splits, &data));
        let files = match self.split {
            Split::Train => splits.train,
            Split::Validation => splits.validation,
            Split::Test => splits.test,
        };
        if files.is_empty() {
            bail!("{path} has no such split; leave out --split");
        }
        let folder = target.open(&self.hub)?;
        let companions = CompanionFiles::of(&folder, target.adapter.as_deref(), &data)?;
        let ends = Ends::find(&folder, &companions, &data)?;
        ends.note_context(common, &folder, &data);
        let encoder = encoder(&folder, companions.chat_template(&data)?, &data, &ends)?;
        let problems = ends.encoder(&folder, &data)?;
        note_template(common, (&encoder, &data), &found);
        Ok(Source { data, files, found, encoder, problems, check })
    }

    /// The command that lists the wrong records of the same rows, whose flags are given.
    fn check_command(&self, path: &str, flags: &str) -> String {
        let mut command =
            format!("frugal data check {} --model {}", shell_word(path), shell_word(&self.model));
        if let Some(revision) = &self.hub.revision {
            command += &format!(" --revision {}", shell_word(revision));
        }
        if self.hub.offline {
            command += " --offline";
        }
        if let Some(split) = self.split.to_possible_value().filter(|_| self.split != Split::Train) {
            command += &format!(" --split {}", split.get_name());
        }
        command + flags
    }
}

impl Source {
    /// Passes what each record becomes, in order, until `each` breaks.
    fn each(&self, each: &mut Each<'_>) -> anyhow::Result<()> {
        match &self.found {
            Found::Records(detected) => {
                rows::encode(&self.files, &self.encoder, detected, |place, encoded| {
                    each(&place.map_or_else(String::new, ToString::to_string), encoded)
                })
            }
            Found::Text => {
                for file in &self.files {
                    let (mut number, mut is_over) = (0, false);
                    rows::text(file, &self.encoder, |row| {
                        number += 1;
                        let flow = each(&format!("{}: row {number}", file.display()), Ok(counted(row)))?;
                        is_over = flow.is_break();
                        Ok::<_, anyhow::Error>(flow)
                    })?;
                    if is_over {
                        return Ok(());
                    }
                }
                Ok(())
            }
            Found::Gsm8k => {
                let problems = Problems::of(&DataConfig {
                    source: self.files[0].display().to_string(),
                    ..self.data.clone()
                });
                let few_shot = problems.few_shot(&[], 0)?;
                for (number, problem) in problems.all()?.iter().enumerate() {
                    let place = format!("{}: problem {}", self.files[0].display(), number + 1);
                    let encoded = self.problems.tokenize(number, problem, &few_shot);
                    let skipped = Counts { records: 1, skipped: 1, ..Counts::default() };
                    let rows = match encoded {
                        Ok(Some(row)) => Ok(counted(row.into())),
                        Ok(None) => Ok((Vec::new(), skipped)),
                        Err(error) => Err(frugal::Error::Toml(format!("{place}: {error}"))),
                    };
                    if each(&place, rows)?.is_break() {
                        return Ok(());
                    }
                }
                Ok(())
            }
        }
    }
}

/// A record of one row.
fn counted(row: MaskedRow) -> (Vec<MaskedRow>, Counts) {
    let trained = learned(&row);
    let counts = Counts { records: 1, rows: 1, tokens: row.tokens.len(), trained, ..Counts::default() };
    (vec![row], counts)
}

/// Number of tokens that a row teaches.
fn learned(row: &MaskedRow) -> usize {
    row.labels.iter().skip(1).filter(|label| **label != frugal::dataloading::IGNORE_INDEX).count()
}
