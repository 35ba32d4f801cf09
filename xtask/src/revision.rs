//! The git revision that is measured.

use std::process::Command;

use crate::workspace::Workspace;

/// Environment variable by which the programs learn the revision.
pub(crate) const VARIABLE: &str = "FRUGAL_REVISION";

/// Short git revision, with `+` when sources differ from it; empty outside a repository.
///
/// Changes in `reports/` are ignored: writing a report does not change the sources.
pub(crate) fn current(workspace: &Workspace) -> String {
    if let Some(bundle) = &workspace.bundle {
        return bundle.revision.clone();
    }
    let git = |args: &[&str]| {
        let output = Command::new("git").current_dir(&workspace.root).args(args).output().ok();
        let output = output.filter(|output| output.status.success())?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let Some(revision) = git(&["rev-parse", "--short", "HEAD"]) else { return String::new() };
    let changes = git(&["status", "--porcelain", "--untracked-files=no", "--", ".", ":!reports"]);
    if changes.is_some_and(|changes| !changes.is_empty()) { revision + "+" } else { revision }
}
