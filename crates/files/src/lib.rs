//! Files that are never seen half written, and files as memory. Nothing here needs libtorch.
//!
//! | module | contents |
//! |---|---|
//! | [`atomic_write`] | atomic writes of files and folders |
//! | [`mapped`] | read-only mappings of files |
//! | [`pages`] | writable memory that is a file's: a private copy of its content, or an unnamed file |

pub mod atomic_write;
pub mod mapped;
pub mod pages;
mod shortened;
