//! GSM8K (Cobbe et al., arXiv:2110.14168): word problems, prompts, and the graders of their answers.
//!
//! The parts of a fine-tuning on it besides the model: [`records`] reads the files, [`split`] divides them as the
//! assignment does (to the same problems as the `datasets` library), [`prompt`] writes questions with examples before them,
//! [`tokenize`] makes rows whose labels are the answer's tokens, [`stop_texts`] ends a generation, [`graders`] say whether a
//! text answers the problem, [`accuracy`] how sure the share of right answers is, and [`evaluate`] joins them.
//!
//! ```
//! use frugal::tasks::gsm8k::{Grader, Problem};
//!
//! let problem = Problem::new("What are 3 boxes of 4 eggs?", "3*4 = <<3*4=12>>12 eggs\n#### 12")?;
//! let answer = "There are 12 eggs.\n#### 12.";
//! assert!(Grader::Strict.right(answer, &problem.answer));
//! assert!(Grader::Flexible.right(answer, &problem.answer));
//! // OpenAI's own grader keeps the full stop, and finds another text.
//! assert!(!Grader::OpenAi.right(answer, &problem.answer));
//! # Ok::<(), frugal::tasks::gsm8k::Error>(())
//! ```

pub mod accuracy;
mod error;
pub mod evaluate;
pub mod graders;
mod numpy_random;
pub mod prompt;
pub mod records;
pub mod solver;
pub mod split;
pub mod stop_texts;
pub mod tokenize;

pub use accuracy::Accuracy;
pub use error::{Error, Result};
pub use evaluate::{EvaluateConfig, Evaluation, Generator, evaluate_generation};
pub use graders::Grader;
pub use prompt::{FewShot, PromptFormat};
pub use records::{Annotations, Problem};
pub use solver::Solver;
pub use split::Split;
pub use stop_texts::StopTexts;
pub use tokenize::{EncodeConfig, Encoder, TooLong, TrainingRow};
