//! A training's pipeline, which `train` and `finetune` share: its plan, its ranks, its loop.

pub(crate) mod diagnosis;
pub(crate) mod job;
pub(crate) mod plan;
pub(crate) mod rank_group;
pub(crate) mod ranks;
pub(crate) mod training;
