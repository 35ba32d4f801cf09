//! The written folder: the page's structure, that it stands alone, and that no text of a record or spec acts as HTML.

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
    const VOID: [&str; 3] = ["meta", "!doctype", "br"];
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
            "part-experiments.md",
            "index.html"
        ]
    );
    let page = file(&files, "index.html");
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
        summary: 2 sections
        li: 
        li: 
        li: 
        h1: Frugal
        summary: 1 of 3 claims fall short
        th: verdict
        th: claim
        th: measured
        th: limit
        th: command
        span: falls short
        summary: 1 of 3 claims are not measured
        th: verdict
        th: claim
        th: measured
        th: limit
        th: command
        span: not measured
        summary: 1 of 3 claims hold
        th: verdict
        th: claim
        th: measured
        th: limit
        th: command
        span: holds
        h2: Experiments
        h3: Keep or recompute
        span: done
        h4: Time and memory
        th: batch
        th: level
        th: backward (ms)
        th: peak (MiB)
        figcaption: Time against memory
        h4: Conclusion
        li: batch 1: InputOnly needs 37.5 % less memory for 25.5 % more time, 250 MiB against 400 MiB (0.625)
        li: batch 8: not measured (needs 12 GiB)
        h3: Against PyTorch
        span: skipped
        h4: All measurements
        th: impl
        th: batch
        th: step (s)
        th: step time ratio
        summary: 2 experiments, 1 done, 1 skipped
        th: experiment
        th: name
        th: run
        span: done
        span: skipped
    "#]]
    .assert_eq(&outline);
}

#[test]
fn the_page_stands_alone_and_its_links_lead_somewhere() {
    let files = written(&specs(), &[swiglu(), rounds()].concat(), &runs());
    let page = file(&files, "index.html");
    let (tags, _) = parse(&page);
    for forbidden in ["<script", "<link", "<img", "<iframe", "@import", "url(", " src="] {
        assert!(!page.contains(forbidden), "{forbidden}");
    }
    for tag in &tags {
        let Some(target) = tag.split("href=\"").nth(1).and_then(|rest| rest.split('"').next()) else {
            continue;
        };
        match target.strip_prefix('#') {
            Some(anchor) => assert!(tags.iter().any(|t| t.contains(&format!("id=\"{anchor}\""))), "{target}"),
            None => assert!(files.iter().any(|(name, _)| name == target), "{target}"),
        }
    }
}

#[test]
fn the_markdown_report() {
    expect![[r#"
        # Frugal: measurements

        | part                               | questions | not measured | sections |
        | ---------------------------------- | --------: | -----------: | -------: |
        | [Experiments](part-experiments.md) |         0 |            0 |        2 |

        [Claims](claims.md): 1 hold, 1 fall short, 1 are not measured.

        Measured on Test CPU, 2 threads, 8.00 GiB, libtorch 2.11.0, revision abc1234, 2026-11-21; each section names its own machine and revision.
    "#]].assert_eq(&file(&written(&specs(), &[swiglu(), rounds()].concat(), &runs()), "report.md"));
}

#[test]
fn the_markdown_of_a_part() {
    let files = written(&specs(), &[swiglu(), rounds()].concat(), &runs());
    assert!(file(&files, "claims.md").contains("| **falls short** "));
    expect![[r#"
        # Experiments

        ## Keep or recompute

        What each **level** costs.

        Run: done in 1 min 15 s

        **Time and memory**

        | batch | level     |    backward (ms) |       peak (MiB) |
        | ----: | --------- | ---------------: | ---------------: |
        |     1 | SaveAll   |          102 ± 1 |              400 |
        |     1 | InputOnly |          128 ± 1 |              250 |
        |     8 | SaveAll   | not measured [a] | not measured [a] |
        |     8 | InputOnly |        1,000 ± 5 |            1,536 |

        - [a] needs 12 GiB

        ![Time against memory](plots/swiglu-pareto.svg)

        - batch 1: InputOnly needs 37.5 % less memory for 25.5 % more time, 250 MiB against 400 MiB (0.625)
        - batch 8: not measured (needs 12 GiB)

        Reproduce: `cargo xtask run-all --only swiglu`

        Measured on Test CPU, 2 threads, 8.00 GiB, libtorch 2.11.0, revision abc1234, 2026-11-21

        All measurements: [swiglu.csv](swiglu.csv)

        ## Against PyTorch

        In turns.

        Run: skipped: no Python

        **All measurements**

        | impl    | batch |    step (s) |   step time ratio |
        | ------- | ----: | ----------: | ----------------: |
        | frugal  |     8 | 3.80 ± 0.95 | 0.950 ± 0.000 [a] |
        | pytorch |     8 | 4.00 ± 1.00 |                 – |

        - [a] against PyTorch 2.11.0

        Reproduce: `cargo xtask compare --only swiglu-time`

        Measured on Test CPU, 2 threads, 8.00 GiB, libtorch 2.11.0, revision abc1234, 2026-11-21

        All measurements: [swiglu-time.csv](swiglu-time.csv)
    "#]]
    .assert_eq(&file(&files, "part-experiments.md"));
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
    assert!(file(&files, "index.html").contains("No crate registers this experiment"));
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
                assert!(!["script", "img", "b", "!--"].contains(&name_of), "{name} has <{tag}> of {text:?}");
                // An attribute's quotes are even, and none of the attributes is a handler.
                assert_eq!(tag.matches('"').count() % 2, 0, "{name}: <{tag}>");
                let outside: String = tag.split('"').step_by(2).collect();
                assert!(!outside.contains(" on"), "{name}: <{tag}>");
                assert!(!tag.contains("href=\"javascript:"), "{name}: <{tag}>");
            }
            assert!(!content.chars().any(|c| c.is_control() && c != '\n'), "{name} has a control character");
        }
        let page = file(&files, "index.html");
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
