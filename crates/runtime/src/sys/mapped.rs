//! A file as memory.

use std::fs::File;

use memmap2::Mmap;

/// Maps the whole file for reading.
pub(crate) fn map(file: &File) -> std::io::Result<Mmap> {
    // SAFETY: the mapping is private to this process and read only. That nobody shortens or rewrites the file meanwhile is
    // what every reader of mapped files has to trust; `MappedFile` says so to its callers, and the writers of this project
    // make a new file and rename it, which leaves an open mapping as it was.
    unsafe { Mmap::map(file) }
}
