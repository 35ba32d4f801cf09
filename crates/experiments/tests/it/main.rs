//! The tests of `experiments`: one binary, a module per behaviour.

mod dataloading_lengths;
mod fused_ce_ladder;
mod swiglu_ckpt_peak;
