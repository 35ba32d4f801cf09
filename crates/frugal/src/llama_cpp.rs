//! llama.cpp as a reference: the log-probabilities and the tokens that it computes from GGUF files, by the Python package `xllamacpp`.
//!
//! A GGUF file whose values are right may still be wrong: rows of another order, or a missing key, change what is computed and load
//! silently. Greedy tokens often stay the same then, so log-probabilities are compared.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Deserialize;
use serde_json::json;

use crate::error::{Error, Result};

/// The program that runs in Python.
const SCRIPT: &str = include_str!("llama_cpp.py");

/// The variable that names the interpreter.
pub const VARIABLE: &str = "FRUGAL_PYTHON";

/// A Python interpreter that has `xllamacpp`.
#[derive(Debug, Clone)]
pub struct LlamaCpp {
    python: PathBuf,
}

impl LlamaCpp {
    /// Finds the interpreter: `python`, else `FRUGAL_PYTHON`, else `python3`.
    ///
    /// # Errors
    /// An interpreter that does not run, or lacks the package; the message says how to install it.
    pub fn find(python: Option<&Path>) -> Result<Self> {
        let python = python
            .map(Path::to_owned)
            .or_else(|| std::env::var_os(VARIABLE).map(PathBuf::from))
            .unwrap_or_else(|| "python3".into());
        let refuse = |reason: String| Error::File { path: python.clone(), reason };
        let output = command(&python, "import xllamacpp").output();
        let output = output.map_err(|cause| refuse(format!("{cause}; give a Python with --python")))?;
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr);
            return Err(refuse(format!(
                "it cannot import xllamacpp, which has llama.cpp ({}); install it with `pip install xllamacpp`, or give another \
                 interpreter with --python",
                text.lines().next_back().unwrap_or("no output").trim()
            )));
        }
        Ok(Self { python })
    }

    /// Returns the log-probabilities of every token after each prompt, and the tokens of each text.
    ///
    /// # Errors
    /// A file that llama.cpp does not load, with its words.
    pub fn compute(&self, request: &Request<'_>) -> Result<Computed> {
        let refuse = |reason: String| Error::File { path: request.model.to_owned(), reason };
        let text = json!({
            "model": request.model, "lora": request.lora, "prompts": request.prompts, "forced": request.forced,
            "texts": request.texts, "vocabulary": request.vocabulary, "threads": request.threads
        })
        .to_string();
        let run = || -> std::io::Result<std::process::Output> {
            let mut child = command(&self.python, SCRIPT)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()?;
            if let Some(mut input) = child.stdin.take() {
                input.write_all(text.as_bytes())?;
            }
            child.wait_with_output()
        };
        let output = run().map_err(|cause| refuse(format!("llama.cpp cannot be run: {cause}")))?;
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        if !output.status.success() {
            let last = err.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("no output");
            return Err(refuse(format!("llama.cpp cannot run it: {last}")));
        }
        let line = out.lines().next_back().unwrap_or_default();
        let answer: Answer = serde_json::from_str(line)
            .map_err(|cause| refuse(format!("llama.cpp gave an unexpected answer: {cause}")))?;
        let complete = |row: Vec<Option<f64>>| row.into_iter().collect::<Option<Vec<f64>>>();
        let rows = answer.rows.into_iter().map(complete).collect::<Option<_>>();
        let log_probabilities =
            rows.ok_or_else(|| refuse("llama.cpp gave no probability for some tokens".to_owned()))?;
        Ok(Computed { log_probabilities, tokens: answer.tokens })
    }
}

/// The program's answer.
#[derive(Deserialize)]
struct Answer {
    rows: Vec<Vec<Option<f64>>>,
    tokens: Option<Vec<Vec<u32>>>,
}

/// Results of llama.cpp.
#[derive(Debug, Clone)]
pub struct Computed {
    /// For each prompt, the log-probability of every token after it.
    pub log_probabilities: Vec<Vec<f64>>,
    /// The tokens of each text, without the one that begins a text; `None` if the package cannot tell.
    pub tokens: Option<Vec<Vec<u32>>>,
}

/// A request to llama.cpp.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// The model's GGUF file.
    pub model: &'a Path,
    /// An adapter's GGUF file.
    pub lora: Option<&'a Path>,
    /// Tokens, at most 255 each.
    pub prompts: &'a [Vec<u32>],
    /// Texts to tokenize.
    pub texts: &'a [String],
    /// A token with a text of whole characters that ends nothing.
    pub forced: u32,
    /// The number of tokens.
    pub vocabulary: usize,
    /// Threads.
    pub threads: usize,
}

/// Python without the libtorch that this program may have on its library path.
fn command(python: &Path, script: &str) -> Command {
    let mut command = Command::new(python);
    command.args(["-c", script]).env_remove("LD_LIBRARY_PATH");
    command
}
