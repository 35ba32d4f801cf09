//! Files as memory.

use files::mapped::MappedFile;

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
    let error_of = |path| MappedFile::open(path).unwrap_err().to_string();
    assert_eq!(error_of(folder.path()), "not a regular file");
    assert!(error_of(&folder.path().join("none")).starts_with("No such file"));
}

/// Run by the test below, as a process of its own.
#[test]
fn reads_a_file_that_becomes_shorter() {
    let Some(path) = std::env::var_os("FRUGAL_TEST_SHORTENED") else { return };
    files::mapped::report_shortened_files().unwrap();
    let mapped = MappedFile::open(path.as_ref()).unwrap();
    let last = mapped.len() - 1;
    std::fs::File::options().write(true).open(&path).unwrap().set_len(10).unwrap();
    assert_eq!(mapped[last], 7, "the page is gone");
}

#[test]
#[cfg(target_os = "linux")]
fn a_file_that_becomes_shorter_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("some weights");
    std::fs::write(&path, vec![7; 100_000]).unwrap();
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "mapped::reads_a_file_that_becomes_shorter", "--nocapture"]);
    let output = command.env("FRUGAL_TEST_SHORTENED", &path).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let expected =
        format!("error: a part of a file that is in use is gone: {}; another program", path.display());
    assert!(stderr.contains(&expected), "{stderr}");
}
