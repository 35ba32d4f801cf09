//! Shared mappings of unnamed files, and tensors over them.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::Path;

use memmap2::{MmapOptions, MmapRaw};
use parking_lot::Mutex;
use tch::{Kind, Tensor};

use super::file::tensor_of;
use crate::error::Result;

/// The mappings, by address: ends.
static MAPPINGS: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

/// A mapping that is in [`MAPPINGS`] while it lives.
struct Mapping(MmapRaw);

impl Mapping {
    fn new(mapping: MmapRaw) -> Self {
        let start = mapping.as_ptr() as usize;
        MAPPINGS.lock().insert(start, start + mapping.len());
        Self(mapping)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Before it is unmapped, when no other can be at its address.
        MAPPINGS.lock().remove(&(self.0.as_ptr() as usize));
    }
}

pub(crate) fn zeros(
    folder: &Path,
    bytes: usize,
    shape: &[i64],
    kind: Kind,
) -> Result<std::io::Result<Tensor>> {
    let mapped = || {
        let file = tempfile::tempfile_in(folder)?;
        reserve(&file, bytes as u64)?;
        MmapOptions::new().len(bytes).map_raw(&file).map(Mapping::new)
    };
    let mapping = match mapped() {
        Ok(mapping) => mapping,
        Err(cause) => return Ok(Err(cause)),
    };
    let memory = mapping.0.as_mut_ptr().cast();
    tensor_of(memory, Box::new(mapping), shape, kind).map(Ok)
}

/// Takes the space of a new file on its disk: without it a write to a page would end the process.
fn reserve(file: &File, bytes: u64) -> std::io::Result<()> {
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
        std::io::Write::write_all(&mut file, &zeros[..count as usize])?;
        left -= count;
    }
    Ok(())
}

/// The bytes of a contiguous tensor, and the mapping that they are in.
fn find(tensor: &Tensor) -> Option<(Range<usize>, Range<usize>)> {
    if tensor.device() != tch::Device::Cpu || tensor.numel() == 0 || !tensor.is_contiguous() {
        return None;
    }
    let start = tensor.data_ptr() as usize;
    let end = start + tensor.numel() * tensor.kind().elt_size_in_bytes();
    let mappings = MAPPINGS.lock();
    let (&from, &until) = mappings.range(..=start).next_back()?;
    (end <= until).then_some((start..end, from..until))
}

pub(crate) fn is_in_file(tensor: &Tensor) -> bool {
    find(tensor).is_some()
}

pub(crate) fn fetch(tensor: &Tensor) -> std::io::Result<()> {
    let Some((bytes, _)) = find(tensor) else { return Ok(()) };
    populate(page_of(bytes.start)..bytes.end)
}

/// Reads the pages of a range, and makes them writable. Linux before 5.14 cannot, and reads them at their first use.
#[cfg(target_os = "linux")]
fn populate(range: Range<usize>) -> std::io::Result<()> {
    const MADV_POPULATE_WRITE: libc::c_int = 23;
    // SAFETY: the pages are of a mapping that the tensor keeps alive; their values do not change.
    let refused = unsafe { libc::madvise(range.start as *mut _, range.len(), MADV_POPULATE_WRITE) } != 0;
    match std::io::Error::last_os_error() {
        error if refused && error.raw_os_error() != Some(libc::EINVAL) => Err(error),
        _ => Ok(()),
    }
}

#[cfg(not(target_os = "linux"))]
fn populate(_range: Range<usize>) -> std::io::Result<()> {
    Ok(())
}

pub(crate) fn release(tensor: &Tensor) -> std::io::Result<()> {
    // All of its file's: the system may have mapped more than what was touched.
    let Some((_, Range { start, end })) = find(tensor) else { return Ok(()) };
    // SAFETY: the pages are of a shared mapping of a file, which the tensor keeps alive: what was written to them is in the file, from which
    // they are read again at the next access.
    let refused = unsafe { libc::madvise(start as *mut _, end - start, libc::MADV_DONTNEED) } != 0;
    if refused { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

fn page_of(address: usize) -> usize {
    address & !(page_size() - 1)
}

fn page_size() -> usize {
    rustix::param::page_size()
}
