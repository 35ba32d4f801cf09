//! Three ways to say whether a text answers a problem.
//!
//! | grader | what it takes from the text | what it compares |
//! |---|---|---|
//! | [`Grader::Strict`] | the first `#### NUMBER` | after normalising both |
//! | [`Grader::Flexible`] | the last number, whatever is before it | after normalising both |
//! | [`Grader::OpenAi`] | the first `#### NUMBER`, without commas | as it is |
//!
//! The first two are the filters of lm-evaluation-harness's task `gsm8k` (version 3) with its `exact_match`: from the taken
//! text, and from the whole gold answer, are removed, in this order, commas, dollar signs, everything up to the last `#### `,
//! and a full stop at the end; then case is ignored. The third is the grader that came with the data set. They disagree on
//! what a model is apt to write: `#### 18.` is right for the first two only, `18` without a mark for the second only, and a
//! text that runs on to another question is right for all but the second. So all three are reported.
//!
//! The patterns are Python's. There `$` also matches before a line break at the end; a taken text never has one, so no verdict
//! can differ. The classes here are ASCII in both.

use std::fmt;
use std::sync::LazyLock;

use regex::Regex;
use serde::Serialize;

/// Answer of lm-evaluation-harness where no number is found.
const INVALID: &str = "[invalid]";

fn pattern(pattern: &str) -> Regex {
    Regex::new(pattern).expect("a valid pattern")
}

static MARKED: LazyLock<Regex> = LazyLock::new(|| pattern(r"#### (\-?[0-9\.\,]+)"));
static NUMBER: LazyLock<Regex> = LazyLock::new(|| pattern(r"(-?[$0-9.,]{2,})|(-?[0-9]+)"));
static UP_TO_MARK: LazyLock<Regex> = LazyLock::new(|| pattern(r"(?s).*#### "));
static FULL_STOP: LazyLock<Regex> = LazyLock::new(|| pattern(r"\.$"));

/// A way of grading.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Grader {
    /// lm-evaluation-harness, `strict-match`.
    Strict,
    /// lm-evaluation-harness, `flexible-extract`.
    Flexible,
    /// The grader of Cobbe et al.
    #[serde(rename = "openai")]
    OpenAi,
}

impl Grader {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Strict, Self::Flexible, Self::OpenAi];

    /// Returns the name in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Strict => "strict",
            Self::Flexible => "flexible",
            Self::OpenAi => "openai",
        }
    }

    /// Returns what it takes from a text; `None` if it finds nothing.
    pub fn extract(self, text: &str) -> Option<String> {
        let marked = || MARKED.captures(text).map(|found| found[1].to_owned());
        match self {
            Self::Strict => marked(),
            Self::Flexible => NUMBER.find_iter(text).last().map(|found| found.as_str().to_owned()),
            Self::OpenAi => marked().map(|found| found.replace(',', "")),
        }
    }

    /// Returns whether `text` answers the problem whose gold answer (steps and `#### NUMBER`) is `answer`. For OpenAI's grader an
    /// answer without a mark matches no text; the harness compares with all of it.
    pub fn right(self, text: &str, answer: &str) -> bool {
        let answer_text = self.extract(text);
        match self {
            Self::OpenAi => answer_text.is_some() && answer_text == self.extract(answer),
            Self::Strict | Self::Flexible => {
                normalised(answer_text.as_deref().unwrap_or(INVALID)) == normalised(answer)
            }
        }
    }
}

impl fmt::Display for Grader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The harness's `regexes_to_ignore` and `ignore_case`.
fn normalised(text: &str) -> String {
    let text = text.replace([',', '$'], "");
    let text = UP_TO_MARK.replace_all(&text, "");
    FULL_STOP.replace(&text, "").to_lowercase()
}
