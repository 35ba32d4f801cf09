//! The files of a folder's splits.

use std::path::PathBuf;

use dataloading::records::Splits;

#[test]
fn splits_are_found_by_the_names_of_files() {
    let files = tempfile::tempdir().unwrap();
    let write = |name: &str| {
        let path = files.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "").unwrap();
    };
    let of = |name: &str| {
        let place = format!("{}/", files.path().display());
        let shown = |paths: Vec<PathBuf>| {
            paths
                .iter()
                .map(|path| path.display().to_string().replace(&place, ""))
                .collect::<Vec<_>>()
                .join(" ")
        };
        match Splits::find(&files.path().join(name)) {
            Ok(splits) => {
                format!("{} | {} | {}", shown(splits.train), shown(splits.validation), shown(splits.test))
            }
            Err(error) => error.to_string().replace(&place, ""),
        }
    };
    for name in ["a/train.jsonl", "a/valid.jsonl", "a/test.jsonl.gz", "a/trainer.json", "a/README.md"] {
        write(name);
    }
    assert_eq!(of("a"), "a/train.jsonl | a/valid.jsonl | a/test.jsonl.gz");
    assert_eq!(of("a/trainer.json"), "a/trainer.json |  | ");
    for name in [
        "b/data/train-00001-of-00002.parquet",
        "b/data/train-00000-of-00002.parquet",
        "b/data/validation-0.parquet",
    ] {
        write(name);
    }
    assert_eq!(
        of("b"),
        "b/data/train-00000-of-00002.parquet b/data/train-00001-of-00002.parquet | b/data/validation-0.parquet | "
    );
    write("c/train/part.csv");
    assert_eq!(of("c"), "c/train/part.csv |  | ");
    write("d/train.csv");
    write("d/train.jsonl");
    assert!(of("d").contains("d/train.jsonl: a file of another type than d/train.csv"), "{}", of("d"));
    write("e/config.json");
    assert!(of("e").contains("no training data: expected a file such as train.jsonl"), "{}", of("e"));
    // Shards have any names, beside a validation split or without one.
    for name in [
        "f/part-1.jsonl.zst",
        "f/part-0.jsonl.gz",
        "f/part-2.jsonl",
        "f/dataset_info.json",
        "f/valid.jsonl",
        "f/README.md",
    ] {
        write(name);
    }
    assert_eq!(of("f"), "f/part-0.jsonl.gz f/part-1.jsonl.zst f/part-2.jsonl | f/valid.jsonl | ");
    write("g/data/0.parquet");
    write("g/data/1.parquet");
    assert_eq!(of("g"), "g/data/0.parquet g/data/1.parquet |  | ");
    write("g/data/2.csv");
    assert!(of("g").contains("g/data/2.csv: a file of another type than g/data/0.parquet"), "{}", of("g"));
    assert!(of("nowhere").contains("there is no such file or folder"), "{}", of("nowhere"));
    // Patterns, of files and of folders.
    assert_eq!(of("f/part-?.jsonl.*"), "f/part-0.jsonl.gz f/part-1.jsonl.zst |  | ");
    assert_eq!(of("*/train.jsonl"), "a/train.jsonl d/train.jsonl |  | ");
    assert!(of("d/train.*").contains("a file of another type than"), "{}", of("d/train.*"));
    assert_eq!(of("a/*.parquet"), "a/*.parquet: no file matches this pattern");
    assert!(of("a/[x").contains("no pattern of files: Pattern syntax error"), "{}", of("a/[x"));
    // A file whose name has such a character is itself.
    write("g/odd[1].jsonl");
    assert_eq!(of("g/odd[1].jsonl"), "g/odd[1].jsonl |  | ");
}
