//! A measurement, and its file: JSON lines, one [`Record`] a line.

use std::borrow::Cow;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::environment::Environment;

/// The ordered key-values that identify the measured case of an experiment.
///
/// The order of insertion is the order of a table's columns.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Case(pub Map<String, Value>);

impl Case {
    /// Returns a case without any key.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a key, or replaces its value.
    #[must_use]
    pub fn with(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.0.insert(key.to_owned(), value.into());
        self
    }

    /// Returns the value of `key`, if this case has it.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key)
    }

    /// Returns whether every key-value of `filter` is in this case. Numbers are equal by value (`8` and `8.0` agree).
    pub fn matches(&self, filter: &Case) -> bool {
        filter.0.iter().all(|(key, want)| self.0.get(key).is_some_and(|have| same_value(have, want)))
    }
}

pub(crate) fn same_value(a: &Value, b: &Value) -> bool {
    a == b || matches!((a.as_f64(), b.as_f64()), (Some(a), Some(b)) if a == b)
}

/// A measured value with its unit and spread.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Metric {
    /// Snake-case name, for example `backward_seconds`.
    pub name: String,
    /// `s`, `B`, `FLOP/s`, `tokens/s`, `ratio`, `count`, or empty for a pure number.
    pub unit: String,
    /// The median of the samples; `None` means "not measured", and `note` has the reason.
    pub value: Option<f64>,
    /// Half of the interquartile range of the samples, in `unit`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spread: Option<f64>,
    /// The 95 % interval of the median, in `unit`; `None` where it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval: Option<(f64, f64)>,
    /// Number of samples behind `value`; 1 for a computed figure.
    pub n: usize,
    /// Why there is no value, or a remark on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

impl Metric {
    /// Returns a computed or counted figure, without spread.
    pub fn exact(name: &str, unit: &str, value: f64) -> Self {
        Self {
            name: name.into(),
            unit: unit.into(),
            value: Some(value),
            spread: None,
            interval: None,
            n: 1,
            note: None,
        }
    }

    /// Returns the median of `samples` with half of their interquartile range. No samples: "not measured".
    pub fn of_samples(name: &str, unit: &str, samples: &[f64]) -> Self {
        let summary = crate::statistics::summarize(samples);
        Self {
            name: name.into(),
            unit: unit.into(),
            value: summary.map(|s| s.median),
            spread: summary.map(|s| s.spread),
            interval: None,
            n: samples.len(),
            note: None,
        }
    }

    /// Returns a figure that could not be measured; `why` is shown in its place.
    pub fn not_measured(name: &str, unit: &str, why: &str) -> Self {
        Self {
            name: name.into(),
            unit: unit.into(),
            value: None,
            spread: None,
            interval: None,
            n: 0,
            note: Some(why.into()),
        }
    }
}

/// A measurement: experiment, case, metric, environment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The experiment's name, as it is registered ([`crate::Specs`]).
    pub experiment: String,
    /// Which case of it.
    pub case: Case,
    /// The measured value.
    pub metric: Metric,
    /// Where and when.
    pub environment: Environment,
}

/// A records file that cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum RecordsError {
    /// The file cannot be opened or created.
    #[error(
        "cannot open the records file {path}: {cause}; give --records a path in a folder that you may write"
    )]
    Open {
        /// The path as given.
        path: PathBuf,
        /// The error of the operating system.
        cause: std::io::Error,
    },
    /// Reading or writing failed.
    #[error("cannot read or write the records file {path}: {cause}")]
    Io {
        /// The path as given.
        path: PathBuf,
        /// The error of the operating system.
        cause: std::io::Error,
    },
    /// A file that exists has something else in it.
    #[error("{path}: its first line is not a record ({cause}), so none is appended; give another file")]
    Foreign {
        /// The path as given.
        path: PathBuf,
        /// The error of the parser.
        cause: serde_json::Error,
    },
    /// A line is not a record.
    #[error("{path}:{line}: not a record: {cause}; remove the line, or run the experiment again")]
    Parse {
        /// The path as given.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// The error of the parser.
        cause: serde_json::Error,
    },
}

/// Appends records to a file. Each record is written and flushed by itself, so that a crash loses none before it.
#[derive(Debug)]
pub struct RecordWriter {
    path: PathBuf,
    file: File,
}

impl RecordWriter {
    /// Opens `path` for appending and creates it where it is missing. A last line that a crash has torn is ended, so
    /// that the next record has a line of its own. A file whose first line is not a record is left as it is.
    pub fn append(path: &Path) -> Result<Self, RecordsError> {
        if let Some(cause) = first_line(path).and_then(|line| serde_json::from_slice::<Record>(&line).err()) {
            return Err(RecordsError::Foreign { path: path.into(), cause });
        }
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .map_err(|cause| RecordsError::Open { path: path.into(), cause })?;
        let mut writer = Self { path: path.into(), file };
        if ends_torn(path) {
            writer.put(b"\n")?;
        }
        Ok(writer)
    }

    /// Writes one record as one line.
    pub fn write(&mut self, record: &Record) -> Result<(), RecordsError> {
        let mut line = serde_json::to_vec(record).expect("a record has only string keys and finite numbers");
        line.push(b'\n');
        self.put(&line)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), RecordsError> {
        self.file.write_all(bytes).map_err(|cause| RecordsError::Io { path: self.path.clone(), cause })
    }
}

/// The first line of a file (not of a pipe or a terminal) that has something in it.
fn first_line(path: &Path) -> Option<Vec<u8>> {
    const MOST: u64 = 1 << 20;
    let file =
        File::open(path).ok().filter(|file| file.metadata().is_ok_and(|m| m.is_file() && m.len() > 0))?;
    let mut line = Vec::new();
    BufReader::new(file.take(MOST)).read_until(b'\n', &mut line).ok()?;
    Some(line)
}

/// Whether a file (not a pipe or a terminal) ends in the middle of a line.
fn ends_torn(path: &Path) -> bool {
    let last = || {
        let mut file = File::open(path).ok().filter(|file| file.metadata().is_ok_and(|m| m.is_file()))?;
        file.seek(SeekFrom::End(-1)).ok()?;
        let mut byte = [0];
        file.read_exact(&mut byte).ok().map(|()| byte[0])
    };
    last().is_some_and(|byte| byte != b'\n')
}

/// A line of a records file. Without an environment it has that of the line before, since most of a run's lines have the same.
#[derive(Serialize, Deserialize)]
struct Line<'a> {
    experiment: Cow<'a, str>,
    case: Cow<'a, Case>,
    metric: Cow<'a, Metric>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    environment: Option<Cow<'a, Environment>>,
}

/// Returns the lines of a file of these records, in which an environment is written where it changes.
///
/// ```
/// use report::{Case, Environment, Metric, Record, record};
///
/// let record = |value: f64| Record {
///     experiment: "copy".into(),
///     case: Case::new(),
///     metric: Metric::exact("seconds", "s", value),
///     environment: Environment { unix_time: 1, ..Environment::detect("cpu", None) },
/// };
/// let lines = record::lines(&[record(1.0), record(2.0)]);
/// assert_eq!(lines.matches("unix_time").count(), 1);
/// ```
pub fn lines(records: &[Record]) -> String {
    let mut last = None;
    let line = |record: &Record| {
        let environment = &record.environment;
        let same = last.replace(environment.clone()).as_ref() == Some(environment);
        let line = Line {
            experiment: Cow::Borrowed(&record.experiment),
            case: Cow::Borrowed(&record.case),
            metric: Cow::Borrowed(&record.metric),
            environment: (!same).then_some(Cow::Borrowed(environment)),
        };
        serde_json::to_string(&line).expect("a record has only string keys and finite numbers") + "\n"
    };
    records.iter().map(line).collect()
}

/// Reads every record of a file; empty lines are passed over, and a line without an environment has that of the line before.
pub fn read_records(path: &Path) -> Result<Vec<Record>, RecordsError> {
    let file = File::open(path).map_err(|cause| RecordsError::Open { path: path.into(), cause })?;
    let mut records: Vec<Record> = Vec::new();
    for (index, line) in BufReader::new(file).lines().enumerate() {
        let line = line.map_err(|cause| RecordsError::Io { path: path.into(), cause })?;
        if line.trim().is_empty() {
            continue;
        }
        let wrong = |cause| RecordsError::Parse { path: path.into(), line: index + 1, cause };
        let Line { experiment, case, metric, environment } = serde_json::from_str(&line).map_err(wrong)?;
        let before = records.last().map(|record| Cow::Owned(record.environment.clone()));
        let missing = || wrong(serde::de::Error::missing_field("environment"));
        records.push(Record {
            experiment: experiment.into_owned(),
            case: case.into_owned(),
            metric: metric.into_owned(),
            environment: environment.or(before).ok_or_else(missing)?.into_owned(),
        });
    }
    Ok(records)
}
