//! The tests of `report` that need only its public interface: one binary, a module per behaviour.

mod against;
mod browser;
mod claims;
mod fixed_records;
mod front_page;
mod fuzz_files;
mod page;
mod parts;
mod records;
mod small_figures;
mod spec_errors;
mod timeline;
mod views;
