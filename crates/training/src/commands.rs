//! The subcommands, a module each.

pub(crate) mod activations;
pub(crate) mod bench;
pub(crate) mod loading;
pub(crate) mod profile;
pub(crate) mod sizes;
pub(crate) mod train;
