//! Which files there are, what they are called, and how long they are.

use std::collections::BTreeSet;

use super::Tree;

const TOP: [&str; 9] = [
    "Cargo.toml",
    "Cargo.lock",
    "README.md",
    "ARCHITECTURE.md",
    "SECURITY.md",
    "crates",
    "data",
    "reports",
    "xtask",
];
/// Names without a subject.
const EMPTY_NAMES: [&str; 5] = ["utils", "helpers", "common", "misc", "types"];
const SOURCES: [&str; 5] = ["rs", "cpp", "h", "hpp", "py"];
const LONGEST: usize = 500;
/// Declarations that stand for Gloo's headers, by the paths that libtorch's headers include.
const NAMED_BY_GLOO: &str = "crates/runtime/cpp/gloo/";

pub(crate) fn check(tree: &Tree) -> Vec<String> {
    let mut problems = Vec::new();
    let tops: BTreeSet<&str> = tree.files.iter().filter_map(|(path, _)| path.split('/').next()).collect();
    for top in tops {
        if !TOP.contains(&top) && !top.starts_with("LICENSE-") && !top.starts_with('.') {
            problems.push(format!(
                "{top}: the top level holds Cargo.toml Cargo.lock README.md ARCHITECTURE.md SECURITY.md LICENSE-* crates data \
                 reports xtask and dotfiles only"
            ));
        }
    }
    for (path, text) in tree.with_extension(&SOURCES) {
        let mut parts = path.split('/').map(|part| part.split('.').next().unwrap_or(part));
        if !path.starts_with(NAMED_BY_GLOO)
            && let Some(name) = parts.rfind(|part| EMPTY_NAMES.contains(part))
        {
            problems.push(format!("{path}: `{name}` names no subject; name the file by what it is about"));
        }
        let lines = text.lines().count();
        if lines > LONGEST {
            problems.push(format!(
                "{path}: {lines} lines; a file has at most {LONGEST}: give the part that has a subject of its own its own \
                 file"
            ));
        }
    }
    problems
}
