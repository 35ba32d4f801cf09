//! Chooses the libtorch: `$LIBTORCH`, the active virtual environment's, or a private installation.

use std::path::Path;

use anyhow::{Context, Result, bail};

use super::Environment;
use crate::torch::{Pair, Torch, Variant};
use crate::venv;

/// The action of `setup`.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Decision {
    /// Keep the existing link.
    Keep(Torch),
    /// Link this one; the string is its origin.
    Link(Torch, &'static str),
    /// Install the wheels of this variant.
    Install(Variant),
}

/// Decides, and adds notes on the candidates that it skips.
///
/// A usable link is always kept, so that entering or leaving a virtual environment does not cause a second
/// build; only an exported `LIBTORCH` or a flag changes it.
pub(super) fn decide(
    environment: &Environment,
    pair: &Pair,
    wanted: Option<Variant>,
) -> Result<(Decision, Vec<String>)> {
    let mut notes = Vec::new();
    if let Some(folder) = &environment.libtorch {
        return Ok((Decision::Link(exported(folder, pair, wanted)?, "from LIBTORCH"), notes));
    }
    match linked(&environment.link, pair) {
        Some(Ok(torch)) if wanted.is_none_or(|variant| variant == torch.variant) => {
            if torch.variant == Variant::Cpu && environment.driver && wanted.is_none() {
                notes.push(
                    "this machine has an NVIDIA driver, but the linked libtorch is for the CPU only; `cargo xtask \
                     setup --cuda` replaces it"
                        .into(),
                );
            }
            return Ok((Decision::Keep(torch), notes));
        }
        Some(Ok(torch)) => {
            notes.push(format!("the linked libtorch is for {}; replacing the link", torch.variant))
        }
        Some(Err(error)) => notes.push(format!("the link .libtorch is unusable ({error:#}); replacing it")),
        None => {}
    }
    if let Some(active) = &environment.virtual_env {
        let folder =
            venv::site_packages(active).map(|site| site.join("torch")).filter(|torch| torch.exists());
        match folder.map(|folder| Torch::inspect(&folder)) {
            Some(Ok(torch)) if !torch.fits(pair) => notes.push(format!(
                "the active environment {} has torch {}, and {} is needed; installing that privately{}",
                active.display(),
                torch.version,
                pair.torch,
                other_pair(&torch).map(|switch| format!(" ({switch} takes the other)")).unwrap_or_default()
            )),
            Some(Ok(torch)) if wanted == Some(Variant::Cuda) && torch.variant == Variant::Cpu => {
                notes.push(format!(
                    "the active environment {} has torch for the CPU only; installing CUDA's privately",
                    active.display()
                ))
            }
            Some(Ok(torch)) => return Ok((Decision::Link(torch, "from the active environment"), notes)),
            Some(Err(error)) => notes.push(format!("the active environment's torch is ignored: {error:#}")),
            None => {}
        }
    }
    let by_driver = if environment.driver { Variant::Cuda } else { Variant::Cpu };
    Ok((Decision::Install(wanted.unwrap_or(by_driver)), notes))
}

/// Returns the libtorch of `$LIBTORCH`, or an error: the caller's choice is never replaced by another.
fn exported(folder: &Path, pair: &Pair, wanted: Option<Variant>) -> Result<Torch> {
    let folder = std::path::absolute(folder).context("LIBTORCH is not a usable path")?;
    let torch =
        Torch::inspect(&folder).context("LIBTORCH is set and cannot be used; correct it, or unset it")?;
    if !torch.fits(pair) {
        let Pair { tch, torch: needed, .. } = pair;
        bail!(
            "LIBTORCH is {}, which is version {}, and tch {tch} needs {needed}; unset LIBTORCH (setup installs {needed} \
             then), or point it to a libtorch {needed}{}",
            folder.display(),
            torch.version,
            other_pair(&torch).map(|switch| format!(", or run {switch}")).unwrap_or_default()
        );
    }
    if wanted == Some(Variant::Cuda) && torch.variant == Variant::Cpu {
        bail!(
            "CUDA was asked for, and the libtorch in {} (from LIBTORCH) computes on the CPU only; unset LIBTORCH, or \
             point it to one with CUDA",
            folder.display()
        );
    }
    Ok(torch)
}

/// Returns the command that switches to this libtorch, if a known `tch` matches it.
fn other_pair(torch: &Torch) -> Option<String> {
    let pair = Pair::of_torch(&torch.version).ok()?;
    Some(format!("`cargo xtask setup --torch {}`", pair.series()))
}

/// Inspects the link: `None` if it is missing, a matching libtorch, or an error.
fn linked(link: &Path, pair: &Pair) -> Option<Result<Torch>> {
    link.symlink_metadata().ok()?;
    let folder = std::fs::read_link(link).unwrap_or_else(|_| link.to_owned());
    Some(Torch::inspect(&folder).and_then(|torch| {
        if torch.fits(pair) {
            return Ok(torch);
        }
        bail!("it leads to version {}, and {} is needed", torch.version, pair.torch)
    }))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::torch::tests::fake_torch;

    /// A machine with every kind of libtorch; each test takes away what it does not have.
    struct Machine {
        dir: tempfile::TempDir,
        environment: Environment,
    }

    impl Machine {
        fn bare() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let environment = Environment { link: dir.path().join(".libtorch"), ..Environment::default() };
            Self { dir, environment }
        }

        fn folder(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        fn exported(mut self, version: &str, cuda: bool) -> Self {
            fake_torch(&self.folder("exported/torch"), version, cuda);
            self.environment.libtorch = Some(self.folder("exported/torch"));
            self
        }

        fn virtual_env(mut self, version: &str, cuda: bool) -> Self {
            fake_torch(&self.folder("venv/lib/python3.12/site-packages/torch"), version, cuda);
            self.environment.virtual_env = Some(self.folder("venv"));
            self
        }

        fn linked(self, version: &str, cuda: bool) -> Self {
            fake_torch(&self.folder("linked/torch"), version, cuda);
            std::os::unix::fs::symlink(self.folder("linked/torch"), &self.environment.link).unwrap();
            self
        }

        fn driver(mut self) -> Self {
            self.environment.driver = true;
            self
        }

        /// The decision for torch 2.11 in short, then the notes.
        fn decide(&self, wanted: Option<Variant>) -> String {
            self.decide_for("2.11", wanted)
        }

        fn decide_for(&self, torch: &str, wanted: Option<Variant>) -> String {
            let pair = Pair::of_torch(torch).unwrap();
            match decide(&self.environment, pair, wanted) {
                Err(error) => format!("error: {error:#}").replace(&*self.dir.path().to_string_lossy(), "DIR"),
                Ok((decision, notes)) => {
                    let short = match decision {
                        Decision::Keep(torch) => format!("keep {}", torch.variant),
                        Decision::Link(torch, from) => format!("link {} {from}", torch.variant),
                        Decision::Install(variant) => format!("install {variant}"),
                    };
                    let lines: Vec<String> = std::iter::once(short).chain(notes).collect();
                    lines.join("\n").replace(&*self.dir.path().to_string_lossy(), "DIR")
                }
            }
        }
    }

    const CPU: Option<Variant> = Some(Variant::Cpu);
    const CUDA: Option<Variant> = Some(Variant::Cuda);

    #[test]
    fn sources_are_taken_in_order() {
        let full = || Machine::bare().virtual_env("2.11.0", true).linked("2.11.0", false);
        assert_eq!(full().exported("2.11.0", false).decide(None), "link CPU from LIBTORCH");
        assert_eq!(full().decide(None), "keep CPU");
        assert_eq!(
            Machine::bare().virtual_env("2.11.0+cu130", true).decide(None),
            "link CUDA from the active environment"
        );
        assert_eq!(Machine::bare().decide(None), "install CPU");
    }

    #[test]
    fn the_variant_follows_the_flag_then_the_driver() {
        assert_eq!(Machine::bare().driver().decide(None), "install CUDA");
        assert_eq!(Machine::bare().driver().decide(CPU), "install CPU");
        assert_eq!(Machine::bare().decide(CUDA), "install CUDA");
        assert!(
            Machine::bare()
                .linked("2.11.0", false)
                .decide(CUDA)
                .starts_with("install CUDA\nthe linked libtorch")
        );
        let note = Machine::bare().linked("2.11.0", false).driver().decide(None);
        assert!(note.starts_with("keep CPU\nthis machine has an NVIDIA driver"), "{note}");
    }

    #[test]
    fn a_wrong_version_is_named_with_the_right_one() {
        assert_eq!(
            Machine::bare().exported("2.9.1+cpu", false).decide(None),
            "error: LIBTORCH is DIR/exported/torch, which is version 2.9.1+cpu, and tch 0.24.0 needs 2.11.0; unset \
             LIBTORCH (setup installs 2.11.0 then), or point it to a libtorch 2.11.0"
        );
        assert_eq!(
            Machine::bare().virtual_env("2.9.1", false).decide(None),
            "install CPU\nthe active environment DIR/venv has torch 2.9.1, and 2.11.0 is needed; installing that privately"
        );
        assert!(
            Machine::bare()
                .linked("2.9.1", false)
                .decide(None)
                .starts_with("install CPU\nthe link .libtorch is unusable")
        );
    }

    #[test]
    fn the_other_pairs_torch_is_taken_by_a_switch_alone() {
        let sources = [
            Machine::bare().exported("2.13.0+cu130", false),
            Machine::bare().linked("2.13.0+cu130", false),
            Machine::bare().virtual_env("2.13.0+cu130", false),
        ];
        let taken = ["link CPU from LIBTORCH", "keep CPU", "link CPU from the active environment"];
        let refused = [
            "error: LIBTORCH is DIR/exported/torch, which is version 2.13.0+cu130, and tch 0.24.0 needs 2.11.0; unset \
             LIBTORCH (setup installs 2.11.0 then), or point it to a libtorch 2.11.0, or run `cargo xtask setup --torch \
             2.13`",
            "install CPU\nthe link .libtorch is unusable (it leads to version 2.13.0+cu130, and 2.11.0 is needed); \
             replacing it",
            "install CPU\nthe active environment DIR/venv has torch 2.13.0+cu130, and 2.11.0 is needed; installing that \
             privately (`cargo xtask setup --torch 2.13` takes the other)",
        ];
        for (machine, (taken, refused)) in sources.iter().zip(taken.into_iter().zip(refused)) {
            assert_eq!(machine.decide_for("2.13", None), taken);
            assert_eq!(machine.decide_for("2.11", None), refused);
        }
    }

    #[test]
    fn an_exported_libtorch_that_does_not_serve_is_an_error() {
        let mut machine = Machine::bare();
        machine.environment.libtorch = Some(machine.folder("nowhere"));
        assert_eq!(
            machine.decide(None),
            "error: LIBTORCH is set and cannot be used; correct it, or unset it: DIR/nowhere does not exist"
        );
        let message = Machine::bare().exported("2.11.0", false).decide(CUDA);
        assert!(message.contains("computes on the CPU only; unset LIBTORCH"), "{message}");
    }

    #[test]
    fn a_dangling_link_is_replaced() {
        let machine = Machine::bare();
        std::os::unix::fs::symlink(machine.folder("gone"), &machine.environment.link).unwrap();
        assert!(machine.decide(None).starts_with("install CPU\nthe link .libtorch is unusable"));
    }
}
