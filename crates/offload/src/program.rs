//! What the subcommands are made of.

pub(crate) mod budget;
pub(crate) mod contest;
pub(crate) mod difference;
pub(crate) mod folder;
pub(crate) mod foretold;
pub(crate) mod output;
pub(crate) mod rates;
pub(crate) mod shape;
pub(crate) mod spans;
pub(crate) mod subject;
