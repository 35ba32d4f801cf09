//! The files of an archive that is made here, and how they are packed.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// A file of an archive.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Entry {
    /// Its path, relative to the archive's top folder.
    pub(crate) place: PathBuf,
    pub(crate) content: Content,
    pub(crate) executable: bool,
}

/// Where a file's bytes come from.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Content {
    File(PathBuf),
    Text(String),
}

impl Entry {
    pub(crate) fn program(place: &Path, from: PathBuf) -> Self {
        Self { place: place.to_owned(), content: Content::File(from), executable: true }
    }

    pub(crate) fn file(place: &Path, from: PathBuf) -> Self {
        Self { place: place.to_owned(), content: Content::File(from), executable: false }
    }

    pub(crate) fn text(place: &Path, text: String, executable: bool) -> Self {
        Self { place: place.to_owned(), content: Content::Text(text), executable }
    }

    /// The same file in a folder of the archive.
    pub(crate) fn below(&self, folder: &Path) -> Self {
        Self { place: folder.join(&self.place), ..self.clone() }
    }

    /// Its bytes.
    pub(crate) fn bytes(&self) -> Result<Vec<u8>> {
        match &self.content {
            Content::Text(text) => Ok(text.clone().into_bytes()),
            Content::File(path) => {
                std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
            }
        }
    }

    /// Its permissions.
    pub(crate) fn mode(&self) -> u32 {
        if self.executable { 0o755 } else { 0o644 }
    }
}

/// A digest in hexadecimal digits.
pub(crate) fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Adds the files in `folder` and below it, in `place` of the archive and in the order of their names; none if there is no such folder.
pub(crate) fn walk(folder: &Path, place: &Path, entries: &mut Vec<Entry>) -> Result<()> {
    if !folder.is_dir() {
        return Ok(());
    }
    let cannot = || format!("cannot read {}", folder.display());
    let mut listing =
        std::fs::read_dir(folder).and_then(Iterator::collect::<Result<Vec<_>, _>>).with_context(cannot)?;
    listing.sort_by_key(std::fs::DirEntry::file_name);
    for entry in listing {
        let (path, place) = (entry.path(), place.join(entry.file_name()));
        if path.is_dir() {
            walk(&path, &place, entries)?;
        } else if path.is_file() {
            entries.push(Entry::file(&place, path));
        }
    }
    Ok(())
}

/// Refuses a listing that would unpack outside its folder, or one file over another: a bug of this program.
pub(crate) fn check_listing(entries: &[Entry]) -> Result<()> {
    let mut seen = std::collections::HashSet::new();
    for entry in entries {
        let plain = entry.place.components().all(|part| matches!(part, std::path::Component::Normal(_)));
        if !plain || !seen.insert(&entry.place) {
            bail!("{} is in the archive twice, or points outside it", entry.place.display());
        }
    }
    Ok(())
}

/// Writes the entries as a tar file into `sink`, below the folder `top` and with the time `mtime`, and returns the sink.
pub(crate) fn tar<W: Write>(sink: W, top: &str, mtime: u64, entries: &[Entry]) -> Result<W> {
    let mut archive = tar::Builder::new(sink);
    for entry in entries {
        let bytes = entry.bytes()?;
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(entry.mode());
        header.set_mtime(mtime);
        archive.append_data(&mut header, Path::new(top).join(&entry.place), &bytes[..])?;
    }
    Ok(archive.into_inner()?)
}

/// Writes a file under a temporary name beside `out`, then renames it. Returns its size in bytes.
pub(crate) fn write(out: &Path, write: impl FnOnce(std::fs::File) -> Result<std::fs::File>) -> Result<u64> {
    let cannot =
        || format!("cannot write {}; give --out a file in a folder that you may write", out.display());
    if let Some(folder) = out.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        std::fs::create_dir_all(folder).with_context(cannot)?;
    }
    let partial = out.with_extension(format!("partial-{}", std::process::id()));
    let file = std::fs::File::create(&partial).with_context(cannot)?;
    let written = write(file).and_then(|file| Ok(file.metadata()?.len()));
    let size = written.inspect_err(|_| drop(std::fs::remove_file(&partial))).with_context(cannot)?;
    std::fs::rename(&partial, out).with_context(cannot)?;
    Ok(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listing_stays_inside_and_names_nothing_twice() {
        let entry = |place: &str| Entry::text(Path::new(place), String::new(), false);
        assert!(check_listing(&[entry("a"), entry("b/a")]).is_ok());
        for wrong in [vec![entry("a"), entry("a")], vec![entry("../a")], vec![entry("/a")]] {
            assert!(check_listing(&wrong).is_err());
        }
    }

    #[test]
    fn a_file_that_could_not_be_written_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("new/a.tar");
        assert!(write(&out, |_| bail!("full")).is_err());
        assert_eq!(std::fs::read_dir(out.parent().unwrap()).unwrap().count(), 0);
        assert_eq!(write(&out, |mut file| Ok(file.write_all(b"four").map(|()| file)?)).unwrap(), 4);
    }
}
