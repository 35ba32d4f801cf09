//! Names the file when a page of a mapped file cannot be read: the kernel sends SIGBUS if the file has become shorter, or if its disk fails.

use std::ffi::{c_int, c_void};
use std::io::{Error, Result};
use std::sync::atomic::{AtomicBool, Ordering};

const BEFORE: &[u8] = b"error: a part of a file that is in use is gone: ";
const AFTER: &[u8] =
    b"; another program has shortened or rewritten it, or its disk fails; put the whole file back and start again\n";

/// Whether a thread is naming the file. Others wait for the end of the process.
static NAMING: AtomicBool = AtomicBool::new(false);

/// Installs the handler.
pub(super) fn install() -> Result<()> {
    // SAFETY: zeros are a valid `sigaction`, with an empty mask; the handler has the signature that SA_SIGINFO asks for and does
    // what a signal handler may: system calls and arithmetic on its own stack.
    let done = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_bus_error;
        action.sa_sigaction = handler as usize;
        // On the thread's own stack: the alternative one, for overflows, is too small for the lines of the kernel's list.
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut())
    };
    if done == 0 { Ok(()) } else { Err(Error::last_os_error()) }
}

/// Names the file and ends the process. An address in no file is left to the default action, when the instruction runs again.
extern "C" fn on_bus_error(_: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    while NAMING.swap(true, Ordering::SeqCst) {
        // SAFETY: only waits.
        unsafe { libc::pause() };
    }
    // SAFETY: the kernel passes a valid siginfo, whose address is set for SIGBUS.
    let address = unsafe { (*info).si_addr() } as usize;
    let mut path = [0; 4096];
    let Some(length) = file_at(address, &mut path) else {
        // SAFETY: a plain call with a constant.
        unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
        return;
    };
    write(BEFORE);
    write(&path[..length]);
    write(AFTER);
    // SAFETY: ends the process without running anything of it.
    unsafe { libc::_exit(1) }
}

fn write(bytes: &[u8]) {
    // SAFETY: the bytes outlive the call. Nothing can be done if it fails.
    let _ = unsafe { libc::write(libc::STDERR_FILENO, bytes.as_ptr().cast(), bytes.len()) };
}

/// Finds the mapping of an address in the kernel's list, whose lines are `begin-end permissions offset device inode path`, and
/// copies its path. Allocates nothing.
fn file_at(address: usize, path: &mut [u8]) -> Option<usize> {
    // SAFETY: the name is a C string.
    let file = unsafe { libc::open(c"/proc/self/maps".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) };
    if file < 0 {
        return None;
    }
    let mut line = [0; 4096];
    let (mut filled, mut buffer) = (0, [0u8; 1024]);
    loop {
        // SAFETY: the buffer has as many bytes and outlives the call.
        let read = unsafe { libc::read(file, buffer.as_mut_ptr().cast(), buffer.len()) };
        let read = usize::try_from(read).ok().filter(|read| *read > 0)?;
        for &byte in &buffer[..read] {
            if byte != b'\n' {
                if filled < line.len() {
                    line[filled] = byte;
                    filled += 1;
                }
                continue;
            }
            let name = path_of(&line[..filled], address);
            filled = 0;
            if let Some(name) = name {
                path[..name.len()].copy_from_slice(name);
                return Some(name.len());
            }
        }
    }
}

/// The path of a line whose range has the address; `None` if it is another one or no file's.
fn path_of(line: &[u8], address: usize) -> Option<&[u8]> {
    let dash = line.iter().position(|byte| *byte == b'-')?;
    let blank = line.iter().position(|byte| *byte == b' ')?;
    let begin = hexadecimal(&line[..dash])?;
    let end = hexadecimal(line.get(dash + 1..blank)?)?;
    if !(begin..end).contains(&address) {
        return None;
    }
    let slash = line.iter().position(|byte| *byte == b'/')?;
    Some(&line[slash..])
}

fn hexadecimal(digits: &[u8]) -> Option<usize> {
    let mut number = 0usize;
    for &digit in digits {
        let digit = (digit as char).to_digit(16)?;
        number = number.checked_mul(16)?.checked_add(digit as usize)?;
    }
    Some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_is_that_of_the_range() {
        let line = b"7f00-7fff r--s 00000000 fe:00 123                  /data/model one.safetensors";
        assert_eq!(path_of(line, 0x7f00), Some(&b"/data/model one.safetensors"[..]));
        assert_eq!(path_of(line, 0x7ffe), Some(&b"/data/model one.safetensors"[..]));
        assert_eq!(path_of(line, 0x7fff), None);
        assert_eq!(path_of(b"7f00-7fff rw-p 00000000 00:00 0 ", 0x7f00), None);
        assert_eq!(path_of(b"", 0), None);
    }
}
