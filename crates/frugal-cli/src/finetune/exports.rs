//! Warns before a fine-tuning if its result cannot be exported.

use frugal::Config;
use frugal::models::hugging_face::Folder;
use kernels::nf4::Scales;
use lora::LoraConfig;

use crate::common_flags::Common;
use crate::flags::model::note_own_head;

const HEAD: &str = "lm_head";
const EMBEDDING: &str = "model.embed_tokens";

/// Prints notes on the model's head, and on exports that will be refused.
pub(super) fn print_notes(common: &Common, config: &Config, folder: &Folder) {
    if common.is_first() {
        note_own_head(common, folder);
        notes(config, folder).iter().for_each(|note| common.note(note));
    }
}

fn notes(config: &Config, folder: &Folder) -> Vec<String> {
    let mut notes = Vec::new();
    if folder.kind().is_ok_and(|kind| Scales::of(kind).is_some()) {
        notes.push(
            "note: the model's files are in NF4, into which an adapter is not merged: `merge` and GGUF will need the original model"
                .to_owned(),
        );
        return notes;
    }
    let model = match gguf::Model::open(folder.path()) {
        Ok(model) => model,
        Err(error) => return vec![format!("note: the result cannot be exported as GGUF: {error}")],
    };
    let Some(adapter) = &config.adapter else { return notes };
    if unties(adapter, folder) && !model.can_have_own_head() {
        notes.push(
            "note: the result cannot be exported as GGUF: the adapter gives the model a head of its own, and llama.cpp computes this \
             family's logits with the embedding"
                .to_owned(),
        );
    } else if let Err(error) = gguf::Adapter::check_before(
        &adapter.to_json(),
        &|module| adapter.adapts(module).unwrap_or(false),
        folder.path(),
    ) {
        notes.push(format!(
            "note: the adapter alone cannot be exported as GGUF (`--format gguf-lora`): {error}"
        ));
    }
    notes
}

/// Whether merging the adapter ends the tie of head and embedding.
fn unties(adapter: &LoraConfig, folder: &Folder) -> bool {
    let changes = |name: &str| adapter.adapts(name).unwrap_or(false);
    folder.config().tie_word_embeddings
        && !adapter.ensure_weight_tying
        && (changes(HEAD) || changes(EMBEDDING))
}
