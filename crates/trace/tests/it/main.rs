//! Tests over traces that are recorded here: one binary, a module per device.

mod diagnose;
mod diagnose_cuda;
