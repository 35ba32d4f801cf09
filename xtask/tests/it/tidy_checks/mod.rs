//! The checks of the tidy test, and the files that they read.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

pub(crate) mod dependencies;
pub(crate) mod layout;
pub(crate) mod sources;

/// The files of the project by their path from its top folder, with their text (empty if they are not text).
pub(crate) struct Tree {
    pub(crate) files: Vec<(String, String)>,
}

impl Tree {
    /// All files that belong to the project: what git tracks, and what is new and not ignored.
    pub(crate) fn read(root: &Path) -> Self {
        let listed = Command::new("git")
            .current_dir(root)
            .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
            .output()
            .ok()
            .filter(|output| output.status.success());
        let mut paths = match listed {
            Some(output) => {
                String::from_utf8_lossy(&output.stdout).split_terminator('\0').map(str::to_owned).collect()
            }
            None => walk(root),
        };
        paths.sort();
        paths.dedup();
        let present = paths.into_iter().filter(|path| root.join(path).is_file());
        let read =
            |path: &str| std::fs::read(root.join(path)).ok().and_then(|bytes| String::from_utf8(bytes).ok());
        Self { files: present.map(|path| (path.clone(), read(&path).unwrap_or_default())).collect() }
    }

    /// A sample.
    pub(crate) fn new(files: &[(&str, &str)]) -> Self {
        Self { files: files.iter().map(|&(path, text)| (path.to_owned(), text.to_owned())).collect() }
    }

    /// Path, text of every file whose name ends in one of `extensions`.
    pub(crate) fn with_extension<'a>(
        &'a self,
        extensions: &'a [&str],
    ) -> impl Iterator<Item = (&'a str, &'a str)> + 'a {
        let files = self.files.iter().map(|(path, text)| (path.as_str(), text.as_str()));
        files.filter(move |(path, _)| {
            Path::new(path).extension().and_then(|e| e.to_str()).is_some_and(|e| extensions.contains(&e))
        })
    }

    /// The manifests of the workspace's members by the member's folder.
    pub(crate) fn members(&self) -> BTreeMap<&str, toml::Table> {
        let manifests = self.files.iter().filter_map(|(path, text)| {
            let folder = path.strip_suffix("/Cargo.toml")?;
            let member =
                folder == "xtask" || folder.strip_prefix("crates/").is_some_and(|name| !name.contains('/'));
            member.then(|| (folder, text.parse().unwrap_or_else(|error| panic!("{path}: {error}"))))
        });
        manifests.collect()
    }
}

/// Lists the files of an unpacked archive without git: everything but dotfiles and build outputs.
fn walk(root: &Path) -> Vec<String> {
    let mut files = Vec::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("the project's folders are readable").flatten() {
            let name = entry.file_name();
            if name == "target" || name == "__pycache__" || name.to_string_lossy().starts_with('.') {
                continue;
            }
            if entry.path().is_dir() {
                folders.push(entry.path());
            } else if let Ok(path) = entry.path().strip_prefix(root) {
                files.push(path.to_string_lossy().into_owned());
            }
        }
    }
    files
}
