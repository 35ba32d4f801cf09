//! `cargo xtask report --pdf`: the page on paper, by a Chromium that is installed.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The names under which Chromium is installed.
const NAMES: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "chrome"];

/// Prints `page` as `report.pdf` beside it.
pub(super) fn print(page: &Path) -> Result<PathBuf> {
    let Some(browser) = find() else {
        bail!(
            "--pdf prints the page with Chromium, and none of {} is on PATH; install one (`apt-get install chromium`)",
            NAMES.join(", ")
        );
    };
    let pdf = page.with_file_name("report.pdf");
    let profile = tempfile::tempdir().context("cannot create a folder for the browser's profile")?;
    let output = Command::new(&browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer"])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .arg(format!("--print-to-pdf={}", pdf.display()))
        .arg(format!("file://{}", page.display()))
        .output()
        .with_context(|| format!("cannot start {}", browser.display()))?;
    if !output.status.success() || !pdf.is_file() {
        bail!("{} printed no page: {}", browser.display(), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(pdf)
}

/// The first browser on `PATH`.
fn find() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    NAMES
        .iter()
        .flat_map(|name| folders.iter().map(move |folder| folder.join(name)))
        .find(|file| file.is_file())
}
