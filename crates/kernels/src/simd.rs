//! The basis of the kernels in Rust: one choice of vector instructions for the process ([`arch`]), the storage types ([`Element`])
//! and the compute types ([`Real`]).

use pulp::Arch;

use crate::processor::{Simd, simd};

mod element;
pub(super) mod half_lines;
mod real;
mod vectors;

pub(super) use element::{Element, blocks, load, store};
pub(super) use real::Real;

/// Returns the vector instructions of the kernels.
pub(crate) fn arch() -> Arch {
    match simd() {
        #[cfg(target_arch = "x86_64")]
        Simd::Avx512 => pulp::x86::V4::try_new().map_or(Arch::Scalar, Arch::V4),
        #[cfg(target_arch = "x86_64")]
        Simd::Avx2 => pulp::x86::V3::try_new().map_or(Arch::Scalar, Arch::V3),
        Simd::Scalar => Arch::Scalar,
        // The vectors of another architecture, which all of its processors have.
        _ => Arch::new(),
    }
}

/// Distance in bytes from the address that a stream of weights reads to the address that it prefetches: the processor's own prefetch ends
/// with a page of 4 KiB.
pub(super) const PREFETCHED: usize = 1024;

/// Prefetches memory, which may be any.
#[inline(always)]
pub(super) fn prefetch(at: usize, bytes: usize) {
    for at in (at..at + bytes).step_by(64) {
        prefetch_line(at);
    }
}

/// Prefetches the cache line of an address, which may be any.
#[inline(always)]
pub(super) fn prefetch_line(at: usize) {
    // SAFETY: every x86-64 processor has the instruction; it reads nothing that the program sees, and faults nowhere.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at as *const i8);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Returns the same bits as pairs of bf16.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) fn pairs(words: std::arch::x86_64::__m512i) -> std::arch::x86_64::__m512bh {
    // SAFETY: both are 512 bits without invalid values.
    unsafe { std::mem::transmute(words) }
}

/// Returns whether the processor has tiles that multiply bf16 (AMX-BF16), and fp16 (AMX-FP16).
#[cfg(target_arch = "x86_64")]
pub(crate) fn tiles() -> (bool, bool) {
    if cpuid(0, 0).eax < 7 {
        return (false, false);
    }
    let (features, more) = (cpuid(7, 0), cpuid(7, 1));
    let tiles = features.edx >> 24 & 1 == 1;
    (tiles && features.edx >> 22 & 1 == 1, tiles && more.eax >> 21 & 1 == 1)
}

#[cfg(target_arch = "x86_64")]
pub(crate) fn is_intel() -> bool {
    let vendor = cpuid(0, 0);
    [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat() == b"GenuineIntel"
}

#[cfg(target_arch = "x86_64")]
fn cpuid(leaf: u32, part: u32) -> std::arch::x86_64::CpuidResult {
    #[allow(unused_unsafe, reason = "safe from Rust 1.94 on")]
    // SAFETY: every x86-64 processor has the instruction.
    unsafe {
        std::arch::x86_64::__cpuid_count(leaf, part)
    }
}
