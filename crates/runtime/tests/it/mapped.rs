//! Files as memory.

use runtime::mapped::MappedFile;

#[test]
fn a_mapped_file_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bytes");
    let bytes: Vec<u8> = (0..100_000u32).map(|i| i as u8).collect();
    std::fs::write(&path, &bytes).unwrap();
    let mapped = MappedFile::open(&path).unwrap();
    assert_eq!(*mapped, *bytes);
    // A replaced file is unchanged for open mappings.
    std::fs::write(folder.path().join("new"), b"new").unwrap();
    std::fs::rename(folder.path().join("new"), &path).unwrap();
    assert_eq!(*mapped, *bytes);

    let error = mapped.forget(5..100_001).unwrap_err().to_string();
    assert!(error.starts_with("forget: the bytes 5..100001 of "), "{error}");
}

#[test]
fn files_that_cannot_be_mapped_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let empty = folder.path().join("empty");
    std::fs::write(&empty, b"").unwrap();
    assert!(MappedFile::open(&empty).unwrap().is_empty());
    let of = |path| MappedFile::open(path).unwrap_err().to_string();
    assert!(of(folder.path()).ends_with(": not a regular file"));
    assert!(of(&folder.path().join("none")).contains("none: No such file"));
}
