//! The guide: from a first fine-tuning to one technique in a program of your own.
//!
//! | chapter | answers |
//! |---|---|
//! | [`first_fine_tuning`] | How do I fine-tune a model, stop and resume, try the result, and take it to other programs? |
//! | [`your_own_data`] | Which records can it read, what is learned of each, and how do I check that? |
//! | [`how_a_plan_is_chosen`] | What fits into a budget, what does it cost, and what if memory runs out? |
//! | [`larger_than_memory`] | How do I run and fine-tune a model that is larger than the memory? |
//! | [`from_scratch`] | How do I train a model of random weights, and what takes the time? |
//! | [`several_ranks`] | How do several processes train one model, and what does each hold? |
//! | [`one_technique`] | How do I take one technique into my own program? |
//! | [`where_every_byte_goes`] | What is in memory during a training step, and what makes each part smaller? |
//! | [`measurements`] | How do I run the experiments and tests, and what decides the kernels? |
//!
//! Every command and every block of code is run by a test, over a tiny model under the name that the command says. `frugal` is the
//! program `target/release/frugal` that `cargo build -p frugal-cli --release` makes.

#[doc = include_str!(concat!(env!("OUT_DIR"), "/first_fine_tuning.md"))]
pub mod first_fine_tuning {}

#[doc = include_str!(concat!(env!("OUT_DIR"), "/your_own_data.md"))]
pub mod your_own_data {}

#[doc = include_str!(concat!(env!("OUT_DIR"), "/how_a_plan_is_chosen.md"))]
pub mod how_a_plan_is_chosen {}

#[doc = include_str!(concat!(env!("OUT_DIR"), "/larger_than_memory.md"))]
pub mod larger_than_memory {}

#[doc = include_str!(concat!(env!("OUT_DIR"), "/from_scratch.md"))]
pub mod from_scratch {}

#[doc = include_str!(concat!(env!("OUT_DIR"), "/several_ranks.md"))]
pub mod several_ranks {}

#[doc = include_str!(concat!(env!("OUT_DIR"), "/one_technique.md"))]
pub mod one_technique {}

#[doc = include_str!(concat!(env!("OUT_DIR"), "/where_every_byte_goes.md"))]
pub mod where_every_byte_goes {}

#[doc = include_str!(concat!(env!("OUT_DIR"), "/measurements.md"))]
pub mod measurements {}
