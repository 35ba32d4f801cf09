//! The tokenizer of a model's folder, and what the model asks of it.

use anyhow::{anyhow, bail};
use clap::Args;
use dataloading::Tokenizer;
use frugal::tasks::gsm8k::{EncodeOptions, Encoder, TooLong};
use models::hugging_face::Folder;

/// How texts become tokens.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct EncodingArgs {
    /// The token that ends an answer, by its text [default: the model's eos_token_id]
    #[arg(long, value_name = "TOKEN")]
    end_token: Option<String>,
    /// Leave out problems that are too long for the model, instead of ending with an error
    #[arg(long)]
    skip_long: bool,
    /// Longest row in tokens [default: the model's context]
    #[arg(long, value_name = "TOKENS")]
    max_length: Option<usize>,
}

impl EncodingArgs {
    /// An encoder for the model of a folder.
    ///
    /// # Errors
    /// No tokenizer in it, or one that does not fit the model; no token to end with.
    pub(crate) fn encoder(&self, folder: &Folder) -> anyhow::Result<Encoder> {
        let tokenizer = tokenizer(folder)?;
        let end = match &self.end_token {
            Some(text) => tokenizer.id(text).ok_or_else(|| {
                anyhow!("--end-token {text}: the tokenizer has no such token; give one of its tokens, as `<|endoftext|>`")
            })?,
            None => match folder.end_tokens().first() {
                Some(end) => u32::try_from(*end)
                    .map_err(|_| anyhow!("{}: eos_token_id is {end}, which is no id", folder.path().display()))?,
                None => bail!(
                    "{}: neither generation_config.json nor config.json has `eos_token_id`; say with --end-token which \
                     token ends an answer",
                    folder.path().display()
                ),
            },
        };
        let config = folder.config();
        let context = usize::try_from(config.max_position_embeddings).unwrap_or(0);
        let options = EncodeOptions {
            vocabulary: usize::try_from(config.vocab_size).unwrap_or(0),
            context: self.max_length.map_or(context, |longest| longest.min(context)),
            begin: tokenizer.begin_of_text()?,
            end,
            too_long: if self.skip_long { TooLong::Skip } else { TooLong::Refuse },
        };
        Ok(Encoder::new(tokenizer, options)?)
    }
}

/// The folder's tokenizer.
///
/// # Errors
/// None there, or a broken one.
pub(crate) fn tokenizer(folder: &Folder) -> anyhow::Result<Tokenizer> {
    let Some(path) = folder.tokenizer() else {
        bail!(
            "{}: tokenizer.json is missing; put there the one that came with the model",
            folder.path().display()
        );
    };
    Ok(Tokenizer::from_file(&path)?)
}
