//! A local hub: a thread that serves folders like the Hugging Face hub, with the headers that its clients read.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use serde_json::json;
use sha2::{Digest, Sha256};

/// The commit of every revision except `missing`.
pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Serves until it is dropped.
pub(crate) struct Server {
    shared: Arc<Shared>,
    address: String,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    root: tempfile::TempDir,
    stop: AtomicBool,
    requests: AtomicUsize,
    bodies: AtomicUsize,
    sent: AtomicUsize,
    ranges: AtomicBool,
    /// Whether requests for files are redirected.
    redirects: AtomicBool,
    /// Files with one changed byte.
    corrupt: Mutex<BTreeMap<String, Corrupt>>,
    /// By file name: what is sent instead; `None` for half of it.
    broken: Mutex<BTreeMap<String, Option<String>>>,
}

/// Which byte of a file is changed.
enum Corrupt {
    First,
    Last,
}

impl Server {
    /// Serves `models/OWNER/NAME` and `datasets/OWNER/NAME` under a folder.
    pub(crate) fn start(root: tempfile::TempDir) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let shared = Arc::new(Shared {
            root,
            stop: AtomicBool::new(false),
            requests: AtomicUsize::new(0),
            bodies: AtomicUsize::new(0),
            sent: AtomicUsize::new(0),
            ranges: AtomicBool::new(true),
            redirects: AtomicBool::new(false),
            corrupt: Mutex::default(),
            broken: Mutex::default(),
        });
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::spawn(move || {
            std::thread::scope(|scope| {
                for stream in listener.incoming() {
                    if of_thread.stop.load(Ordering::SeqCst) {
                        break;
                    }
                    let shared = &of_thread;
                    // A client may hang up whenever it likes.
                    scope.spawn(move || stream.and_then(|stream| answer(shared, &stream)).ok());
                }
            });
        });
        Self { shared, address, thread: Some(thread) }
    }

    pub(crate) fn address(&self) -> String {
        format!("http://{}", self.address)
    }

    /// A file that is served.
    pub(crate) fn file(&self, path: &str) -> PathBuf {
        self.shared.root.path().join(path)
    }

    /// Returns the number of requests.
    pub(crate) fn requests(&self) -> usize {
        self.shared.requests.load(Ordering::SeqCst)
    }

    /// Returns the number of files sent.
    pub(crate) fn bodies(&self) -> usize {
        self.shared.bodies.load(Ordering::SeqCst)
    }

    /// Returns the bytes of complete responses with files.
    pub(crate) fn sent(&self) -> usize {
        self.shared.sent.load(Ordering::SeqCst)
    }

    /// From now on sends complete files, even for range requests.
    pub(crate) fn forget_ranges(&self) {
        self.shared.ranges.store(false, Ordering::SeqCst);
    }

    /// From now on redirects to the files.
    pub(crate) fn redirect(&self) {
        self.shared.redirects.store(true, Ordering::SeqCst);
    }

    /// From now on changes the first byte of a file.
    pub(crate) fn corrupt(&self, file: &str) {
        self.shared.corrupt.lock().unwrap().insert(file.to_owned(), Corrupt::First);
    }

    /// From now on changes the last byte of a file.
    pub(crate) fn corrupt_last(&self, file: &str) {
        self.shared.corrupt.lock().unwrap().insert(file.to_owned(), Corrupt::Last);
    }

    /// From now on closes the connection in the middle of a file.
    pub(crate) fn break_off(&self, file: &str) {
        self.shared.broken.lock().unwrap().insert(file.to_owned(), None);
    }

    /// From now on sends something else instead of a file.
    pub(crate) fn replace(&self, file: &str, text: &str) {
        self.shared.broken.lock().unwrap().insert(file.to_owned(), Some(text.to_owned()));
    }

    /// Serves everything correctly again.
    pub(crate) fn mend(&self) {
        self.shared.broken.lock().unwrap().clear();
        self.shared.corrupt.lock().unwrap().clear();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        // Wakes the thread up.
        let _ = TcpStream::connect(&self.address);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn answer(shared: &Shared, stream: &TcpStream) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream).lines();
    let request = lines.next().transpose()?.unwrap_or_default();
    let mut from = 0;
    for line in lines.by_ref() {
        let line = line?.to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(range) = line.strip_prefix("range: bytes=")
            && shared.ranges.load(Ordering::SeqCst)
        {
            from = range.trim_end_matches('-').parse().unwrap();
        }
    }
    shared.requests.fetch_add(1, Ordering::SeqCst);
    let target = request.split(' ').nth(1).unwrap_or_default();
    let path = target.split('?').next().unwrap_or_default().trim_start_matches('/');
    let parts: Vec<&str> = path.split('/').collect();
    let root = shared.root.path();
    match parts[..] {
        ["api", kind, owner, name, "revision", revision] => {
            let folder = root.join(kind).join(owner).join(name);
            if revision == "missing" || !folder.is_dir() {
                return not_found(stream);
            }
            let mut siblings = Vec::new();
            list(&folder, "", &mut siblings);
            let info = json!({ "id": format!("{owner}/{name}"), "sha": COMMIT, "siblings": siblings });
            send(stream, "200 OK", &[], info.to_string().as_bytes())
        }
        ["datasets", owner, name, "resolve", _, ..] => {
            let file = root.join("datasets").join(owner).join(name).join(parts[5..].join("/"));
            send_file(shared, stream, &file, from)
        }
        ["elsewhere", owner, name, ..] => {
            let file = root.join("models").join(owner).join(name).join(parts[3..].join("/"));
            send_file(shared, stream, &file, from)
        }
        [owner, name, "resolve", _, ..] if shared.redirects.load(Ordering::SeqCst) => {
            let location = format!("Location: /elsewhere/{owner}/{name}/{}", parts[4..].join("/"));
            send(stream, "302 Found", &[location], b"")
        }
        [owner, name, "resolve", _, ..] => {
            let file = root.join("models").join(owner).join(name).join(parts[4..].join("/"));
            send_file(shared, stream, &file, from)
        }
        _ => not_found(stream),
    }
}

/// The files with their sizes and digests, as the hub returns them for `blobs=true`.
fn list(folder: &Path, prefix: &str, siblings: &mut Vec<serde_json::Value>) {
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let path = format!("{prefix}{}", entry.file_name().to_string_lossy());
        if entry.metadata().unwrap().is_dir() {
            list(&entry.path(), &format!("{path}/"), siblings);
        } else {
            let bytes = fs::read(entry.path()).unwrap();
            let mut sibling = json!({ "rfilename": path, "size": bytes.len(), "blobId": digest(&bytes) });
            if path.ends_with(".safetensors") {
                let lfs = json!({ "size": bytes.len(), "sha256": sha256(&bytes), "pointerSize": 132 });
                sibling["lfs"] = lfs;
            }
            siblings.push(sibling);
        }
    }
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The same bytes have the same digest, as on the hub.
fn digest(bytes: &[u8]) -> String {
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{hash:016x}")
}

fn send_file(shared: &Shared, mut stream: &TcpStream, file: &Path, from: usize) -> std::io::Result<()> {
    let Ok(mut bytes) = fs::read(file) else { return not_found(stream) };
    let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
    match shared.corrupt.lock().unwrap().get(&name) {
        Some(Corrupt::First) => bytes[0] ^= 1,
        Some(Corrupt::Last) => *bytes.last_mut().unwrap() ^= 1,
        None => {}
    }
    shared.bodies.fetch_add(1, Ordering::SeqCst);
    let broken = shared.broken.lock().unwrap().get(&name).cloned();
    if let Some(Some(text)) = broken {
        return send(stream, "200 OK", &[], text.as_bytes());
    }
    let length = bytes.len();
    let rest = &bytes[from.min(length)..];
    let (status, headers) = match from {
        0 => ("200 OK", vec![]),
        _ => ("206 Partial Content", vec![format!("Content-Range: bytes {from}-{}/{length}", length - 1)]),
    };
    if broken.is_none() {
        shared.sent.fetch_add(rest.len(), Ordering::SeqCst);
        return send(stream, status, &headers, rest);
    }
    write!(stream, "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", rest.len())?;
    stream.write_all(&rest[..rest.len() / 2])
}

fn not_found(stream: &TcpStream) -> std::io::Result<()> {
    send(stream, "404 Not Found", &[], br#"{"error":"Repository not found"}"#)
}

fn send(mut stream: &TcpStream, status: &str, headers: &[String], body: &[u8]) -> std::io::Result<()> {
    write!(stream, "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n", body.len())?;
    for header in headers {
        write!(stream, "{header}\r\n")?;
    }
    stream.write_all(b"\r\n")?;
    stream.write_all(body)
}
