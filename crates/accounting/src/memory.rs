//! Memory of training and generation, part by part.
//!
//! | module | subject |
//! |---|---|
//! | [`recipe`] | number formats of parameters, master weights, gradients and activations |
//! | [`optimizer`] | the optimizer's state, and the temporaries of its step |
//! | [`zero`] | ZeRO's division of these three between devices |
//! | [`activations`] | tensors that the forward keeps, by recomputation choice |
//! | [`published`] | the formulas of Korthikanti et al. for these |
//! | [`logits`] | logits and the temporaries of the loss |
//! | [`vocabulary_parallel`] | the loss of ranks that share the vocabulary, and what they send |
//! | [`working_set`] | temporaries of one block's backward, and of ZeRO's communication |
//! | [`host`] | tensors on the host instead of the device |
//! | [`kv_cache`] | keys and values of generation |
//! | [`nf4`] | frozen weights of four bits |
//!
//! [`estimate`](crate::estimate) puts them together.

pub mod activations;
pub mod host;
pub mod kv_cache;
pub mod logits;
pub mod nf4;
pub mod optimizer;
pub mod published;
pub mod recipe;
pub mod vocabulary_parallel;
pub mod working_set;
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
