//! The platform tag of a wheel: the oldest Linux distributions that run a program.

use anyhow::{Result, bail, ensure};

use super::elf::Needs;

/// A tag of PEP 600, `manylinux_2_N`: distributions whose glibc is 2.N or newer.
#[derive(Debug)]
struct Policy {
    /// N.
    glibc: u32,
    /// The newest `GLIBCXX_3.4.N` that all of them have.
    glibcxx: u32,
    /// The newest `CXXABI_1.3.N` that all of them have.
    cxxabi: u32,
}

/// From `manylinux-policy.json` of the package `auditwheel` 6, for x86-64.
const POLICIES: [Policy; 7] = [
    Policy { glibc: 17, glibcxx: 19, cxxabi: 7 },
    Policy { glibc: 24, glibcxx: 22, cxxabi: 10 },
    Policy { glibc: 28, glibcxx: 24, cxxabi: 11 },
    Policy { glibc: 31, glibcxx: 28, cxxabi: 12 },
    Policy { glibc: 34, glibcxx: 29, cxxabi: 13 },
    Policy { glibc: 35, glibcxx: 30, cxxabi: 13 },
    Policy { glibc: 39, glibcxx: 33, cxxabi: 15 },
];

/// Libraries that every Linux on which torch runs has: glibc's and GCC's.
const SYSTEM: [&str; 9] = [
    "ld-linux-x86-64.so.2",
    "libc.so.6",
    "libdl.so.2",
    "libgcc_s.so.1",
    "libm.so.6",
    "libpthread.so.0",
    "librt.so.1",
    "libstdc++.so.6",
    "libutil.so.1",
];

/// Libraries in torch's folder that the program needs.
const TORCH: [&str; 3] = ["libc10.so", "libgomp.so.1", "libtorch_cpu.so"];

/// Whether every Linux on which torch runs has the library.
pub(super) fn of_the_system(library: &str) -> bool {
    SYSTEM.contains(&library)
}

/// N of the tag `manylinux_2_N` that a program fits.
///
/// # Errors
/// It needs a library that not every machine has, or is newer than every known tag.
pub(super) fn glibc(needs: &Needs) -> Result<u32> {
    if let Some(library) =
        needs.libraries.iter().find(|library| !of_the_system(library) && !TORCH.contains(&&***library))
    {
        bail!("the program needs {library}, which is in no torch and not on every Linux");
    }
    for library in ["libtorch_cpu.so", "libc10.so"] {
        ensure!(
            needs.libraries.contains(library),
            "the program does not need {library}: it is not linked to torch"
        );
    }
    // The last number of the version, and 0 without one: 3.4 is older than 3.4.1.
    let last = |prefix: &str, length: usize| {
        needs.versions.get(prefix).map_or(0, |version| version.get(length - 1).copied().unwrap_or(0))
    };
    let (glibcxx, cxxabi) = (last("GLIBCXX", 3), last("CXXABI", 3));
    match POLICIES.iter().find(|policy| policy.glibcxx >= glibcxx && policy.cxxabi >= cxxabi) {
        Some(policy) => Ok(policy.glibc.max(last("GLIBC", 2))),
        None => bail!(
            "the program needs GLIBCXX_3.4.{glibcxx} and CXXABI_1.3.{cxxabi}, which no known distribution has; link it with an \
             older compiler"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn needs(libraries: &[&str], versions: &[(&str, &[u32])]) -> Needs {
        Needs {
            libraries: libraries.iter().map(|&library| library.to_owned()).collect(),
            versions: versions
                .iter()
                .map(|(prefix, version)| ((*prefix).to_owned(), version.to_vec()))
                .collect(),
            ..Needs::default()
        }
    }

    #[test]
    fn a_tag_is_the_oldest_that_has_every_version() {
        let tag = |libc: &[u32], glibcxx: &[u32], cxxabi: &[u32]| {
            let versions = [("GLIBC", libc), ("GLIBCXX", glibcxx), ("CXXABI", cxxabi), ("GCC", &[4, 2, 0])];
            let needs = needs(&["libc.so.6", "libtorch_cpu.so", "libc10.so"], &versions);
            glibc(&needs).map_err(|error| error.to_string())
        };
        // torch 2.13 itself, the program as it is linked for 2.28, and as GCC 12 links it.
        assert_eq!(tag(&[2, 28], &[3, 4, 22], &[1, 3, 11]), Ok(28));
        assert_eq!(tag(&[2, 28], &[3, 4, 21], &[1, 3, 11]), Ok(28));
        assert_eq!(tag(&[2, 34], &[3, 4, 29], &[1, 3, 13]), Ok(34));
        assert_eq!(tag(&[2, 2, 5], &[3, 4], &[1, 3]), Ok(17));
        assert_eq!(tag(&[2, 30], &[3, 4, 21], &[1, 3, 9]), Ok(30));
        assert_eq!(tag(&[2, 17], &[3, 4, 30], &[1, 3, 9]), Ok(35));
        assert!(tag(&[2, 17], &[3, 4, 99], &[1, 3, 9]).unwrap_err().contains("GLIBCXX_3.4.99"));
    }

    #[test]
    fn libraries_that_a_machine_may_lack_are_refused() {
        let error = |libraries: &[&str]| glibc(&needs(libraries, &[])).unwrap_err().to_string();
        assert_eq!(
            error(&["libtorch_cpu.so", "libc10.so", "libzstd.so.1"]),
            "the program needs libzstd.so.1, which is in no torch and not on every Linux"
        );
        assert_eq!(
            error(&["libc.so.6", "libtorch_cpu.so"]),
            "the program does not need libc10.so: it is not linked to torch"
        );
    }
}
