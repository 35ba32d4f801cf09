//! The subcommands, a module each.

pub(crate) mod bench;
pub(crate) mod memory;
pub(crate) mod numerics;
pub(crate) mod sizes;
pub(crate) mod train;
