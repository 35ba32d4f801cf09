//! Errors of problems, prompts and answers.

use std::path::PathBuf;

/// Result of the functions around GSM8K.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the functions around GSM8K.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be read.
    #[error("{}: {cause}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        cause: std::io::Error,
    },
    /// A line that is not a problem.
    #[error("{}: line {line}: {reason}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: u64,
        /// The problem and the remedy.
        reason: String,
    },
    /// A file without problems.
    #[error("{}: no problem in it; expected JSON lines with `question` and `answer`", path.display())]
    NoProblems {
        /// The file.
        path: PathBuf,
    },
    /// An answer that no grader can grade against.
    #[error(
        "the answer has no `#### NUMBER` (it ends with {end:?}); write the result in a last line, as `#### 42`; other questions and answers are read by --format question-answer"
    )]
    NoResult {
        /// The last characters of the answer.
        end: String,
    },
    /// A setting that cannot be used.
    #[error("{what}: {reason}")]
    Config {
        /// The setting or part.
        what: &'static str,
        /// The value, the expected values, and the remedy.
        reason: String,
    },
    /// A row that is longer than the model's context.
    #[error(
        "problem {number}: {tokens} tokens{} are more than the context of {context}; give fewer examples, a model with a \
         longer context, or skip such problems", room(*new)
    )]
    TooLong {
        /// The problem's index in its list, from 0.
        number: usize,
        /// Tokens of the row, or of the prompt.
        tokens: usize,
        /// Tokens to be generated after them.
        new: usize,
        /// The model's context.
        context: usize,
    },
    /// Ids that the model does not know.
    #[error(
        "the tokenizer does not match the model: it gives the id {id} ({token:?}) and the model's vocabulary is {vocabulary} (0 \
         to {}); take the tokenizer.json that came with the model", vocabulary.saturating_sub(1)
    )]
    Vocabulary {
        /// The id.
        id: u32,
        /// Its token.
        token: String,
        /// Size of the model's vocabulary.
        vocabulary: usize,
    },
    /// A generated token that is not an id.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// The tokenizer refuses a text.
    #[error(transparent)]
    Dataloading(#[from] dataloading::Error),
    /// The model failed.
    #[error("while generating for problems {problems}: {cause}")]
    Generate {
        /// The numbers of the problems of the batch.
        problems: String,
        /// The problem.
        cause: Box<dyn std::error::Error + Send + Sync>,
    },
}

fn room(new: usize) -> String {
    if new == 0 { String::new() } else { format!(" and {new} to be generated") }
}
