//! The tokenizer of a model's folder, and the tokens that begin and end a row.

use anyhow::{anyhow, bail};
use frugal::companion_files::CompanionFiles;
use frugal::config::DataConfig;
use frugal::dataloading::Tokenizer;
use frugal::models::hugging_face::Folder;
use frugal::rows::Overlong;
use frugal::tasks::gsm8k::{EncodeConfig, Encoder, TooLong};

use crate::common_flags::Common;

/// A model's tokenizer, and the tokens that begin and end a row.
pub(crate) struct Ends {
    pub(crate) tokenizer: Tokenizer,
    pub(crate) begin: Option<u32>,
    pub(crate) end: u32,
}

impl Ends {
    /// Any error of a model's folder.
    ///
    /// # Errors
    /// No tokenizer in it; no token to end with.
    pub(crate) fn find(
        folder: &Folder,
        companions: &CompanionFiles,
        data: &DataConfig,
    ) -> anyhow::Result<Self> {
        let tokenizer = companions.tokenizer()?;
        let end = match &data.end_token {
            Some(text) => tokenizer.id(text).ok_or_else(|| {
                anyhow!("--end-token {text}: the tokenizer has no such token; give one of its tokens, as `<|endoftext|>`")
            })?,
            None => end_token(folder)?,
        };
        Ok(Self { begin: tokenizer.begin_of_text()?, tokenizer, end })
    }

    /// The most tokens of a row.
    pub(crate) fn longest(&self, folder: &Folder, data: &DataConfig) -> usize {
        let context = usize::try_from(folder.config().max_position_embeddings).unwrap_or(0);
        data.max_length.map_or(context, |longest| longest.min(context))
    }

    /// Says that rows cannot be as long as they may be.
    pub(crate) fn note_context(&self, common: &Common, folder: &Folder, data: &DataConfig) {
        let context = folder.config().max_position_embeddings;
        if data.max_length.is_some_and(|asked| i64::try_from(asked).is_ok_and(|asked| asked > context)) {
            common.note(&format!("rows have at most {context} tokens, the model's context"));
        }
    }

    /// An encoder of problems.
    ///
    /// # Errors
    /// A tokenizer that does not fit the model.
    pub(crate) fn encoder(&self, folder: &Folder, data: &DataConfig) -> anyhow::Result<Encoder> {
        let options = EncodeConfig {
            vocabulary: usize::try_from(folder.config().vocab_size).unwrap_or(0),
            context: self.longest(folder, data),
            begin: self.begin,
            end: self.end,
            too_long: if data.overlong == Overlong::Skip { TooLong::Skip } else { TooLong::Refuse },
        };
        Ok(Encoder::new(self.tokenizer.clone(), options)?)
    }
}

/// The first end token of a model's folder that the model can write.
///
/// # Errors
/// None is given, or none of them is within the model's vocabulary.
fn end_token(folder: &Folder) -> anyhow::Result<u32> {
    let vocabulary = folder.config().vocab_size;
    let path = folder.path().display();
    if let Some(end) = folder.end_tokens().iter().find(|end| (0..vocabulary).contains(*end)) {
        return u32::try_from(*end).map_err(|_| anyhow!("{path}: eos_token_id is {end}, which is not an id"));
    }
    match folder.end_tokens() {
        [] => bail!(
            "{path}: neither generation_config.json nor config.json has `eos_token_id`; say with --end-token which token ends an \
             answer"
        ),
        [end, ..] => bail!(
            "{path}: `eos_token_id` is {end} (generation_config.json, else config.json), and the model's vocabulary is {vocabulary} \
             (0 to {}); correct it, or say with --end-token which token ends an answer",
            vocabulary - 1
        ),
    }
}
