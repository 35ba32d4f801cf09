//! Tests of `ptx` by its public interface, with small kernels in PTX that show one rule each.

mod arithmetic;
mod faults;
mod flow;
mod kernel;
mod text;
