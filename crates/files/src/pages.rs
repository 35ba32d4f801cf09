//! Writable memory whose pages are a file's: a private copy of a file's content, or a file without a name.
//!
//! Memory is known by its address, because whoever holds a part of it may hold nothing else: [`is_unnamed_file`], [`fetch`],
//! [`release`] and [`forget`] take addresses and leave memory alone that is not this module's.
//!
//! ```
//! use files::pages::{self, Pages};
//!
//! let folder = tempfile::tempdir()?;
//! let memory = Pages::unnamed(folder.path(), 5000)?;
//! let start = memory.as_mut_ptr() as usize;
//! assert!(pages::is_unnamed_file(&(start + 10..start + 20)));
//! pages::release(&(start..start + 5000))?;
//! # Ok::<(), std::io::Error>(())
//! ```

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use memmap2::{MmapOptions, MmapRaw};
use parking_lot::Mutex;

/// The living [`Pages`], by address.
static MAPPINGS: Mutex<BTreeMap<usize, Mapping>> = Mutex::new(BTreeMap::new());

/// Number of those of an unnamed file.
static UNNAMED: AtomicUsize = AtomicUsize::new(0);

#[derive(Debug, Clone)]
struct Mapping {
    memory: Arc<MmapRaw>,
    /// The folder of an unnamed file, to which what is written goes; `None` for a private copy.
    folder: Option<Arc<Path>>,
}

/// Memory over a file. It is unmapped when it is dropped.
#[derive(Debug)]
pub struct Pages(Mapping);

impl Pages {
    /// Maps `len` bytes of `file` from `offset` on, copy-on-write: writes stay in this process, and use memory. The file must not be
    /// shortened or rewritten in place while the memory lives: see [`crate::mapped`].
    ///
    /// # Errors
    /// A system that refuses.
    pub fn private(file: &File, offset: u64, len: usize) -> io::Result<Self> {
        // SAFETY: writes stay in this process. Nobody shortens or rewrites the file meanwhile: a requirement of all mapped files.
        let memory = unsafe { MmapOptions::new().offset(offset).len(len).map_copy(file) }?;
        Ok(Self::new(memory.into(), None))
    }

    /// Maps `len` zeros in an unnamed file in `folder`, whose space on the disk is reserved. The file is freed with the memory,
    /// however the process ends.
    ///
    /// # Errors
    /// A folder that is not there or cannot be written; a full disk.
    pub fn unnamed(folder: &Path, len: usize) -> io::Result<Self> {
        let file = tempfile::tempfile_in(folder)?;
        reserve(&file, len as u64)?;
        Ok(Self::new(MmapOptions::new().len(len).map_raw(&file)?, Some(folder.into())))
    }

    fn new(memory: MmapRaw, folder: Option<Arc<Path>>) -> Self {
        let mapping = Mapping { memory: Arc::new(memory), folder };
        MAPPINGS.lock().insert(mapping.memory.as_ptr() as usize, mapping.clone());
        UNNAMED.fetch_add(usize::from(mapping.folder.is_some()), Ordering::Relaxed);
        Self(mapping)
    }

    /// Returns the address of the first byte.
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.0.memory.as_mut_ptr()
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // Before it is unmapped, when no other can be at its address.
        MAPPINGS.lock().remove(&(self.as_mut_ptr() as usize));
        UNNAMED.fetch_sub(usize::from(self.0.folder.is_some()), Ordering::Relaxed);
    }
}

/// Takes the space of a new file on its disk: without it a write to a page would end the process.
fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{FallocateFlags, fallocate};
        match fallocate(file, FallocateFlags::empty(), 0, bytes) {
            Ok(()) => return Ok(()),
            Err(rustix::io::Errno::OPNOTSUPP) => {}
            Err(cause) => return Err(cause.into()),
        }
    }
    let (mut file, zeros) = (file, vec![0; 1 << 20]);
    let mut left = bytes;
    while left > 0 {
        let count = left.min(zeros.len() as u64);
        io::Write::write_all(&mut file, &zeros[..count as usize])?;
        left -= count;
    }
    Ok(())
}

/// Returns the mapping that contains the bytes.
fn find(bytes: &Range<usize>) -> Option<Mapping> {
    let mappings = MAPPINGS.lock();
    let (start, mapping) = mappings.range(..=bytes.start).next_back()?;
    let contains = !bytes.is_empty() && bytes.end <= start + mapping.memory.len();
    contains.then(|| mapping.clone())
}

/// Returns the mapping that contains the bytes, which stays mapped while it is borrowed.
fn mapping_of(bytes: &Range<usize>, is_shared: bool) -> Option<Arc<MmapRaw>> {
    find(bytes).filter(|mapping| mapping.folder.is_some() == is_shared).map(|mapping| mapping.memory)
}

/// Returns whether an unnamed file is mapped. Where none is, whoever has memory need not ask for its address.
pub fn has_unnamed_files() -> bool {
    UNNAMED.load(Ordering::Relaxed) > 0
}

/// Returns the folder of the unnamed file that the bytes are in; `None` if they are in none.
pub fn folder_of(bytes: &Range<usize>) -> Option<Arc<Path>> {
    find(bytes)?.folder
}

/// Returns whether the bytes are in an unnamed file.
pub fn is_unnamed_file(bytes: &Range<usize>) -> bool {
    mapping_of(bytes, true).is_some()
}

/// Brings the pages of bytes in an unnamed file into memory at once, faster than one by one at their first use. A page that the disk does
/// not give back is an error here, and would end the process later.
///
/// # Errors
/// Pages that cannot be read.
pub fn fetch(bytes: &Range<usize>) -> io::Result<()> {
    match mapping_of(bytes, true) {
        Some(_mapped) => populate(page_before(bytes.start)..bytes.end),
        None => Ok(()),
    }
}

/// Reads the pages of a range of a living mapping, and makes them writable. Linux before 5.14 cannot, and reads them at their first use.
#[cfg(target_os = "linux")]
fn populate(range: Range<usize>) -> io::Result<()> {
    const MADV_POPULATE_WRITE: libc::c_int = 23;
    // SAFETY: the caller keeps the pages mapped; their values do not change.
    let refused = unsafe { libc::madvise(range.start as *mut _, range.len(), MADV_POPULATE_WRITE) } != 0;
    match io::Error::last_os_error() {
        error if refused && error.raw_os_error() != Some(libc::EINVAL) => Err(error),
        _ => Ok(()),
    }
}

#[cfg(not(target_os = "linux"))]
fn populate(_range: Range<usize>) -> io::Result<()> {
    Ok(())
}

/// Ends the use of the pages of the unnamed file that contains the bytes: they count to this process's memory no more, and the system
/// may write them to the disk. Values stay.
///
/// # Errors
/// A system that refuses.
pub fn release(bytes: &Range<usize>) -> io::Result<()> {
    // All of the file's: the system may have mapped more pages than were touched.
    let Some(mapping) = mapping_of(bytes, true) else { return Ok(()) };
    // SAFETY: the pages are of a shared mapping of a file, which is borrowed: what was written to them is in the file, from which
    // they are read again at the next access.
    unsafe { discard(mapping.as_mut_ptr().cast(), mapping.len()) }
}

/// Frees the pages of bytes of a private mapping that were read and not written: they are read from the file again at the next access.
/// No thread may write to the bytes meanwhile.
///
/// # Errors
/// A system that refuses.
#[cfg(target_os = "linux")]
pub fn forget(bytes: &Range<usize>) -> io::Result<()> {
    use std::os::unix::fs::FileExt;

    /// `/proc/self/pagemap`: the page is in memory, and is one of a file.
    const PRESENT: u64 = 1 << 63;
    const OF_FILE: u64 = 1 << 61;
    const ENTRY: usize = size_of::<u64>();
    /// Pages whose entries are read together.
    const PAGES: usize = 8192;

    let Some(_mapped) = mapping_of(bytes, false) else { return Ok(()) };
    // Without the list nothing is known of the pages.
    let Ok(list) = File::open("/proc/self/pagemap") else { return Ok(()) };
    let page = rustix::param::page_size();
    let mut entries = vec![0; PAGES * ENTRY];
    let (first, last) = (bytes.start.div_ceil(page), bytes.end / page);
    for from in (first..last).step_by(PAGES) {
        let entries = &mut entries[..PAGES.min(last - from) * ENTRY];
        list.read_exact_at(entries, (from * ENTRY) as u64)?;
        let is_of_file = |entry: &[u8]| {
            let entry = entry.try_into().map_or(0, u64::from_ne_bytes);
            entry & (PRESENT | OF_FILE) == PRESENT | OF_FILE
        };
        let mut pages = entries.chunks_exact(ENTRY).map(is_of_file).enumerate().peekable();
        while let Some((at, _)) = pages.find(|(_, is_of_file)| *is_of_file) {
            let mut end = at + 1;
            while pages.next_if(|(_, is_of_file)| *is_of_file).is_some() {
                end += 1;
            }
            let (address, len) = (((from + at) * page) as *mut c_void, (end - at) * page);
            // SAFETY: the pages are within a mapping of a file, which is borrowed, and were not written: what is written is in a page
            // of no file. So they are read from the file again with the same content. The caller sees to it that no thread writes
            // meanwhile.
            unsafe { discard(address, len) }?;
        }
    }
    Ok(())
}

/// Only Linux reports which pages belong to a file.
#[cfg(not(target_os = "linux"))]
pub fn forget(_: &Range<usize>) -> io::Result<()> {
    Ok(())
}

/// Drops pages, which are read from their file at the next access.
///
/// # Safety
/// The pages are mapped, and are the file's: no write to them is lost.
unsafe fn discard(address: *mut c_void, len: usize) -> io::Result<()> {
    // SAFETY: by this function's contract.
    let refused = unsafe { libc::madvise(address, len, libc::MADV_DONTNEED) } != 0;
    if refused { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn page_before(address: usize) -> usize {
    address & !(rustix::param::page_size() - 1)
}
