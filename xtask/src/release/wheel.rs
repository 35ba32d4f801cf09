//! The wheel: the program for people who have Python and torch, and no Rust.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;

use anyhow::Result;
use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use sha2::{Digest, Sha256};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, DateTime, ZipWriter};

use super::Parts;
use crate::archive::{self, Entry};
use crate::torch::Pair;

/// The distribution's name: `frugal` is another project's.
const NAME: &str = "frugal-train";
/// The import package, and the distribution's name in files.
const PACKAGE: &str = "frugal_train";

/// Finds torch and starts the program. It contains `@TORCH@` in place of the version.
const LAUNCHER: &str = include_str!("launcher.py");

/// The version of the distribution: a build for an older torch names it, since a version has one requirement.
fn version(pair: &Pair) -> String {
    let own = env!("CARGO_PKG_VERSION");
    if Pair::newest() == pair { own.to_owned() } else { format!("{own}+torch{}", pair.series()) }
}

/// The file's name. It has no Python of its own and no Python API: one wheel for every version of Python.
pub(super) fn file_name(pair: &Pair, glibc: u32) -> String {
    format!("{PACKAGE}-{}-{}.whl", version(pair), tag(glibc))
}

fn tag(glibc: u32) -> String {
    format!("py3-none-manylinux_2_{glibc}_{}", std::env::consts::ARCH)
}

fn metadata(pair: &Pair) -> String {
    let (version, torch) = (version(pair), pair.torch);
    format!(
        "Metadata-Version: 2.4\n\
         Name: {NAME}\n\
         Version: {version}\n\
         Summary: Trains, fine-tunes, evaluates and exports language models on the memory at hand\n\
         License-Expression: MIT OR Apache-2.0\n\
         License-File: LICENSE-APACHE\n\
         License-File: LICENSE-MIT\n\
         Requires-Python: >=3.10\n\
         Requires-Dist: torch=={torch}\n\
         Description-Content-Type: text/markdown\n\
         \n\
         # Frugal\n\
         \n\
         The program `frugal` trains and fine-tunes language models: LoRA and all weights, 16-bit and 4-bit bases, packing, recomputation,\n\
         offloading to host memory and files, preferences, distillation and rewards, over processes and GPUs, within a budget of memory\n\
         that it plans first. It reads Hugging Face's folders and GGUF files, and writes both.\n\
         \n\
         This wheel holds the program and small data sets to try it with; it computes with the libraries of torch {torch}, for the CPU or\n\
         with CUDA, which lie in the same environment. Python is used to find them, and for nothing else.\n\
         \n\
         ```\n\
         frugal doctor\n\
         frugal finetune --model MODEL --data ROWS.jsonl --budget 8GiB --out RUN\n\
         frugal --help\n\
         ```\n"
    )
}

/// The wheel's files, without the list of them.
///
/// # Errors
/// A file of the parts that cannot be read.
fn entries(parts: &Parts, pair: &Pair, glibc: u32) -> Result<Vec<Entry>> {
    let info = Path::new(&format!("{PACKAGE}-{}.dist-info", version(pair))).to_owned();
    let shared = Path::new(&format!("{PACKAGE}-{}.data/data/share", version(pair))).to_owned();
    let package = Path::new(PACKAGE);
    let text = |place: &Path, text: String| Entry::text(place, text, false);
    let mut entries = vec![
        text(
            &package.join("__init__.py"),
            format!(
                "\"\"\"The program frugal; see `frugal --help`.\"\"\"\n\n__version__ = \"{}\"\n",
                version(pair)
            ),
        ),
        text(&package.join("__main__.py"), LAUNCHER.replace("@TORCH@", pair.torch)),
        Entry::program(&package.join("bin/frugal"), parts.program.clone()),
        text(&info.join("METADATA"), metadata(pair)),
        text(
            &info.join("WHEEL"),
            format!(
                "Wheel-Version: 1.0\nGenerator: frugal ({})\nRoot-Is-Purelib: false\nTag: {}\n",
                env!("CARGO_PKG_VERSION"),
                tag(glibc)
            ),
        ),
        text(
            &info.join("entry_points.txt"),
            format!("[console_scripts]\nfrugal = {PACKAGE}.__main__:main\n"),
        ),
        // PEP 770.
        text(&info.join("sboms/frugal.cdx.json"), parts.components.clone()),
    ];
    let folders =
        [(&parts.data, package), (&parts.licences, &info.join("licenses")), (&parts.manual, &shared)];
    for (files, folder) in folders {
        entries.extend(files.iter().map(|entry| entry.below(folder)));
    }
    archive::check_listing(&entries)?;
    Ok(entries)
}

/// Writes the wheel into `out` and returns its size in bytes. Equal parts give equal bytes.
///
/// # Errors
/// A file of the parts that cannot be read; a full disk.
pub(super) fn write(out: &Path, parts: &Parts, pair: &Pair, glibc: u32) -> Result<u64> {
    let entries = entries(parts, pair, glibc)?;
    let record = format!("{PACKAGE}-{}.dist-info/RECORD", version(pair));
    archive::write(out, |file| {
        let mut wheel = ZipWriter::new(file);
        let mut list = String::new();
        let mut add = |place: &str, bytes: &[u8], mode: u32| -> Result<()> {
            let options = SimpleFileOptions::default()
                .compression_method(CompressionMethod::Deflated)
                .compression_level(Some(9))
                .last_modified_time(DateTime::default())
                .unix_permissions(mode);
            wheel.start_file(place, options)?;
            Ok(wheel.write_all(bytes)?)
        };
        for entry in &entries {
            let (place, bytes) = (entry.place.display().to_string(), entry.bytes()?);
            let digest = BASE64_URL_SAFE_NO_PAD.encode(Sha256::digest(&bytes));
            writeln!(list, "{place},sha256={digest},{}", bytes.len())?;
            add(&place, &bytes, entry.mode())?;
        }
        writeln!(list, "{record},,")?;
        add(&record, list.as_bytes(), 0o644)?;
        Ok(wheel.finish()?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_names_an_older_torch() {
        let name = |torch| file_name(Pair::of_torch(torch).unwrap(), 28);
        let arch = std::env::consts::ARCH;
        assert_eq!(name("2.13"), format!("frugal_train-0.1.0-py3-none-manylinux_2_28_{arch}.whl"));
        assert_eq!(name("2.11"), format!("frugal_train-0.1.0+torch2.11-py3-none-manylinux_2_28_{arch}.whl"));
    }
}
