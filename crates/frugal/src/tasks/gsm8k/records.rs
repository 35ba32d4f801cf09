//! Problems from JSON lines: one object a line, with the strings `question` and `answer`.
//!
//! An answer is steps and a last line `#### 42`. Steps carry calculator annotations, `48/2 = <<48/2=24>>24`, which the set's
//! authors let a calculator fill in; [`Annotations::Strip`] takes them out. A file is read line by line.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use regex::Regex;
use serde_json::Value;

use super::error::{Error, Result};
use super::graders::Grader;

/// Bytes of the longest line; a file without line breaks must not fill the memory.
const LONGEST_LINE: u64 = 16 << 20;

static ANNOTATION: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"<<[^<>=\n]*=[^<>\n]*>>").expect("a valid pattern"));

/// A word problem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The question.
    pub question: String,
    /// Steps, and `#### ` with the result.
    pub answer: String,
}

/// Handling of annotations such as `<<48/2=24>>`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Annotations {
    /// Keeps them.
    #[default]
    Keep,
    /// Removes them; the result after them stays.
    Strip,
}

impl Problem {
    /// Returns a problem whose answer has a result.
    ///
    /// # Errors
    /// [`Error::NoResult`]: the answer has no `#### NUMBER`.
    pub fn new(question: impl Into<String>, answer: impl Into<String>) -> Result<Self> {
        let answer = answer.into();
        match Grader::OpenAi.extract(&answer) {
            Some(_) => Ok(Self { question: question.into(), answer }),
            None => {
                let skip = answer.chars().count().saturating_sub(40);
                Err(Error::NoResult { end: answer.chars().skip(skip).collect() })
            }
        }
    }

    /// Returns the problem without calculator annotations.
    pub fn stripped(&self) -> Self {
        let answer = ANNOTATION.replace_all(&self.answer, "").into_owned();
        Self { question: self.question.clone(), answer }
    }

    /// Returns the number after `####`, without commas.
    pub fn result(&self) -> String {
        Grader::OpenAi.extract(&self.answer).unwrap_or_default()
    }
}

/// The problems of a file, one at a time.
#[derive(Debug)]
pub struct Problems {
    path: PathBuf,
    reader: BufReader<File>,
    annotations: Annotations,
    line: u64,
    found: bool,
    ended: bool,
}

impl Problems {
    /// Opens a file.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn open(path: &Path, annotations: Annotations) -> Result<Self> {
        let file = File::open(path).map_err(|cause| Error::Io { path: path.to_owned(), cause })?;
        let reader = BufReader::with_capacity(1 << 16, file);
        Ok(Self { path: path.to_owned(), reader, annotations, line: 0, found: false, ended: false })
    }

    fn wrong(&self, reason: String) -> Error {
        Error::Line { path: self.path.clone(), line: self.line, reason }
    }

    /// The next line that is not blank.
    fn next_line(&mut self) -> Result<Option<String>> {
        loop {
            let mut bytes = Vec::new();
            let read = (&mut self.reader).take(LONGEST_LINE + 1).read_until(b'\n', &mut bytes);
            let read = read.map_err(|cause| Error::Io { path: self.path.clone(), cause })?;
            if read == 0 {
                return Ok(None);
            }
            self.line += 1;
            if read as u64 > LONGEST_LINE {
                let reason = format!("longer than {LONGEST_LINE} bytes; is this a file of JSON lines?");
                return Err(self.wrong(reason));
            }
            if self.line == 1 && bytes.starts_with(b"\xef\xbb\xbf") {
                bytes.drain(..3);
            }
            let text = String::from_utf8(bytes).map_err(|bad| {
                let at = bad.utf8_error().valid_up_to();
                self.wrong(format!("byte {at} of the line is not UTF-8; convert the file to UTF-8"))
            })?;
            if !text.trim().is_empty() {
                return Ok(Some(text.trim_end().to_owned()));
            }
        }
    }

    fn parse(&self, line: &str) -> Result<Problem> {
        let object = match serde_json::from_str(line) {
            Ok(Value::Object(object)) => object,
            Ok(_) => return Err(self.wrong("expected an object with `question` and `answer`".into())),
            Err(cause) => {
                // serde_json sees one line; its column is the file's, its line is not.
                let (column, text) = (cause.column(), cause.to_string());
                let reason = text.split(" at line ").next().unwrap_or_default();
                let reason = format!("not JSON ({reason}, column {column}); fix or remove the line");
                return Err(self.wrong(reason));
            }
        };
        let field = |name: &str| match object.get(name) {
            Some(Value::String(text)) if text.trim().is_empty() => {
                Err(self.wrong(format!("field '{name}' is empty; fix or remove the line")))
            }
            Some(Value::String(text)) => Ok(text.clone()),
            Some(_) => Err(self.wrong(format!("field '{name}' is not a string; fix or remove the line"))),
            None => {
                let there: Vec<&str> = object.keys().map(String::as_str).collect();
                let there = if there.is_empty() { "none".to_owned() } else { there.join(", ") };
                Err(self.wrong(format!("no field '{name}'; the fields here are: {there}")))
            }
        };
        let problem = Problem::new(field("question")?, field("answer")?);
        let problem = problem.map_err(|error| self.wrong(error.to_string()))?;
        Ok(match self.annotations {
            Annotations::Keep => problem,
            Annotations::Strip => problem.stripped(),
        })
    }

    fn advance(&mut self) -> Result<Option<Problem>> {
        match self.next_line()? {
            Some(line) => {
                self.found = true;
                self.parse(&line).map(Some)
            }
            None if self.found => Ok(None),
            None => Err(Error::NoProblems { path: self.path.clone() }),
        }
    }
}

impl Iterator for Problems {
    type Item = Result<Problem>;

    /// The next problem. After an error there are no more.
    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let next = self.advance().transpose();
        self.ended = !matches!(next, Some(Ok(_)));
        next
    }
}

/// Returns all problems of a file.
///
/// # Errors
/// The file cannot be read or has no problem; the first invalid line, with its number: not JSON, a field that is missing
/// or no string, an answer without `#### NUMBER`.
pub fn read(path: &Path, annotations: Annotations) -> Result<Vec<Problem>> {
    Problems::open(path, annotations)?.collect()
}
