//! The subcommands, a module each.

pub(crate) mod formats;
pub(crate) mod gradient;
pub(crate) mod numerics;
pub(crate) mod overhead;
pub(crate) mod sizes;
pub(crate) mod sweep;
pub(crate) mod train;
pub(crate) mod underflow;
