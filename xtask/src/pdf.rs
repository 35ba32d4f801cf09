//! Prints a page to PDF with a Chromium that is installed.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// The names under which distributions install Chromium and Chrome.
const NAMES: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];

/// Prints the page to `report.pdf` beside it, with everything unfolded, and returns its path.
pub(crate) fn print(page: &Path) -> Result<PathBuf> {
    let browser = find(std::env::var_os("CHROME").map(PathBuf::from))?;
    let pdf = page.with_file_name("report.pdf");
    let html = std::fs::read_to_string(page).with_context(|| format!("cannot read {}", page.display()))?;
    let folder = tempfile::tempdir().context("cannot create a temporary folder")?;
    let unfolded_page = folder.path().join("report.html");
    std::fs::write(&unfolded_page, unfolded(&html))
        .with_context(|| format!("cannot write {}", unfolded_page.display()))?;
    // The sandbox needs rights that containers and root do not have; the page is our own and has no script.
    let output = Command::new(&browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer"])
        .arg(format!("--user-data-dir={}", folder.path().join("profile").display()))
        .arg(format!("--print-to-pdf={}", pdf.display()))
        .arg(format!("file://{}", unfolded_page.display()))
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot start {}", browser.display()))?;
    let printed = pdf.is_file() && output.status.success();
    if !printed {
        bail!(
            "{} could not print {}: {}",
            browser.display(),
            page.display(),
            String::from_utf8_lossy(&output.stderr).lines().last().unwrap_or("it said nothing")
        );
    }
    Ok(pdf)
}

/// The browser that `CHROME` names, or the first of the known names that starts.
fn find(chosen: Option<PathBuf>) -> Result<PathBuf> {
    let starts = |program: &Path| {
        let mut command = Command::new(program);
        command.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    if let Some(program) = chosen {
        if starts(&program) {
            return Ok(program);
        }
        bail!("CHROME is {}, which does not start; set it to a Chromium or Chrome", program.display());
    }
    NAMES.iter().map(PathBuf::from).find(|program| starts(program)).with_context(|| {
        format!(
            "printing needs Chromium or Chrome, and none of {} is installed; install one (Debian: sudo apt install chromium; \
             Fedora: sudo dnf install chromium), or set CHROME to its path, or print index.html from any browser",
            NAMES.join(", ")
        )
    })
}

/// The page with every folded element open, since paper cannot unfold it.
fn unfolded(html: &str) -> String {
    html.replace("<details open", "<details").replace("<details", "<details open")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paper_has_everything_unfolded() {
        let html = "<details class=\"a\"><summary>x</summary></details><details open></details>";
        let open = "<details open class=\"a\"><summary>x</summary></details><details open></details>";
        assert_eq!(unfolded(html), open);
    }

    #[test]
    fn a_browser_that_does_not_start_is_named() {
        let error = find(Some("/no/such/browser".into())).unwrap_err().to_string();
        assert_eq!(error, "CHROME is /no/such/browser, which does not start; set it to a Chromium or Chrome");
    }
}
