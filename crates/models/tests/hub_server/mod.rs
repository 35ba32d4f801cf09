//! A hub of one's own: a thread that serves folders as the Hugging Face hub does, with the headers that its clients read.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use serde_json::json;

/// The commit that every revision but `missing` is.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Serves until it is dropped.
pub struct Server {
    shared: Arc<Shared>,
    address: String,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    root: tempfile::TempDir,
    stop: AtomicBool,
    requests: AtomicUsize,
    bodies: AtomicUsize,
    /// By file name: what is sent in its place; `None` for half of it.
    broken: Mutex<BTreeMap<String, Option<String>>>,
}

impl Server {
    /// Serves `models/OWNER/NAME` and `datasets/OWNER/NAME` under a folder.
    pub fn start(root: tempfile::TempDir) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let shared = Arc::new(Shared {
            root,
            stop: AtomicBool::new(false),
            requests: AtomicUsize::new(0),
            bodies: AtomicUsize::new(0),
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

    pub fn address(&self) -> String {
        format!("http://{}", self.address)
    }

    /// How many requests have come.
    pub fn requests(&self) -> usize {
        self.shared.requests.load(Ordering::SeqCst)
    }

    /// How many files have been sent.
    pub fn bodies(&self) -> usize {
        self.shared.bodies.load(Ordering::SeqCst)
    }

    /// Hangs up in the middle of a file from here on.
    pub fn break_off(&self, file: &str) {
        self.shared.broken.lock().unwrap().insert(file.to_owned(), None);
    }

    /// Sends something else in the place of a file from here on.
    pub fn replace(&self, file: &str, text: &str) {
        self.shared.broken.lock().unwrap().insert(file.to_owned(), Some(text.to_owned()));
    }

    /// Sends everything as it is again.
    pub fn mend(&self) {
        self.shared.broken.lock().unwrap().clear();
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
    for line in lines.by_ref() {
        if line?.is_empty() {
            break;
        }
    }
    shared.requests.fetch_add(1, Ordering::SeqCst);
    let mut words = request.split(' ');
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let path = target.split('?').next().unwrap_or_default().trim_start_matches('/');
    let parts: Vec<&str> = path.split('/').collect();
    let root = shared.root.path();
    match parts[..] {
        ["api", kind, owner, name, "tree", revision] => {
            let folder = root.join(kind).join(owner).join(name);
            if revision == "missing" || !folder.is_dir() {
                return not_found(stream);
            }
            let mut entries = Vec::new();
            list(&folder, "", &mut entries);
            send(stream, "200 OK", &[], serde_json::to_string(&entries)?.as_bytes(), true)
        }
        ["api", kind, owner, name, "revision", revision] => {
            if revision == "missing" || !root.join(kind).join(owner).join(name).is_dir() {
                return not_found(stream);
            }
            let info = json!({ "id": format!("{owner}/{name}"), "sha": COMMIT });
            send(stream, "200 OK", &[], info.to_string().as_bytes(), true)
        }
        ["datasets", owner, name, "resolve", _, ..] => {
            let file = root.join("datasets").join(owner).join(name).join(parts[5..].join("/"));
            send_file(shared, stream, method, &file)
        }
        [owner, name, "resolve", _, ..] => {
            let file = root.join("models").join(owner).join(name).join(parts[4..].join("/"));
            send_file(shared, stream, method, &file)
        }
        _ => not_found(stream),
    }
}

fn list(folder: &Path, prefix: &str, entries: &mut Vec<serde_json::Value>) {
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let path = format!("{prefix}{}", entry.file_name().to_string_lossy());
        let metadata = entry.metadata().unwrap();
        if metadata.is_dir() {
            entries.push(json!({ "type": "directory", "oid": "d", "size": 0, "path": path }));
            list(&entry.path(), &format!("{path}/"), entries);
        } else {
            entries.push(json!({ "type": "file", "oid": "f", "size": metadata.len(), "path": path }));
        }
    }
}

fn send_file(shared: &Shared, stream: &TcpStream, method: &str, file: &Path) -> std::io::Result<()> {
    let Ok(mut bytes) = fs::read(file) else { return not_found(stream) };
    let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
    // The same bytes have the same tag, as on the hub.
    let etag = bytes.iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let headers = [format!("ETag: \"{etag:016x}\""), format!("X-Repo-Commit: {COMMIT}")];
    if method == "HEAD" {
        return send(stream, "200 OK", &headers, &bytes, false);
    }
    shared.bodies.fetch_add(1, Ordering::SeqCst);
    match shared.broken.lock().unwrap().get(&name) {
        Some(None) => {
            let half = bytes.len() / 2;
            let mut stream = stream;
            write!(
                stream,
                "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                bytes.len()
            )?;
            return stream.write_all(&bytes[..half]);
        }
        Some(Some(text)) => bytes = text.clone().into_bytes(),
        None => {}
    }
    send(stream, "200 OK", &headers, &bytes, true)
}

fn not_found(stream: &TcpStream) -> std::io::Result<()> {
    send(stream, "404 Not Found", &[], br#"{"error":"Repository not found"}"#, true)
}

fn send(
    mut stream: &TcpStream,
    status: &str,
    headers: &[String],
    body: &[u8],
    with_body: bool,
) -> std::io::Result<()> {
    write!(stream, "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n", body.len())?;
    for header in headers {
        write!(stream, "{header}\r\n")?;
    }
    stream.write_all(b"\r\n")?;
    if with_body { stream.write_all(body) } else { Ok(()) }
}
