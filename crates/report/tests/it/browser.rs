//! A Chromium that measures a page: its height, its words, and what is cut. Where none is installed, a test says that it is skipped.

use std::io::Write;
use std::path::PathBuf;
use std::process::Command;

/// What a page measures in a window.
#[derive(Debug, serde::Deserialize)]
pub(crate) struct Measured {
    pub(crate) height: u64,
    pub(crate) words: usize,
    /// Pixels that the page is wider than its window.
    pub(crate) over: i64,
    /// The beginnings of tables that are wider than their place.
    pub(crate) cut: Vec<String>,
}

/// Runs within the page, which is in a frame of the wanted width: a window of Chromium is 500 pixels wide at least.
const SCRIPT: &str = "addEventListener('load', () => { const d = document, e = d.documentElement; parent.postMessage(JSON.stringify({ \
     height: e.scrollHeight, words: d.body.innerText.split(/\\s+/).filter(w => w).length, over: e.scrollWidth - e.clientWidth, \
     cut: [...d.querySelectorAll('.sheet')].filter(t => t.scrollWidth > t.clientWidth + 1).map(t => t.innerText.slice(0, 40)) }), '*') })";

/// Measures `page` in a window of `width`; `None` without a browser.
pub(crate) fn measure(page: &str, width: u32) -> Option<Measured> {
    let browser = find()?;
    let folder = tempfile::tempdir().expect("a folder can be made");
    let inner = page.replacen("</body>", &format!("<script>{SCRIPT}</script></body>"), 1);
    let frame = inner.replace('&', "&amp;").replace('"', "&quot;");
    let outer = format!(
        "<!doctype html><title></title><script>addEventListener('message', e => {{ document.title = e.data; \
         document.body.remove() }})</script><body><iframe width=\"{width}\" height=\"1000\" style=\"border:0\" srcdoc=\"{frame}\"></iframe></body>"
    );
    let file = folder.path().join("outer.html");
    std::fs::write(&file, outer).expect("a file can be written");
    let output = Command::new(browser)
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--window-size=1600,1200",
            "--dump-dom",
        ])
        .arg(format!("--user-data-dir={}", folder.path().join("profile").display()))
        .arg(format!("file://{}", file.display()))
        .output()
        .expect("the browser starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let title =
        text.split_once("<title>").and_then(|(_, rest)| rest.split_once("</title>")).map(|(title, _)| title);
    let title = title
        .expect("the browser prints the page")
        .replace("&amp;", "&")
        .replace("&lt;", "<")
        .replace("&gt;", ">");
    Some(serde_json::from_str(&title).unwrap_or_else(|error| panic!("{error}: {title:?}")))
}

/// Says that a test is skipped, on standard error, which a test that passes does not swallow.
pub(crate) fn skipped(what: &str) {
    let _ = writeln!(
        std::io::stderr().lock(),
        "SKIPPED: {what}: no Chromium on PATH (`apt-get install chromium`)"
    );
}

fn find() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    let names = ["chromium", "chromium-browser", "google-chrome", "chrome"];
    names
        .iter()
        .flat_map(|name| folders.iter().map(move |folder| folder.join(name)))
        .find(|file| file.is_file())
}
