//! The rows of a fine-tuning.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use frugal::companion_files::{CompanionFiles, turn_end};
use frugal::config::{CONFIG_FILE, Config, DataConfig, ObjectiveKind};
use frugal::dataloading::chat::{ChatTemplate, Date};
use frugal::dataloading::records::{RecordFormat, Splits};
use frugal::dataloading::{self, Tokenizer};
use frugal::models::hugging_face::Folder;
use frugal::rows::{self, Cached, Found, Overlong, RowEncoder};
use frugal::tasks::gsm8k;
use frugal::training::masked_rows::{MaskedRow, MaskedRows};

use super::learned_end::{learned_end, note};
use super::samples::Samples;
use crate::common_flags::Common;
use crate::flags::rows::{encoder, flags_of_rows, found, found_text, note_template};
use crate::flags::tokenizer::Ends;
use crate::flags::unread;
use crate::output::problems::Problems;
use crate::output::shell_command::shell_word;
use crate::run::training::NO_VALIDATION;

/// Rows to train on and to measure on, and the token that pads.
pub(super) struct Data {
    pub(super) train: MaskedRows,
    pub(super) validation: MaskedRows,
    pub(super) pad: i64,
    pub(super) train_files: Vec<PathBuf>,
    pub(super) validation_files: Vec<PathBuf>,
    /// Whether the model has a chat template.
    pub(super) is_chat: bool,
    /// The token with which the template ends an answer, if there is a template.
    turn_end: Option<i64>,
    tokenizer: Tokenizer,
    /// Whether rows have a prompt and an answer.
    has_answers: bool,
}

/// The configuration with the date that its chat template writes, if it writes one, and the template: the date of the configuration, of
/// the training that is resumed, or today's.
pub(super) fn with_date(
    config: &Config,
    companions: &CompanionFiles,
    out: &Path,
    resume: bool,
) -> anyhow::Result<(Config, Option<ChatTemplate>)> {
    let mut config = config.clone();
    let mut dated = config.data.clone();
    let earlier = out.join(CONFIG_FILE);
    if dated.date.is_none() && resume && earlier.is_file() {
        dated.date = Config::read(&earlier)?.data.date;
    }
    dated.date.get_or_insert_with(|| Date::today().to_string());
    let template = companions.chat_template(&dated)?;
    if template.as_ref().is_some_and(ChatTemplate::reads_the_date) {
        config.data.date = dated.date;
    }
    Ok((config, template))
}

impl Data {
    /// Reads the rows that the configuration names.
    ///
    /// # Errors
    /// Files that are missing; a record that is wrong, by its line; rows that are too long; data without a row to learn from.
    pub(super) fn read(
        common: &Common,
        config: &Config,
        folder: &Folder,
        companions: &CompanionFiles,
        template: Option<ChatTemplate>,
    ) -> anyhow::Result<Self> {
        let own = &config.data;
        let ends = Ends::find(folder, companions, own)?;
        ends.note_context(common, folder, own);
        let paths = own.sources()?;
        for path in &paths {
            if !Splits::may_exist(Path::new(path)) {
                bail!(
                    "{path} does not exist; give a file of records (.jsonl, .json, .csv, .parquet), a text file, or a folder with \
                     train.*"
                );
            }
        }
        if let Some(path) = own.validation.as_deref().filter(|path| !path.is_file()) {
            bail!("--validation {}: no such file", path.display());
        }
        let sources = paths.iter().map(|path| Source::find(path, own)).collect::<anyhow::Result<Vec<_>>>()?;
        let is_mixed = !own.mixture.is_empty();
        if let Some(source) = sources.iter().find(|source| is_mixed && source.found == Found::Gsm8k) {
            bail!(
                "--mixture {}: GSM8K has prompts and splits of its own, which are not mixed; give its file as questions and answers \
                 (`--format question-answer`)",
                source.path
            );
        }
        let is_chat =
            sources.iter().any(|source| matches!(source.found, Found::Records(_))) && template.is_some();
        let turn_end = template.as_ref().and_then(|template| turn_end(template, &ends.tokenizer));
        let has_validation = sources.iter().all(Source::has_validation) || own.validation.is_some();
        for source in &sources {
            common.note(&found_text(&source.found, &source.splits, own));
            check_objective(config, &source.found)?;
            unread::refuse_for_data(common, config, &source.found, has_validation)?;
        }
        let (train, mut validation) = match &sources[..] {
            [source] if source.found == Found::Gsm8k => problems(common, config, folder, &ends)?,
            _ => {
                let none = sources.iter().all(|source| source.splits.validation.is_empty());
                if config.training.evaluate_every.is_some()
                    && none
                    && own.validation.is_none()
                    && own.held_out <= 0.0
                {
                    bail!(NO_VALIDATION);
                }
                let encoder = encoder(folder, template, own, &ends)?;
                let mut parts = (Vec::new(), Vec::new());
                for source in &sources {
                    note_template(common, (&encoder, own), &source.found);
                    let (train, validation) = source.read(common, config, &encoder)?;
                    parts.0.push(train);
                    parts.1.push(validation);
                }
                if !is_mixed {
                    (parts.0.remove(0), parts.1.remove(0))
                } else {
                    (MaskedRows::join(parts.0), MaskedRows::join(parts.1))
                }
            }
        };
        let mut validation_files: Vec<PathBuf> =
            sources.iter().flat_map(|source| source.splits.validation.clone()).collect();
        if let (Some(file), true) = (&own.validation, is_mixed) {
            let whole = Source::of_file(file, own)?;
            let encoder = encoder(folder, companions.chat_template(own)?, own, &ends)?;
            validation = whole.rows(common, config, (&encoder, "validation"), &whole.splits.train, None)?;
            validation_files = vec![file.clone()];
        }
        if config.training.evaluate_every.is_some() && validation.is_empty() {
            bail!(NO_VALIDATION);
        }
        let has_answers = sources.iter().any(|source| source.found != Found::Text);
        Ok(Self {
            train,
            validation,
            pad: i64::from(ends.end),
            train_files: sources.into_iter().flat_map(|source| source.splits.train).collect(),
            validation_files,
            is_chat,
            turn_end,
            tokenizer: ends.tokenizer,
            has_answers,
        })
    }

    /// The token with which answers end, if it is not among `end_tokens`, and a note about it: that of most rows, or else the one that a flag
    /// gives. The note is left out where the flag is why.
    pub(super) fn learned_end(
        &self,
        config: &Config,
        end_tokens: &[i64],
    ) -> anyhow::Result<Option<(Option<String>, i64)>> {
        let of_rows = match self.has_answers {
            true => learned_end(&self.train, &self.tokenizer, self.turn_end)?,
            false => None,
        };
        let of_flag = config.data.end_token.is_some().then_some(self.pad);
        let Some(end) = of_rows.or(of_flag).filter(|end| !end_tokens.contains(end)) else { return Ok(None) };
        let note = (of_flag != Some(end)).then(|| note(end, &self.tokenizer, end_tokens));
        Ok(Some((note, end)))
    }

    /// The rows whose answers are shown before and after, of the validation data or else of the training data. None with `--quiet`, which
    /// does not show them, and over several ranks, where each would have to answer.
    pub(super) fn samples(
        &self,
        common: &Common,
        config: &Config,
        mut end_tokens: Vec<i64>,
        out: &Path,
    ) -> anyhow::Result<Option<Samples>> {
        let count = config.training.samples;
        if count == 0 || common.quiet || common.ranks.is_some() || !self.has_answers {
            return Ok(None);
        }
        if !end_tokens.contains(&self.pad) {
            end_tokens.push(self.pad);
        }
        let rows = if self.validation.is_empty() { &self.train } else { &self.validation };
        Samples::of(rows, count, &self.tokenizer, end_tokens, out)
    }
}

/// Files of one source.
struct Source<'a> {
    path: &'a str,
    splits: Splits,
    found: Found,
}

impl<'a> Source<'a> {
    fn find(path: &'a str, data: &DataConfig) -> anyhow::Result<Self> {
        let mut splits = Splits::find(Path::new(path))?;
        let found = found(&splits, &DataConfig { source: path.to_owned(), ..data.clone() })?;
        if found == Found::Gsm8k {
            splits.validation.clear();
        } else if let Some(file) = &data.validation {
            // That of a mixture is of no source.
            splits.validation = if data.mixture.is_empty() { vec![file.clone()] } else { Vec::new() };
        }
        Ok(Self { path, splits, found })
    }

    /// A file of validation data beside a mixture, whose format is its own.
    fn of_file(file: &'a Path, data: &DataConfig) -> anyhow::Result<Self> {
        let splits = Splits { train: vec![file.to_owned()], ..Splits::default() };
        let found = found(&splits, data)?;
        Ok(Self { path: "", splits, found })
    }

    fn has_validation(&self) -> bool {
        self.found == Found::Gsm8k || !self.splits.validation.is_empty()
    }

    /// The rows to train on and to measure on. What is held out of a mixture's source is its own share.
    fn read(
        &self,
        common: &Common,
        config: &Config,
        encoder: &RowEncoder,
    ) -> anyhow::Result<(MaskedRows, MaskedRows)> {
        let (data, splits) = (&config.data, &self.splits);
        let together = rows_of_record(config, &self.found)?;
        let limit = data.limit.map(|limit| limit.saturating_mul(together));
        let train = self.rows(common, config, (encoder, "training"), &splits.train, limit)?;
        if splits.validation.is_empty() && (data.mixture.is_empty() || data.validation.is_none()) {
            return held_out(common, config, &train, together);
        }
        Ok((train, self.rows(common, config, (encoder, "validation"), &splits.validation, None)?))
    }

    fn rows(
        &self,
        common: &Common,
        config: &Config,
        (encoder, which): (&RowEncoder, &str),
        files: &[PathBuf],
        limit: Option<usize>,
    ) -> anyhow::Result<MaskedRows> {
        match files {
            [] => Ok(MaskedRows::default()),
            files => records(common, encoder, &self.found, files, which, limit)
                .map_err(|error| name_check(error, &files[0], config)),
        }
    }
}

/// Checks that the data are those of the objective.
///
/// # Errors
/// Pairs or rated answers without an objective over them, or the other way round.
fn check_objective(config: &Config, found: &Found) -> anyhow::Result<()> {
    let kind = config.objective.kind;
    let formats: Vec<RecordFormat> = match found {
        Found::Records(detected) => detected.formats.iter().map(|(format, _)| *format).collect(),
        Found::Gsm8k | Found::Text => vec![RecordFormat::Text],
    };
    let (pairs, rated) =
        (formats.contains(&RecordFormat::Preference), formats.contains(&RecordFormat::Rated));
    let others =
        formats.iter().any(|format| !matches!(format, RecordFormat::Preference | RecordFormat::Rated));
    match kind {
        ObjectiveKind::NextToken | ObjectiveKind::Distillation if pairs => bail!(
            "the data have pairs of a `chosen` and a `rejected` answer; give --objective dpo (or ipo, orpo, simpo, cpo, kto), or write \
             the chosen ones as `messages` or `completion` to learn them alone"
        ),
        ObjectiveKind::NextToken | ObjectiveKind::Distillation if rated => bail!(
            "the data have answers with a `label`, true for desirable and false for undesirable ones; give --objective kto, or learn the \
             desirable ones alone (`jq -c 'select(.label) | del(.label)' FILE`), or remove the column `label` if it has another meaning"
        ),
        ObjectiveKind::Kto if others || pairs && rated => bail!(
            "--objective kto learns from rated answers: the data need `prompt`, `completion` and a `label` of true or false in each \
             record, or `chosen` and `rejected` in each"
        ),
        _ if kind.is_preference() && kind != ObjectiveKind::Kto && (others || rated) => bail!(
            "--objective {} learns from pairs of answers: the data need `chosen` and `rejected` in each record, with their `prompt`{}",
            kind.name(),
            if rated { "; answers with a `label` are for --objective kto" } else { "" }
        ),
        _ => Ok(()),
    }
}

/// Rows that stay together when some are held out or left out: those of a record.
fn rows_of_record(config: &Config, found: &Found) -> anyhow::Result<usize> {
    let is_pairs = |(format, _): &(RecordFormat, usize)| *format == RecordFormat::Preference;
    match found {
        Found::Records(detected) if detected.formats.iter().all(is_pairs) => Ok(2),
        _ => Ok(config.objective.grouping()?.rows()),
    }
}

/// The training rows, and those of them that are held out for validation.
///
/// # Errors
/// None is held out although a person asks for that, or for evaluations; rows that cannot be read.
fn held_out(
    common: &Common,
    config: &Config,
    rows: &MaskedRows,
    together: usize,
) -> anyhow::Result<(MaskedRows, MaskedRows)> {
    let share = config.data.held_out;
    let (all, what) = (rows.len() / together, if together == 1 { "rows" } else { "pairs" });
    let (train, held) = rows::hold_out(rows, together, share)?;
    if !held.is_empty() {
        common.note(&format!(
            "{} of {all} {what} are held out for validation, by their hash (--held-out 0 trains on all)",
            held.len() / together
        ));
    }
    let is_asked = common.asked.has("data.held_out") && share > 0.0;
    if held.is_empty() && share > 0.0 && (is_asked || config.training.evaluate_every.is_some()) {
        let flag = if is_asked { format!("--held-out {share}") } else { "--evaluate-every".to_owned() };
        let why = match all < rows::MIN_ROWS {
            true => format!(
                "of {all} {what} none is held out for validation, which takes {} {what} at least",
                rows::MIN_ROWS
            ),
            false => {
                format!("of {all} {what} none is held out for validation, because so many of them are equal")
            }
        };
        bail!("{flag}: {why}; give validation data as --validation, or leave it out");
    }
    Ok((train, held))
}

/// Names the command that lists all wrong records in an error about the first.
fn name_check(error: anyhow::Error, file: &Path, config: &Config) -> anyhow::Error {
    match error.downcast_ref() {
        Some(frugal::Error::Data(dataloading::Error::Record { .. })) => {
            let model = config.model.name.as_deref().unwrap_or_default();
            let (file, model) = (shell_word(&file.display().to_string()), shell_word(model));
            anyhow::Error::msg(format!(
                "{error}; `frugal data check {file} --model {model}{}` lists all wrong records",
                flags_of_rows(&config.data, &DataConfig::default())
            ))
        }
        _ => error,
    }
}

/// The rows of a split.
fn records(
    common: &Common,
    encoder: &RowEncoder,
    found: &Found,
    files: &[PathBuf],
    which: &str,
    limit: Option<usize>,
) -> anyhow::Result<MaskedRows> {
    let Found::Records(detected) = found else { return Ok(rows::texts(files, encoder, limit)?) };
    let rows = match rows::cache_folder() {
        None => rows::prepare(files, encoder, detected, limit)?,
        Some(folder) => {
            let (rows, cached) = rows::prepare_cached(files, encoder, detected, limit, &folder)?;
            match cached {
                Cached::Written(_) => {}
                Cached::Read(path) => {
                    common.note(&format!("the {which} rows were prepared before: {}", path.display()))
                }
                Cached::NotWritten(why) => {
                    common.note(&format!("the {which} rows are not kept for the next run: {why}"))
                }
            }
            rows
        }
    };
    let counts = rows.counts;
    let all = counts.rows + counts.skipped + counts.without_label;
    for (count, what) in [
        (counts.skipped, "are too long and are left out"),
        (counts.truncated, "are too long and are cut"),
        (counts.split, "are too long and are divided"),
        (counts.without_label, "have no text to learn and are left out"),
        (counts.empty_answers, "have an empty answer, from which the model learns to end at once"),
        (counts.weighted, "have a `weight` other than 1, the factor of their loss"),
    ] {
        if count > 0 {
            common.note(&format!("{count} of {all} {which} rows {what}"));
        }
    }
    counts.notes.lines().iter().for_each(|line| common.note(&format!("note: {line}")));
    Ok(rows.rows)
}

/// The rows of GSM8K's problems to train on and to measure on.
fn problems(
    common: &Common,
    config: &Config,
    folder: &Folder,
    ends: &Ends,
) -> anyhow::Result<(MaskedRows, MaskedRows)> {
    let own = &config.data;
    if own.validation.is_some() {
        bail!("--validation: GSM8K has a validation split of its own; leave it out");
    }
    if matches!(own.overlong, Overlong::Split | Overlong::Truncate) {
        bail!(
            "--overlong {}: GSM8K's answers end with their result; use --overlong skip, or --format question-answer",
            own.overlong.name()
        );
    }
    if own.mask != frugal::dataloading::chat::Mask::Answers {
        bail!("--mask: GSM8K trains on the answers only; use --format question-answer for another mask");
    }
    let encoder = ends.encoder(folder, own)?;
    let problems = Problems::of(own);
    let parts = problems.parts()?;
    let few_shot = problems.few_shot(&parts.train, own.shots)?;
    let limit = own.limit.unwrap_or(parts.train.len()).min(parts.train.len());
    let encoded = |problems: &[gsm8k::Problem], which: &str| -> anyhow::Result<MaskedRows> {
        let rows = encoder
            .tokenize_all(problems, &few_shot)
            .with_context(|| format!("the {which} rows (--skip-long leaves long ones out)"))?;
        if !rows.skipped.is_empty() {
            let (count, all) = (rows.skipped.len(), problems.len());
            common.note(&format!("{count} of {all} {which} rows are too long and are left out"));
        }
        let rows: Vec<MaskedRow> = rows.rows.into_iter().map(MaskedRow::from).collect();
        Ok(MaskedRows::of(&rows)?)
    };
    Ok((encoded(&parts.train[..limit], "training")?, encoded(&parts.validation, "validation")?))
}
