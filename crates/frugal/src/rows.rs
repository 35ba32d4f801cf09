//! Fine-tuning rows from a user's own files.
//!
//! | record | a row | what is learned |
//! |---|---|---|
//! | `messages`, `conversations` | a conversation, or one for each answer ([`dataloading::chat`]) | the answers and their end tokens |
//! | `prompt` and `completion`, `instruction` and `output`, `question` and `answer` | the record | the second and an end token |
//! | any fields, by two [templates](dataloading::records::PromptTemplates) | the record | the second and an end token |
//! | `chosen` and `rejected`, with `prompt` or without | two: the chosen answer with its prompt, then the rejected one | the answer and its end token |
//! | `text` | the record | everything, and an end token |
//! | `input_ids` and `labels` | the record | what is labelled |
//! | plain text | the begin token, if the model has one, and as many tokens as fit | everything |
//!
//! A [`RowEncoder`] makes rows of what records hold ([`dataloading::records`]). A text is tokenized once, as a whole, and
//! what is learned follows from the part of the text that each token is of ([`dataloading::tokenizer::Encoded`]): so a row has the tokens
//! of transformers' `apply_chat_template`, and those that inference reads. Its begin and end tokens are there once, also where the data
//! have written them. A record's [weight](dataloading::records::WEIGHT) is that of its rows. A row that is longer than the longest one is an error, left out, cut, or divided as plain text is ([`Overlong`]). A row
//! without anything to learn is left out and counted; data without any row to learn from is an error. Rows are kept in files, by
//! everything that they depend on ([`prepare_cached`]), and of large data none is in memory ([`MaskedRows`](training::masked_rows::MaskedRows)).

mod cache;
mod counts;
mod encoder;
mod held_out;
mod marked;
mod notes;
mod overlong;
mod plain_text;
mod prepare;
mod second_end;

pub use cache::folder as cache_folder;
pub(crate) use cache::hex_digest_of;
pub use counts::{Counts, Rows};
pub use encoder::{RowConfig, RowEncoder};
pub use held_out::{MAX_HELD_OUT, MIN_ROWS, hold_out};
pub use marked::{Marks, marked};
pub use notes::Notes;
pub use overlong::Overlong;
pub use plain_text::{text, texts};
pub use prepare::{Cached, Found, detect, detect_records, encode, prepare, prepare_cached};
