//! The data of a training.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The data of a training.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DataConfig {
    /// A file or folder; or `embedded` (the encyclopedia in `data/`) or `synthetic` (a generated language), for a training from
    /// scratch.
    pub source: String,
    /// Its format.
    pub format: DataFormat,
    /// A file to measure the validation loss on, in the same format.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation: Option<PathBuf>,
    /// The field of a JSON object that holds its text.
    pub field: String,
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
    /// Leaves out rows that are too long, instead of failing.
    pub skip_long: bool,
    /// Trains on the first rows only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
    /// Positions of a packed row; absent to pad each batch to its longest row.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub packing: Option<usize>,
    /// How batches of documents are made, in a training from scratch: `base`, `standard`, `balanced:K`, `sequenced` or
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
}

impl Default for DataConfig {
    fn default() -> Self {
        Self {
            source: String::new(),
            format: DataFormat::default(),
            validation: None,
            field: "text".to_owned(),
            tokenizer: None,
            vocabulary: None,
            end_token: None,
            max_length: None,
            skip_long: false,
            limit: None,
            packing: None,
            strategy: "packed".to_owned(),
            workers: 1,
            shots: 0,
            strip_annotations: false,
            split_seed: crate::tasks::gsm8k::split::SEED,
        }
    }
}

/// What a file of training data holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DataFormat {
    /// Found from the name and the first line: a folder, or lines with `question` and `answer`, are GSM8K; other `.jsonl` files
    /// are rows; everything else is text.
    #[default]
    Auto,
    /// GSM8K: a folder with `train.jsonl` and `test.jsonl`, or one file of JSON lines with `question` and `answer`.
    Gsm8k,
    /// JSON lines: `{"prompt": …, "completion": …}`, of which the completion is learned, or `{"text": …}`.
    Rows,
    /// Plain text, cut into rows.
    Text,
}
