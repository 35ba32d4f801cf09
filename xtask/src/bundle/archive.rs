//! The content of a bundle, and how it is packed.

use std::fs::File;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Result;
use liblzma::stream::{Check, Filters, LzmaOptions, Stream};
use liblzma::write::XzEncoder;

use crate::archive::{self, Entry};

/// The folder that an unpacked bundle makes.
pub(super) const TOP: &str = "frugal-bundle";

/// The files of the checkout that programs and tests read: registered experiments, peers, data, and the files beside a
/// crate's tests that are not source.
pub(super) fn shared_files(root: &Path) -> Result<Vec<Entry>> {
    let mut files = Vec::new();
    for folder in ["xtask/peers", "data", "crates"] {
        archive::walk(&root.join(folder), Path::new(folder), &mut files)?;
    }
    let wanted = |place: &Path| {
        let names: Vec<_> = place.iter().map(|name| name.to_string_lossy()).collect();
        if names.iter().any(|name| name == "__pycache__") {
            return false;
        }
        match names.as_slice() {
            // Tests start in the crate's folder, so it must exist; its manifest makes it exist.
            [first, _, manifest] if first == "crates" => manifest == "Cargo.toml",
            [first, _, folder, ..] if first == "crates" => {
                ["tests", "data", "experiments"].contains(&&**folder)
                    && place.extension().is_none_or(|e| e != "rs")
            }
            _ => true,
        }
    };
    files.retain(|file| wanted(&file.place));
    Ok(files)
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
pub(super) fn write(out: &Path, entries: &[Entry]) -> Result<u64> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    archive::write(out, |file| Ok(archive::tar(encoder(file)?, TOP, now, entries)?.finish()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::archive::check_listing;

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
            shared_files(dir.path()).unwrap().iter().map(|file| file.place.display().to_string()).collect();
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
        let size = write(&out, &entries).unwrap();
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
}
