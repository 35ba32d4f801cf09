//! Answers of the model before and after a fine-tuning.

use std::fs;
use std::path::{Path, PathBuf};

use frugal::dataloading::{IGNORE_INDEX, Tokenizer};
use frugal::models::module::LanguageModel;
use frugal::run_folder::SAMPLES;
use frugal::training::masked_rows::MaskedRows;
use models::generation::{GenerationConfig, generate};
use serde_json::{Value, json};

use crate::common_flags::Common;
use crate::output::summary::Sample;

/// The most tokens of an answer.
const TOKENS: usize = 48;
/// The most tokens of a prompt: a longer one says little in a table.
const PROMPT: usize = 512;

/// Prompts of rows, what the rows answer, and what the model answered before the first step.
pub(super) struct Samples {
    tokenizer: Tokenizer,
    prompts: Vec<Vec<i64>>,
    references: Vec<String>,
    before: Vec<Option<String>>,
    end_tokens: Vec<i64>,
    path: PathBuf,
}

impl Samples {
    /// Takes the first rows with different prompts; `None` if no row has one.
    pub(super) fn of(
        rows: &MaskedRows,
        count: usize,
        tokenizer: &Tokenizer,
        end_tokens: Vec<i64>,
        out: &Path,
    ) -> anyhow::Result<Option<Self>> {
        let (mut prompts, mut references) = (Vec::<Vec<i64>>::new(), Vec::new());
        for row in rows.iter() {
            if prompts.len() == count {
                break;
            }
            let row = row?;
            let at = row.labels.iter().position(|label| *label != IGNORE_INDEX);
            // A text that is learned from its beginning has no prompt.
            let Some(at) = at.filter(|at| (2..=PROMPT).contains(at)) else { continue };
            let (prompt, answer) = row.tokens.split_at(at);
            if !prompts.iter().any(|own| own == prompt) {
                prompts.push(prompt.to_vec());
                references.push(text(tokenizer, answer)?);
            }
        }
        let path = out.join(SAMPLES);
        let before = vec![None; prompts.len()];
        let tokenizer = tokenizer.clone();
        Ok((!prompts.is_empty()).then_some(Self { tokenizer, prompts, references, before, end_tokens, path }))
    }

    /// Answers before the first step. A resumed training has them in its folder.
    pub(super) fn before(
        &mut self,
        common: &Common,
        model: &dyn LanguageModel,
        step: u64,
    ) -> anyhow::Result<()> {
        if step == 0 {
            self.before = self.answer(common, model)?.into_iter().map(Some).collect();
            return self.write(&vec![None; self.prompts.len()]);
        }
        let lines = fs::read_to_string(&self.path).unwrap_or_default();
        let kept: Vec<Value> = lines.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        for (number, before) in self.before.iter_mut().enumerate() {
            let prompt = text(&self.tokenizer, &self.prompts[number])?;
            let same = kept.iter().find(|value| value["prompt"] == *prompt);
            *before = same.and_then(|value| value["base"].as_str()).map(str::to_owned);
        }
        Ok(())
    }

    /// Answers after the last step, and writes them.
    pub(super) fn after(&self, common: &Common, model: &dyn LanguageModel) -> anyhow::Result<Vec<Sample>> {
        let answers = self.answer(common, model)?;
        self.write(&answers.iter().cloned().map(Some).collect::<Vec<_>>())?;
        let mut samples = Vec::new();
        for ((prompt, before), after) in self.prompts.iter().zip(&self.before).zip(answers) {
            samples.push(Sample { prompt: text(&self.tokenizer, prompt)?, before: before.clone(), after });
        }
        Ok(samples)
    }

    /// Greedy answers. Samples are an extra: where there is no memory for them, there are none.
    fn answer(&self, common: &Common, model: &dyn LanguageModel) -> anyhow::Result<Vec<String>> {
        let options = GenerationConfig {
            max_new_tokens: TOKENS,
            end_tokens: self.end_tokens.clone(),
            ..GenerationConfig::default()
        };
        match generate(model, &self.prompts, &options, &mut ()) {
            Ok(rows) => rows.iter().map(|row| text(&self.tokenizer, &row.tokens)).collect(),
            Err(error) => {
                common.note(&format!("no samples: {error}"));
                Ok(vec![String::new(); self.prompts.len()])
            }
        }
    }

    fn write(&self, after: &[Option<String>]) -> anyhow::Result<()> {
        let mut lines = String::new();
        for (number, prompt) in self.prompts.iter().enumerate() {
            let line = json!({
                "prompt": text(&self.tokenizer, prompt)?, "reference": self.references[number],
                "base": self.before[number], "tuned": after[number],
            });
            lines += &format!("{line}\n");
        }
        Ok(files::atomic_write::file(&self.path, |out| out.write_all(lines.as_bytes()))?)
    }
}

fn text(tokenizer: &Tokenizer, tokens: &[i64]) -> anyhow::Result<String> {
    let ids: Vec<u32> = tokens.iter().map(|id| u32::try_from(*id).unwrap_or(u32::MAX)).collect();
    Ok(tokenizer.decode_known(&ids)?)
}
