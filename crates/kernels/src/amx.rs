//! AMX's tiles: registers of 16 rows of 64 bytes.
//!
//! Source: Intel's manual of instructions, `LDTILECFG`.

use std::arch::asm;
use std::sync::OnceLock;

use super::simd;

/// Rows of a tile, and 32-bit words of a row.
pub(super) const TILE: usize = 16;
const ROW_BYTES: u8 = 64;

/// Returns whether the processor has tiles of bf16 and the system lets this process use them.
pub(crate) fn is_there() -> bool {
    static IS_THERE: OnceLock<bool> = OnceLock::new();
    *IS_THERE.get_or_init(|| simd::tiles().0 && permitted())
}

/// Requests the tiles' registers from Linux, which saves their state only for processes that did.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    /// `ARCH_REQ_XCOMP_PERM` and the number of the tiles' data among the states of `XSAVE`, of Linux's documentation of `x86/xstate`.
    const REQUEST: libc::c_long = 0x1023;
    const TILE_DATA: libc::c_long = 18;
    // SAFETY: the call takes two numbers and touches no memory of the process.
    unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST, TILE_DATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// Eight tiles of 16 rows of 64 bytes, on this thread, until it is dropped.
pub(super) struct Tiles;

impl Tiles {
    /// # Safety
    /// [`is_there`] is true.
    pub(super) unsafe fn configure() -> Self {
        /// Palette 1; from byte 16 on the bytes of a row of each tile, from byte 48 on its rows.
        #[repr(align(64))]
        struct Configuration([u8; 64]);
        let mut configuration = Configuration([0; 64]);
        configuration.0[0] = 1;
        for tile in 0..8 {
            configuration.0[16 + 2 * tile] = ROW_BYTES;
            configuration.0[48 + tile] = TILE as u8;
        }
        // SAFETY: by this function's contract; the instruction reads the 64 bytes.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const configuration, options(nostack, readonly)) };
        Self
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: no tile is used any more.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}
