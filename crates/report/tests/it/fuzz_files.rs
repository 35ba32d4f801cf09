//! Records and specifications that others may have changed: each is refused, or is read as it is written.

use std::fs;
use std::path::Path;

use report::{Case, Environment, Metric, Record, Specs, read_records};
use serde_json::Value;
use testing::fuzz::{self, Outcome};

/// A folder in memory where there is one: the tests write it some ten thousand times.
fn scratch() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap()
}

#[test]
fn records() {
    let folder = scratch();
    let path = folder.path().join("records.jsonl");
    let record = Record {
        experiment: "swiglu".into(),
        case: Case::new().with("batch", 8).with("level", "SaveAll"),
        metric: Metric::of_samples("forward_seconds", "s", &[0.5, 0.25, 0.125]),
        environment: Environment::detect("cpu", Some("2.11.0")),
    };
    let good = serde_json::to_value(&record).unwrap();
    fuzz::run("records", |random| {
        let line = fuzz::json(random, &good);
        fs::write(&path, format!("{good}\n{line}\n\n{good}\n")).unwrap();
        let read = fuzz::within(400 * line.len() + (64 << 10), || read_records(&path));
        let Ok(read) = read else { return Outcome::Refused };
        assert_eq!((&read[0], read.last()), (&record, Some(&record)));
        // A record that was read and written again has every field of its line.
        for (read, line) in
            read[1..read.len() - 1].iter().zip(line.lines().filter(|line| !line.trim().is_empty()))
        {
            // A field that nobody reads may be nested deeper than a value can be.
            let Ok(line) = serde_json::from_str::<Value>(line) else { continue };
            let written = serde_json::to_value(read).unwrap();
            for (name, value) in written.as_object().unwrap() {
                if name == "case" || name == "experiment" {
                    assert_eq!(value, &line[name], "{name}");
                }
            }
            assert_eq!(written["metric"]["value"].as_f64(), line["metric"]["value"].as_f64());
            assert_eq!(written["metric"]["name"], line["metric"]["name"]);
            // A record that was read can be appended and read again.
            assert_eq!(serde_json::from_value::<Record>(written).unwrap(), *read);
        }
        Outcome::Read
    });
}

#[test]
fn specifications() {
    let folder = scratch();
    let path = folder.path().join("experiments.toml");
    let committed = Path::new(env!("CARGO_MANIFEST_DIR")).join("../experiments/experiments/swiglu-ckpt.toml");
    let text = fs::read_to_string(committed).unwrap();
    // Its first tables, claims and comparisons; a case takes time for each line.
    let good: String = text.lines().take(60).map(|line| format!("{line}\n")).collect();
    fuzz::run("experiments.toml", |random| {
        let text = fuzz::text(random, &good);
        fs::write(&path, &text).unwrap();
        let files = [path.clone()];
        let read = fuzz::within(2000 * text.len() + (64 << 10), || Specs::load_files(&files));
        let Ok(specs) = read else { return Outcome::Refused };
        // The table as TOML has it: as many entries, of these names. (`toml::Table` has no numbers from 2⁶³ on.)
        let table: Value = toml::from_str(&text).unwrap();
        let names = |kind: &str| -> Vec<String> {
            let entries = table.get(kind).and_then(Value::as_array).into_iter().flatten();
            entries.map(|entry| entry["name"].as_str().unwrap().to_owned()).collect()
        };
        assert_eq!(specs.experiments.iter().map(|e| e.name.clone()).collect::<Vec<_>>(), names("experiment"));
        assert_eq!(specs.claims.iter().map(|c| c.name.clone()).collect::<Vec<_>>(), names("claim"));
        assert_eq!(specs.comparisons.iter().map(|c| c.name.clone()).collect::<Vec<_>>(), names("comparison"));
        Outcome::Read
    });
}
