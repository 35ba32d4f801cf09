//! The data of a training.

use std::path::PathBuf;

use dataloading::chat::Mask;
use dataloading::records::RecordFormat;
use serde::{Deserialize, Serialize};
use training::masked_rows::Arrangement;

use super::MixtureSource;
use crate::rows::Overlong;

/// The data of a training.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DataConfig {
    /// A file or folder; or `embedded` (the encyclopedia in `data/`) or `synthetic` (a generated language), for a training from
    /// scratch.
    pub source: String,
    /// The sources of a fine-tuning that mixes several by weight, in the place of `source`, such as `["chat.jsonl=0.7", "code.jsonl=0.3"]`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mixture: Vec<MixtureSource>,
    /// Its format.
    pub format: DataFormat,
    /// A file to measure the validation loss on, in the same format; absent for the validation split of a folder, if it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation: Option<PathBuf>,
    /// The share of the rows of a fine-tuning that is held out for validation where there is no such split: 1 row at least and 1,000 at
    /// most, none of fewer than 50; 0 for none.
    pub held_out: f64,
    /// The field of a JSON object that holds its text.
    pub field: String,
    /// The prompt of a record, with its fields in braces, such as `Question: {query} Answer:`; together with `completion_template`, in
    /// place of `format`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_template: Option<String>,
    /// The text after the prompt, which is learned, such as ` {response}`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_template: Option<String>,
    /// A `tokenizer.json`; absent for the model's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<PathBuf>,
    /// The model's number of tokens, in a training from scratch; absent for the tokenizer's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vocabulary: Option<u32>,
    /// The token that ends a row, by its text; absent for the model's `eos_token_id`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end_token: Option<String>,
    /// The longest row in tokens; absent for the model's context.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_length: Option<usize>,
    /// Handling of rows that are too long.
    pub overlong: Overlong,
    /// Part of a conversation, or of a prompt with its completion, that counts in the loss: `answers`, `last` or `all`.
    pub mask: Mask,
    /// A file with a chat template; absent for the model's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<PathBuf>,
    /// The date, as `2026-11-23`, in prompts of a chat template that writes it; absent for that of the training's first start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub date: Option<String>,
    /// Trains on the first rows only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
    /// Positions of a packed row; absent for batches of whole rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub packing: Option<usize>,
    /// Lays the rows of a batch end to end, without attention between them, instead of padding each to the longest. Packed rows have their own
    /// padding.
    pub padding_free: bool,
    /// Batching strategy for documents, in a training from scratch: `base`, `standard`, `balanced:K`, `sequenced` or
    /// `packed`.
    pub strategy: String,
    /// Threads that make batches of documents; 0 makes them in the training thread.
    pub workers: usize,
    /// Solved examples before each question (GSM8K).
    pub shots: usize,
    /// Removes calculator annotations (`<<6*7=42>>`) from answers (GSM8K).
    pub strip_annotations: bool,
    /// Seed of the split into 90, 5 and 5 %, and of the examples (GSM8K).
    pub split_seed: u64,
    /// Variables of the chat template, such as `enable_thinking`.
    #[serde(skip_serializing_if = "serde_json::Map::is_empty")]
    pub template_arguments: serde_json::Map<String, serde_json::Value>,
}

/// The value of [`DataConfig::source`] for a generated language.
pub const SYNTHETIC: &str = "synthetic";

impl DataConfig {
    /// Returns whether a training from scratch learns a generated language, which has no documents.
    pub fn is_synthetic(&self) -> bool {
        self.source == SYNTHETIC
    }

    /// Returns how the rows of a fine-tuning's batches lie, for a model of so many positions.
    pub fn arrangement(&self, context: usize) -> Arrangement {
        match self.packing {
            Some(positions) => Arrangement::Packed(positions.min(context)),
            None if self.padding_free => Arrangement::PaddingFree,
            None => Arrangement::Padded,
        }
    }
}

impl Default for DataConfig {
    fn default() -> Self {
        Self {
            source: String::new(),
            mixture: Vec::new(),
            format: DataFormat::default(),
            validation: None,
            held_out: 0.02,
            field: "text".to_owned(),
            prompt_template: None,
            completion_template: None,
            tokenizer: None,
            vocabulary: None,
            end_token: None,
            max_length: None,
            overlong: Overlong::default(),
            mask: Mask::default(),
            chat_template: None,
            date: None,
            limit: None,
            packing: None,
            padding_free: true,
            strategy: "packed".to_owned(),
            workers: 1,
            shots: 0,
            strip_annotations: false,
            split_seed: crate::tasks::gsm8k::split::SEED,
            template_arguments: serde_json::Map::new(),
        }
    }
}

/// The format of training data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
pub enum DataFormat {
    /// Detected from file names and the first 100 records.
    ///
    /// A folder with GSM8K's train.jsonl and test.jsonl is GSM8K; other records have the format that their fields show; files of other
    /// types are text.
    #[default]
    Auto,
    /// GSM8K: a folder with train.jsonl and test.jsonl, or JSON lines of problems, which are divided into 90, 5 and 5 %.
    Gsm8k,
    /// Records of one of the following formats, detected from the first 100.
    Rows,
    /// messages: a list of role and content.
    Messages,
    /// conversations: a list of from and value.
    Conversations,
    /// prompt and completion.
    PromptCompletion,
    /// instruction, input and output.
    Instruction,
    /// question and answer.
    QuestionAnswer,
    /// input_ids and labels.
    Tokens,
    /// text, or the field that --field names.
    TextField,
    /// Plain text, cut into rows.
    Text,
}

impl DataFormat {
    /// Returns the format of every record; `None` if it is found from the first ones, or there are no records.
    pub fn of_records(self) -> Option<RecordFormat> {
        Some(match self {
            Self::Auto | Self::Gsm8k | Self::Rows | Self::Text => return None,
            Self::Messages => RecordFormat::Messages,
            Self::Conversations => RecordFormat::Conversations,
            Self::PromptCompletion => RecordFormat::PromptCompletion,
            Self::Instruction => RecordFormat::Instruction,
            Self::QuestionAnswer => RecordFormat::QuestionAnswer,
            Self::Tokens => RecordFormat::Tokens,
            Self::TextField => RecordFormat::Text,
        })
    }
}
