//! The tests of `experiments`: one binary, a module per behaviour.

mod swiglu_ckpt_peak;
