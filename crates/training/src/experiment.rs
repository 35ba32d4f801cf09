//! What the training assignment measures.

pub mod corpus;
pub mod strategy;
