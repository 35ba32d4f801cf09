//! The tensors of a step by subject: number formats, the optimizer's state, logits, the KV cache.
//!
//! | module | subject |
//! |---|---|
//! | [`recipe`] | number formats of parameters, master weights, gradients and activations |
//! | [`optimizer`] | the optimizer's state |
//! | [`zero`] | the stages of ZeRO |
//! | [`logits`] | logits and the temporaries of the loss |
//! | [`vocabulary_parallel`] | the loss of ranks that share the vocabulary, and the bytes that they send |
//! | [`kv_cache`] | keys and values of generation |
//! | [`quantized`] | frozen weights in few bits |
//!
//! A step as this project runs it is put together by [`candidates`](crate::candidates), one of a lecture by [`textbook`](crate::textbook).

pub mod kv_cache;
pub mod logits;
pub mod optimizer;
pub mod quantized;
pub mod recipe;
pub mod vocabulary_parallel;
pub mod zero;

use crate::{Error, exact};

/// A tensor, or several of the same kind, and its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// The name.
    pub name: &'static str,
    /// Bytes.
    pub bytes: u64,
}

impl Item {
    /// Creates an item of `elements` (a product of sizes) of `element_bytes` each.
    pub(crate) fn new(name: &'static str, element_bytes: u64, elements: &[u64]) -> Result<Self, Error> {
        let elements = exact::product(name, elements)?;
        Ok(Self { name, bytes: exact::product(name, &[element_bytes, elements])? })
    }
}

/// Returns the sum of items, in bytes.
pub fn total(items: &[Item]) -> Result<u64, Error> {
    exact::sum("bytes of all items", items.iter().map(|item| item.bytes))
}
