//! `frugal export --verify`: compares log-probabilities and tokens of llama.cpp with this program's.

use std::fmt;
use std::path::Path;

use anyhow::{Context, bail};
use dataloading::chat::{ChatTemplate, Conversation, Message, TemplateConfig};
use frugal::companion_files::tokenizer_of;
use frugal::llama_cpp::{LlamaCpp, Request};
use frugal::planning;
use gguf::{FileType, Model, ModelFile, ReadOptions};
use models::Llama;
use models::hugging_face::{Folder, tensor_name};
use models::module::{Input, LanguageModel};
use models::state_dict::state_dict;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::flags::model::with_adapter;

/// Lengths of the prompts, in tokens.
const LENGTHS: [usize; 3] = [3, 17, 60];

/// The models and texts that are compared.
pub(super) struct Files<'a> {
    /// The model's folder, which this program loads.
    pub(super) folder: &'a Path,
    /// The folder of the tokenizer and the chat template that the GGUF file contains.
    pub(super) texts: &'a Path,
    /// The adapter's folder, if there is one.
    pub(super) adapter: Option<&'a Path>,
    /// The GGUF file of the model, which llama.cpp loads.
    pub(super) model: &'a Path,
    /// The GGUF file of the adapter, if there is one.
    pub(super) lora: Option<&'a Path>,
    /// The type of the matrices in the GGUF file.
    pub(super) kind: FileType,
}

/// The result of a comparison.
pub(super) struct Figures {
    /// The largest difference of a log-probability.
    largest: f64,
    /// The largest difference that a correct file may have.
    limit: f64,
    /// The type of the matrices, which decides the limit.
    kind: FileType,
    /// The first text that llama.cpp tokenizes differently.
    other_tokens: Option<String>,
}

/// Texts that test how a tokenizer splits: letters, digits, blanks, line breaks, other scripts, and characters that most vocabularies lack.
const TEXTS: [&str; 3] = [
    "Hello there, it's 12345.67 (x)!",
    "Two  blanks,\ttabs\n\nand lines\r\n  of them",
    "Zoë 🗼 日本語 👩‍👧 שלום",
];

/// Returns the largest difference of a log-probability that a correct file may have, for log-probabilities that lie in a range of this
/// length: about 1 for random weights and 20 for pretrained ones, and rounding grows with it. Measured on Qwen2.5-Coder-0.5B: 0.003 in f32,
/// 0.2 in f16, 0.9 in q8_0 and q4_k_m.
///
/// llama.cpp multiplies 16-bit matrices with activations that it rounds to the same type, and all others with activations of 8 bits, so a
/// correct file differs by more than its weights' rounding. A wrong order of rows differs by far more. For types of fewer than 8 bits this
/// program computes with the matrices as they are stored.
fn limit(kind: FileType, architecture: &str, range: f64) -> f64 {
    let of_range = match kind {
        // llama.cpp looks Gemma's GELU up in a table in fp16.
        FileType::F32 if architecture.starts_with("gemma") => 1e-2,
        FileType::F32 => 1e-3,
        FileType::F16 => 3e-2,
        FileType::BF16
        | FileType::Q8_0
        | FileType::Q6K
        | FileType::Q5KM
        | FileType::Q4KM
        | FileType::Q4_0
        | FileType::Mxfp4Moe => 1e-1,
    };
    of_range * range.max(1.0)
}

/// Returns whether a model's weights in fp32 take at most half of the free memory.
///
/// # Errors
/// A folder without a model.
pub(super) fn fits_memory(folder: &Path) -> anyhow::Result<bool> {
    let weights = 4 * Folder::open(folder)?.config().parameter_count();
    Ok(weights <= planning::default_budget(Device::Cpu, 1)? / 2)
}

/// Compares the log-probabilities of the whole vocabulary after three prompts, and the tokens of [`TEXTS`] and of a rendered conversation.
///
/// # Errors
/// A tokenizer without plain tokens; a model or an adapter that llama.cpp or this program cannot load.
pub(super) fn compare(llama_cpp: &LlamaCpp, model: &Model, files: &Files<'_>) -> anyhow::Result<Figures> {
    let plain = model.tokenizer().plain_tokens();
    let Some(forced) = plain.first().copied() else {
        bail!("the tokenizer has no token of letters alone to verify with")
    };
    // Prompts of plain tokens, by a linear congruential generator: the same on every run.
    let mut state = 1u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        plain[(state >> 33) as usize % plain.len()]
    };
    let prompts: Vec<Vec<u32>> =
        LENGTHS.iter().map(|length| (0..*length).map(|_| next()).collect()).collect();
    // llama.cpp's log-probabilities and tokens, then this program's.
    let tokenizer = tokenizer_of(files.texts)?;
    let mut texts = TEXTS.map(str::to_owned).to_vec();
    texts.extend(chat(files.texts));
    let theirs = llama_cpp.compute(&Request {
        model: files.model,
        lora: files.lora,
        prompts: &prompts,
        texts: &texts,
        forced,
        vocabulary: model.vocabulary() as usize,
        threads: std::thread::available_parallelism().map_or(1, usize::from),
    })?;
    let ours = log_probabilities(files, &prompts).context("the log-probabilities of this program")?;
    let largest = largest_difference(&ours, &theirs.log_probabilities);
    let range = ours.iter().map(|row| range_of(row)).fold(0.0, f64::max);
    let mut other_tokens = None;
    for (text, theirs) in texts.into_iter().zip(theirs.tokens.iter().flatten()) {
        if tokenizer.encode(&text)? != *theirs {
            other_tokens = Some(text);
            break;
        }
    }
    Ok(Figures {
        largest,
        limit: limit(files.kind, model.architecture(), range),
        kind: files.kind,
        other_tokens,
    })
}

/// Returns the largest difference of two numbers at one place. A NaN counts as larger than every number.
fn largest_difference(ours: &[Vec<f64>], theirs: &[Vec<f64>]) -> f64 {
    let differences = ours
        .iter()
        .zip(theirs)
        .flat_map(|(ours, theirs)| ours.iter().zip(theirs).map(|(x, y)| (x - y).abs()));
    differences.fold(
        0.0,
        |largest: f64, difference| {
            if difference.is_nan() || difference > largest { difference } else { largest }
        },
    )
}

/// The difference of the largest and the smallest finite number.
fn range_of(numbers: &[f64]) -> f64 {
    let finite = || numbers.iter().copied().filter(|number| number.is_finite());
    (finite().fold(f64::MIN, f64::max) - finite().fold(f64::MAX, f64::min)).max(0.0)
}

/// Renders a conversation with the chat template; `None` without a template.
fn chat(folder: &Path) -> Option<String> {
    let template = ChatTemplate::from_folder(folder, TemplateConfig::default()).ok()??;
    let messages = [("user", TEXTS[0]), ("assistant", TEXTS[2]), ("user", "And?")];
    let messages = messages.map(|(role, content)| Message::new(role, content));
    Some(template.render(&Conversation::new(messages), true).ok()?.text)
}

/// Computes the log-probabilities of every token after each prompt, in fp32.
fn log_probabilities(files: &Files<'_>, prompts: &[Vec<u32>]) -> anyhow::Result<Vec<Vec<f64>>> {
    let _no_grad = tch::no_grad_guard();
    let model = Folder::open(files.folder)?.load(Some(Kind::Float), Device::Cpu)?;
    if files.kind.base().is_quantized() && files.kind != FileType::Q8_0 {
        copy_stored(&model, files.model)?;
    }
    let model: Box<dyn LanguageModel> = with_adapter(model, files.adapter)?;
    let after_prompt = |prompt: &Vec<u32>| -> anyhow::Result<Vec<f64>> {
        let tokens: Vec<i64> = prompt.iter().map(|token| i64::from(*token)).collect();
        let tokens = Tensor::from_slice(&tokens).unsqueeze(0);
        let last = model.logits(&Input::new(&tokens))?.f_select(1, -1)?.f_squeeze_dim(0)?;
        Ok(Vec::try_from(last.f_log_softmax(-1, Kind::Double)?)?)
    };
    prompts.iter().map(after_prompt).collect()
}

/// Gives a model the matrices of a GGUF file, rounded as they are stored.
fn copy_stored(model: &Llama, file: &Path) -> anyhow::Result<()> {
    let file = ModelFile::open(file, ReadOptions::default())?;
    for (name, mut tensor) in state_dict(model) {
        let stored = file.tensor(&tensor_name(&name));
        let Some(stored) = stored.filter(|stored| stored.shape.len() == 2) else { continue };
        let mut values = Vec::new();
        file.rows(stored, 0..stored.shape[0], &mut values)?;
        file.forget(stored)?;
        tensor.f_copy_(&Tensor::f_from_slice(&values)?.f_view_as(&tensor)?)?;
    }
    Ok(())
}

impl Figures {
    /// Returns the figures for `--json`.
    pub(super) fn json(&self) -> Value {
        json!({
            "largest_difference": self.largest, "limit": self.limit, "type": self.kind.to_string(),
            "other_tokens": self.other_tokens,
        })
    }

    /// Returns an error if the largest difference exceeds the limit or is NaN.
    pub(super) fn judge(&self) -> anyhow::Result<()> {
        if self.largest <= self.limit {
            return Ok(());
        }
        bail!(
            "llama.cpp computes other log-probabilities: they differ by up to {:.1e}, and {} allows {:.0e}; the file is wrong, or \
             llama.cpp does not have an option of this model",
            self.largest,
            self.kind,
            self.limit
        )
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "llama.cpp: the log-probabilities of all tokens after prompts of {LENGTHS:?} tokens differ by at most {:.1e} ({} allows {:.0e})",
            self.largest, self.kind, self.limit
        )?;
        match &self.other_tokens {
            Some(text) => write!(
                f,
                "; note: it splits some texts into other tokens than the tokenizer does, such as {text:?}"
            ),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nan_at_any_place_fails_the_verification() {
        let ours = vec![vec![-1.0, -2.0], vec![-3.0, -4.0]];
        let figures = |theirs: &[Vec<f64>]| Figures {
            largest: largest_difference(&ours, theirs),
            limit: limit(FileType::F32, "qwen2", 3.0),
            kind: FileType::F32,
            other_tokens: None,
        };
        assert!(figures(&ours).judge().is_ok());
        let mut theirs = ours.clone();
        theirs[0][1] = -2.5;
        assert_eq!(figures(&theirs).largest, 0.5);
        assert!(figures(&theirs).judge().is_err());
        for place in 0..4 {
            let mut theirs = ours.clone();
            theirs[place / 2][place % 2] = f64::NAN;
            assert!(figures(&theirs).judge().is_err(), "{place}");
        }
    }
}
