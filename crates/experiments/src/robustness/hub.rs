//! A hub on this machine with one model, which sends slowly enough to be interrupted.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// The commit of the model.
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
/// Bytes that are sent at a time, and the pause after them.
const PART: usize = 8 << 10;
const PAUSE: Duration = Duration::from_millis(1);

/// Serves `owner/small` until the process ends.
#[derive(Debug)]
pub(super) struct Hub {
    address: String,
}

impl Hub {
    /// Serves the files of a folder.
    ///
    /// # Errors
    /// No free port.
    pub(super) fn start(folder: &Path) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = format!("http://{}", listener.local_addr()?);
        let folder = folder.to_owned();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let folder = folder.clone();
                // A client that was killed has hung up.
                std::thread::spawn(move || answer(&folder, &stream).ok());
            }
        });
        Ok(Self { address })
    }

    /// Its address.
    pub(super) fn address(&self) -> &str {
        &self.address
    }
}

fn answer(folder: &Path, stream: &TcpStream) -> anyhow::Result<()> {
    let mut lines = BufReader::new(stream).lines();
    let request = lines.next().transpose()?.unwrap_or_default();
    let mut from = 0;
    for line in lines {
        let line = line?.to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(range) = line.strip_prefix("range: bytes=") {
            from = range.trim_end_matches('-').parse()?;
        }
    }
    let target = request.split(' ').nth(1).unwrap_or_default();
    let path = target.split('?').next().unwrap_or_default();
    if path.starts_with("/api/models/owner/small/revision/") {
        let files: Vec<Value> =
            files(folder).iter().map(|path| sibling(path)).collect::<anyhow::Result<_>>()?;
        let about = json!({ "id": "owner/small", "sha": COMMIT, "siblings": files });
        return send(stream, "200 OK", "", about.to_string().as_bytes());
    }
    let name = path.rsplit('/').next().unwrap_or_default();
    let wanted = path.starts_with("/owner/small/resolve/").then(|| folder.join(name));
    let Some(bytes) = wanted.and_then(|file| std::fs::read(file).ok()) else {
        return send(stream, "404 Not Found", "", b"{}");
    };
    let (all, from) = (bytes.len(), from.min(bytes.len()));
    let range = format!("Content-Range: bytes {from}-{}/{all}\r\n", all.saturating_sub(1));
    match from {
        0 => send(stream, "200 OK", "", &bytes),
        _ => send(stream, "206 Partial Content", &range, &bytes[from..]),
    }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

/// A file as the hub describes it.
fn sibling(path: &Path) -> anyhow::Result<Value> {
    let bytes = std::fs::read(path)?;
    let digest: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut file = json!({ "rfilename": name, "size": bytes.len(), "blobId": digest[..40] });
    if name.ends_with(".safetensors") {
        file["lfs"] = json!({ "size": bytes.len(), "sha256": digest, "pointerSize": 132 });
    }
    Ok(file)
}

fn send(mut stream: &TcpStream, status: &str, headers: &str, body: &[u8]) -> anyhow::Result<()> {
    let length = body.len();
    write!(stream, "HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n{headers}\r\n")?;
    for part in body.chunks(PART) {
        stream.write_all(part)?;
        std::thread::sleep(PAUSE);
    }
    Ok(())
}
