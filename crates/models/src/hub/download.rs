//! Downloads. One request per revision lists its commit and every file's size and name in the cache. Each file is one more
//! request for that commit, so that a push in between mixes nothing. A file grows as `blobs/NAME.part`, locked by one process
//! at a time, and is renamed only when it is complete and synced; an interrupted download resumes. The blob of a large file
//! (LFS) is named by its SHA-256, which is computed while the file is written, and compared.
//!
//! `hf-hub` provides only the cache's layout: its own download asks for ranges of compressed responses, which the hub returns
//! whole and without the header that it then misses, and it sends the token to every host that the hub redirects to.

use std::fs;
use std::io::{self, Read};
use std::path::PathBuf;

use serde::Deserialize;
use ureq::Body;
use ureq::http::header::CONTENT_RANGE;
use ureq::http::{Response, StatusCode};

use super::cache::{self, CachedRepository};
use super::http::Http;
use super::partial_file::PartialFile;
use super::{Hub, Progress, RepositoryKind, refuse};
use crate::error::{Error, Result};
use crate::strict_json;

/// Maximum size of a file list: some 500,000 files.
const MAX_LIST_BYTES: u64 = 256 << 20;

impl Hub {
    /// Fetches the wanted files. Returns their folder and the paths of all files in the repository.
    pub(super) fn download(
        &self,
        kind: RepositoryKind,
        name: &str,
        revision: Option<&str>,
        is_wanted: &dyn Fn(&str) -> bool,
    ) -> Result<(PathBuf, Vec<String>)> {
        let revision = revision.unwrap_or("main");
        let repository = CachedRepository::new(self, kind, name, revision)?;
        let request = Request { kind, name, revision, repository, http: Http::new(self) };
        let description = request.describe()?;
        let names = description.siblings.iter().map(|file| file.rfilename.clone()).collect();
        let chosen: Vec<Chosen<'_>> = description
            .siblings
            .iter()
            .filter(|file| is_wanted(&file.rfilename))
            .map(|file| request.chosen(file))
            .collect::<Result<_>>()?;
        if chosen.is_empty() {
            // The caller reports what is missing.
            return Ok((PathBuf::new(), names));
        }
        let commit = &description.sha;
        let missing: Vec<&Chosen<'_>> = chosen.iter().filter(|file| !request.is_here(commit, file)).collect();
        let mut progress = Progress { bytes: 0, total: missing.iter().map(|file| file.size).sum() };
        for file in missing {
            let path = file.path;
            request.fetch(commit, file, &mut |bytes| {
                progress.bytes += bytes;
                if let Some(report) = &self.progress {
                    report(progress);
                }
            })?;
            request.repository.link(commit, path, file.blob).map_err(|error| request.cannot_write(&error))?;
        }
        request.repository.note(commit).map_err(|error| request.cannot_write(&error))?;
        Ok((request.repository.snapshot(commit), names))
    }

    /// Looks up a revision in the cache, without the network.
    pub(super) fn cached(
        &self,
        kind: RepositoryKind,
        name: &str,
        revision: Option<&str>,
    ) -> Result<(PathBuf, Vec<String>)> {
        let revision = revision.unwrap_or("main");
        let folder = CachedRepository::new(self, kind, name, revision)?.cached_snapshot().ok_or_else(|| {
            refuse(
                name,
                format!(
                    "the cache has no {} of this name at revision `{revision}`, and the network is switched off (offline, or \
                     HF_HUB_OFFLINE); fetch it once with the network",
                    kind.word()
                ),
            )
        })?;
        let files = cache::files(&folder);
        Ok((folder, files))
    }
}

/// The hub's description of a revision; other fields are ignored.
#[derive(Deserialize)]
struct Description {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob: Option<String>,
    /// Present for a file in git LFS.
    lfs: Option<LfsFile>,
}

#[derive(Deserialize)]
struct LfsFile {
    sha256: Option<String>,
}

impl Description {
    /// Parses the hub's response; the error names what is invalid in it.
    fn read(text: &str) -> std::result::Result<Self, String> {
        let mut description: Self = strict_json::from_str(text)
            .map_err(|cause| format!("responds, but not as a hub does: {cause}"))?;
        description.siblings.sort_by(|a, b| a.rfilename.cmp(&b.rfilename));
        if let Some(pair) =
            description.siblings.windows(2).find(|pair| pair[0].rfilename == pair[1].rfilename)
        {
            return Err(format!("describes `{}` twice", pair[0].rfilename));
        }
        if !is_digest(&description.sha) {
            return Err(format!("names `{}`, which is not a commit", description.sha));
        }
        Ok(description)
    }
}

impl Sibling {
    /// Returns what to fetch, if the description is complete.
    fn chosen(&self) -> Option<Chosen<'_>> {
        let sha256 = self.lfs.as_ref().and_then(|lfs| lfs.sha256.as_deref());
        let blob = sha256.or(self.blob.as_deref())?;
        let is_known = is_digest(blob)
            && sha256.is_none_or(|digest| digest.len() == 64)
            && cache::is_inside(&self.rfilename);
        is_known.then_some(Chosen { path: &self.rfilename, size: self.size?, blob, sha256 })
    }
}

/// A file to fetch.
pub(super) struct Chosen<'a> {
    path: &'a str,
    pub(super) size: u64,
    blob: &'a str,
    /// The SHA-256 of a file in git LFS.
    sha256: Option<&'a str>,
}

struct Request<'a> {
    kind: RepositoryKind,
    name: &'a str,
    revision: &'a str,
    repository: CachedRepository,
    http: Http,
}

impl Request<'_> {
    fn describe(&self) -> Result<Description> {
        let kind = format!("{}s", self.kind.word());
        let revision = encoded(self.revision, "");
        let url = format!("{}/api/{kind}/{}/revision/{revision}?blobs=true", self.http.endpoint, self.name);
        let mut response = self.http.get(&url, 0).map_err(|error| self.failed(&error))?;
        let text = response.body_mut().with_config().limit(MAX_LIST_BYTES).read_to_string();
        let text = text.map_err(|error| self.failed(&error))?;
        Description::read(&text)
            .map_err(|reason| refuse(self.name, format!("{} {reason}", self.http.endpoint)))
    }

    fn chosen<'a>(&self, file: &'a Sibling) -> Result<Chosen<'a>> {
        file.chosen().ok_or_else(|| {
            let path = &file.rfilename;
            refuse(
                self.name,
                format!(
                    "the hub describes `{path}` without a size, a digest or a path inside the repository"
                ),
            )
        })
    }

    fn is_here(&self, commit: &str, file: &Chosen<'_>) -> bool {
        let metadata = fs::metadata(self.repository.snapshot(commit).join(file.path));
        metadata.is_ok_and(|metadata| metadata.is_file() && metadata.len() == file.size)
    }

    /// Completes the blob, and reports the bytes received.
    fn fetch(&self, commit: &str, file: &Chosen<'_>, arrived: &mut dyn FnMut(u64)) -> Result<()> {
        let cannot = |error: io::Error| self.cannot_write(&error);
        let blob = self.repository.blob(file.blob);
        let Some(mut part) = PartialFile::open(&blob, file).map_err(cannot)? else {
            arrived(file.size);
            return Ok(());
        };
        if part.bytes < file.size {
            let mut response = self.ask(commit, file, part.bytes)?;
            if part.bytes > 0 && response.status() != StatusCode::PARTIAL_CONTENT {
                // A server without ranges sends everything again.
                part.clear().map_err(cannot)?;
            }
            self.check_length(file, part.bytes, &response)?;
            arrived(part.bytes);
            // One byte more than expected would be noticed.
            let mut body = response.body_mut().as_reader().take(file.size - part.bytes + 1);
            let mut buffer = vec![0; 64 << 10];
            loop {
                let count = body.read(&mut buffer).map_err(|error| {
                    let broke = format!(
                        "`{}` was interrupted after {} of {} bytes",
                        file.path, part.bytes, file.size
                    );
                    refuse(self.name, again(&format!("{broke}: {error}")))
                })?;
                if count == 0 {
                    break;
                }
                part.write(&buffer[..count]).map_err(cannot)?;
                arrived(count as u64);
            }
        } else {
            arrived(file.size);
        }
        if part.bytes != file.size {
            let received = part.bytes;
            part.remove();
            return Err(self.another_size(file, received));
        }
        let (digest, expected) = (part.sha256(), file.sha256.map(str::to_ascii_lowercase));
        if let Some(expected) = expected.filter(|expected| *expected != digest) {
            part.remove();
            return Err(refuse(
                self.name,
                format!(
                    "`{}` has the SHA-256 {}…, but the hub has {}…; the download is deleted, fetch it again",
                    file.path,
                    &digest[..12],
                    &expected[..12]
                ),
            ));
        }
        part.finish(&blob).map_err(cannot)
    }

    fn ask(&self, commit: &str, file: &Chosen<'_>, start: u64) -> Result<Response<Body>> {
        let kind = match self.kind {
            RepositoryKind::Model => "",
            RepositoryKind::Dataset => "datasets/",
        };
        let path = encoded(file.path, "/");
        let url = format!("{}/{kind}{}/resolve/{commit}/{path}", self.http.endpoint, self.name);
        self.http.get(&url, start).map_err(|error| self.failed(&error))
    }

    /// Refuses a response that announces another file, such as a proxy's page.
    fn check_length(&self, file: &Chosen<'_>, start: u64, response: &Response<Body>) -> Result<()> {
        let rest = response.body().content_length().unwrap_or(file.size - start);
        let range = response.headers().get(CONTENT_RANGE).and_then(|range| range.to_str().ok());
        let from = range.and_then(|range| range.strip_prefix("bytes ")?.split('-').next()?.parse().ok());
        if start > 0 && from != Some(start) {
            let range = range.unwrap_or("nothing");
            return Err(refuse(
                self.name,
                again(&format!("asked for `{}` from byte {start}, got {range}", file.path)),
            ));
        }
        if start + rest != file.size {
            return Err(self.another_size(file, start + rest));
        }
        Ok(())
    }

    fn another_size(&self, file: &Chosen<'_>, found: u64) -> Error {
        let Chosen { path, size, .. } = file;
        refuse(
            self.name,
            format!("`{path}` has {found} bytes instead of {size}; the download is deleted, fetch it again"),
        )
    }

    fn cannot_write(&self, error: &io::Error) -> Error {
        refuse(
            self.name,
            format!("the cache at {} cannot be written: {error}", self.repository.blob("").display()),
        )
    }

    fn failed(&self, error: &ureq::Error) -> Error {
        let reason = match error {
            ureq::Error::RequireHttpsOnly(address) => format!(
                "{} redirects to {address}, which is not encrypted, so nothing was fetched from there; if that is meant, set \
                 HF_ENDPOINT to the hub's http address",
                self.http.endpoint
            ),
            // The hub responds 401 for a repository that does not exist, so that private ones stay hidden.
            ureq::Error::StatusCode(401 | 403 | 404) => format!(
                "the hub has no {} of this name at revision `{}`, or it is private or gated (then set HF_TOKEN)",
                self.kind.word(),
                self.revision
            ),
            _ => again(&format!("{}: {error}", self.http.endpoint)),
        };
        refuse(self.name, reason)
    }
}

fn again(what: &str) -> String {
    format!("{what}; try again, or work offline from the cache")
}

/// Whether a text can be the name of a blob or a commit, and nothing else.
fn is_digest(text: &str) -> bool {
    text.len() >= 16 && text.chars().all(|c| c.is_ascii_hexdigit())
}

/// Percent-encodes a part of an address; `also` lists characters to leave besides letters and digits.
fn encoded(text: &str, also: &str) -> String {
    let stands =
        |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) || also.as_bytes().contains(&byte);
    text.bytes()
        .map(|byte| if stands(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

#[cfg(test)]
mod tests;
