//! A disk cache of compiled kernels. A damaged file, or a folder that is not writable, costs a compilation.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;

use files::atomic_write;

use super::nvrtc::Compiled;

/// Returns a key that depends on each of the texts.
pub(super) fn key(texts: &[&str]) -> String {
    format!("{:016x}", digest(texts))
}

/// 64 bits of a hash that is the same in every process; another release of Rust may have another one, and compiles the kernels again.
fn digest(content: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    content.hash(&mut hasher);
    hasher.finish()
}

/// Reads the kernel of a key, if it exists and is intact.
pub(super) fn read(key: &str) -> Option<Compiled> {
    parse(&std::fs::read(path(key)?).ok()?)
}

/// Stores a kernel, if possible.
pub(super) fn write(key: &str, compiled: &Compiled) {
    let Some(path) = path(key) else { return };
    let written = std::fs::create_dir_all(atomic_write::parent(&path))
        .and_then(|()| atomic_write::file(&path, |out| out.write_all(&bytes(compiled))));
    // On failure, the next process compiles it again.
    drop(written);
}

/// Returns the file's content: a digest of the rest, the kernel's name, a NUL byte, the machine code.
fn bytes(compiled: &Compiled) -> Vec<u8> {
    let content = [compiled.name.as_bytes(), &[0], &compiled.cubin].concat();
    [&digest(&content).to_le_bytes()[..], &content].concat()
}

fn parse(bytes: &[u8]) -> Option<Compiled> {
    let (expected, content) = bytes.split_at_checked(8)?;
    if digest(content).to_le_bytes() != *expected {
        return None;
    }
    let end = content.iter().position(|byte| *byte == 0)?;
    let name = std::str::from_utf8(&content[..end]).ok()?.to_owned();
    Some(Compiled { name, cubin: content[end + 1..].to_vec() })
}

fn path(key: &str) -> Option<PathBuf> {
    Some(folder()?.join("kernels").join(format!("{key}.cubin")))
}

/// Returns the folder of what this project measures or compiles once on a machine.
pub(crate) fn folder() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("FRUGAL_CACHE")
        .or_else(|| set("XDG_CACHE_HOME").map(|cache| cache.join("frugal")))
        .or_else(|| set("HOME").map(|home| home.join(".cache/frugal")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cached_kernel_round_trips_and_damaged_files_are_refused() {
        let compiled = Compiled { name: "_Z1fv".into(), cubin: vec![0x7f, b'E', 0, 3] };
        let content = bytes(&compiled);
        assert_eq!(parse(&content), Some(compiled));
        for at in 0..content.len() {
            let mut other = content.clone();
            other[at] ^= 1;
            assert_eq!(parse(&other), None, "{at}");
            assert_eq!(parse(&content[..at]), None, "{at}");
        }
    }

    #[test]
    fn a_key_depends_on_every_text_and_its_end() {
        let keys = [key(&["a", "bc"]), key(&["ab", "c"]), key(&["a", "b"]), key(&["a", "bc", ""])];
        for (index, one) in keys.iter().enumerate() {
            assert!(keys[..index].iter().all(|other| other != one));
            assert_eq!(one.len(), 16);
        }
    }
}
