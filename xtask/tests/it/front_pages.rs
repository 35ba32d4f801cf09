//! README.md and ARCHITECTURE.md: short, and with the report's own figures; each crate's README: of its manifest and its front page.

use std::path::Path;

use expect_test::expect_file;

const README: &str = include_str!("../../../README.md");
const ARCHITECTURE: &str = include_str!("../../../ARCHITECTURE.md");
const REPORT: &str = include_str!("../../../reports/report.md");

#[test]
fn they_are_short() {
    assert!(
        README.lines().count() <= 120,
        "README.md has {} lines; the guide takes more",
        README.lines().count()
    );
    let bytes = ARCHITECTURE.len();
    assert!(bytes <= 15_000, "ARCHITECTURE.md has {bytes} bytes; mechanisms are explained in their modules");
}

/// The first two cells of the rows of the first table with these headings.
fn rows<'a>(page: &'a str, headings: [&str; 2]) -> Vec<[&'a str; 2]> {
    let cells = |line: &'a str| {
        let mut cells = line.split('|').skip(1).map(str::trim);
        [cells.next().unwrap_or_default(), cells.next().unwrap_or_default()]
    };
    let lines = page.lines().skip_while(|line| cells(line) != headings).skip(2);
    lines.take_while(|line| line.starts_with('|')).map(cells).collect()
}

#[test]
fn the_readmes_figures_are_the_reports() {
    let figures = rows(README, ["figure", "measured"]);
    let measured = rows(REPORT, ["figure", "measured"]);
    assert_eq!(figures.len(), 5);
    for figure in figures {
        assert!(measured.contains(&figure), "{figure:?} of the README is none of {measured:#?}");
    }
}

/// The lines of the first runnable example of a front page, without those that rustdoc hides.
fn example(front_page: &str) -> Option<String> {
    let mut lines = front_page
        .lines()
        .map_while(|line| line.strip_prefix("//!"))
        .map(|line| line.strip_prefix(' ').unwrap_or(line));
    while let Some(line) = lines.next() {
        let Some(language) = line.strip_prefix("```") else { continue };
        let block = lines.by_ref().take_while(|line| *line != "```");
        let shown = block
            .filter(|line| *line != "#" && !line.starts_with("# "))
            .map(|line| format!("{line}\n"))
            .collect();
        if ["", "no_run"].contains(&language) {
            return Some(shown);
        }
    }
    None
}

/// The README of a crate of this name, with this description and front page. `others` are the workspace's crates.
fn crate_readme(name: &str, description: &str, front_page: Option<&str>, others: &[String]) -> String {
    let top = "[Frugal](../../README.md)";
    let Some(front_page) = front_page else {
        return format!(
            "# {name}\n\n{description}.\n\nA program of {top}: `cargo run -p {name} --release -- --help`.\n"
        );
    };
    let example = example(front_page).unwrap_or_default();
    // A path through another crate, such as `lora::runtime::autograd`, needs no dependency on its second part.
    let begins = |at: usize| !example[..at].ends_with(|c: char| c.is_alphanumeric() || "_:".contains(c));
    let used = |krate: &str| {
        let path = format!("{}::", krate.replace('-', "_"));
        krate == name || example.match_indices(&path).any(|(at, _)| begins(at))
    };
    let mut dependencies: String = others
        .iter()
        .filter(|krate| used(krate))
        .map(|krate| format!("{krate} = {{ path = \"frugal/crates/{krate}\" }}\n"))
        .collect();
    if used("tch") {
        dependencies += "tch = \"0.26\"\n";
    }
    let code = if example.is_empty() { example } else { format!("```rust\n{example}```\n\n") };
    format!(
        "# {name}\n\n{description}.\n\n```toml\n[dependencies]\n{dependencies}```\n\n{code}\
         The whole front page: [`src/lib.rs`](src/lib.rs), or `cargo doc -p {name} --open`. A crate of {top}.\n"
    )
}

/// `UPDATE_EXPECT=1 cargo test -p xtask --test it front_pages` writes them anew.
#[test]
fn each_crates_readme_is_of_its_manifest_and_its_front_page() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates");
    let folders = std::fs::read_dir(&crates).expect("the crates are beside xtask");
    let names = folders.map(|entry| entry.expect("a folder can be listed").file_name().into_string());
    let mut names: Vec<String> = names.collect::<Result<_, _>>().expect("names are UTF-8");
    names.sort();
    for name in &names {
        let folder = crates.join(name);
        let manifest = std::fs::read_to_string(folder.join("Cargo.toml")).expect("a crate has a manifest");
        let manifest: toml::Table = manifest.parse().expect("a manifest is TOML");
        let description = manifest["package"]["description"].as_str().expect("a crate has a description");
        let is_program = folder.join("src/main.rs").exists();
        let front_page = std::fs::read_to_string(folder.join("src/lib.rs")).ok().filter(|_| !is_program);
        let expected = crate_readme(name, description, front_page.as_deref(), &names);
        expect_file![folder.join("README.md")].assert_eq(&expected);
    }
}
