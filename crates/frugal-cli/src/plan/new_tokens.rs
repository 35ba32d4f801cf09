//! New tokens in a plan: the vocabulary that has rows for them, and the rows that an adapter trains.

use accounting::Decoder;
use accounting::model::Sizes;
use anyhow::Context;
use dataloading::Tokenizer;
use dataloading::tokenizer::TokenToAdd;
use frugal::Config;
use frugal::config::NewToken;

use crate::folder::vocabulary::{padded, trained_rows};
use crate::plan::model_args::ModelArgs;

const TOKENIZER: &str = "tokenizer.json";

/// Returns the model with a row for each new token, and these rows, as `frugal finetune` has them. Of a model without a tokenizer here, all
/// rows are taken to be in use.
///
/// # Errors
/// A tokenizer that cannot be read; a token without text, or twice.
pub(super) fn rows(
    arguments: &ModelArgs,
    model: &Decoder,
    tokens: &[NewToken],
    multiple: Option<i64>,
) -> anyhow::Result<(Decoder, Vec<i64>)> {
    let stored = i64::try_from(model.vocabulary)?;
    let ids = match arguments.folder().map(|folder| folder.join(TOKENIZER)).filter(|path| path.is_file()) {
        Some(path) => {
            let bytes = std::fs::read(&path).with_context(|| path.display().to_string())?;
            let list: Vec<TokenToAdd<'_>> = tokens
                .iter()
                .map(|token| TokenToAdd { text: token.text(), special: token.is_special() })
                .collect();
            Tokenizer::add_tokens(&bytes, &list)?.ids.into_iter().map(i64::from).collect()
        }
        None => (stored..).take(tokens.len()).collect::<Vec<i64>>(),
    };
    let most = ids.iter().copied().max().unwrap_or(0) + 1;
    let rows = padded(stored, most, multiple);
    let sizes = Sizes { vocabulary: rows.unsigned_abs(), ..**model };
    Ok((Decoder::new(sizes)?, ids))
}

/// Returns the model of [`rows`], and the configuration whose adapter trains these rows.
///
/// # Errors
/// As [`rows`].
pub(super) fn added(
    arguments: &ModelArgs,
    model: Decoder,
    mut config: Config,
) -> anyhow::Result<(Decoder, Config)> {
    if config.model.new_tokens.is_empty() {
        return Ok((model, config));
    }
    let multiple = config.model.pad_vocabulary_to;
    let (model, ids) = rows(arguments, &model, &config.model.new_tokens, multiple)?;
    if let Some(adapter) = &mut config.adapter {
        adapter.trainable_token_indices.get_or_insert(trained_rows(ids, model.tied));
    }
    Ok((model, config))
}
