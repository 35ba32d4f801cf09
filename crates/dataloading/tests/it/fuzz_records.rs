//! Mutated files of records and mutated chat templates: each is refused, or read within bounded memory, and nothing panics.

use std::path::Path;

use dataloading::chat::{ChatTemplate, Conversation, EndTokens, Mask, Message, TemplateConfig};
use dataloading::records::{self, RecordFormat};
use serde_json::json;
use testing::fuzz::{self, Outcome};

use crate::chat_templates::fixtures;

/// A folder in memory if possible: the tests write it tens of thousands of times.
fn scratch() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap()
}

/// Reads all records and what they hold.
fn read_all(path: &Path) -> Outcome {
    let Ok(read) = records::read(path) else { return Outcome::Refused };
    let mut outcome = Outcome::Read;
    let mut count = 0;
    for record in read {
        count += 1;
        assert!(count < 100_000, "records without an end");
        let read = record.map_err(|_| ()).and_then(|record| {
            let format = RecordFormat::from_fields(&record.fields, "text").ok_or(())?;
            record.content(format, "text").map_err(|_| ())
        });
        if read.is_err() {
            outcome = Outcome::Refused;
        }
    }
    outcome
}

#[test]
fn files_of_records() {
    let folder = scratch();
    let good = json!([
        { "messages": [{ "role": "user", "content": "a" }, { "role": "assistant", "content": "b", "weight": 1 }], "tools": [{}] },
        { "conversations": [{ "from": "human", "value": "a" }, { "from": "gpt", "value": "b" }] },
        { "prompt": "a", "completion": "b" },
        { "instruction": "a", "input": "", "output": "b" },
        { "input_ids": [1, 2, 3], "labels": [-100, 2, 3] },
        { "text": "a" },
    ]);
    let csv = "question,answer\n\"a,\"\"b\"\"\",1\nc,2\n";
    fuzz::run("records", |random| {
        let (name, bytes) = match random.below(4) {
            0 => ("rows.json", fuzz::json(random, &good).into_bytes()),
            1 => {
                let row = &good[random.below(6)];
                ("rows.jsonl", fuzz::json(random, row).into_bytes())
            }
            2 => ("rows.csv", fuzz::text(random, csv).into_bytes()),
            _ => ("rows.json", fuzz::bytes(random, good.to_string().as_bytes())),
        };
        let path = folder.path().join(name);
        std::fs::write(&path, &bytes).unwrap();
        fuzz::within(64 * bytes.len() + (4 << 20), || read_all(&path))
    });
}

#[test]
fn parquet_files() {
    let folder = scratch();
    let path = folder.path().join("rows.parquet");
    let good: [&[u8]; 3] = [
        include_bytes!("parquet/dictionary.parquet"),
        include_bytes!("parquet/plain.parquet"),
        include_bytes!("parquet/messages.zstd.parquet"),
    ];
    fuzz::run("parquet", |random| {
        let file = random.pick(&good);
        let bytes = fuzz::bytes(random, file);
        std::fs::write(&path, &bytes).unwrap();
        // The library reserves what a page says it takes, up to 2 GiB: its memory is not bounded by the size of the file.
        read_all(&path)
    });
}

#[test]
fn chat_templates() {
    let fixtures = fixtures();
    let sources: Vec<&str> =
        fixtures["templates"].as_object().unwrap().values().map(|source| source.as_str().unwrap()).collect();
    let short: Vec<&str> = sources.iter().copied().filter(|source| source.len() < 3000).collect();
    let mut conversation = Conversation::new([
        Message::new("user", "Hi"),
        Message::new("assistant", "<think>\na\n</think>\n\nb"),
        Message::new("user", "c"),
        Message::new("assistant", "d"),
    ]);
    let ends = EndTokens { added: vec!["<|im_end|>".to_owned(), "<|end|>".to_owned()], model: Vec::new() };
    fuzz::run("chat templates", |random| {
        let source = random.pick(&short);
        let source = fuzz::text(random, source);
        conversation.tools = random.once_in(4).then(|| json!([{ "function": { "name": "f" } }]));
        // The engine's limit on what a template makes is 256 MiB; no mutation comes near it.
        fuzz::within(64 << 20, || {
            let Ok(template) = ChatTemplate::new("t", &source, TemplateConfig::default()) else {
                return Outcome::Refused;
            };
            let Ok(rendered) = template.render(&conversation, false) else { return Outcome::Refused };
            assert!(rendered.spans.iter().all(|span| rendered.text.get(span.clone()).is_some()));
            // Rows hold what was rendered.
            if let Ok(rows) = template.rows(&conversation, Mask::Answers, &ends) {
                assert!(rows.iter().all(|row| row.last().is_some_and(|segment| segment.is_trained)));
            }
            Outcome::Read
        })
    });
}
