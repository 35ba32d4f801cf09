//! Questions as a model reads them, with solved examples before them.
//!
//! With the defaults, which are lm-evaluation-harness's, a prompt of one example is
//!
//! ```text
//! Question: How many …?
//! Answer: Natalia sold 48/2 = <<48/2=24>>24 clips in May.
//! …
//! #### 72
//!
//! Question: How many …?
//! Answer:
//! ```
//!
//! The answer that follows begins with a space. The examples are drawn from the training problems by a seed, once for a whole
//! evaluation, so that every figure is over the same examples; a question that is among them gets another example instead.

use super::error::{Error, Result};
use super::numpy_random::permutation;
use super::records::Problem;

/// The words around questions and answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PromptFormat {
    /// Before a question.
    pub question: String,
    /// Between a question and its answer. Best without white space at its end: a byte-level BPE puts it into the next token.
    pub answer: String,
    /// Before the text of an answer.
    pub delimiter: String,
    /// Between an answer and the next question.
    pub separator: String,
}

impl Default for PromptFormat {
    /// `Question: …\nAnswer: …\n\n`.
    fn default() -> Self {
        let [question, answer, delimiter, separator] =
            ["Question: ", "\nAnswer:", " ", "\n\n"].map(str::to_owned);
        Self { question, answer, delimiter, separator }
    }
}

impl PromptFormat {
    /// Returns the question, up to where the model continues.
    pub fn ask(&self, question: &str) -> String {
        format!("{}{question}{}", self.question, self.answer)
    }

    /// Returns the expected text: the delimiter and the answer.
    pub fn reply(&self, answer: &str) -> String {
        format!("{}{answer}", self.delimiter)
    }
}

/// Prompts with a fixed number of solved examples before the question.
#[derive(Debug, Clone)]
pub struct FewShot {
    format: PromptFormat,
    /// The examples that are shown, and one more, if there are enough: it replaces an example that is the question itself.
    examples: Vec<Problem>,
    shots: usize,
}

impl FewShot {
    /// The assignment's number of examples.
    pub const SHOTS: usize = 3;

    /// Draws `shots` examples of different questions from `train`, by `seed`.
    ///
    /// # Errors
    /// There are not that many. One more is needed for prompts of the training problems themselves.
    pub fn new(train: &[Problem], shots: usize, format: PromptFormat, seed: u64) -> Result<Self> {
        let count = u32::try_from(train.len()).unwrap_or(u32::MAX);
        let mut examples: Vec<Problem> = Vec::new();
        if shots > 0 {
            for number in permutation(count, seed) {
                if examples.len() > shots {
                    break;
                }
                let problem = &train[number];
                if !examples.iter().any(|chosen| chosen.question == problem.question) {
                    examples.push(problem.clone());
                }
            }
        }
        if examples.len() < shots {
            return Err(Error::Config {
                what: "few-shot prompt",
                reason: format!(
                    "{shots} examples are to be drawn from {} different training problems; ask for fewer, or give more",
                    examples.len()
                ),
            });
        }
        Ok(Self { format, examples, shots })
    }

    /// Prompts without examples.
    pub fn zero(format: PromptFormat) -> Self {
        Self { format, examples: Vec::new(), shots: 0 }
    }

    /// Returns the words around questions and answers.
    pub fn format(&self) -> &PromptFormat {
        &self.format
    }

    /// Returns the number of examples before a question.
    pub fn shots(&self) -> usize {
        self.shots
    }

    /// Returns the examples before this question: never the question itself.
    ///
    /// # Errors
    /// The question is among the examples, and there was no other problem to take its place.
    pub fn examples(&self, question: &str) -> Result<Vec<&Problem>> {
        let others = self.examples.iter().filter(|example| example.question != question);
        let examples: Vec<&Problem> = others.take(self.shots).collect();
        if examples.len() < self.shots {
            return Err(Error::Config {
                what: "few-shot prompt",
                reason: format!(
                    "the question is one of the {} examples and there is no other problem to show instead; draw them from \
                     more problems, or ask for fewer",
                    self.shots
                ),
            });
        }
        Ok(examples)
    }

    /// Returns the examples, the question, and the words before its answer.
    ///
    /// # Errors
    /// Errors of [`examples`](Self::examples).
    pub fn prompt(&self, question: &str) -> Result<String> {
        let mut prompt = String::new();
        for example in self.examples(question)? {
            prompt += &self.format.ask(&example.question);
            prompt += &self.format.reply(&example.answer);
            prompt += &self.format.separator;
        }
        Ok(prompt + &self.format.ask(question))
    }
}
