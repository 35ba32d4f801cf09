//! The program as it is given to machines other than the one that built it.

use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};

use super::elf::{self, Needs};
use super::platform;
use crate::archive::hex;
use crate::cargo;
use crate::setup::cache_folder;
use crate::torch::{Pair, Torch};
use crate::venv::{self, Recipe};
use crate::workspace::Workspace;

/// Where the program looks for libtorch, from its own folder: in the environment where pip put the wheel and torch; in an unpacked archive.
pub(super) const SEARCH: &str = "$ORIGIN/../../torch/lib:$ORIGIN/../lib";

/// Compiled in: no path of the machine that builds.
const RELOCATABLE: &str = "FRUGAL_RELOCATABLE";

/// The linker, with `@…@` in place of what [`linker`] finds.
const LINKER: &str = include_str!("link.py");
const COMPATIBILITY: &str = include_str!("compat.c");
/// The release of zig whose stubs of glibc are linked to.
const ZIG: &str = "ziglang==0.17.0";

/// The oldest glibc that a program shall run with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Glibc {
    /// The one of this machine.
    Host,
    /// 2.N.
    Version(u32),
}

impl FromStr for Glibc {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.strip_prefix("2.").map(str::parse)) {
            ("host", _) => Ok(Self::Host),
            // The oldest that torch's own wheels run with.
            (_, Some(Ok(minor @ 28..))) => Ok(Self::Version(minor)),
            _ => Err("give 2.28 or a newer glibc, or host for the one of this machine".to_owned()),
        }
    }
}

/// The program, and what it needs.
pub(super) struct Program {
    pub(super) bytes: Vec<u8>,
    /// N of the oldest glibc 2.N that runs it.
    pub(super) glibc: u32,
}

impl Program {
    /// Compiles and links the program so that it runs with `glibc` and holds no path of this machine.
    ///
    /// # Errors
    /// A failed build; a program that is newer than `glibc`, or in which a path of this machine is left.
    pub(super) fn build(workspace: &Workspace, torch: &Torch, pair: &Pair, glibc: Glibc) -> Result<Self> {
        let path = compile(workspace, torch, pair, glibc)?;
        let bytes = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        for (folder, _) in own_folders(workspace, torch) {
            if let Some(text) = text_with(&bytes, &folder) {
                bail!(
                    "the program holds a path of this machine: {text}; see that what puts it there has its prefix mapped"
                );
            }
        }
        let program = Self::new(bytes)?;
        if let Glibc::Version(wanted) = glibc {
            ensure!(
                program.glibc <= wanted,
                "the program needs glibc 2.{}, and 2.{wanted} was asked for; see what is newer with `readelf --version-info`, and \
                 define it in xtask/src/release/compat.c",
                program.glibc
            );
        }
        Ok(program)
    }

    /// Takes a program that was built before: it may hold paths of this machine.
    ///
    /// # Errors
    /// No such file, or one that is not linked to libtorch.
    pub(super) fn read(path: &Path) -> Result<Self> {
        Self::new(std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?)
            .with_context(|| path.display().to_string())
    }

    fn new(mut bytes: Vec<u8>) -> Result<Self> {
        elf::set_search_path(&mut bytes, SEARCH)?;
        let needs: Needs = elf::needs(&bytes)?;
        Ok(Self { glibc: platform::glibc(&needs)?, bytes })
    }
}

/// The folders of this machine that a build reads, and what stands for them in the program.
fn own_folders(workspace: &Workspace, torch: &Torch) -> Vec<(PathBuf, &'static str)> {
    let home = |variable: &str, folder: &str| match std::env::var_os(variable) {
        Some(folder) => Some(PathBuf::from(folder)),
        None => Some(PathBuf::from(std::env::var_os("HOME")?).join(folder)),
    };
    let folders = [
        (Some(workspace.root.clone()), "frugal"),
        (home("CARGO_HOME", ".cargo"), "cargo"),
        (home("RUSTUP_HOME", ".rustup"), "rustup"),
        (torch.folder.canonicalize().ok(), "torch"),
    ];
    folders.into_iter().filter_map(|(folder, name)| Some((folder?, name))).collect()
}

/// The printable text in `bytes` that begins with `folder`.
fn text_with(bytes: &[u8], folder: &Path) -> Option<String> {
    let wanted = folder.as_os_str().as_encoded_bytes();
    let at = memchr::memmem::find(bytes, wanted)?;
    let text = bytes[at..].iter().take(200).take_while(|byte| (b' '..=b'~').contains(byte));
    Some(text.map(|&byte| char::from(byte)).collect())
}

/// Runs cargo and returns the program's path. Its flags are not those of other builds, so it has a target folder of its own.
fn compile(workspace: &Workspace, torch: &Torch, pair: &Pair, glibc: Glibc) -> Result<PathBuf> {
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let folder = workspace.root.join("target/relocatable");
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let (mut rust, mut native) = (OsString::from(format!("-Clink-arg=-Wl,-rpath,{SEARCH}")), OsString::new());
    for (own, name) in own_folders(workspace, torch) {
        for (flags, flag) in [(&mut rust, "\x1f--remap-path-prefix="), (&mut native, " -ffile-prefix-map=")] {
            flags.push(flag);
            flags.push(&own);
            flags.push(format!("={name}"));
        }
    }
    let mut command = cargo::command(workspace);
    command.args(["rustc", "--release", "--package", "frugal-cli", "--bin", "frugal", "--target", &target]);
    command.arg("--target-dir").arg(&folder);
    command.env("CARGO_ENCODED_RUSTFLAGS", rust).env("CFLAGS", &native).env("CXXFLAGS", &native);
    command.env(RELOCATABLE, "1");
    if let Glibc::Version(minor) = glibc {
        let linker =
            linker(&folder, torch, pair, &format!("{}-linux-gnu.2.{minor}", std::env::consts::ARCH))?;
        // It takes the arguments of a compiler; rustc would guess from its name.
        command.arg("--").arg("-C").arg(linker_flag(&linker)).args(["-C", "linker-flavor=gcc"]);
    }
    eprintln!("build: the program, in {}", folder.display());
    let status = command.status().context("cannot run cargo")?;
    ensure!(status.success(), "the build failed; cargo's errors are above");
    Ok(folder.join(target).join("release/frugal"))
}

fn linker_flag(linker: &Path) -> OsString {
    let mut flag = OsString::from("linker=");
    flag.push(linker);
    flag
}

/// Writes the linker for zig's `target` into `folder`.
fn linker(folder: &Path, torch: &Torch, pair: &Pair, target: &str) -> Result<PathBuf> {
    let recipe = Recipe {
        name: ZIG.replace("==", "-"),
        what: format!("zig's linker ({ZIG}), for an older glibc than this machine's"),
        torch: pair.torch.into(),
        size: "0.5 GB",
        packages: vec![ZIG.into()],
        fingerprint: ZIG.into(),
    };
    let works = |folder: &Path| venv::wheels_complete(folder, &["ziglang"]);
    let zig = venv::ensure(&cache_folder()?, &recipe, works)
        .context("--glibc host links without zig, for machines as new as this one")?;

    let object = folder.join("compat.o");
    let source = folder.join("compat.c");
    std::fs::write(&source, COMPATIBILITY)?;
    let status = Command::new("cc").args(["-c", "-O2", "-fPIC", "-o"]).arg(&object).arg(&source).status();
    ensure!(status.context("cannot run cc")?.success(), "cc could not compile {}", source.display());

    let text = LINKER
        .replace("@PYTHON@", &zig.python().display().to_string())
        .replace("@STDCXX@", &library_of_the_compiler("libstdc++.so.6")?)
        .replace("@GCC_S@", &library_of_the_compiler("libgcc_s.so.1")?)
        .replace("@TORCH@", &torch.folder.join("lib").display().to_string())
        .replace("@COMPAT@", &object.display().to_string())
        .replace("@SEARCH@", SEARCH)
        .replace("@TARGET@", target);
    // Cargo links again where the linker's path has changed.
    let digest = hex(&Sha256::digest([&text, COMPATIBILITY].concat()));
    let linker = folder.join(format!("link-{digest:.16}.py"));
    std::fs::write(&linker, text)?;
    std::fs::set_permissions(&linker, std::fs::Permissions::from_mode(0o755))?;
    Ok(linker)
}

/// The path of a library that the host's C++ compiler links.
fn library_of_the_compiler(name: &str) -> Result<String> {
    let output =
        Command::new("c++").arg(format!("-print-file-name={name}")).output().context("cannot run c++")?;
    let path = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    ensure!(Path::new(&path).is_absolute(), "the C++ compiler has no {name}");
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_glibc_is_named_as_its_version() {
        assert_eq!("host".parse(), Ok(Glibc::Host));
        assert_eq!("2.28".parse(), Ok(Glibc::Version(28)));
        assert_eq!("2.35".parse(), Ok(Glibc::Version(35)));
        for wrong in ["2.17", "2", "3.28", "2.x", "", "2.28.1"] {
            assert!(wrong.parse::<Glibc>().unwrap_err().starts_with("give 2.28"), "{wrong}");
        }
    }

    #[test]
    fn a_path_of_this_machine_is_found_with_what_follows() {
        let bytes = b"\0some\0/users/me/x/src/lib.rs\0other";
        assert_eq!(text_with(bytes, Path::new("/users/me")).as_deref(), Some("/users/me/x/src/lib.rs"));
        assert_eq!(text_with(bytes, Path::new("/users/you")), None);
    }

    #[test]
    fn the_linker_has_no_other_placeholders() {
        for name in ["PYTHON", "STDCXX", "GCC_S", "TORCH", "COMPAT", "SEARCH", "TARGET"] {
            assert!(LINKER.contains(&format!("@{name}@")), "{name}");
        }
        assert_eq!(
            LINKER.matches('@').count(),
            2 * 9 + 2,
            "torch stands three times, and once in the docstring"
        );
    }
}
