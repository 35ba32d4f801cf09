//! The tests of `ptx` by its public interface: small kernels in PTX, each of which shows one rule.

mod arithmetic;
mod faults;
mod flow;
mod kernel;
mod text;
