//! Tensors over a file's pages, and files read into tensors.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;

use memmap2::{MmapMut, MmapOptions};
use parking_lot::Mutex;
use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

use super::tensor::bump_version;
use super::{Status, check, take};
use crate::error::{Error, Result};

unsafe extern "C" {
    fn rt_tensor_over(
        memory: *mut c_void,
        shape: *const i64,
        dims: usize,
        prototype: *const C_tensor,
        owner: *mut c_void,
        release: extern "C" fn(*mut c_void),
        out: *mut *mut C_tensor,
    ) -> Status;
}

/// The private mappings that tensors own, by address: ends.
static MAPPINGS: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

/// A mapping that is in [`MAPPINGS`] while it lives.
struct Mapping(MmapMut);

impl Mapping {
    fn new(mapping: MmapMut) -> Self {
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

/// Maps `len` bytes from `offset` on, copy-on-write: writes stay in this process.
pub(crate) fn map_private(file: &File, offset: u64, len: usize) -> std::io::Result<MmapMut> {
    // SAFETY: writes stay in this process. Nobody shortens or rewrites the file meanwhile: a requirement of all mapped files, which
    // `file::tensor_over` documents.
    unsafe { MmapOptions::new().offset(offset).len(len).map_copy(file) }
}

extern "C" fn release<T>(owner: *mut c_void) {
    // SAFETY: the pointer is the box of a `T` that `tensor_of` gave away, and libtorch gives it back once.
    drop(unsafe { Box::from_raw(owner.cast::<T>()) });
}

/// Returns a contiguous tensor over the mapping, which it owns. The caller has checked sizes and alignment.
pub(crate) fn tensor_over(mapping: MmapMut, shape: &[i64], kind: Kind) -> Result<Tensor> {
    let mut mapping = Box::new(Mapping::new(mapping));
    let memory = mapping.0.as_mut_ptr().cast::<c_void>();
    tensor_of(memory, mapping, shape, kind)
}

/// Returns a contiguous tensor over memory of `owner`, which it owns. The caller has checked sizes and alignment.
pub(super) fn tensor_of<T: Send + 'static>(
    memory: *mut c_void,
    owner: Box<T>,
    shape: &[i64],
    kind: Kind,
) -> Result<Tensor> {
    let prototype = Tensor::f_empty([0], (kind, Device::Cpu))?;
    let owner = Box::into_raw(owner).cast::<c_void>();
    let mut out: *mut C_tensor = std::ptr::null_mut();
    // SAFETY: the memory is the owner's, at least as large as the tensor (checked by the caller), and lives until `release` is called,
    // when no tensor views it any more; shape and prototype are borrowed during the call; the new tensor is ours.
    let tensor = unsafe {
        let shape = (shape.as_ptr(), shape.len());
        check(rt_tensor_over(memory, shape.0, shape.1, prototype.as_ptr(), owner, release::<T>, &mut out))?;
        take(out)
    };
    tensor.ok_or_else(|| Error::Torch("no tensor came back".into()))
}

/// Fills a contiguous CPU tensor with the file's bytes from `offset` on.
pub(crate) fn read_into(file: &File, offset: u64, target: &Tensor) -> Result<std::io::Result<()>> {
    let len = target.numel() * target.kind().elt_size_in_bytes();
    if len == 0 {
        return Ok(Ok(()));
    }
    // Before the first byte changes, so that a graph that saved the tensor never uses a partly written one.
    bump_version(target)?;
    // SAFETY: the tensor is contiguous and on the CPU (checked by the caller), so these are exactly its bytes; bytes have no
    // invalid value. As with every in-place operation of libtorch, the caller ensures that no thread uses them meanwhile.
    let bytes = unsafe { std::slice::from_raw_parts_mut(target.data_ptr().cast::<u8>(), len) };
    Ok(file.read_exact_at(bytes, offset))
}

/// Writes the bytes of a contiguous CPU tensor.
pub(crate) fn write_values(out: &mut dyn Write, tensor: &Tensor) -> std::io::Result<()> {
    let len = tensor.numel() * tensor.kind().elt_size_in_bytes();
    if len == 0 {
        return Ok(());
    }
    // SAFETY: the tensor is contiguous and on the CPU (checked by the caller), so these are exactly its bytes, which live as long as it
    // does. As with every operation of libtorch that reads it, the caller ensures that no thread writes them meanwhile.
    let bytes = unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast::<u8>(), len) };
    out.write_all(bytes)?;
    super::file_memory::release(tensor)
}

/// Frees the pages of a contiguous CPU tensor that are those of a mapped file.
#[cfg(target_os = "linux")]
pub(crate) fn forget(tensor: &Tensor) -> std::io::Result<()> {
    /// `/proc/self/pagemap`: the page is in memory, and is one of a file.
    const PRESENT: u64 = 1 << 63;
    const OF_FILE: u64 = 1 << 61;
    const ENTRY: usize = size_of::<u64>();
    /// Pages that are looked at together.
    const PAGES: usize = 8192;

    let start = tensor.data_ptr() as usize;
    let end = start + tensor.numel() * tensor.kind().elt_size_in_bytes();
    // Held meanwhile, so that the memory stays mapped.
    let mappings = MAPPINGS.lock();
    let within = mappings.range(..=start).next_back().is_some_and(|(_, last)| end <= *last);
    // Without it nothing is known of the pages.
    let (true, Ok(entries)) = (within, File::open("/proc/self/pagemap")) else { return Ok(()) };
    let page = rustix::param::page_size();
    let mut known = vec![0; PAGES * ENTRY];
    let (first, last) = (start.div_ceil(page), end / page);
    for from in (first..last).step_by(PAGES) {
        let known = &mut known[..PAGES.min(last - from) * ENTRY];
        entries.read_exact_at(known, (from * ENTRY) as u64)?;
        let of_file = |entry: &[u8]| {
            let entry = entry.try_into().map_or(0, u64::from_ne_bytes);
            entry & (PRESENT | OF_FILE) == PRESENT | OF_FILE
        };
        let mut pages = known.chunks_exact(ENTRY).map(of_file).enumerate().peekable();
        while let Some((at, _)) = pages.find(|(_, of_file)| *of_file) {
            let mut end = at + 1;
            while pages.next_if(|(_, of_file)| *of_file).is_some() {
                end += 1;
            }
            let (address, bytes) = (((from + at) * page) as *mut c_void, (end - at) * page);
            // SAFETY: the pages are within a mapping of a file, which lives, and were not written: what is written is in a page of no
            // file. So they are read from the file again with the same content. The caller of `file::forget` sees to it that no thread
            // writes meanwhile.
            let done = unsafe { libc::madvise(address, bytes, libc::MADV_DONTNEED) };
            if done != 0 {
                return Err(std::io::Error::last_os_error());
            }
        }
    }
    Ok(())
}

/// Only Linux says which pages are a file's.
#[cfg(not(target_os = "linux"))]
pub(crate) fn forget(_: &Tensor) -> std::io::Result<()> {
    Ok(())
}
