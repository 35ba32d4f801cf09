//! Permissions of files and folders that are written atomically: those of what is replaced, else those that the user's mask allows.
#![cfg(unix)]

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use files::atomic_write::{self, Folder};

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o7777
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

fn write(path: &Path, text: &str) {
    atomic_write::file(path, |out| out.write_all(text.as_bytes())).unwrap();
}

#[test]
fn a_file_that_its_check_refuses_replaces_nothing() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("model");
    write(&path, "old");
    let replace = |is_right: bool| {
        let check = |new: &Path| {
            assert_eq!((fs::read(new)?, fs::read(&path)?), (b"new".to_vec(), b"old".to_vec()));
            if is_right { Ok(()) } else { Err(std::io::Error::other("wrong")) }
        };
        atomic_write::checked_file(&path, |out| out.write_all(b"new"), check)
    };
    assert_eq!(replace(false).unwrap_err().to_string(), "wrong");
    assert_eq!(fs::read(&path).unwrap(), b"old");
    assert_eq!(fs::read_dir(place.path()).unwrap().count(), 1);
    replace(true).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"new");
}

#[test]
fn a_rewritten_file_keeps_its_mode() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("token");
    // A plain file, for what the mask allows.
    fs::write(place.path().join("plain"), "").unwrap();
    write(&path, "new");
    assert_eq!(mode(&path), mode(&place.path().join("plain")));
    for wanted in [0o600, 0o640, 0o664, 0o755, 0o400] {
        set_mode(&path, wanted);
        let text = format!("{wanted:o}");
        write(&path, &text);
        assert_eq!((mode(&path), fs::read_to_string(&path).unwrap()), (wanted, text));
    }
}

#[test]
fn a_file_is_never_more_readable_than_the_one_that_it_replaces() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("token");
    write(&path, "old");
    set_mode(&path, 0o600);
    atomic_write::file(&path, |out| {
        out.write_all(b"secret")?;
        let modes = fs::read_dir(place.path())?.map(|entry| Ok(mode(&entry?.path())));
        assert_eq!(modes.collect::<std::io::Result<Vec<_>>>()?, [0o600, 0o600]);
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_file_that_is_reached_by_a_link_replaces_the_link() {
    let place = tempfile::tempdir().unwrap();
    let (target, link) = (place.path().join("target"), place.path().join("link"));
    write(&target, "old");
    set_mode(&target, 0o600);
    std::os::unix::fs::symlink("target", &link).unwrap();
    write(&link, "new");
    assert!(!fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!((mode(&link), fs::read_to_string(&target).unwrap().as_str()), (0o600, "old"));
}

#[test]
fn a_rewritten_folder_and_its_files_keep_their_modes() {
    let place = tempfile::tempdir().unwrap();
    let target = place.path().join("adapter");
    let publish = |names: &[&str]| {
        let new = Folder::beside(&target).unwrap();
        for name in names {
            fs::write(new.path().join(name), "x").unwrap();
        }
        new.publish(&["config"], &|_| false).unwrap();
    };
    publish(&["config", "weights"]);
    set_mode(&target, 0o700);
    set_mode(&target.join("config"), 0o600);
    set_mode(&target.join("weights"), 0o640);
    publish(&["config", "weights", "added"]);
    let modes = ["", "config", "weights"].map(|name| mode(&target.join(name)));
    assert_eq!(modes.map(|mode| format!("{mode:o}")), ["700", "600", "640"]);
}

#[test]
fn files_that_are_renamed_one_by_one_keep_their_modes() {
    let place = tempfile::tempdir().unwrap();
    let target = place.path().join("adapter");
    fs::create_dir(&target).unwrap();
    fs::write(target.join("weights"), "old").unwrap();
    set_mode(&target.join("weights"), 0o600);
    // The old folder cannot be exchanged while its parent is not writable; for root it is exchanged.
    let new = Folder::beside(&target).unwrap();
    fs::write(new.path().join("weights"), "new").unwrap();
    set_mode(place.path(), 0o500);
    new.publish(&[], &|_| false).unwrap();
    set_mode(place.path(), 0o700);
    assert_eq!(mode(&target.join("weights")), 0o600);
    assert_eq!(fs::read_to_string(target.join("weights")).unwrap(), "new");
}

#[test]
fn a_file_that_is_not_synced_replaces_the_former_one_and_keeps_its_mode() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("page.html");
    for content in ["a long first page", "short"] {
        atomic_write::unsynced(&path, content.as_bytes()).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), content);
    }
    for private in [0o600, 0o664] {
        set_mode(&path, private);
        atomic_write::unsynced(&path, b"again").unwrap();
        assert_eq!(mode(&path), private);
    }
    assert!(atomic_write::unsynced(&folder.path().join("absent/page.html"), b"x").is_err());
    fs::create_dir(folder.path().join("taken")).unwrap();
    assert!(atomic_write::unsynced(&folder.path().join("taken"), b"x").is_err());
    let entries = fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(entries, 2, "no temporary file stays");
}
