//! The content of a bundle, and how it is packed.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use liblzma::stream::{Check, Filters, LzmaOptions, Stream};
use liblzma::write::XzEncoder;

/// The folder that an unpacked bundle makes.
pub(super) const TOP: &str = "frugal-bundle";

/// A file of a bundle.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Entry {
    /// Its path, relative to the bundle's top folder.
    pub(super) place: PathBuf,
    pub(super) content: Content,
    pub(super) executable: bool,
}

/// Where a file's bytes come from.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Content {
    File(PathBuf),
    Text(String),
}

impl Entry {
    pub(super) fn program(place: &Path, from: PathBuf) -> Self {
        Self { place: place.to_owned(), content: Content::File(from), executable: true }
    }

    pub(super) fn file(place: &Path, from: PathBuf) -> Self {
        Self { place: place.to_owned(), content: Content::File(from), executable: false }
    }

    pub(super) fn text(place: &Path, text: String, executable: bool) -> Self {
        Self { place: place.to_owned(), content: Content::Text(text), executable }
    }
}

/// The files of the checkout that programs and tests read: registered experiments, peers, data, and the files beside a
/// crate's tests that are not source.
pub(super) fn shared_files(root: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    walk(root, Path::new("xtask/peers"), &mut files)?;
    walk(root, Path::new("data"), &mut files)?;
    for member in sorted(&root.join("crates"))? {
        let member = Path::new("crates").join(member);
        // Tests start in this folder, so it must exist; its manifest makes it exist.
        files.push(member.join("Cargo.toml"));
        for folder in ["tests", "data", "experiments"] {
            walk(root, &member.join(folder), &mut files)?;
        }
    }
    files.retain(|file| {
        let source =
            file.starts_with("crates") && file.extension().is_some_and(|extension| extension == "rs");
        let compiled = file.components().any(|part| part.as_os_str() == "__pycache__");
        !source && !compiled && root.join(file).is_file()
    });
    Ok(files)
}

fn walk(root: &Path, folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    if !root.join(folder).is_dir() {
        return Ok(());
    }
    for name in sorted(&root.join(folder))? {
        let path = folder.join(name);
        if root.join(&path).is_dir() {
            walk(root, &path, files)?;
        } else {
            files.push(path);
        }
    }
    Ok(())
}

fn sorted(folder: &Path) -> Result<Vec<std::ffi::OsString>> {
    let entries = std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut names: Vec<_> = entries.flatten().map(|entry| entry.file_name()).collect();
    names.sort();
    Ok(names)
}

/// Refuses a listing that would unpack outside its folder, or one file over another: a bug of this program.
pub(super) fn check_listing(entries: &[Entry]) -> Result<()> {
    let mut seen = std::collections::HashSet::new();
    for entry in entries {
        let plain = entry.place.components().all(|part| matches!(part, std::path::Component::Normal(_)));
        if !plain || !seen.insert(&entry.place) {
            bail!("{} is in the bundle twice, or points outside it", entry.place.display());
        }
    }
    Ok(())
}

/// The programs and tests contain the same libraries; the dictionary is large enough to find them again in the next file.
const DICTIONARY: u32 = 128 << 20;

/// An archive of 200 MB compresses to 80 MB with gzip at its best in half a minute, to 24 MB with the lowest presets and this
/// dictionary, and to 21 MB with the default preset in two minutes.
const PRESET: u32 = 2;

fn encoder(file: File) -> Result<XzEncoder<File>, liblzma::stream::Error> {
    let mut options = LzmaOptions::new_preset(PRESET)?;
    options.dict_size(DICTIONARY);
    let mut filters = Filters::new();
    filters.lzma2(&options);
    Ok(XzEncoder::new_stream(file, Stream::new_stream_encoder(&filters, Check::Crc64)?))
}

/// Packs the entries into `out` and returns the archive's size in bytes.
pub(super) fn write(out: &Path, entries: Vec<Entry>) -> Result<u64> {
    let cannot =
        || format!("cannot write {}; give --out a file in a folder that you may write", out.display());
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let partial = out.with_extension(format!("partial-{}", std::process::id()));
    let file = File::create(&partial).with_context(cannot)?;
    let mut archive = tar::Builder::new(encoder(file).with_context(cannot)?);
    for entry in entries {
        let bytes = match entry.content {
            Content::Text(text) => text.into_bytes(),
            Content::File(path) => {
                std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?
            }
        };
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(if entry.executable { 0o755 } else { 0o644 });
        header.set_mtime(now);
        archive
            .append_data(&mut header, Path::new(TOP).join(&entry.place), &bytes[..])
            .with_context(cannot)?;
    }
    let file = archive.into_inner().and_then(XzEncoder::finish).with_context(cannot)?;
    let size = file.metadata().with_context(cannot)?.len();
    std::fs::rename(&partial, out).with_context(cannot)?;
    Ok(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_files_are_data_and_no_sources() {
        let dir = tempfile::tempdir().unwrap();
        for file in [
            "data/fixtures/a.json",
            "xtask/peers/swiglu.py",
            "xtask/peers/__pycache__/swiglu.pyc",
            "xtask/src/main.rs",
            "crates/amp/Cargo.toml",
            "crates/experiments/experiments/amp.toml",
            "crates/amp/src/lib.rs",
            "crates/amp/tests/traces.rs",
            "crates/amp/tests/traces/one.json",
            "crates/report/Cargo.toml",
        ] {
            let path = dir.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, file).unwrap();
        }
        let files: Vec<String> =
            shared_files(dir.path()).unwrap().iter().map(|file| file.to_str().unwrap().to_owned()).collect();
        assert_eq!(
            files,
            [
                "xtask/peers/swiglu.py",
                "data/fixtures/a.json",
                "crates/amp/Cargo.toml",
                "crates/amp/tests/traces/one.json",
                "crates/experiments/experiments/amp.toml",
                "crates/report/Cargo.toml",
            ]
        );
    }

    #[test]
    fn an_archive_unpacks_to_what_was_listed() {
        let dir = tempfile::tempdir().unwrap();
        let (source, out) = (dir.path().join("program"), dir.path().join("b.tar.xz"));
        std::fs::write(&source, "binary").unwrap();
        let entries = vec![
            Entry::program(Path::new("bin/amp"), source.clone()),
            Entry::text(Path::new("run.sh"), "#!/bin/sh\n".into(), true),
            Entry::text(Path::new("bin/bundle.json"), "{}".into(), false),
        ];
        check_listing(&entries).unwrap();
        let size = write(&out, entries).unwrap();
        assert_eq!(size, std::fs::metadata(&out).unwrap().len());
        let mut archive = tar::Archive::new(liblzma::read::XzDecoder::new(File::open(&out).unwrap()));
        let listing: Vec<String> = archive
            .entries()
            .unwrap()
            .map(|entry| {
                let entry = entry.unwrap();
                let header = entry.header();
                format!(
                    "{} {:o} {}",
                    entry.path().unwrap().display(),
                    header.mode().unwrap(),
                    header.size().unwrap()
                )
            })
            .collect();
        assert_eq!(
            listing,
            [
                "frugal-bundle/bin/amp 755 6",
                "frugal-bundle/run.sh 755 10",
                "frugal-bundle/bin/bundle.json 644 2"
            ]
        );
    }

    #[test]
    fn a_listing_stays_inside_and_names_nothing_twice() {
        let entry = |place: &str| Entry::text(Path::new(place), String::new(), false);
        assert!(check_listing(&[entry("a"), entry("b/a")]).is_ok());
        for wrong in [vec![entry("a"), entry("a")], vec![entry("../a")], vec![entry("/a")]] {
            assert!(check_listing(&wrong).is_err());
        }
    }
}
