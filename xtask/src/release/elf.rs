//! What an ELF program needs of the machine that runs it, and where it looks for its libraries.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail};
use object::Endianness;
use object::elf::{self, FileHeader64};
use object::read::SectionIndex;
use object::read::elf::{Dyn, FileHeader, SectionHeader};

/// A version of a library's symbols: `[2, 28]` of `GLIBC_2.28`.
pub(super) type Version = Vec<u32>;

/// What the loader must find.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Needs {
    /// Names of the shared libraries.
    pub(super) libraries: BTreeSet<String>,
    /// For each prefix of versions (`GLIBC`, `GLIBCXX`, `CXXABI`, `GCC`), the newest.
    pub(super) versions: BTreeMap<String, Version>,
    /// The folders where the libraries are looked for before those in `LD_LIBRARY_PATH`: the tag `DT_RPATH`.
    pub(super) search_first: Option<String>,
    /// The folders where they are looked for after those: `DT_RUNPATH`.
    pub(super) search_last: Option<String>,
}

/// Reads the dynamic section and the needed versions of a 64-bit program.
///
/// # Errors
/// Bytes that are no such program.
pub(super) fn needs(program: &[u8]) -> Result<Needs> {
    let header = FileHeader64::<Endianness>::parse(program).context("no 64-bit ELF file")?;
    let endian = header.endian()?;
    let sections = header.sections(endian, program)?;
    let table = sections.dynamic_table(endian, program)?;
    let text = |entry| Ok::<_, anyhow::Error>(String::from_utf8_lossy(table.string(entry)?).into_owned());
    let mut needs = Needs::default();
    for entry in &table {
        match entry.tag {
            elf::DT_NEEDED => drop(needs.libraries.insert(text(entry)?)),
            elf::DT_RPATH => needs.search_first = Some(text(entry)?),
            elf::DT_RUNPATH => needs.search_last = Some(text(entry)?),
            _ => {}
        }
    }
    let Some((libraries, strings)) = sections.gnu_verneed(endian, program)? else { return Ok(needs) };
    let strings = sections.strings(endian, program, strings)?;
    for library in libraries {
        let (_, versions) = library?;
        for version in versions {
            let name = String::from_utf8_lossy(version?.name(endian, strings)?).into_owned();
            let Some((prefix, version)) = parse_version(&name) else { continue };
            let newest = needs.versions.entry(prefix).or_default();
            *newest = version.max(std::mem::take(newest));
        }
    }
    Ok(needs)
}

/// `GLIBC` and `[2, 28]` of `GLIBC_2.28`. A name without numbers (`GLIBC_ABI_DT_RELR`) is no version.
fn parse_version(name: &str) -> Option<(String, Version)> {
    let (prefix, version) = name.rsplit_once('_')?;
    let numbers = version.split('.').map(|number| number.parse().ok()).collect::<Option<Version>>()?;
    Some((prefix.to_owned(), numbers))
}

/// Makes the loader look for libraries in `path` first: the program's search path, which must be at least as long, is replaced by
/// `path`, and its tag becomes `DT_RPATH`. With `DT_RUNPATH`, the folders of `LD_LIBRARY_PATH` would come first, and with them another
/// libtorch than the one that the program was linked to.
///
/// # Errors
/// Bytes that are no 64-bit program, a program without a search path, or one whose path is shorter.
pub(super) fn set_search_path(program: &mut [u8], path: &str) -> Result<()> {
    let header = FileHeader64::<Endianness>::parse(&*program).context("no 64-bit ELF file")?;
    let endian = header.endian()?;
    let sections = header.sections(endian, &*program)?;
    let dynamic = sections.iter().find(|section| section.sh_type(endian) == elf::SHT_DYNAMIC);
    let dynamic = dynamic.context("a program that loads no library")?;
    let entries = dynamic.data_as_array::<elf::Dyn64<Endianness>, _>(endian, &*program)?;
    let is_path =
        |entry: &elf::Dyn64<Endianness>| [elf::DT_RPATH, elf::DT_RUNPATH].contains(&entry.d_tag(endian));
    let index = entries.iter().position(is_path).context("the program has no search path to replace")?;
    let strings = sections.section(SectionIndex(dynamic.sh_link(endian) as usize))?.sh_offset(endian);
    let text = (strings + entries[index].d_val(endian)) as usize;
    let tag = dynamic.sh_offset(endian) as usize + index * size_of::<elf::Dyn64<Endianness>>();
    let old = program[text..].iter().position(|&byte| byte == 0).context("the search path does not end")?;
    if path.len() > old {
        bail!("the program has room for a search path of {old} bytes, and {path} has {}", path.len());
    }
    program[text..text + old].fill(0);
    program[text..text + path.len()].copy_from_slice(path.as_bytes());
    let first = elf::DT_RPATH.0;
    let bytes = if endian == Endianness::Little { first.to_le_bytes() } else { first.to_be_bytes() };
    program[tag..tag + 8].copy_from_slice(&bytes);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// A program that the host's compiler links with `flags`.
    fn linked(flags: &[&str]) -> Vec<u8> {
        let dir = tempfile::tempdir().unwrap();
        let (source, program) = (dir.path().join("a.c"), dir.path().join("a"));
        std::fs::write(&source, "#include <math.h>\nint main(int n, char **v) { return (int)pow(n, n); }\n")
            .unwrap();
        let status =
            Command::new("cc").args(["-o".as_ref(), &*program, &*source]).arg("-lm").args(flags).status();
        assert!(status.unwrap().success());
        std::fs::read(program).unwrap()
    }

    #[test]
    fn needs_are_those_that_the_loader_reads() {
        let program = linked(&["-Wl,--enable-new-dtags,-rpath,$ORIGIN/../lib"]);
        let needs = needs(&program).unwrap();
        let expected = ["libc.so.6", "libm.so.6"].map(str::to_owned);
        assert!(needs.libraries.is_superset(&expected.into()), "{needs:?}");
        assert_eq!(needs.search_last.as_deref(), Some("$ORIGIN/../lib"));
        assert_eq!(needs.search_first, None);
        // `pow` has a version of its own since 2.29.
        assert!(needs.versions["GLIBC"] >= vec![2, 29], "{needs:?}");
        assert!(super::needs(b"#!/bin/sh\n").is_err());
    }

    #[test]
    fn a_search_path_is_replaced_in_its_place() {
        let mut program = linked(&["-Wl,--enable-new-dtags,-rpath,$ORIGIN/../../lib"]);
        let before = needs(&program).unwrap();
        set_search_path(&mut program, "$ORIGIN/../lib").unwrap();
        let after = needs(&program).unwrap();
        assert_eq!((after.search_first.as_deref(), after.search_last), (Some("$ORIGIN/../lib"), None));
        assert_eq!((after.libraries, after.versions), (before.libraries, before.versions));
        let error = set_search_path(&mut program, "$ORIGIN/../../../lib").unwrap_err().to_string();
        assert_eq!(
            error,
            "the program has room for a search path of 14 bytes, and $ORIGIN/../../../lib has 20"
        );
        let without = set_search_path(&mut linked(&[]), "a").unwrap_err().to_string();
        assert_eq!(without, "the program has no search path to replace");
    }

    #[test]
    fn a_version_has_a_prefix_and_numbers() {
        assert_eq!(parse_version("GLIBCXX_3.4.21"), Some(("GLIBCXX".into(), vec![3, 4, 21])));
        assert_eq!(parse_version("GLIBC_ABI_DT_RELR"), None);
        assert_eq!(parse_version("GLIBC_PRIVATE"), None);
        assert!(vec![2, 4] < vec![2, 28], "numbers are compared as numbers");
    }
}
