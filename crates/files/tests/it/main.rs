//! Files as other processes and crashes see them.

mod atomic_write;
mod mapped;
