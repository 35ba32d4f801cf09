//! New tokens of a fine-tuning: in the tokenizer, in the model's rows, and in what its adapter trains.

use std::rc::Rc;

use anyhow::bail;
use frugal::Config;
use frugal::companion_files::CompanionFiles;
use frugal::config::{Dtype, NewTokenInit};
use frugal::models::hugging_face::Folder;
use frugal::recipe::{NewRow, NewRows};

use crate::common_flags::Common;
use crate::folder::vocabulary::{grown, padded, trained_rows};
use crate::output::figures::counted;

/// A model with new tokens.
pub(super) struct NewTokens {
    /// The folder of the model, whose vocabulary has a row for each token.
    pub(super) folder: Rc<Folder>,
    /// First values of the new rows.
    pub(super) rows: NewRows,
    /// The configuration, whose adapter trains these rows.
    pub(super) config: Config,
}

/// Adds the tokens of a configuration; `None` if it has none.
///
/// # Errors
/// A token without text, or twice; rows for padding in a table that cannot have them; an adapter with other trained rows.
pub(super) fn add(
    common: &Common,
    config: &Config,
    folder: &Rc<Folder>,
    companions: &mut CompanionFiles,
) -> anyhow::Result<Option<NewTokens>> {
    let tokens = &config.model.new_tokens;
    if tokens.is_empty() {
        return Ok(None);
    }
    let before = companions.tokenizer()?;
    let added = companions.add_tokens(tokens)?;
    let ids: Vec<i64> = added.ids.iter().map(|id| i64::from(*id)).collect();
    let mut rows = Vec::new();
    for ((token, id), is_new) in tokens.iter().zip(&ids).zip(&added.is_new) {
        if !is_new {
            common.note(&format!(
                "`{}` is token {id} already: its row is trained from the values that it has",
                token.text()
            ));
            continue;
        }
        let text = match config.model.new_token_init {
            _ if token.from().is_some() => token.from(),
            NewTokenInit::Pieces => Some(token.text()),
            NewTokenInit::Mean => None,
        };
        let from = text.map(|text| before.encode(text)).transpose()?.unwrap_or_default();
        rows.push(NewRow { token: *id, from: from.into_iter().map(i64::from).collect() });
    }

    // The rows of the model: spare ones first.
    let stored = folder.config().vocab_size;
    let most = ids.iter().copied().max().unwrap_or(0) + 1;
    let needed = padded(stored, most, config.model.pad_vocabulary_to);
    if needed > most && needed > stored && config.model.dtype == Some(Dtype::Gguf) {
        bail!(
            "--pad-vocabulary-to: the embedding stays in the blocks of the GGUF file, where rows of padding have no values; leave it out, or \
             give --dtype bfloat16"
        );
    }
    let has_second_embedding = folder.config().gemma4.is_some_and(|gemma4| gemma4.per_layer_input > 0);
    if needed > stored && has_second_embedding {
        bail!(
            "the new tokens need {needed} rows, and the model has {stored}: its second embedding, `embed_tokens_per_layer`, would need rows for \
             them, too, which an adapter's file has no place for; name tokens of the vocabulary, such as its unused ones"
        );
    }
    let new = rows.len();
    if needed > stored {
        common.note(&format!(
            "{} added: the vocabulary grows from {stored} to {needed} rows",
            counted(new as u64, "token")
        ));
    } else if new > 0 {
        common.note(&format!(
            "{} added, in spare rows of the vocabulary of {stored}",
            counted(new as u64, "token")
        ));
    }
    let folder = match needed > stored {
        true => Rc::new(grown(folder.path(), needed)?),
        false => folder.clone(),
    };

    // An adapter trains the rows of the embedding, and of a head of its own.
    let mut config = config.clone();
    if let Some(adapter) = &mut config.adapter {
        let indices = trained_rows(ids, folder.config().tie_word_embeddings);
        match &adapter.trainable_token_indices {
            Some(given) if *given != indices => bail!(
                "`adapter.trainable_token_indices` names other tokens than `model.new_tokens`, which are {}; leave it out: the rows of \
                 the new tokens are trained",
                added.ids.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
            ),
            _ => adapter.trainable_token_indices = Some(indices),
        }
    }
    let before = i64::try_from(before.vocabulary()).unwrap_or(i64::MAX).min(stored);
    Ok(Some(NewTokens { folder, rows: NewRows { rows, before }, config }))
}
