//! The memory limit of this process's control group (cgroup), version 2 or 1.
//!
//! `/proc/self/cgroup` names the process's group; a limit of any group above it applies too. A container often sees its own group as
//! the root. Pages of files that the system would drop before it refuses an allocation (`inactive_file`) do not count as used.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// The memory of a control group, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ControlGroup {
    /// The limit.
    pub limit: u64,
    /// Memory of its processes in bytes, without pages of files that can be dropped.
    pub used: u64,
}

/// From here on a limit is none: version 1 states one near 2⁶³ for a group without.
const NO_LIMIT: u64 = 1 << 60;

/// Returns the control group that leaves this process the least memory; `None` without a limit.
///
/// # Errors
/// A `/proc/self/cgroup` that exists and cannot be read.
pub fn control_group() -> Result<Option<ControlGroup>> {
    let path = PathBuf::from("/proc/self/cgroup");
    let groups = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(cause) => return Err(Error::Io { path, cause }),
    };
    Ok(tightest(Path::new("/sys/fs/cgroup"), &groups))
}

/// Names of the files of a version.
struct Files {
    limit: &'static str,
    used: &'static str,
    /// The line of `memory.stat` with the pages that can be dropped.
    dropped: &'static str,
}

const VERSION_2: Files = Files { limit: "memory.max", used: "memory.current", dropped: "inactive_file " };
const VERSION_1: Files =
    Files { limit: "memory.limit_in_bytes", used: "memory.usage_in_bytes", dropped: "total_inactive_file " };

/// The group with the least memory left among those that `groups` (the text of `/proc/self/cgroup`) names under `root`, and theirs above.
fn tightest(root: &Path, groups: &str) -> Option<ControlGroup> {
    // `0::/path` is of version 2, `4:cpu,memory:/path` of version 1.
    let of = |line: &str| -> Option<(PathBuf, Files, String)> {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        match controllers {
            "" => Some((root.to_owned(), VERSION_2, path.to_owned())),
            _ if controllers.split(',').any(|one| one == "memory") => {
                Some((root.join("memory"), VERSION_1, path.to_owned()))
            }
            _ => None,
        }
    };
    let mut found = Vec::new();
    for (top, files, path) in groups.lines().filter_map(of) {
        let own = top.join(path.trim_start_matches('/'));
        let above = own.ancestors().take_while(|folder| folder.starts_with(&top));
        // A container may see its own group as the root and still be told the path outside.
        let folders: Vec<&Path> = above.chain([top.as_path()]).collect();
        found.extend(folders.into_iter().filter_map(|folder| read(folder, &files)));
    }
    found.into_iter().min_by_key(|group| group.limit.saturating_sub(group.used))
}

fn read(folder: &Path, files: &Files) -> Option<ControlGroup> {
    let text = |name: &str| std::fs::read_to_string(folder.join(name)).ok();
    let number = |name: &str| text(name)?.trim().parse::<u64>().ok();
    let limit = number(files.limit).filter(|limit| *limit < NO_LIMIT)?;
    let dropped = text("memory.stat").and_then(|stat| {
        stat.lines().find_map(|line| line.strip_prefix(files.dropped)?.trim().parse::<u64>().ok())
    });
    let used = number(files.used)?.saturating_sub(dropped.unwrap_or(0));
    Some(ControlGroup { limit, used })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, files: &[(&str, &str)]) {
        for (name, text) in files {
            let path = root.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
    }

    #[test]
    fn version_2_takes_the_tightest_group_on_the_way_up() {
        let root = tempfile::tempdir().unwrap();
        write(
            root.path(),
            &[
                ("a/memory.max", "8000\n"),
                ("a/memory.current", "6000\n"),
                ("a/memory.stat", "anon 1\ninactive_file 500\nfile 9\n"),
                ("a/b/memory.max", "max\n"),
                ("a/b/memory.current", "5000\n"),
            ],
        );
        let found = tightest(root.path(), "0::/a/b\n");
        assert_eq!(found, Some(ControlGroup { limit: 8000, used: 5500 }));
        // A tighter one inside.
        write(root.path(), &[("a/b/memory.max", "5100\n")]);
        assert_eq!(tightest(root.path(), "0::/a/b\n"), Some(ControlGroup { limit: 5100, used: 5000 }));
        assert_eq!(tightest(root.path(), "0::/c\n"), None);
        assert_eq!(tightest(root.path(), ""), None);
    }

    #[test]
    fn version_1_and_a_container_whose_group_is_the_root() {
        let root = tempfile::tempdir().unwrap();
        write(
            root.path(),
            &[
                ("memory/memory.limit_in_bytes", "4000\n"),
                ("memory/memory.usage_in_bytes", "1500\n"),
                ("memory/memory.stat", "inactive_file 1\ntotal_inactive_file 200\n"),
            ],
        );
        let text = "5:cpu,cpuacct:/x\n4:memory:/docker/0123\n";
        assert_eq!(tightest(root.path(), text), Some(ControlGroup { limit: 4000, used: 1300 }));
        write(root.path(), &[("memory/memory.limit_in_bytes", "9223372036854771712\n")]);
        assert_eq!(tightest(root.path(), text), None);
    }
}
