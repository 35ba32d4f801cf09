//! The tests of `xtask` that need only its public interface: one binary, a module per behaviour.

mod bundle;
mod compare;
mod floors;
mod front_pages;
mod gpu_day;
mod imports;
mod release;
mod run_all;
mod setup;
mod tidy;
mod tidy_checks;
