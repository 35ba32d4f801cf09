//! The network, and the cache's layout, through `hf-hub`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use hf_hub::progress::{DownloadEvent, ProgressEvent, ProgressHandler};
use hf_hub::repository::RepoTreeEntry;
use hf_hub::{HFClient, HFClientSync, HFError, HFRepositorySync, RepoType, split_id};

use super::{Hub, Progress, RepositoryKind, refuse};
use crate::error::{Error, Result};

impl Hub {
    /// Fetches the files that are wanted. Gives their folder and the paths of all files that the repository has.
    pub(super) fn download(
        &self,
        kind: RepositoryKind,
        name: &str,
        revision: Option<&str>,
        wanted: &dyn Fn(&str) -> bool,
    ) -> Result<(PathBuf, Vec<String>)> {
        let client = self.client(name)?;
        let (owner, short) = split_id(name);
        let request = Request { kind, name, revision, wanted };
        match kind {
            RepositoryKind::Model => self.download_from(&client.model(owner, short), &request),
            RepositoryKind::Dataset => self.download_from(&client.dataset(owner, short), &request),
        }
    }

    fn download_from<T: RepoType>(
        &self,
        repository: &HFRepositorySync<T>,
        request: &Request<'_>,
    ) -> Result<(PathBuf, Vec<String>)> {
        let revision = request.revision.map(str::to_owned);
        let failed = |error: HFError| self.failed(request, &error);
        let entries =
            repository.list_tree().maybe_revision(revision.clone()).recursive(true).send().map_err(failed)?;
        let files: BTreeMap<String, u64> = entries
            .into_iter()
            .filter_map(|entry| match entry {
                RepoTreeEntry::File { path, size, .. } => Some((path, size)),
                RepoTreeEntry::Directory { .. } => None,
            })
            .collect();
        let chosen: Vec<(&String, u64)> = files
            .iter()
            .filter(|(path, _)| (request.wanted)(path))
            .map(|(path, size)| (path, *size))
            .collect();
        let names: Vec<String> = files.keys().cloned().collect();
        if chosen.is_empty() {
            // The caller says what it misses.
            return Ok((PathBuf::new(), names));
        }
        let watch = self.progress.as_ref().map(|report| {
            hf_hub::progress::Progress::new(Watch { report: Arc::clone(report), state: Mutex::default() })
        });
        let folder = repository
            .snapshot_download()
            .maybe_revision(revision)
            .allow_patterns(chosen.iter().map(|(path, _)| literal(path)).collect())
            .maybe_progress(watch)
            .send()
            .map_err(failed)?;
        for (path, size) in chosen {
            check_size(request.name, &folder, path, size)?;
        }
        Ok((folder, names))
    }

    /// What the cache has of a revision, without the network.
    pub(super) fn cached(
        &self,
        kind: RepositoryKind,
        name: &str,
        revision: Option<&str>,
    ) -> Result<(PathBuf, Vec<String>)> {
        let client = self.client(name)?;
        let (owner, short) = split_id(name);
        let revision_name = revision.map(str::to_owned);
        let found = match kind {
            RepositoryKind::Model => client
                .model(owner, short)
                .snapshot_download()
                .maybe_revision(revision_name)
                .local_files_only(true)
                .send(),
            RepositoryKind::Dataset => client
                .dataset(owner, short)
                .snapshot_download()
                .maybe_revision(revision_name)
                .local_files_only(true)
                .send(),
        };
        let folder = found.map_err(|error| match error {
            HFError::LocalEntryNotFound { .. } => refuse(
                name,
                format!(
                    "the cache has no {} of this name at revision `{}`, and the network is switched off (offline, or \
                     HF_HUB_OFFLINE); fetch it once with the network",
                    kind.word(),
                    revision.unwrap_or("main")
                ),
            ),
            error => refuse(name, words(&error)),
        })?;
        let mut files = Vec::new();
        list(&folder, &folder, &mut files);
        files.sort();
        Ok((folder, files))
    }

    fn client(&self, name: &str) -> Result<HFClientSync> {
        let mut builder = HFClient::builder();
        if let Some(endpoint) = &self.endpoint {
            builder = builder.endpoint(endpoint);
        }
        if let Some(cache) = &self.cache {
            builder = builder.cache_dir(cache);
        }
        builder.build().and_then(HFClientSync::from_inner).map_err(|error| refuse(name, words(&error)))
    }

    fn failed(&self, request: &Request<'_>, error: &HFError) -> Error {
        let status = match error {
            HFError::Http { context }
            | HFError::AuthRequired { context }
            | HFError::Forbidden { context } => Some(context.status.as_u16()),
            HFError::RepoNotFound { .. }
            | HFError::RevisionNotFound { .. }
            | HFError::EntryNotFound { .. } => Some(404),
            _ => None,
        };
        let reason = match status {
            // The hub answers 401 for a repository that is not there, so as not to tell of private ones.
            Some(401 | 403 | 404) => format!(
                "the hub has no {} of this name at revision `{}`, or it is private or gated (then set HF_TOKEN)",
                request.kind.word(),
                request.revision.unwrap_or("main")
            ),
            _ => format!("{}; try again, or work offline with what the cache has", words(error)),
        };
        refuse(request.name, reason)
    }
}

struct Request<'a> {
    kind: RepositoryKind,
    name: &'a str,
    revision: Option<&'a str>,
    wanted: &'a dyn Fn(&str) -> bool,
}

/// A pattern that matches a path and nothing else.
fn literal(path: &str) -> String {
    path.chars().map(|c| if "*?[]{}".contains(c) { format!("[{c}]") } else { c.to_string() }).collect()
}

/// The error with its causes, where these say something new.
fn words(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        let more = next.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = next.source();
    }
    text
}

/// A file of another size than the hub says is taken out of the cache, with the bytes that its name leads to.
fn check_size(name: &str, folder: &Path, path: &str, expected: u64) -> Result<()> {
    let file = folder.join(path);
    let found = fs::metadata(&file).map_or(0, |metadata| metadata.len());
    if found == expected && file.is_file() {
        return Ok(());
    }
    if let Ok(bytes) = fs::canonicalize(&file) {
        let _ = fs::remove_file(bytes);
    }
    let _ = fs::remove_file(&file);
    Err(refuse(
        name,
        format!("`{path}` came as {found} bytes of {expected}; what came is thrown away, fetch it again"),
    ))
}

/// The paths of all files under a folder; the cache's are links to its blobs.
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

/// Sums what the files of a download tell.
struct Watch {
    report: Arc<dyn Fn(Progress) + Send + Sync>,
    state: Mutex<Sums>,
}

#[derive(Default)]
struct Sums {
    files: BTreeMap<String, u64>,
    /// Those that are not told file by file.
    others: u64,
    total: u64,
}

impl ProgressHandler for Watch {
    fn on_progress(&self, event: &ProgressEvent) {
        let ProgressEvent::Download(event) = event else { return };
        let mut sums = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            // The whole download begins first; its files' own beginnings are of less.
            DownloadEvent::Start { total_bytes, .. } => sums.total = sums.total.max(*total_bytes),
            DownloadEvent::Progress { files } => {
                for file in files {
                    sums.files.insert(file.filename.clone(), file.bytes_completed);
                }
            }
            DownloadEvent::AggregateProgress { bytes_completed, .. } => sums.others = *bytes_completed,
            DownloadEvent::Complete => return,
        }
        let bytes = sums.files.values().sum::<u64>() + sums.others;
        let progress = Progress { bytes: bytes.min(sums.total), total: sums.total };
        drop(sums);
        (self.report)(progress);
    }
}
