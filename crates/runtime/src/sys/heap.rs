//! The heaps of the C library and of mimalloc.

/// Returns pages of freed small blocks to the system: from glibc's heap, and with feature `mimalloc` from that allocator's heap of this
/// thread. Both keep them otherwise, so that what a process held at its most, as when it encoded its data, counts to it ever after.
pub fn release_freed_pages() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: any thread may call it; it frees no block that is in use.
    unsafe {
        libc::malloc_trim(0)
    };
    #[cfg(feature = "mimalloc")]
    // SAFETY: any thread may call it; it frees no block that is in use.
    unsafe {
        libmimalloc_sys::mi_collect(true)
    };
}
