//! Tests the messages for mistakes in a file of experiments.

use std::path::{Path, PathBuf};

use expect_test::{Expect, expect};
use report::Specs;

/// Writes one file for each text, `a.toml`, `b.toml`, …, and loads them.
fn load(texts: &[&str]) -> Result<Specs, String> {
    let root = tempfile::tempdir().unwrap();
    for (index, text) in texts.iter().enumerate() {
        let folder = root.path().join(report::spec::FOLDER);
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join(format!("{}.toml", char::from(b'a' + index as u8))), text).unwrap();
    }
    let without_root = |message: String| message.replace(&format!("{}/", root.path().display()), "");
    Specs::load(root.path()).map_err(|error| without_root(error.to_string()))
}

fn check(texts: &[&str], expected: Expect) {
    expected.assert_eq(&load(texts).unwrap_err());
}

fn experiment(rest: &str) -> String {
    format!("[[experiment]]\nname = \"e\"\ntitle = \"E\"\nabout = \"a\"\npackage = \"p\"\n{rest}")
}

#[test]
fn the_crates_are_read_in_order() {
    let other = experiment("").replace("\"e\"", "\"later\"");
    let specs = load(&[&experiment(""), "", &other]).unwrap();
    let names: Vec<_> = specs.experiments.iter().map(|experiment| experiment.name.as_str()).collect();
    assert_eq!(names, ["e", "later"]);
}

#[test]
fn the_sample_has_every_field_and_loads() {
    let sample = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/sample.toml");
    let specs = Specs::load_files(&[sample]).unwrap();
    assert_eq!((specs.experiments.len(), specs.comparisons.len(), specs.claims.len()), (4, 1, 4));
    assert!(!specs.experiments[0].runs_at(report::cli::Scale::Paper));
    assert!(specs.experiments[1].runs_at(report::cli::Scale::Paper));
}

#[test]
fn a_folder_without_experiments() {
    let error = Specs::load(Path::new("/nonexistent")).unwrap_err().to_string();
    expect![[r#"cannot read /nonexistent/crates/experiments/experiments: No such file or directory (os error 2); run from a checkout of the project, or give a folder with crates/experiments/ in it"#]]
    .assert_eq(&error);
    assert!(Specs::load_files(&[PathBuf::from("/nonexistent/experiments.toml")]).is_err());
}

#[test]
fn mistakes_in_one_file() {
    check(
        &["[[experiment]\n"],
        expect![
            "crates/experiments/experiments/a.toml:1: unclosed array table, expected `]`; correct the line (the documentation of `report::spec` lists every field)"
        ],
    );
    check(
        &["\n\n[[experiment]]\nname = \"e\"\n"],
        expect![
            "crates/experiments/experiments/a.toml:3: missing field `title`; correct the line (the documentation of `report::spec` lists every field)"
        ],
    );
    check(
        &[&experiment("colour = \"red\"\n")],
        expect![
            "crates/experiments/experiments/a.toml:6: unknown field `colour`, expected one of `name`, `title`, `about`, `package`, `starts`, `args`, `scales`, `one_size`, `laptop_seconds`, `table`, `plot`, `finding`; correct the line (the documentation of `report::spec` lists every field)"
        ],
    );
    check(
        &[&experiment("scales = [\"huge\"]\n")],
        expect![
            "crates/experiments/experiments/a.toml:6: unknown variant `huge`, expected one of `smoke`, `laptop`, `full`, `paper`; correct the line (the documentation of `report::spec` lists every field)"
        ],
    );
    check(
        &[&experiment("").replace("\"e\"", "\"../e\"")],
        expect![[
            r#"crates/experiments/experiments/a.toml:2: the name "../e" becomes part of a file name; use letters, digits, `-` and `_`; correct the line (the documentation of `report::spec` lists every field)"#
        ]],
    );
    check(
        &[&experiment("[[experiment.table]]\ntitle = \"t\"\nrow = [\"batch\"]\n")],
        expect![
            "crates/experiments/experiments/a.toml:8: unknown field `row`, expected one of `title`, `filter`, `rows`, `columns`, `pivot`, `units`; correct the line (the documentation of `report::spec` lists every field)"
        ],
    );
}

#[test]
fn mistakes_in_plots() {
    let plot =
        |rest: &str| experiment(&format!("[[experiment.plot]]\nname = \"p\"\ntitle = \"P\"\n{rest}\n"));
    check(
        &[&plot("kind = \"pie\"\nx = \"a\"")],
        expect![
            "crates/experiments/experiments/a.toml:9: unknown variant `pie`, expected one of `line`, `scatter`, `bar`, `stacked-bar`, `timeline`; correct the line (the documentation of `report::spec` lists every field)"
        ],
    );
    check(
        &[&plot("kind = \"line\"\nx = \"a\"")],
        expect![
            "crates/experiments/experiments/a.toml:6: the plot `p` has no `y`; add the case key or metric to plot; correct the line (the documentation of `report::spec` lists every field)"
        ],
    );
    check(
        &[&plot("kind = \"stacked-bar\"\nx = \"a\"")],
        expect![[
            r#"crates/experiments/experiments/a.toml:6: the stacked bar `p` names no metrics; add `stack = ["metric", …]`; correct the line (the documentation of `report::spec` lists every field)"#
        ]],
    );
    check(
        &[&plot("kind = \"bar\"\nx = \"a\"\ny = \"b\"\nlog_y = true")],
        expect![
            "crates/experiments/experiments/a.toml:6: the plot `p` asks for a logarithmic axis; remove it, the length of a bar is read from zero; correct the line (the documentation of `report::spec` lists every field)"
        ],
    );
    check(
        &[&plot("kind = \"line\"\nx = \"a\"\ny = \"b\"\npareto = true")],
        expect![[
            r#"crates/experiments/experiments/a.toml:6: the plot `p` asks for `pareto`; remove it, or set `kind = "scatter"`; correct the line (the documentation of `report::spec` lists every field)"#
        ]],
    );
    check(
        &[&plot("kind = \"timeline\"\nx = \"start\"\ny = \"lane\"")],
        expect![
            "crates/experiments/experiments/a.toml:6: the timeline `p` has no `end`; add the metric at which a span ends (`x` is that at which it starts); correct the line (the documentation of `report::spec` lists every field)"
        ],
    );
    check(
        &[&plot("kind = \"timeline\"\nx = \"start\"\nend = \"end\"")],
        expect![
            "crates/experiments/experiments/a.toml:6: the plot `p` has no `y`; add the case key or metric to plot; correct the line (the documentation of `report::spec` lists every field)"
        ],
    );
    check(
        &[&plot("kind = \"bar\"\nx = \"a\"\ny = \"b\"\nend = \"c\"")],
        expect![[
            r#"crates/experiments/experiments/a.toml:6: the plot `p` has `end`; remove it, or set `kind = "timeline"`; correct the line (the documentation of `report::spec` lists every field)"#
        ]],
    );
    check(
        &[&plot("kind = \"timeline\"\nx = \"start\"\nend = \"end\"\ny = \"lane\"\nlog_x = true")],
        expect![
            "crates/experiments/experiments/a.toml:6: the timeline `p` asks for a logarithmic axis; remove it, the length of a span is its time; correct the line (the documentation of `report::spec` lists every field)"
        ],
    );
}

#[test]
fn mistakes_in_findings() {
    let finding = |text: &str| experiment(&format!("[[experiment.finding]]\ntext = \"{text}\"\n"));
    check(
        &[&finding("saves {less:peak_bytes}")],
        expect![
            "crates/experiments/experiments/a.toml:6: the finding uses `{less:peak_bytes}` or `{more:peak_bytes}` and has no `against`; add `against = { … }`; correct the line (the documentation of `report::spec` lists every field)"
        ],
    );
    check(
        &[&finding("saves {half:peak_bytes}")],
        expect![
            "crates/experiments/experiments/a.toml:7: the text asks for the unknown quantity `half`; known: of, against, percent, ratio, less, more, slower, faster; correct the line (the documentation of `report::spec` lists every field)"
        ],
    );
    check(
        &[&finding("saves {of:}")],
        expect![
            "crates/experiments/experiments/a.toml:7: the text has `{of:}` without a metric; write `{of:backward_seconds}`; correct the line (the documentation of `report::spec` lists every field)"
        ],
    );
    check(
        &[&finding("saves {of:peak")],
        expect![
            "crates/experiments/experiments/a.toml:7: the text has a `{` without its `}`; write `{{` for a brace; correct the line (the documentation of `report::spec` lists every field)"
        ],
    );
    check(
        &[&finding("saves } much")],
        expect![
            "crates/experiments/experiments/a.toml:7: the text has a `}` without its `{`; write `}}` for a brace; correct the line (the documentation of `report::spec` lists every field)"
        ],
    );
    check(
        &[&finding("saves {}")],
        expect![
            "crates/experiments/experiments/a.toml:7: the text has an empty `{}`; name a case key or a quantity; correct the line (the documentation of `report::spec` lists every field)"
        ],
    );
}

#[test]
fn mistakes_in_claims_and_comparisons() {
    let claim = |experiment: &str, limit: &str, op: &str| {
        format!(
            "[[claim]]\nname = \"c/x\"\nwhat = \"w\"\nexperiment = \"{experiment}\"\nmetric = \"m\"\nop = \"{op}\"\n\
             limit = {limit}\nrun = \"r\"\n"
        )
    };
    check(
        &[&claim("missing", "1.0", "<=")],
        expect![
            "crates/experiments/experiments/a.toml:2: the claim `c/x` is about the experiment `missing`, which no crate registers; known: none"
        ],
    );
    check(
        &[&(experiment("") + &claim("missing", "1.0", "<="))],
        expect![
            "crates/experiments/experiments/a.toml:7: the claim `c/x` is about the experiment `missing`, which no crate registers; known: `e`"
        ],
    );
    check(
        &[&(experiment("") + &claim("e", "nan", "<="))],
        expect![
            "crates/experiments/experiments/a.toml:12: the limit NaN cannot be checked; give a finite number; correct the line (the documentation of `report::spec` lists every field)"
        ],
    );
    check(
        &[&(experiment("") + &claim("e", "1.0", "<"))],
        expect![
            "crates/experiments/experiments/a.toml:11: unknown variant `<`, expected one of `<=`, `>=`, `==`; correct the line (the documentation of `report::spec` lists every field)"
        ],
    );
    check(
        &[
            "[[comparison]]\nname = \"c\"\ntitle = \"C\"\nabout = \"a\"\npackage = \"p\"\npeer = \"p.py\"\nrounds = 0\n",
        ],
        expect![
            "crates/experiments/experiments/a.toml:7: 0 rounds measure nothing; give `rounds = 1` or more; correct the line (the documentation of `report::spec` lists every field)"
        ],
    );
}

#[test]
fn one_name_twice() {
    check(
        &[&experiment(""), &experiment("")],
        expect![
            "crates/experiments/experiments/b.toml:2: the experiment `e` is registered already, in crates/experiments/experiments/a.toml; rename one of the two"
        ],
    );
    let comparison = "\n[[comparison]]\nname = \"e\"\ntitle = \"C\"\nabout = \"a\"\npackage = \"p\"\npeer = \"p.py\"\nrounds = 1\n";
    check(
        &[&(experiment("") + comparison)],
        expect![
            "crates/experiments/experiments/a.toml:8: the experiment `e` is registered already, in crates/experiments/experiments/a.toml; rename one of the two"
        ],
    );
}
