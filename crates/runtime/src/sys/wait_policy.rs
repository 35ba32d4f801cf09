//! Restarts a program before its libraries are initialised, with OpenMP's spinning bounded.
//!
//! The code runs in the program's `.preinit_array`: after all libraries are loaded and relocated, before any of them is initialised.
//! There the C library has no environment yet (`environ` is null), so the system's own pointers are used, and nothing is allocated
//! by the heap.

/// Iterations that a waiting thread spins before it sleeps.
pub const SPINS: u32 = 10_000;

#[cfg(target_os = "linux")]
pub use linux::{Preinit, RESTART};

#[cfg(target_os = "linux")]
mod linux {
    use std::ffi::{CStr, c_char, c_int};
    use std::ptr;

    /// The setting, as [`SPINS`](super::SPINS) has it.
    const SETTING: &CStr = c"GOMP_SPINCOUNT=10000";

    /// A link to the file of this process's program.
    const PROGRAM: &CStr = c"/proc/self/exe";

    /// Settings of a person, or of a thread that has none to wait for.
    const CHOSEN: [&[u8]; 5] =
        [b"GOMP_SPINCOUNT=", b"OMP_WAIT_POLICY=", b"KMP_BLOCKTIME=", b"KMP_LIBRARY=", b"OMP_NUM_THREADS=1\0"];

    /// A function of `.preinit_array`: the C library calls it with `argc`, `argv` and `envp`.
    pub type Preinit = unsafe extern "C" fn(c_int, *const *const c_char, *const *const c_char);

    /// The function that restarts the program.
    pub const RESTART: Preinit = restart;

    /// Executes the program again with [`SETTING`] added to its environment; returns if the environment has a setting, or if anything fails.
    ///
    /// # Safety
    /// `argv` and `envp` are the arrays that the system gave the process: they end with null, and the auxiliary vector follows `envp`.
    unsafe extern "C" fn restart(_: c_int, argv: *const *const c_char, envp: *const *const c_char) {
        let mut count = 0;
        // SAFETY: `envp` ends with null, and each of its pointers before leads to a text that ends with a zero byte.
        unsafe {
            while !(*envp.add(count)).is_null() {
                let variable = CStr::from_ptr(*envp.add(count)).to_bytes_with_nul();
                if CHOSEN.iter().any(|chosen| variable.starts_with(chosen)) {
                    return;
                }
                count += 1;
            }
        }
        // SAFETY: the auxiliary vector follows the environment's null.
        if unsafe { is_loaded_otherwise(envp.add(count + 1).cast()) } {
            return;
        }
        let mut path = [0_u8; libc::PATH_MAX as usize];
        // SAFETY: at most one byte less than `path` has is written, so that the text ends with a zero byte.
        let length = unsafe { libc::readlink(PROGRAM.as_ptr(), path.as_mut_ptr().cast(), path.len() - 1) };
        if length <= 0 {
            return;
        }
        let bytes = (count + 2) * size_of::<*const c_char>();
        // SAFETY: new memory of this process.
        let memory = unsafe {
            libc::mmap(
                ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if memory == libc::MAP_FAILED {
            return;
        }
        let environment: *mut *const c_char = memory.cast();
        // SAFETY: the memory has room for the variables, the setting and the null, which it has as new memory. If `execve` returns, it has
        // failed and changed nothing, and the memory is given back.
        unsafe {
            ptr::copy_nonoverlapping(envp, environment, count);
            *environment.add(count) = SETTING.as_ptr();
            libc::execve(path.as_ptr().cast(), argv, environment);
            libc::munmap(memory, bytes);
        }
    }

    /// Returns whether the program runs with rights that its caller lacks, or was loaded by a dynamic linker that was started as the program:
    /// `execve` of its file would then start something else.
    ///
    /// # Safety
    /// `auxiliary` is the process's auxiliary vector: pairs of a kind and a value, the last of kind `AT_NULL`.
    unsafe fn is_loaded_otherwise(mut auxiliary: *const [libc::c_ulong; 2]) -> bool {
        let mut has_linker = false;
        loop {
            // SAFETY: the caller's promise; the loop ends at the last pair.
            let [kind, value] = unsafe { *auxiliary };
            match kind {
                libc::AT_NULL => return !has_linker,
                libc::AT_SECURE if value != 0 => return true,
                libc::AT_BASE => has_linker = value != 0,
                _ => {}
            }
            // SAFETY: this pair was not the last.
            auxiliary = unsafe { auxiliary.add(1) };
        }
    }

    #[cfg(test)]
    #[test]
    fn the_setting_is_the_documented_number() {
        assert_eq!(SETTING.to_str(), Ok(&*format!("GOMP_SPINCOUNT={}", super::SPINS)));
    }
}
