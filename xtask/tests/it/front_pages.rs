//! README.md and ARCHITECTURE.md: short, and with the report's own figures.

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
