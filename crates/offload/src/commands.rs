//! The subcommands, a module each.

pub(crate) mod equality;
pub(crate) mod generate;
pub(crate) mod large;
pub(crate) mod methods;
pub(crate) mod optimizer;
pub(crate) mod plan;
pub(crate) mod timeline;
pub(crate) mod tokens;
