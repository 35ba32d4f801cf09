//! The one page: what it shows of records, and that the project's own is short, whole and true.

use std::path::Path;
use std::sync::OnceLock;

use crate::browser;
use crate::fixed_records::{record, rounds, swiglu};
use crate::parts::{VERDICTS, registered};
use expect_test::expect;
use report::front::{self, FrontPage};
use report::spec::{Article, Exhibit, Grid};
use report::{Case, Document, Metric, OtherReport, Record, Specs, page};

const HEIGHT: u64 = 18_000;
const WORDS: usize = 6_000;
const PDF_PAGES: usize = 30;

const FRONT: &str = r#"
    [[experiment]]
    name = "swiglu"
    title = "Keep or recompute"
    about = ""

    [[comparison]]
    name = "swiglu-time"
    title = "Against PyTorch"
    about = ""
    peer = "swiglu.py"
    rounds = 3

    [[part]]
    name = "p"
    title = "The part"
    about = ""
    sections = ["swiglu", "swiglu-time"]
    [[part.row]]
    asks = "How much memory?"
    says = "Half."
    [[part.row]]
    asks = "On a GPU?"
    says = "No."
    short = "**A GPU** is not at hand."
    [[part.row]]
    asks = "And beyond?"
    says = "Yes."
    own = true

    [front]
    about = "A project."
    reading = "Ours by theirs."
    colours = { ours = 0 }
    machine = [{ name = "test", title = "The machine", matches = "Test" }]
    [front.table]
    heading = "technique"
    machines = ["test"]
    column = [{ title = "time", quantity = "time" }]
    row = [
        { label = "step", metrics = { time = "step_seconds" }, all = { experiment = "swiglu-time", of = { impl = "frugal" } }, peers = [{ label = "PyTorch", against = { impl = "pytorch" } }] },
    ]
    [front.figure]
    kind = "bars"
    caption = "A bar."
    panel = [{ title = "peak", all = { machine = "test", experiment = "swiglu", metric = "peak_bytes" } }]
    item = [{ label = "input", thing = "ours", all = { of = { level = "InputOnly", batch = 1 } } }]

    [[article]]
    name = "a"
    title = "An article"
    part = "p"
    question = "What does it cost?"
    idea = "$x^2$"
    [article.value]
    peak = { machine = "test", experiment = "swiglu", metric = "peak_bytes", of = { level = "InputOnly", batch = 1 }, against = { level = "SaveAll" } }
    time = { machine = "test", experiment = "swiglu", metric = "backward_seconds", of = { level = "InputOnly", batch = 1 }, against = { level = "SaveAll" } }
    [[article.exhibit]]
    title = "It frees {peak:percent}"
    setting = "Two batches."
    [article.exhibit.table]
    heading = "level"
    all = { machine = "test", experiment = "swiglu", of = { batch = 1 } }
    column = [{ title = "backward", unit = "ms", all = { metric = "backward_seconds" } }, { title = "peak", unit = "MiB", all = { metric = "peak_bytes" } }]
    row = [{ label = "kept", all = { of = { level = "SaveAll" } } }, { label = "computed again", all = { of = { level = "InputOnly" } } }]
    [[article.follows]]
    decides = "time"
    more = "It takes {time:change} time, {time:against} kept and {time:of} computed again."
    less = "It takes less."
    same = "It takes as long."
    unclear = "It is undecided."
"#;

/// The texts of the page between its tags, without drawings.
fn text(html: &str) -> String {
    let (mut text, mut rest) = (String::new(), html);
    while let Some((before, after)) = rest.split_once('<') {
        text += before;
        text.push(' ');
        rest = match after.starts_with("svg") {
            true => after.split_once("</svg>").map_or("", |(_, rest)| rest),
            false => after.split_once('>').map_or("", |(_, rest)| rest),
        };
    }
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn built(change: &dyn Fn(&str) -> String) -> FrontPage {
    let specs: Specs = toml::from_str(&change(FRONT)).unwrap();
    let records = [swiglu(), rounds()].concat();
    front::build(&specs, &records.iter().collect::<Vec<_>>()).unwrap()
}

#[test]
fn a_page_of_records() {
    let page = built(&str::to_owned);
    assert_eq!(page.problems, Vec::<String>::new());
    assert_eq!(page.headlines, [("step: time".to_owned(), "0.95 × PyTorch".to_owned())]);
    expect!["Frugal A project. The machine technique time step 0.95 Ours by theirs. A bar. The assignments ask 2 questions. 1 are answered as asked; 1 with less, which each article lists. An article What does it cost? x 2 It frees 38 % level backward ms peak MiB kept 102 ±5 % 400 computed again 128 ±5 % 250 Two batches. The machine abc1234 2026-11-21. What follows It takes 25 % more (18–34 %) time, 102 ms kept and 128 ms computed again. What is not measured A GPU is not at hand. Everything else: appendix “The part” . Machines and appendix machine processor libtorch records revisions measured The machine Test CPU, 2 threads 2.11.0 14 1 2026-11-21 to 2026-11-21 The part"]
    .assert_eq(&text(&page.html).replace('\u{a0}', " "));
}

#[test]
fn what_no_record_fills_is_a_problem_and_no_sentence() {
    let problems = |from: &str, to: &str| {
        assert!(FRONT.contains(from), "{from}");
        let page = built(&|text| text.replace(from, to));
        (page.problems.join("\n"), page.html)
    };
    let (found, html) = problems("{time:change}", "{tmie:change}");
    expect!["article a: What follows: no value is named `tmie`"].assert_eq(&found);
    assert!(!html.contains("What follows"));
    let (found, _) = problems(
        "more = \"It takes {time:change} time, {time:against} kept and {time:of} computed again.\"",
        "",
    );
    expect!["article a: What follows: time needs the sentence `more`"].assert_eq(&found);
    let (found, _) = problems(
        "label = \"kept\", all = { of = { level = \"SaveAll\" } }",
        "label = \"kept\", all = { of = { level = \"Nope\" } }",
    );
    expect![[r#"article a: It frees {peak:percent}: the row "kept" has no value"#]].assert_eq(&found);
    let (found, _) = problems("thing = \"ours\"", "thing = \"theirs\"");
    expect![[r#"the first figure, figure: "theirs" has no colour on this page"#]].assert_eq(&found);
    let (found, _) = problems("level = \"InputOnly\", batch = 1 } } }]", "batch = 1 } } }]");
    expect![[r#"
        the first figure, figure, input: 2 cases have peak_bytes: batch 1, SaveAll | batch 1, InputOnly; name one
        the first figure, figure: the panel "peak" has no value"#]]
    .assert_eq(&found);
    let (found, _) =
        problems("reading = \"Ours by theirs.\"", "reading = \"\"\nseveral_revisions = \"because\"");
    expect!["each machine has one revision; remove the reason"].assert_eq(&found);
}

#[test]
fn one_run_gives_no_direction() {
    let specs: Specs = toml::from_str(FRONT).unwrap();
    let mut records = rounds();
    records.retain(|record| record.case.get("round").and_then(serde_json::Value::as_u64) == Some(0));
    let case = |level: &str| Case::new().with("batch", 1).with("level", level);
    for (level, seconds) in [("SaveAll", 1.0), ("InputOnly", 2.0)] {
        records.push(record("swiglu", case(level), Metric::exact("backward_seconds", "s", seconds)));
        records.push(record("swiglu", case(level), Metric::exact("peak_bytes", "B", 1024.0 * seconds)));
    }
    let html = front::build(&specs, &records.iter().collect::<Vec<_>>()).unwrap().html;
    assert!(html.contains("<b class=\"unclear\">0.95</b><span class=\"ci\">one run</span>"), "{html}");
    assert!(html.contains("It is undecided."), "{html}");
}

/// The project's page, from the records that are committed.
fn committed() -> &'static (FrontPage, String) {
    static PAGE: OnceLock<(FrontPage, String)> = OnceLock::new();
    PAGE.get_or_init(|| {
        let reports = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reports");
        let read = |folder: &Path| {
            let mut files: Vec<_> = std::fs::read_dir(folder.join("records"))
                .unwrap()
                .map(|entry| entry.unwrap().path())
                .collect();
            files.sort();
            files.iter().flat_map(|file| report::read_records(file).unwrap()).collect::<Vec<Record>>()
        };
        let specs = registered();
        let others = ["h200", "intel"]
            .map(|folder| OtherReport { folder: folder.into(), records: read(&reports.join(folder)) });
        let records = read(&reports);
        let all: Vec<&Record> =
            records.iter().chain(others.iter().flat_map(|other| &other.records)).collect();
        let front = front::build(&specs, &all).expect("the front is registered");
        let html = page::html(Some(&front), &Document::new(&specs, &[], &[], &[]));
        (front, html)
    })
}

#[test]
fn every_figure_table_and_sentence_has_its_records() {
    assert_eq!(committed().0.problems, Vec::<String>::new());
}

#[test]
fn the_committed_page_is_of_the_committed_records() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reports/index.html");
    let html = std::fs::read_to_string(file).unwrap();
    assert!(
        html == committed().1,
        "reports/index.html is not what the records give; run `cargo xtask report --pdf`"
    );
}

#[test]
fn no_gain_without_an_interval_and_no_gap_beside_a_value() {
    let html = &committed().1;
    for class in ["less", "more", "same"] {
        let once = html
            .split(&format!("<b class=\"{class}\">"))
            .skip(1)
            .find(|cell| cell.split("</td>").next().is_some_and(|cell| cell.contains("one run")));
        assert!(once.is_none(), "one run has a direction: {once:?}");
    }
    for words in [
        "not measured (",
        "no record",
        "neither more nor less",
        "by the 95 % interval",
        "On NVIDIA",
        "On Intel",
        "On AMD",
    ] {
        assert!(!text(html).contains(words), "the page says \"{words}\"");
    }
}

#[test]
fn every_question_has_a_figure_or_a_reason() {
    let reports = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reports");
    let measured = |name: &String| {
        ["", "h200", "intel"]
            .iter()
            .any(|folder| reports.join(folder).join(format!("records/{name}.jsonl")).is_file())
    };
    for part in &registered().parts {
        for row in part.rows.iter().filter(|row| !row.own && row.short.is_none() && !row.sections.is_empty())
        {
            assert!(
                row.sections.iter().any(measured),
                "{}: \"{}\" has no record; say on the page why, with `short`",
                part.name,
                row.asks
            );
        }
        let short = part.rows.iter().filter_map(|row| row.short.as_ref());
        assert!(
            short.clone().all(|text| text.starts_with("**")),
            "{}: a gap begins with its subject",
            part.name
        );
    }
}

/// Every text of an article that no value chooses.
fn unchosen(article: &Article) -> Vec<&str> {
    let mut all: Vec<&str> = vec![&article.title];
    all.extend(article.follows.iter().chain(&article.surprised).filter_map(|says| says.text.as_deref()));
    for Exhibit { title, setting, figure, .. } in &article.exhibits {
        all.extend([title.as_str(), setting.as_str()]);
        all.extend(figure.iter().map(|figure| figure.caption.as_str()));
    }
    all
}

#[test]
fn a_verdict_is_chosen_by_an_interval() {
    for article in &registered().articles {
        for text in unchosen(article) {
            let words = text.to_lowercase();
            let verdict = words.split(|c: char| !c.is_alphanumeric()).find(|word| VERDICTS.contains(word));
            assert_eq!(verdict, None, "{}: this is said whatever the figures are: {text}", article.name);
        }
        for exhibit in &article.exhibits {
            assert!(exhibit.setting.len() > 20, "{}: {} names no sizes", article.name, exhibit.title);
            let columns = exhibit
                .table
                .as_ref()
                .map_or(0, |Grid { columns, machines, .. }| columns.len() * machines.len().max(1));
            assert!(columns <= 8, "{}: {} has {columns} columns", article.name, exhibit.title);
        }
        assert!((1..=6).contains(&article.exhibits.len()), "{}", article.name);
        assert!(!article.follows.is_empty() && !article.surprised.is_empty(), "{}", article.name);
    }
}

#[test]
fn every_part_has_its_article() {
    let specs = registered();
    for part in &specs.parts {
        assert!(specs.articles.iter().any(|article| article.part == part.name), "{}", part.name);
    }
}

#[test]
fn the_page_is_short_and_nothing_is_cut() {
    let html = &committed().1;
    let Some(wide) = browser::measure(html, 1400) else {
        return browser::skipped("the height, the words and the tables of the page");
    };
    assert!(wide.height <= HEIGHT && wide.words <= WORDS, "{wide:?}");
    for width in [1400, 1000, 420] {
        let measured = browser::measure(html, width).expect("the browser was found");
        assert!(measured.over <= 0 && measured.cut.is_empty(), "{width}: {measured:?}");
    }
}

#[test]
fn the_printed_page_is_committed() {
    let pdf = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reports/report.pdf"))
        .expect("`cargo xtask report --pdf` prints it");
    let pages = pdf.windows(11).filter(|bytes| bytes == b"/Type /Page").count();
    let trees = pdf.windows(12).filter(|bytes| bytes == b"/Type /Pages").count();
    assert!((5..=PDF_PAGES).contains(&(pages - trees)), "{} pages", pages - trees);
}

/// The contrast of two colours of the form `#rrggbb`, as WCAG defines it.
fn contrast(a: &str, b: &str) -> f64 {
    let light = |colour: &str| {
        let channel = |at: usize| {
            let value = f64::from(u8::from_str_radix(&colour[at..at + 2], 16).unwrap()) / 255.0;
            if value <= 0.03928 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
        };
        0.2126 * channel(1) + 0.7152 * channel(3) + 0.0722 * channel(5)
    };
    let (a, b) = (light(a), light(b));
    (a.max(b) + 0.05) / (a.min(b) + 0.05)
}

#[test]
fn texts_have_contrast_on_both_backgrounds() {
    let css = include_str!("../../src/page.css");
    let modes: Vec<&str> = css.split(":root {").skip(1).map(|rest| rest.split('}').next().unwrap()).collect();
    assert_eq!(modes.len(), 2, "light and dark");
    for mode in modes {
        let colour = |name: &str| {
            let at = mode.split_once(&format!("--{name}: ")).unwrap_or_else(|| panic!("no {name}")).1;
            at[..7].to_owned()
        };
        for text in ["ink", "soft", "link", "good", "bad", "open"] {
            for background in ["paper", "faint"] {
                let ratio = contrast(&colour(text), &colour(background));
                assert!(ratio >= 4.5, "{text} on {background}: {ratio:.2}");
            }
        }
        for kind in ["good", "bad", "open"] {
            let ratio = contrast(&colour(kind), &colour(&format!("{kind}-bg")));
            assert!(ratio >= 4.5, "{kind} on its own background: {ratio:.2}");
        }
    }
}
