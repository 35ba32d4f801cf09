//! The parts of the report: each question with its answer, every experiment in one part, and sentences that follow the sign.

use std::path::Path;

use crate::fixed_records::record;
use report::spec::Finding;
use report::{Case, Document, Filter, Measurements, Metric, OtherReport, Record, Specs, finding};

/// All experiments and claims that the workspace registers.
pub(crate) fn registered() -> Specs {
    Specs::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")).unwrap()
}

const PART: &str = r#"
    [[experiment]]
    name = "e"
    title = "E"
    about = ""

    [[claim]]
    name = "c/e"
    what = "time"
    experiment = "e"
    metric = "step_seconds"
    op = "<="
    limit = 2.0
    unit = "s"
    run = "measure"

    [[part]]
    name = "p"
    title = "The part"
    about = "What is asked."
    sections = ["e"]

    [[part.row]]
    asks = "How fast?"
    sections = ["e"]
    short = "**A GPU** is not at hand."

    [[part.row]]
    asks = "Why?"
    says = "Because."
"#;

fn seconds(method: &str, samples: &[f64]) -> Record {
    record("e", Case::new().with("method", method), Metric::of_samples("step_seconds", "s", samples))
}

fn sentence(ours: &[f64], theirs: &[f64]) -> String {
    let finding: Finding = toml::from_str(
        "of = { method = 'ours' }\nagainst = { method = 'theirs' }\ntext = 'Ours is {slower:step_seconds} than theirs.'",
    )
    .unwrap();
    let measured = Measurements::from_records(&[seconds("ours", ours), seconds("theirs", theirs)]);
    finding::sentences(&finding, &measured).remove(0)
}

#[test]
fn the_words_follow_the_sign_and_the_size() {
    let first = |ours: &[f64]| sentence(ours, &[1.0, 1.01, 0.99]);
    assert_eq!(first(&[1.13, 1.14, 1.12]), "Ours is 13.0 % slower than theirs.");
    assert_eq!(first(&[0.8, 0.81, 0.79]), "Ours is 25.0 % faster than theirs.");
    assert_eq!(first(&[0.2, 0.2, 0.2]), "Ours is 5.00 times as fast as theirs.");
    assert_eq!(first(&[3.0, 3.0, 3.0]), "Ours is 3.00 times as slow as theirs.");
    assert_eq!(
        first(&[0.995, 1.0, 0.99]),
        "Ours is just as fast as theirs. (no difference by the 95 % interval: step)"
    );
    assert_eq!(
        first(&[1.03, 1.04, 1.02]),
        "Ours is just as fast as theirs. (undecided by the 95 % interval: step)"
    );
    assert_eq!(first(&[0.5]), "Ours is 2.00 times as fast as theirs. (single runs: step)");
}

#[test]
fn a_claim_takes_the_figure_of_the_machine_that_has_it() {
    let other = OtherReport { folder: "gpu".into(), records: vec![seconds("elsewhere", &[0.5, 0.5, 0.5])] };
    let specs: Specs = toml::from_str(PART).unwrap();
    let claim = |records: &[Record]| {
        let document = Document::new(&specs, records, &[], std::slice::from_ref(&other));
        document.claims[0].to_string()
    };
    assert_eq!(claim(&[]), "claim c/e 0.50 s <= 2.00 s holds (on Test CPU)");
    assert_eq!(claim(&[seconds("ours", &[3.0])]), "claim c/e 3.00 s <= 2.00 s falls short");
}

#[test]
fn the_records_of_every_machine_stand_in_one_section() {
    let other = OtherReport { folder: "gpu".into(), records: vec![seconds("elsewhere", &[0.5, 0.5, 0.5])] };
    let specs: Specs = toml::from_str(PART).unwrap();
    let document = Document::new(&specs, &[seconds("ours", &[1.0])], &[], &[other]);
    let section = &document.parts[0].sections[0];
    assert_eq!(
        (section.csv_file().as_str(), section.elsewhere[0].csv_file().as_str()),
        ("e.csv", "gpu/e.csv")
    );
    let (_, page) = report::page::appendix(&document).remove(0);
    for text in ["Less than asked", "A GPU", "Because.", "href=\"../gpu/e.csv\"", "href=\"#x-e\""] {
        assert!(page.contains(text), "{text}");
    }
}

#[test]
fn ranges_over_groups() {
    let finding: Finding = toml::from_str(
        "over = ['size']\nof = { method = 'ours' }\nagainst = { method = 'theirs' }\n\
         text = '{groups} sizes: {more:step_seconds} time, {of:step_seconds}'",
    )
    .unwrap();
    let at = |size: u64, ours: f64| {
        [("ours", ours), ("theirs", 1.0)].map(|(method, value)| {
            record(
                "e",
                Case::new().with("size", size).with("method", method),
                Metric::exact("step_seconds", "s", value),
            )
        })
    };
    let text = |values: &[f64]| {
        let records: Vec<_> = values.iter().zip(1..).flat_map(|(value, size)| at(size, *value)).collect();
        finding::sentences(&finding, &Measurements::from_records(&records)).join("\n")
    };
    assert_eq!(text(&[1.1, 1.5]), "2 sizes: 10.0 to 50.0 % more time, 1.10 to 1.50 s");
    assert_eq!(text(&[0.9, 0.5]), "2 sizes: 10.0 to 50.0 % less time, 500 to 900 ms");
    assert_eq!(text(&[0.9, 1.5]), "2 sizes: between 10.0 % less and 50.0 % more time, 900 ms to 1.50 s");
    assert_eq!(text(&[1.0, 1.5]), "2 sizes: up to 50.0 % more time, 1 to 1.50 s");
    assert_eq!(text(&[1.0, 1.0]), "2 sizes: neither more nor less time, 1 s");
}

#[test]
fn the_words_of_several_groups_follow_those_that_are_below() {
    let finding: Finding = toml::from_str(
        "over = ['size']\nof = {}\ndecides = 'found@1'\nless = 'Not all of {groups}.'\nsame = 'All {groups}.'\n\
         more = 'All {groups}, and more.'",
    )
    .unwrap();
    let text = |values: &[f64]| {
        let one = |(value, size): (&f64, u64)| {
            record("e", Case::new().with("size", size), Metric::exact("found", "count", *value))
        };
        let records: Vec<_> = values.iter().zip(1..).map(one).collect();
        finding::sentences(&finding, &Measurements::from_records(&records)).join("\n")
    };
    assert_eq!(text(&[1.0, 1.0]), "All 2.");
    assert_eq!(text(&[2.0, 0.0]), "Not all of 2.");
    assert_eq!(text(&[2.0, 1.0]), "All 2, and more.");
    let measured = Measurements::from_records(&[seconds("ours", &[1.0])]);
    let by_method: Finding =
        toml::from_str("over = ['method']\nof = {}\ndecides = 'found@1'\nless = '-'\nsame = '-'\nmore = '-'")
            .unwrap();
    assert_eq!(finding::sentences(&by_method, &measured), ["not measured (no record of found)"]);
}

#[test]
fn a_run_at_scale_laptop_takes_ten_minutes() {
    let at_laptop = |e: &&report::spec::Experiment| e.runs_at(report::cli::Scale::Laptop);
    let specs = registered();
    let seconds: f64 = specs.experiments.iter().filter(at_laptop).map(|e| e.laptop_seconds).sum();
    assert!(seconds <= 600.0, "the budgets come to {seconds} s");
}

#[test]
fn every_experiment_has_its_part_and_every_question_an_answer() {
    let specs = registered();
    let experiments = specs.experiments.iter().map(|e| &e.name);
    for name in experiments.chain(specs.comparisons.iter().map(|c| &c.name)) {
        let parts: Vec<_> = specs.parts.iter().filter(|part| part.sections.contains(name)).collect();
        assert_eq!(parts.len(), 1, "`{name}` stands in {} parts' `sections`; it belongs to one", parts.len());
        let finds = specs.experiment(name).map(|e| e.findings.len());
        let finds = finds.or_else(|| specs.comparison(name).map(|c| c.findings.len()));
        assert_ne!(finds, Some(0), "`{name}` has no finding; a section concludes something, or goes");
    }
    for part in &specs.parts {
        assert!(!part.rows.is_empty(), "{}", part.name);
        for row in &part.rows {
            let answered = !row.sections.is_empty() || !row.says.trim().is_empty() || !row.code.is_empty();
            assert!(answered, "{}: \"{}\" has neither `sections` nor `says` nor `code`", part.name, row.asks);
        }
    }
}

/// Words that a text must leave to its figures.
pub(crate) const VERDICTS: [&str; 14] = [
    "save", "saves", "saved", "saving", "gain", "gains", "faster", "slower", "reduces", "improves", "better",
    "worse", "cuts", "speedup",
];

/// Every registered finding with the name of its experiment.
fn findings(specs: &Specs) -> Vec<(String, Finding)> {
    let experiments = specs.experiments.iter().map(|e| (&e.name, &e.findings));
    let sections = experiments.chain(specs.comparisons.iter().map(|c| (&c.name, &c.findings)));
    let sections = sections.flat_map(|(name, all)| all.iter().map(move |f| (name.clone(), f.clone())));
    sections.collect()
}

/// Records that a finding takes, where every value of `of` is `times` its baseline, with the given spread.
fn made_up(experiment: &str, finding: &Finding, times: f64, spread: f64) -> Vec<Record> {
    let one_of = |filter: &Filter, mark: &str| {
        let mut case = Case::new();
        for key in finding.per.iter().chain(&finding.over) {
            case = case.with(key, "group");
        }
        for (key, value) in &filter.0.0 {
            let value = value.as_array().and_then(|any| any.first()).unwrap_or(value);
            case = case.with(key, value.clone());
        }
        case.with("side", mark)
    };
    let of = one_of(&finding.of, "of");
    let against = finding.against.as_ref().map(|filter| {
        // A key that the baseline does not fix has the group's value.
        let mut case = one_of(filter, "against");
        for key in finding.per.iter().chain(&finding.over) {
            if !filter.fixes(key) {
                case = case.with(key, of.get(key).cloned().unwrap_or_default());
            }
        }
        case
    });
    let mut records = Vec::new();
    for operand in finding.wording.templates().into_iter().flat_map(|template| template.operands()) {
        let base = operand.baseline.unwrap_or(1.0);
        let metric =
            |value: f64| Metric { spread: Some(spread), n: 5, ..Metric::exact(&operand.metric, "s", value) };
        records.push(record(experiment, of.clone(), metric(base * times)));
        records.extend(against.iter().map(|case| record(experiment, case.clone(), metric(base))));
    }
    records
}

#[test]
fn every_finding_follows_the_sign_of_its_figures() {
    let specs = registered();
    for (experiment, finding) in findings(&specs) {
        for template in finding.wording.templates() {
            // Words in backquotes are names.
            let words: String = template.plain_text().to_lowercase().split('`').step_by(2).collect();
            let verdict = words.split(|c: char| !c.is_alphanumeric()).find(|word| VERDICTS.contains(word));
            // A text that a sign has chosen may say what the sign is.
            let chosen = finding.wording.templates().len() > 1;
            assert!(
                chosen || verdict.is_none(),
                "{experiment}: the text says \"{}\" whatever its figures are: {words}",
                verdict.unwrap_or_default()
            );
        }
        let text = |times: f64, spread: f64| {
            let records = made_up(&experiment, &finding, times, spread);
            let sentences = finding::render(&finding, &Measurements::from_records(&records));
            assert!(sentences.iter().all(|sentence| sentence.measured), "{experiment}: {sentences:?}");
            sentences.into_iter().map(|sentence| sentence.text).collect::<Vec<_>>().join("\n")
        };
        let relates = finding.wording.templates().iter().any(|template| template.relates());
        if !relates {
            continue;
        }
        let (below, above, inside) = (text(0.7, 0.0), text(1.3, 0.0), text(0.99, 0.2));
        let directed = |text: &str| {
            let words: Vec<_> = text.split([' ', ',', '.', ')', ';', ':']).collect();
            let at = |word: &str| words.windows(2).any(|pair| pair[0] == "%" && pair[1] == word);
            (at("less") || at("faster") || at("slower"), at("more") || at("slower") || at("faster"))
        };
        let chosen = finding.wording.templates().len() > 1;
        assert!(chosen || directed(&below).0, "{experiment}: {below}");
        assert!(chosen || directed(&above).1, "{experiment}: {above}");
        assert!(below != above && below != inside && above != inside, "{experiment}: {below}");
        assert_eq!(directed(&inside), (false, false), "{experiment}: {inside}");
        assert!(chosen || inside.contains("by the 95 % interval"), "{experiment}: {inside}");
        for text in [&below, &above, &inside] {
            let negative = |word: &str| {
                word.strip_prefix('-').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
            };
            assert!(!text.split(' ').any(negative), "{experiment} has a negative figure: {text}");
        }
    }
}

#[test]
fn every_formula_is_drawn() {
    let specs = registered();
    let document = Document::new(&specs, &[], &[], &[]);
    let front = report::front::build(&specs, &[]).expect("the front is registered");
    let appendix: String = report::page::appendix(&document).into_iter().map(|(_, text)| text).collect();
    for page in [front.html, appendix] {
        assert!(page.contains("<math"), "the texts have formulas");
        let undrawn = page.split("<code>").find(|rest| {
            let inside = rest.split("</code>").next().unwrap_or_default();
            inside.contains('\\') && !rest.starts_with("<!doctype")
        });
        assert_eq!(
            undrawn.map(|rest| &rest[..rest.len().min(60)]),
            None,
            "a formula has what `math` does not know"
        );
    }
}

#[test]
fn mistakes_in_parts() {
    let error = |change: &dyn Fn(&str) -> String| {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.toml");
        std::fs::write(&file, change(PART)).unwrap();
        let error = Specs::load_files(&[file]).unwrap_err().to_string();
        error.replace(&folder.path().display().to_string(), "ROOT")
    };
    expect_test::expect![
        "ROOT/a.toml:21: the part `p` is about the experiment `nope`, which no crate registers; known: `e`"
    ]
    .assert_eq(&error(&|part| part.replacen("sections = [\"e\"]", "sections = [\"nope\"]", 1)));
    expect_test::expect![
        "ROOT/a.toml:25: the part `p` is about the experiment `nope`, which no crate registers; known: `e`"
    ]
    .assert_eq(&error(&|part| {
        part.replace(
            "asks = \"How fast?\"\n    sections = [\"e\"]",
            "asks = \"How fast?\"\n    sections = [\"nope\"]",
        )
    }));
    expect_test::expect![
        "ROOT/a.toml:3: the section `e` is registered already, in ROOT/a.toml; rename one of the two"
    ]
    .assert_eq(&error(&|part| part.replacen("sections = [\"e\"]", "sections = [\"e\", \"e\"]", 1)));
    assert!(error(&|part| part.replace("asks = \"Why?\"", "ask = \"Why?\"")).contains("unknown field `ask`"));
}
