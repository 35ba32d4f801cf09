//! The summary at the end of a training: losses, samples, files, and next commands.

use std::path::Path;

use crate::output::progress_bar::duration;
use accounting::quantity::bytes_text;
use frugal::Config;
use frugal::config::{Dtype, Task};
use frugal::loss_log::Losses;
use frugal::run_folder::{BEST, Outcome, PAGE, SAMPLES, State, TABLE};
use serde_json::{Value, json};

use crate::common_flags::Common;
use crate::folder::best_weights::best_evaluation;
use crate::output::figures::counted;
use crate::output::shell_command::shell_word;

/// The most characters of a prompt or an answer on a line.
const WIDTH: usize = 100;

/// A prompt with its answers before and after.
pub(crate) struct Sample {
    pub(crate) prompt: String,
    pub(crate) before: Option<String>,
    pub(crate) after: String,
}

/// Steps and losses as text.
pub(crate) fn losses_text(step: u64, losses: Losses) -> String {
    let mut text = counted(step, "step");
    if let Some([first, last]) = losses.rewards {
        text += &format!(", mean reward {first:.3} to {last:.3}");
        if let Some(loss) = losses.validation {
            let before = losses.before.map_or_else(String::new, |before| format!("{:.3} to ", -before));
            text += &format!(", validation reward {before}{:.3}", -loss);
        }
        return text;
    }
    if let (Some(first), Some(last)) = (losses.first, losses.last) {
        text += &format!(", training loss {first:.4} to {last:.4}");
    }
    if let Some(loss) = losses.validation {
        let before = losses.before.map_or_else(String::new, |before| format!("{before:.4} to "));
        text += &format!(", validation loss {before}{loss:.4}");
    }
    text
}

/// The best evaluation, the end and the memory of a training, for `--json`.
pub(crate) fn fields(out: Option<&Path>, outcome: Option<&Outcome>) -> Vec<(&'static str, Value)> {
    let mut fields = Vec::new();
    if let Some(best) = out.and_then(best_evaluation) {
        let path = out.map(|out| out.join(BEST));
        fields.push(("best", json!({ "loss": best.loss, "step": best.step, "path": path })));
    }
    if let Some(outcome) = outcome {
        fields.push(("state", json!(outcome.state)));
        fields.push(("peak_bytes", json!(outcome.peak_bytes)));
        fields.push(("file_bytes", json!(outcome.file_bytes)));
    }
    fields
}

/// Prints what follows the losses and the result's place.
pub(crate) fn print(
    common: &Common,
    config: &Config,
    out: &Path,
    outcome: Option<&Outcome>,
    samples: &[Sample],
    next: &[String],
) {
    let (shown, word) = (out.display(), shell_word(&out.display().to_string()));
    if let Some(best) = best_evaluation(out) {
        let what = if config.adapter.is_some() { "adapter" } else { "model" };
        common.note(&format!(
            "the best {what} is in {shown}/{BEST} (validation loss {:.4} at step {})",
            best.loss, best.step
        ));
    }
    if let Some(outcome) = outcome {
        let budget = config.training.budget.map_or_else(String::new, |budget| format!(" of {budget}"));
        let files = match outcome.file_bytes {
            0 => String::new(),
            bytes => format!(", beside {} of mapped files", bytes_text(bytes)),
        };
        let memory = match outcome.peak_bytes {
            0 => String::new(),
            peak => format!(", at most {}{budget} held{files}", bytes_text(peak)),
        };
        common.note(&format!("{}{memory}", duration(outcome.seconds)));
        if outcome.state == State::StoppedEarly {
            let patience = config.training.patience.unwrap_or_default();
            common.note(&format!(
                "stopped early: {} in a row {} not better; `frugal resume {word} --patience N` goes on",
                counted(patience, "evaluation"),
                if patience == 1 { "was" } else { "were" }
            ));
        }
    }
    if !samples.is_empty() {
        common.note(&format!("samples, greedy (in full in {shown}/{SAMPLES}):"));
    }
    for sample in samples {
        common.note(&format!("  {}", tail(&sample.prompt)));
        // A resumed training has none for rows that were not chosen at its start.
        if let Some(before) = &sample.before {
            common.note(&format!("    before: {}", head(before)));
        }
        common.note(&format!("    after:  {}", head(&sample.after)));
    }
    common.note(&format!("curves: {shown}/{PAGE}, {shown}/{TABLE}, or `tensorboard --logdir {word}`"));
    if !next.is_empty() {
        common.note("next:");
        next.iter().for_each(|command| common.note(&format!("  {command}")));
    }
}

/// Three commands for what a fine-tuning has made.
pub(crate) fn next_commands(config: &Config, out: &Path, is_chat: bool) -> Vec<String> {
    let shown = out.display().to_string();
    let (word, file) = (shell_word(&shown), shell_word(&format!("{shown}.gguf")));
    let mut next = Vec::new();
    if is_chat {
        next.push(format!("frugal chat {word}"));
    } else {
        next.push(format!("frugal generate --model {word} --prompt TEXT"));
    }
    if config.model.dtype == Some(Dtype::Gguf) && config.adapter.is_some() {
        // Beside the base's own file, whose blocks stay as they are.
        let file = shell_word(&format!("{shown}-lora.gguf"));
        next.push(format!("frugal export --model {word} --format gguf-lora --out {file}"));
    } else if config.task == Task::Finetune {
        next.push(format!("frugal export --model {word} --format gguf --type q8_0 --out {file}"));
    }
    next.push(format!("frugal runs show {word}"));
    next
}

/// The end of a text in one line.
fn tail(text: &str) -> String {
    let line = one_line(text);
    let count = line.chars().count();
    if count <= WIDTH { line } else { format!("…{}", line.chars().skip(count - WIDTH).collect::<String>()) }
}

/// The beginning of a text in one line.
fn head(text: &str) -> String {
    let line = one_line(text);
    if line.chars().count() <= WIDTH {
        line
    } else {
        format!("{}…", line.chars().take(WIDTH).collect::<String>())
    }
}

/// A text in one line, without what could control the terminal.
fn one_line(text: &str) -> String {
    let words = text.split(|c: char| c.is_whitespace() || c.is_control()).filter(|word| !word.is_empty());
    words.collect::<Vec<_>>().join(" ")
}
