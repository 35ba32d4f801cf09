//! Which libtorch each version of `tch` is made for, and which of these pairs `Cargo.lock` has.
//!
//! This table is the one place where xtask knows versions. A pair that is added here is also added to the requirement of
//! `tch` and `torch-sys` in the workspace's `Cargo.toml`, and to `crates/runtime/cpp/versions.h`.

use std::path::Path;

use anyhow::{Context, Result, bail};

/// A version of `tch` and of `torch-sys`, which are published together, and the libtorch that they are made for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Pair {
    /// Version of `tch` and `torch-sys`.
    pub(crate) tch: &'static str,
    /// `TORCH_VERSION` in the build script of `torch-sys`.
    pub(crate) torch: &'static str,
    /// The packages that libtorch's CPU library itself links to on Linux, as pip names them: the profiler's library and CUDA's
    /// runtime, of the release of `cuda-toolkit` that torch's wheel requires.
    pub(crate) slim: [(&'static str, &'static str); 2],
}

/// All pairs, from the oldest to the newest. `tch` 0.25, for torch 2.12, was never published.
pub(crate) const PAIRS: [Pair; 2] = [
    Pair {
        tch: "0.24.0",
        torch: "2.11.0",
        slim: [("nvidia-cuda-cupti", "13.0.*"), ("nvidia-cuda-runtime", "13.0.*")],
    },
    Pair {
        tch: "0.26.0",
        torch: "2.13.0",
        slim: [("nvidia-cuda-cupti", "13.0.*"), ("nvidia-cuda-runtime", "13.0.*")],
    },
];

impl Pair {
    /// The pair whose torch is `version`: `2.13`, `2.13.0` or `2.13.0+cu130`.
    pub(crate) fn of_torch(version: &str) -> Result<&'static Self> {
        let version = super::public_version(version);
        match PAIRS.iter().find(|pair| version == pair.torch || version == pair.series()) {
            Some(pair) => Ok(pair),
            None => bail!("no tch that is known here goes with torch {version}; the pairs are {}", known()),
        }
    }

    /// The pair with the newest torch.
    pub(crate) fn newest() -> &'static Self {
        &PAIRS[PAIRS.len() - 1]
    }

    /// The pair that the text of a `Cargo.lock` has.
    pub(crate) fn of_lock(text: &str) -> Result<&'static Self> {
        let lock: toml::Table = text.parse().context("Cargo.lock is no TOML")?;
        let packages = lock.get("package").and_then(toml::Value::as_array).into_iter().flatten();
        let versions: Vec<&str> = packages
            .filter(|package| package.get("name").and_then(toml::Value::as_str) == Some("torch-sys"))
            .filter_map(|package| package.get("version").and_then(toml::Value::as_str))
            .collect();
        let [version] = versions.as_slice() else {
            bail!("Cargo.lock has {} versions of torch-sys, and must have one", versions.len());
        };
        match PAIRS.iter().find(|pair| series(version) == series(pair.tch)) {
            Some(pair) => Ok(pair),
            None => bail!(
                "Cargo.lock has torch-sys {version}, and the pairs that are known here are {}; `cargo xtask setup --torch \
                 VERSION` takes one of them",
                known()
            ),
        }
    }

    /// The pair of the `Cargo.lock` in the folder `root`.
    pub(crate) fn locked(root: &Path) -> Result<&'static Self> {
        let file = root.join("Cargo.lock");
        let text =
            std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        Self::of_lock(&text)
    }

    /// torch's version without the patch: `2.13`.
    pub(crate) fn series(&self) -> &'static str {
        series(self.torch)
    }
}

/// `2.13` of `2.13.0`.
fn series(version: &str) -> &str {
    version.match_indices('.').nth(1).map_or(version, |(at, _)| &version[..at])
}

fn known() -> String {
    PAIRS.map(|pair| format!("torch {} with tch {}", pair.torch, pair.tch)).join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lock(versions: &[&str]) -> String {
        let package =
            |version: &&str| format!("[[package]]\nname = \"torch-sys\"\nversion = \"{version}\"\n\n");
        let others = "version = 4\n\n[[package]]\nname = \"tch\"\nversion = \"9.9.9\"\n\n[[package]]\nname = \"xtask\"\n\n";
        others.to_owned() + &versions.iter().map(package).collect::<String>()
    }

    #[test]
    fn the_lock_says_which_torch_is_expected() {
        let check = |versions: &[&str], expected: Result<&str, &str>| {
            let torch = Pair::of_lock(&lock(versions)).map(|pair| pair.torch).map_err(|e| format!("{e:#}"));
            assert_eq!(torch, expected.map_err(str::to_owned));
        };
        check(&["0.24.0"], Ok("2.11.0"));
        check(&["0.24.3"], Ok("2.11.0"));
        check(&["0.26.0"], Ok("2.13.0"));
        check(
            &["0.25.0"],
            Err(
                "Cargo.lock has torch-sys 0.25.0, and the pairs that are known here are torch 2.11.0 with tch 0.24.0, \
                 torch 2.13.0 with tch 0.26.0; `cargo xtask setup --torch VERSION` takes one of them",
            ),
        );
        check(&[], Err("Cargo.lock has 0 versions of torch-sys, and must have one"));
        check(&["0.24.0", "0.26.0"], Err("Cargo.lock has 2 versions of torch-sys, and must have one"));
        assert!(Pair::of_lock("[[").unwrap_err().to_string().contains("no TOML"));
    }

    #[test]
    fn a_torch_is_named_with_or_without_its_patch() {
        for (text, tch) in
            [("2.11", "0.24.0"), ("2.11.0", "0.24.0"), ("2.13", "0.26.0"), ("2.13.0+cu130", "0.26.0")]
        {
            assert_eq!(Pair::of_torch(text).unwrap().tch, tch, "{text}");
        }
        for text in ["2.12", "2.1", "2", "", "2.13.1", "0.26"] {
            let message = Pair::of_torch(text).unwrap_err().to_string();
            assert_eq!(
                message,
                format!(
                    "no tch that is known here goes with torch {text}; the pairs are torch 2.11.0 with tch 0.24.0, torch \
                     2.13.0 with tch 0.26.0"
                )
            );
        }
    }

    #[test]
    fn the_checkouts_own_lock_and_requirement_are_known_pairs() {
        let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
        Pair::locked(root).unwrap();
        let manifest = std::fs::read_to_string(root.join("Cargo.toml")).unwrap();
        let manifest: toml::Table = manifest.parse().unwrap();
        // The first minor version of the table, and the one after the last.
        let minor = |pair: &Pair| -> u32 { series(pair.tch).strip_prefix("0.").unwrap().parse().unwrap() };
        let expected = format!(">=0.{}, <0.{}", minor(&PAIRS[0]), minor(&PAIRS[PAIRS.len() - 1]) + 1);
        for name in ["tch", "torch-sys"] {
            let requirement = manifest["workspace"]["dependencies"][name].as_str();
            assert_eq!(requirement, Some(&*expected), "{name}");
        }
    }

    #[test]
    fn the_shim_admits_the_same_versions() {
        let header = include_str!("../../../crates/runtime/cpp/versions.h");
        for pair in &PAIRS {
            let minor = pair.series().strip_prefix("2.").unwrap();
            assert!(
                header.contains(&format!("TORCH_VERSION_MINOR == {minor}")),
                "versions.h without {}",
                pair.torch
            );
        }
        assert_eq!(header.matches("TORCH_VERSION_MINOR == ").count(), PAIRS.len());
    }
}
