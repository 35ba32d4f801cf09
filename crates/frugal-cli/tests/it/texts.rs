//! Texts in each form that `frugal train` reads.

use std::path::Path;

use dataloading::text::{Corpus, Format};
use dataloading::token_store::{TokenizeConfig, WriterConfig, tokenize_to_store};
use dataloading::tokenizer::{Tokenizer, TrainConfig};
use serde_json::json;

/// Size of the vocabulary.
pub(crate) const VOCABULARY: &str = "300";
/// Tokens of the longest row.
pub(crate) const LENGTH: usize = 32;

/// The same lines as WikiText, as JSON lines, and as a token store with its tokenizer.
pub(crate) fn write_texts(folder: &Path) {
    let texts: Vec<String> = (0..80)
        .map(|n| format!("The river {} runs {} miles to Arden{}", n % 7, n * 3, " and on".repeat(n % 9)))
        .collect();
    std::fs::write(folder.join("lines.txt"), texts.join("\n \n")).unwrap();
    let objects = texts.iter().map(|text| json!({ "answer": text, "question": "?" }).to_string());
    std::fs::write(folder.join("objects.jsonl"), objects.collect::<Vec<_>>().join("\n")).unwrap();
    let corpus = Corpus::new([folder.join("lines.txt")], Format::Lines);
    let options = TrainConfig { vocabulary: VOCABULARY.parse().unwrap(), ..TrainConfig::default() };
    let records = corpus.records().unwrap().map(|record| Ok(record?.text));
    let json = Tokenizer::train_json(records, &options).unwrap();
    std::fs::write(folder.join("tokenizer.json"), &json).unwrap();
    let tokenizer = Tokenizer::from_bytes(json.as_bytes()).unwrap();
    let options = TokenizeConfig {
        end_of_text: tokenizer.end_of_text().ok(),
        longest: Some(LENGTH),
        ..TokenizeConfig::default()
    };
    let writer = WriterConfig::new(tokenizer.vocabulary());
    tokenize_to_store(&corpus, &tokenizer, &options, &folder.join("store"), &writer, |_| ()).unwrap();
}
