//! The cache that all hub tools share: `blobs/` holds files by content, `snapshots/COMMIT/` links to them by path, `refs/`
//! records the commit of each revision when it was last fetched.

use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use files::atomic_write;
use hf_hub::{Cache, Repo, RepoType};

use super::{Hub, RepositoryKind, refuse};
use crate::error::Result;

/// A repository in the cache.
pub(super) struct CachedRepository {
    cache: Cache,
    repo: Repo,
}

impl CachedRepository {
    pub(super) fn new(hub: &Hub, kind: RepositoryKind, name: &str, revision: &str) -> Result<Self> {
        let folder = match &hub.cache {
            Some(folder) => folder.clone(),
            None => folder_of_environment().ok_or_else(|| {
                refuse(name, "there is no home folder for the cache; set HF_HOME or HF_HUB_CACHE".to_owned())
            })?,
        };
        let kind = match kind {
            RepositoryKind::Model => RepoType::Model,
            RepositoryKind::Dataset => RepoType::Dataset,
        };
        let repo = Repo::with_revision(name.to_owned(), kind, revision.to_owned());
        Ok(Self { cache: Cache::new(folder), repo })
    }

    fn folder(&self) -> PathBuf {
        self.cache.path().join(self.repo.folder_name())
    }

    pub(super) fn blob(&self, blob: &str) -> PathBuf {
        self.folder().join("blobs").join(blob)
    }

    pub(super) fn snapshot(&self, commit: &str) -> PathBuf {
        self.cache.repo(self.repo.clone()).pointer_path(commit)
    }

    /// Returns the snapshot of the revision's commit when it was last fetched, or of the commit that the revision names.
    pub(super) fn cached_snapshot(&self) -> Option<PathBuf> {
        let named = fs::read_to_string(self.folder().join("refs").join(self.repo.revision()));
        let commit = named.map_or_else(|_| self.repo.revision().to_owned(), |text| text.trim().to_owned());
        let folder = self.snapshot(&commit);
        (is_inside(&commit) && folder.is_dir()).then_some(folder)
    }

    /// Records the revision's commit.
    pub(super) fn note(&self, commit: &str) -> io::Result<()> {
        if self.repo.revision() == commit {
            return Ok(());
        }
        let path = self.folder().join("refs").join(self.repo.revision());
        // A revision may be called `refs/pr/1`.
        fs::create_dir_all(atomic_write::parent(&path))?;
        atomic_write::file(&path, |out| out.write_all(commit.as_bytes()))
    }

    /// Links a path of a snapshot to a blob.
    pub(super) fn link(&self, commit: &str, path: &str, blob: &str) -> io::Result<()> {
        let link = self.snapshot(commit).join(path);
        if let Some(parent) = link.parent() {
            fs::create_dir_all(parent)?;
        }
        // Relative to the link's own folder, so that the cache can be moved: up from the path, the commit and `snapshots`.
        let target = "../".repeat(path.matches('/').count() + 2) + "blobs/" + blob;
        atomic_write::link(&link, Path::new(&target), &self.blob(blob))
    }
}

/// Whether a path from the hub or the user stays inside the folder that it is joined to.
pub(super) fn is_inside(path: &str) -> bool {
    let normal = |part| matches!(part, Component::Normal(_));
    !path.is_empty() && !path.contains('\\') && Path::new(path).components().all(normal)
}

/// Lists the paths of all files in a folder; the cache's files are links to its blobs.
pub(super) fn files(folder: &Path) -> Vec<String> {
    let mut files = Vec::new();
    list(folder, folder, &mut files);
    files.sort();
    files
}

fn list(root: &Path, folder: &Path, files: &mut Vec<String>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            list(root, &path, files);
        } else if path.is_file()
            && let Ok(relative) = path.strip_prefix(root)
        {
            files.push(relative.to_string_lossy().replace('\\', "/"));
        }
    }
}

/// Reads an environment variable; empty counts as unset.
pub(super) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
}

/// The folder where hub tools keep the token and, by default, the cache.
pub(super) fn home() -> Option<PathBuf> {
    variable("HF_HOME").map(PathBuf::from).or_else(|| {
        let caches = variable("XDG_CACHE_HOME").map(PathBuf::from);
        Some(caches.or_else(|| std::env::home_dir().map(|home| home.join(".cache")))?.join("huggingface"))
    })
}

fn folder_of_environment() -> Option<PathBuf> {
    let named = variable("HF_HUB_CACHE").or_else(|| variable("HUGGINGFACE_HUB_CACHE"));
    named.map(PathBuf::from).or_else(|| Some(home()?.join("hub")))
}
