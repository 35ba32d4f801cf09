//! Bytes that training and generation take, part by part.
//!
//! | module | what it counts |
//! |---|---|
//! | [`recipe`] | which number format parameters, master weights, gradients and activations have |
//! | [`optimizer`] | the optimizer's state, and what its step needs for a moment |
//! | [`zero`] | how ZeRO divides these three between devices |
//! | [`activations`] | what the forward keeps, tensor by tensor, by recomputation choice |
//! | [`published`] | the formulas of Korthikanti et al. for the same |
//! | [`logits`] | the output's logits and what the loss makes of them |
//! | [`working_set`] | what the backward of one block, and ZeRO's communication, need for a moment |
//! | [`host`] | what is on the host instead of the device |
//! | [`kv_cache`] | keys and values of generation |
//!
//! [`estimate`](crate::estimate) puts them together.

pub mod activations;
pub mod host;
pub mod kv_cache;
pub mod logits;
pub mod optimizer;
pub mod published;
pub mod recipe;
pub mod working_set;
pub mod zero;

use crate::{Error, exact};

/// A tensor, or several of the same kind, and what it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// What it is.
    pub name: &'static str,
    /// Bytes.
    pub bytes: u64,
}

impl Item {
    /// An item of `elements` (a product of sizes) of `element_bytes` each.
    pub(crate) fn new(name: &'static str, element_bytes: u64, elements: &[u64]) -> Result<Self, Error> {
        let elements = exact::product(name, elements)?;
        Ok(Self { name, bytes: exact::product(name, &[element_bytes, elements])? })
    }
}

/// The sum of items, in bytes.
pub fn total(items: &[Item]) -> Result<u64, Error> {
    exact::sum("bytes of all items", items.iter().map(|item| item.bytes))
}
