//! The written folder: the appendix's structure, that pages stand alone, and that no text of a record or spec acts as HTML.

use crate::fixed_records::{environment, record, rounds, specs, swiglu};
use expect_test::expect;
use report::{Case, Environment, Metric, Record, RunOutcome, RunState, Specs, site};

fn runs() -> Vec<RunOutcome> {
    vec![
        RunOutcome { experiment: "swiglu".into(), state: RunState::Done { seconds: 75.2 } },
        RunOutcome { experiment: "swiglu-time".into(), state: RunState::Skipped { why: "no Python".into() } },
    ]
}

/// The files that are written, by name.
fn written(specs: &Specs, records: &[Record], runs: &[RunOutcome]) -> Vec<(String, String)> {
    let folder = tempfile::tempdir().unwrap();
    let written = site::write(specs, records, runs, &[], folder.path()).unwrap();
    let name = |path: &std::path::Path| path.strip_prefix(folder.path()).unwrap().display().to_string();
    written.files.iter().map(|path| (name(path), std::fs::read_to_string(path).unwrap())).collect()
}

fn file(files: &[(String, String)], name: &str) -> String {
    files.iter().find(|(have, _)| have == name).unwrap_or_else(|| panic!("no {name}")).1.clone()
}

/// Every tag in order of the text, and every text between; fails where tags are not closed in order.
fn parse(html: &str) -> (Vec<String>, Vec<String>) {
    const VOID: [&str; 4] = ["meta", "!doctype", "br", "img"];
    let (mut open, mut tags, mut texts) = (Vec::<String>::new(), Vec::new(), Vec::new());
    let mut rest = html;
    while let Some(at) = rest.find('<') {
        texts.push(rest[..at].to_owned());
        let end = at + rest[at..].find('>').expect("a tag ends");
        let tag = &rest[at + 1..end];
        rest = &rest[end + 1..];
        let name = tag.trim_start_matches('/').split([' ', '/']).next().unwrap().to_owned();
        if tag.starts_with('/') {
            assert_eq!(
                open.pop().as_ref(),
                Some(&name),
                "closing </{name}> near {}",
                &rest[..rest.len().min(80)]
            );
        } else if !tag.ends_with('/') && !VOID.contains(&name.as_str()) {
            open.push(name.clone());
        }
        tags.push(tag.to_owned());
        if name == "style" && !tag.starts_with('/') {
            rest = &rest[rest.find("</style>").expect("a style ends")..];
        }
    }
    assert!(open.is_empty(), "never closed: {open:?}");
    (tags, texts)
}

#[test]
fn the_page_has_its_parts_in_order() {
    let files = written(&specs(), &[swiglu(), rounds()].concat(), &runs());
    let names: Vec<_> = files.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        names,
        [
            "plots/swiglu-pareto.svg",
            "swiglu.csv",
            "swiglu-time.csv",
            "report.md",
            "claims.md",
            "appendix/experiments.html",
            "index.html"
        ]
    );
    let page = file(&files, "appendix/experiments.html");
    let (tags, texts) = parse(&page);
    let (mut outline, mut texts) = (String::new(), texts.into_iter().skip(1));
    for tag in tags {
        let text = texts.next().unwrap_or_default();
        let name = tag.split(' ').next().unwrap();
        if ["h1", "h2", "h3", "h4", "th", "figcaption", "li", "summary"].contains(&name)
            || tag.contains("badge")
        {
            outline += &format!("{name}: {}\n", text.trim());
        }
    }
    expect![[r#"
        li: 
        li: 
        li: 
        h1: Appendix: Experiments
        h2: Claims
        th: claim
        th: limit
        th: Test CPU
        span: falls short
        span: holds
        h2: Keep or recompute
        span: done
        h4: Time and memory
        th: batch
        th: level
        th: backward (ms)
        th: peak (MiB)
        figcaption: Time against memory
        li: batch 1: InputOnly needs 37.5 % less memory for 25.5 % more time, 250 MiB against 400 MiB (0.625)
        li: batch 8: not measured (needs 12 GiB)
        h2: Against PyTorch
        span: skipped
        h4: All measurements
        th: impl
        th: batch
        th: step (s)
        th: step time ratio
    "#]]
    .assert_eq(&outline);
}

#[test]
fn the_pages_stand_alone_and_their_links_lead_somewhere() {
    let files = written(&specs(), &[swiglu(), rounds()].concat(), &runs());
    for (page, within) in [("index.html", ""), ("appendix/experiments.html", "appendix/")] {
        let text = file(&files, page);
        let (tags, _) = parse(&text);
        for forbidden in ["<script", "<link", "<iframe", "@import", "url(", "http:", "https:"] {
            assert!(
                !text.contains(forbidden) || text.contains("http://www.w3.org/2000/svg"),
                "{page}: {forbidden}"
            );
        }
        let value = |tag: &String, name: &str| {
            let rest = tag.split_once(&format!("{name}=\""))?.1;
            rest.split('"').next().map(str::to_owned)
        };
        for target in tags.iter().flat_map(|tag| [value(tag, "href"), value(tag, "src")]).flatten() {
            if let Some(anchor) = target.strip_prefix('#') {
                assert!(tags.iter().any(|t| t.contains(&format!("id=\"{anchor}\""))), "{page}: {target}");
                continue;
            }
            let path = match target.strip_prefix("../") {
                Some(path) => path.to_owned(),
                None => format!("{within}{target}"),
            };
            assert!(files.iter().any(|(name, _)| *name == path), "{page}: {target}");
        }
    }
}

#[test]
fn the_markdown_report() {
    expect![[r#"
        # Frugal: measurements

        Everything else is in the appendix:

        - [Experiments](appendix/experiments.html), 2 sections

        [Claims](claims.md): 1 hold, 0 are a tie, 1 fall short, 1 are not measured.
    "#]]
    .assert_eq(&file(&written(&specs(), &[swiglu(), rounds()].concat(), &runs()), "report.md"));
}

#[test]
fn the_same_records_give_the_same_bytes() {
    let records = [swiglu(), rounds()].concat();
    assert_eq!(written(&specs(), &records, &runs()), written(&specs(), &records, &runs()));
}

#[test]
fn nothing_at_all_is_a_page_too() {
    parse(&file(&written(&Specs::default(), &[], &[]), "index.html"));
    parse(&file(&written(&specs(), &[], &[]), "index.html"));
}

#[test]
fn records_that_no_crate_registers_are_shown_as_they_are() {
    let stray = record("a/../stray", Case::new().with("x", 1), Metric::exact("m", "", 2.0));
    let files = written(&Specs::default(), &[stray], &[]);
    assert_eq!(files[0].0, "a____stray.csv");
    assert!(file(&files, "appendix/experiments.html").contains("No crate registers this experiment"));
}

/// Texts that end an element, an attribute, a comment or a table cell, in every place where a text can come from.
const HOSTILE: [&str; 7] = [
    "<script>alert(1)</script>",
    "\"><img src=x onerror=alert(1)>",
    "' onmouseover='alert(1)",
    "</style></svg></title>",
    "a & b &amp; c",
    "]]> --> | `x` \u{0} \u{1b}[31m",
    "[x](javascript:alert(1)) **<b>** <!--",
];

#[test]
fn no_text_acts_as_html() {
    for text in HOSTILE {
        let q = serde_json::to_string(text).unwrap().replace("\\u0000", "").replace("\\u001b", "");
        let specs: Specs = toml::from_str(&format!(
            "[[experiment]]\nname = 'e'\ntitle = {q}\nabout = {q}\npackage = 'p'\n\
             [[experiment.table]]\ntitle = {q}\n\
             [[experiment.plot]]\nname = 'dots'\ntitle = {q}\nkind = 'scatter'\nx = 'i'\ny = {q}\nseries = {q}\n\
             label = {q}\nfacet = ['i']\n\
             [[experiment.plot]]\nname = 'bars'\ntitle = {q}\nkind = 'bar'\nx = {q}\ny = {q}\nseries = 'i'\n\
             [[experiment.finding]]\nper = [{q}]\ntext = {text}\n\
             [[claim]]\nname = {q}\nwhat = {q}\nexperiment = 'e'\nmetric = {q}\nop = '<='\nlimit = 1\nunit = {q}\nrun = {q}\n",
            text = serde_json::to_string(&format!("{text} {{per}}")).unwrap().replace("\\u0000", "").replace("\\u001b", ""),
        ))
        .unwrap();
        let plain = text.replace(['\0', '\u{1b}'], "");
        let mut records = Vec::new();
        for i in 0..3 {
            let case = Case::new().with("i", i).with(&plain, text);
            let metric = Metric { note: Some(text.into()), ..Metric::exact(&plain, text, f64::from(i)) };
            let environment = Environment {
                device: text.into(),
                cpu: text.into(),
                torch: Some(text.into()),
                implementations: None,
                scale: None,
                revision: text.into(),
                ..environment()
            };
            records.push(Record { environment, ..record("e", case, metric) });
        }
        records.push(record(text, Case::new().with("i", 1), Metric::not_measured("m", text, text)));
        let runs = [RunOutcome { experiment: "e".into(), state: RunState::Failed { message: text.into() } }];
        let files = written(&specs, &records, &runs);
        for (name, content) in
            files.iter().filter(|(name, _)| name.ends_with("html") || name.ends_with("svg"))
        {
            let (tags, _) = parse(content);
            for tag in &tags {
                let name_of = tag.trim_start_matches('/').split([' ', '/']).next().unwrap();
                // The appendix's plots are files.
                let plot = tag.starts_with("img loading=\"lazy\" src=\"../plots/");
                assert!(
                    plot || !["script", "img", "b", "!--"].contains(&name_of),
                    "{name} has <{tag}> of {text:?}"
                );
                // An attribute's quotes are even, and none of the attributes is a handler.
                assert_eq!(tag.matches('"').count() % 2, 0, "{name}: <{tag}>");
                let outside: String = tag.split('"').step_by(2).collect();
                assert!(!outside.contains(" on"), "{name}: <{tag}>");
                assert!(!tag.contains("href=\"javascript:"), "{name}: <{tag}>");
            }
            assert!(!content.chars().any(|c| c.is_control() && c != '\n'), "{name} has a control character");
        }
        let page = file(&files, "appendix/experiments.html");
        assert!(page.matches("alert(1)").count() > 0 || !text.contains("alert"), "the text itself is shown");
    }
}

#[test]
fn a_folder_that_cannot_be_written() {
    let folder = tempfile::tempdir().unwrap();
    let taken = folder.path().join("taken");
    std::fs::write(&taken, "").unwrap();
    let error = site::write(&Specs::default(), &[], &[], &[], &taken).unwrap_err().to_string();
    expect![["cannot write ROOT/taken/report.md: File exists (os error 17); give an output folder that you may write to and that has space"]]
    .assert_eq(&error.replace(&folder.path().display().to_string(), "ROOT"));
}
