//! Records of every type of file, the formats that are found, and errors by line.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use dataloading::records::{self, Content, Detected, PromptTemplates, RecordFormat};
use dataloading::{Error, Result};
use flate2::write::GzEncoder;
use serde_json::{Value, json};

struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn write(&self, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
        path
    }

    /// The records of a file and its errors, in order, without the folder's path.
    fn read(&self, path: &Path) -> Vec<String> {
        let place = format!("{}/", self.0.path().display());
        let read = match records::read(path) {
            Ok(records) => records,
            Err(error) => return vec![error.to_string().replace(&place, "")],
        };
        let shown = read.map(|record| match record {
            Ok(record) => format!("{} {}", record.location, Value::Object(record.fields)),
            Err(error) => format!("error {error}"),
        });
        shown.map(|text| text.replace(&place, "")).collect()
    }
}

fn compressed(text: &str) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(text.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn records_have_their_places_and_wrong_ones_do_not_hide_the_next() {
    let files = Files::new();
    let lines = "{\"a\": 1}\n\n[2]\n{\"a\": \n{\"b\": {\"c\": null}}";
    let path = files.write("rows.jsonl", lines);
    let expected = [
        "rows.jsonl: line 1 {\"a\":1}",
        "error rows.jsonl: line 3: expected an object, found an array; one line is one object",
        "error rows.jsonl: line 4: not JSON (EOF while parsing a value, column 6); an object is on one line in such a file (`jq -c . FILE` writes it so); join its lines, or correct the line",
        "rows.jsonl: line 5 {\"b\":{\"c\":null}}",
    ];
    assert_eq!(files.read(&path), expected);
    let array = files.write("array.jsonl", "[{\"a\": 1}, {\"b\": 2}]");
    assert_eq!(
        files.read(&array),
        ["array.jsonl: record 1 (line 1) {\"a\":1}", "array.jsonl: record 2 (line 1) {\"b\":2}"]
    );
    let path = files.write("rows.jsonl.gz", compressed(lines));
    assert_eq!(files.read(&path), expected.map(|text| text.replace("jsonl", "jsonl.gz")));
    let zst = zstd::encode_all(lines.as_bytes(), 3).unwrap();
    let path = files.write("rows.jsonl.zst", zst.clone());
    assert_eq!(files.read(&path), expected.map(|text| text.replace("jsonl", "jsonl.zst")));
    let read = files.read(&files.write("cut.jsonl.zst", &zst[..zst.len() - 3]));
    assert!(read.last().unwrap().starts_with("error cut.jsonl.zst: "), "{read:?}");
    let mut bytes = b"{\"a\": \"".to_vec();
    bytes.extend_from_slice(b"\xff\"}\n{\"a\": 2}\n");
    let read = files.read(&files.write("latin.jsonl", bytes));
    assert!(
        read[0].contains("line 1, byte 7 of the file (0xff): not UTF-8; convert the file (iconv -f LATIN1"),
        "{read:?}"
    );
    assert_eq!(read[1], "latin.jsonl: line 2 {\"a\":2}");
    let wide = |text: &str, order: fn(u16) -> [u8; 2]| -> Vec<u8> {
        "\u{feff}".encode_utf16().chain(text.encode_utf16()).flat_map(order).collect()
    };
    for (name, order) in
        [("little.jsonl", u16::to_le_bytes as fn(u16) -> [u8; 2]), ("big.jsonl", u16::to_be_bytes)]
    {
        let read = files.read(&files.write(name, wide("{\"a\": 1}\n{\"a\": 2}\n", order)));
        let expected =
            format!("error {name}: line 1: the file is UTF-16; convert it (iconv -f UTF-16 -t UTF-8)");
        assert_eq!(read, [expected], "one error for all lines");
    }
    let read = files.read(&files.write("wide.csv", wide("a,b\n1,2\n", u16::to_le_bytes)));
    assert_eq!(read, ["wide.csv: the file is UTF-16; convert it (iconv -f UTF-16 -t UTF-8)"]);
    let truncated = &compressed(&lines.repeat(1000))[..100];
    let read = files.read(&files.write("cut.jsonl.gz", truncated));
    assert!(read.last().unwrap().starts_with("error cut.jsonl.gz: "), "{read:?}");
}

#[test]
fn an_array_is_read_element_by_element() {
    let files = Files::new();
    let text =
        "\u{feff} [\n {\"a\": \"],}\\\"\"},\n 5,\n\n {\n \"b\": [1, {\"c\": 2}]\n },{\"d\": x\n}, {}\n]";
    assert_eq!(
        files.read(&files.write("rows.json", text)),
        [
            "rows.json: record 1 (line 2) {\"a\":\"],}\\\"\"}",
            "error rows.json: record 2 (line 3): expected an object, found a number; an element of the array is one record",
            "rows.json: record 3 (line 5) {\"b\":[1,{\"c\":2}]}",
            "error rows.json: record 4 (line 7): not JSON (expected value); correct or remove the record",
            "rows.json: record 5 (line 8) {}",
        ]
    );
    assert_eq!(files.read(&files.write("none.json", "[ ]")), [] as [&str; 0]);
    let cut = files.read(&files.write("cut.json", "[{\"a\": 1},\n{\"a\""));
    assert_eq!(
        cut,
        [
            "cut.json: record 1 (line 1) {\"a\":1}",
            "error cut.json: record 2 (line 2): the array does not end with `]`; the file is cut off"
        ]
    );
    let lines = files.read(&files.write("lines.json", "{\"a\": 1}\n{\"a\": 2}\n"));
    assert_eq!(lines, ["lines.json: line 1 {\"a\":1}", "lines.json: line 2 {\"a\":2}"]);
}

#[test]
fn rows_of_csv_are_texts_by_the_names_of_the_first() {
    let files = Files::new();
    let text = "question, answer\r\n\"a,\n\"\"b\"\"\",1\r\nc\r\nd,2\r\n";
    assert_eq!(
        files.read(&files.write("rows.csv", text)),
        [
            "rows.csv: line 2 {\"question\":\"a,\\n\\\"b\\\"\",\"answer\":\"1\"}",
            "error rows.csv: line 4: 1 values, and the first line names 2 columns; put a value with separators or line \
             breaks between double quotes",
            "rows.csv: line 5 {\"question\":\"d\",\"answer\":\"2\"}",
        ]
    );
    assert_eq!(
        files.read(&files.write("rows.tsv", "a\tb\n1,2\t3\n")),
        ["rows.tsv: line 2 {\"a\":\"1,2\",\"b\":\"3\"}"]
    );
    let twice = files.read(&files.write("twice.csv", "a,b,a\n1,2,3\n"));
    assert_eq!(twice, ["twice.csv: line 1: column 3 has the name `a` of another; rename it"]);
    let latin = files.read(&files.write("latin.csv", b"a,b\n1,\xff\n2,3\n"));
    assert_eq!(
        latin[0],
        "error latin.csv: line 2: column 2 is not UTF-8; convert the file (iconv -f LATIN1 -t UTF-8)"
    );
    assert_eq!(latin[1], "latin.csv: line 3 {\"a\":\"2\",\"b\":\"3\"}");
    assert!(files.read(&files.write("rows.txt", "a"))[0].contains("plain text has no records"));
}

const DICTIONARY: &[u8] = include_bytes!("parquet/dictionary.parquet");
const PLAIN: &[u8] = include_bytes!("parquet/plain.parquet");
const ZSTD: &[u8] = include_bytes!("parquet/messages.zstd.parquet");
const GZIP: &[u8] = include_bytes!("parquet/messages.gzip.parquet");
const BROTLI: &[u8] = include_bytes!("parquet/text.brotli.parquet");
const LZ4: &[u8] = include_bytes!("parquet/text.lz4.parquet");
/// A binary column with `a`, and with `\xff\xfe`.
const BINARY: &[u8] = include_bytes!("parquet/binary.parquet");
/// A text of 40 MiB, and one between two short ones, packed to 2 KB.
const LONG: &[u8] = include_bytes!("parquet/long.zstd.parquet");
const ONE_LONG: &[u8] = include_bytes!("parquet/one_long.zstd.parquet");
/// The same in the messages of a nested column.
const LONG_MESSAGE: &[u8] = include_bytes!("parquet/long_message.zstd.parquet");

/// Files of pyarrow: a dictionary and a null in row groups of two, by Snappy; uncompressed pages of the second version; nested columns
/// by Zstandard and gzip.
#[test]
fn rows_of_parquet_are_those_that_pyarrow_wrote() {
    let files = Files::new();
    let texts = |bytes: &[u8]| {
        let path = files.write("rows.parquet", bytes);
        let rows: Vec<_> = records::read(&path).unwrap().map(|row| row.unwrap()).collect();
        assert_eq!(
            rows.last().unwrap().location.to_string(),
            format!("{}: row {}", path.display(), rows.len())
        );
        rows.iter()
            .filter_map(|row| row.fields["text"].as_str())
            .map(|text| text.trim().to_owned())
            .collect::<Vec<_>>()
    };
    for bytes in [DICTIONARY, PLAIN] {
        let all = texts(bytes);
        let lines: Vec<&String> = all.iter().filter(|line| !line.is_empty()).collect();
        assert_eq!(lines, ["= Arden =", "Arden is a town , and ærø is none .", "= Arden ="]);
    }
    for bytes in [ZSTD, GZIP] {
        let path = files.write("messages.parquet", bytes);
        let rows: Vec<_> = records::read(&path).unwrap().map(|row| row.unwrap()).collect();
        let user = json!([{ "role": "user", "content": "2+2?" }, { "role": "assistant", "content": "4" }]);
        assert_eq!(rows[0].fields["messages"], user, "keys that a message does not have are left out");
        let Content::Conversation(conversation) = rows[1].content(RecordFormat::Messages, "text").unwrap()
        else {
            panic!("messages")
        };
        let trained: Vec<bool> = conversation.messages.iter().map(|message| message.is_trained).collect();
        assert_eq!(trained, [true, true, true, false]);
        assert_eq!(conversation.messages[1].fields["content"], Value::Null);
    }
    let refused = files.read(&files.write("no.parquet", "no Parquet at all"));
    assert!(refused[0].starts_with("no.parquet: not a Parquet file that can be read: "), "{refused:?}");
}

#[test]
fn columns_that_cannot_be_read_are_named_with_the_remedy() {
    let files = Files::new();
    for (bytes, codec) in [(BROTLI, "brotli"), (LZ4, "lz4")] {
        let refused = files.read(&files.write("packed.parquet", bytes));
        let expected = format!("its columns are compressed with {codec}, and snappy, zstd and gzip are read");
        assert!(refused[0].contains(&expected), "{refused:?}");
    }
    let path = files.write("binary.parquet", BINARY);
    let rows: Vec<_> = records::read(&path).unwrap().map(|row| row.unwrap()).collect();
    assert_eq!(rows[0].fields["text"], "a");
    let error = rows[1].content(RecordFormat::Text, "text").unwrap_err().to_string();
    assert!(
        error.contains("row 2: `text` has bytes that are not UTF-8; write the column as text"),
        "{error}"
    );
}

/// The same bound as in the other formats.
#[test]
fn a_text_beyond_the_bound_of_a_record_is_refused() {
    let files = Files::new();
    let refused = files.read(&files.write("long.parquet", LONG));
    assert!(refused[0].contains("the column `text` has 1 values in 419"), "{refused:?}");
    let read = files.read(&files.write("one_long.parquet", ONE_LONG));
    let expected = "error one_long.parquet: row 2: a text is longer than 33554432 bytes; divide it";
    assert_eq!((read.len(), &*read[1]), (3, expected));
    let read = files.read(&files.write("long_message.parquet", LONG_MESSAGE));
    assert!(read[1].ends_with("row 2: a text is longer than 33554432 bytes; divide it"), "{}", read[1].len());
}

fn content(fields: Value) -> Result<Content, String> {
    let fields = fields.as_object().unwrap().clone();
    let format = RecordFormat::from_fields(&fields, "text").ok_or("no format")?;
    let location =
        records::RecordLocation { path: Path::new("f").into(), unit: "line", number: 1, line: None };
    let record = records::Record { fields, location };
    record.content(format, "text").map_err(|error| error.to_string())
}

fn roles(fields: Value) -> String {
    let (Content::Conversation(conversation) | Content::Exchange { conversation, .. }) =
        content(fields).unwrap()
    else {
        panic!("a conversation")
    };
    let shown = conversation.messages.iter().map(|message| {
        let mark = if message.is_answer() && message.is_trained { "!" } else { "" };
        format!("{}{mark}={}", message.role(), message.fields["content"].as_str().unwrap_or("-"))
    });
    shown.collect::<Vec<_>>().join(" ")
}

#[test]
fn formats_are_what_their_fields_say() {
    let user = || json!({ "role": "user", "content": "u" });
    let answer = |weight: Value| json!({ "role": "assistant", "content": "a", "weight": weight });
    assert_eq!(
        roles(json!({ "messages": [user(), answer(json!(0)), answer(json!(1)), answer(Value::Null)] })),
        "user=u assistant=a assistant!=a assistant!=a"
    );
    let turns = json!([{ "from": "system", "value": "s" }, { "from": "human", "value": "u" }, { "from": "gpt", "value": "a" }]);
    assert_eq!(roles(json!({ "conversations": turns, "system": "x" })), "system=s user=u assistant!=a");
    let parts = json!([{ "role": "user", "content": [{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }] }]);
    assert_eq!(roles(json!({ "messages": parts, "system": "s" })), "system=s user=ab");
    assert_eq!(roles(json!({ "messages": format!("[{}]", user()) })), "user=u", "a column of CSV");
    assert_eq!(
        roles(json!({ "prompt": [user(), answer(json!(1)), user()], "completion": [answer(json!(1))] })),
        "user=u assistant=a user=u assistant!=a"
    );
    assert_eq!(roles(json!({ "instruction": "i", "input": "x", "output": "o" })), "user=i\n\nx assistant!=o");
    assert_eq!(
        roles(json!({ "question": "q", "answer": "a", "system": "s" })),
        "system=s user=q assistant!=a"
    );
    let text = |content: Result<Content, String>| format!("{:?}", content.unwrap());
    assert_eq!(
        text(content(json!({ "prompt": "p", "completion": "c", "text": "t" }))),
        "Completion { prompt: \"p\", completion: \"c\" }"
    );
    assert_eq!(text(content(json!({ "text": "t", "prompt": null }))), "Text(\"t\")");
    assert_eq!(
        text(content(json!({ "input_ids": [5, 6, 7], "labels": [-100, 6, 7], "attention_mask": [1, 1, 1] }))),
        "Tokens { ids: [5, 6, 7], is_trained: [false, true, true] }"
    );
    let call = json!([{ "role": "assistant", "tool_calls": [{ "function": { "name": "f" } }] }]);
    let with_tools = content(json!({ "messages": call, "tools": "[{\"type\": \"function\"}]" })).unwrap();
    let Content::Conversation(conversation) = with_tools else { panic!("messages") };
    assert_eq!(conversation.tools, Some(json!([{ "type": "function" }])));
}

#[test]
fn wrong_fields_are_named() {
    for (fields, expected) in [
        (json!({ "messages": [] }), "`messages` is empty"),
        (json!({ "messages": "hi" }), "`messages` is a string, expected a list of messages"),
        (json!({ "messages": [{ "role": "user" }] }), "message 1: no `content`, and no `tool_calls` either"),
        (
            json!({ "messages": [{ "content": "a", "x": 1 }] }),
            "message 1: no `role`; the fields here are: content, x",
        ),
        (
            json!({ "messages": [{ "role": "assistant", "content": "a", "weight": 0.5 }] }),
            "`weight` is 0.5; expected 0",
        ),
        (
            json!({ "messages": [{ "role": "user", "content": [{ "type": "image" }] }] }),
            "a part of type \"image\"",
        ),
        (json!({ "messages": [{ "role": "user", "content": 5 }] }), "`content` is a number"),
        (
            json!({ "messages": [{ "role": "human", "content": "a" }, { "role": "gpt", "content": "b" }] }),
            "`messages`, message 1: `role` is \"human\"; expected \"user\"",
        ),
        (
            json!({ "prompt": [{ "role": "user", "content": "u" }], "completion": [{ "role": "gpt", "content": "b" }] }),
            "`completion`, message 1: `role` is \"gpt\"; expected \"assistant\"",
        ),
        (
            json!({ "messages": [{ "role": "user", "content": "a" }, { "role": "asistant", "content": "b" }] }),
            "`messages`, message 2: `role` is \"asistant\"; did you mean \"assistant\"?",
        ),
        (json!({ "messages": [5] }), "message 1: a number, expected an object"),
        (
            json!({ "conversations": [{ "from": "me", "value": "a" }] }),
            "`from` is \"me\"; expected one of human, user",
        ),
        (json!({ "messages": [{ "role": "user", "content": "a" }], "tools": 5 }), "`tools` is a number"),
        (json!({ "prompt": 5, "completion": "a" }), "`prompt` is a number, expected a text"),
        (json!({ "instruction": "a", "output": "b", "history": [["a", "b"]] }), "`history` is not read"),
        (json!({ "input_ids": [1, 2], "labels": [1] }), "2 `input_ids` and 1 `labels`"),
        (json!({ "input_ids": [1, 2], "labels": [2, -100] }), "label 0 is 2, and the token there 1"),
        (json!({ "input_ids": [1, -2] }), "`input_ids` has -2, which is no token"),
        (json!({ "input_ids": [1, 2], "attention_mask": [1, 0] }), "remove the padding"),
        (json!({ "input_ids": [1.5] }), "`input_ids` has 1.5, expected whole numbers"),
    ] {
        let error = content(fields.clone()).unwrap_err();
        assert!(error.starts_with("f: line 1: ") && error.contains(expected), "{fields}: {error}");
    }
}

#[test]
fn the_format_is_found_from_the_first_hundred_records() {
    let files = Files::new();
    let detect = |text: &str| {
        let path = files.write("rows.jsonl", text);
        Detected::new(records::read(&path).unwrap(), "text")
    };
    let mixed = format!(
        "{}{{\n{}{}",
        "{\"prompt\": \"a\", \"completion\": \"b\", \"id\": 1}\n".repeat(60),
        "{\"text\": \"t\"}\n".repeat(39),
        "{\"question\": \"q\", \"answer\": \"a\"}\n"
    );
    let detected = detect(&mixed).unwrap();
    assert_eq!(detected.formats, [(RecordFormat::PromptCompletion, 60), (RecordFormat::Text, 39)]);
    assert_eq!(
        (detected.to_string().as_str(), detected.ignored.clone()),
        ("prompt and completion; or text", vec!["id".to_owned()])
    );
    let path = files.write("rows.jsonl", &mixed);
    let errors: Vec<String> = records::read(&path)
        .unwrap()
        .filter_map(Result::ok)
        .filter_map(|record| detected.format(&record, "text").err())
        .map(|error: Error| error.to_string())
        .collect();
    assert_eq!(errors.len(), 1);
    assert!(errors[0].contains("line 101: the record has question and answer"), "{errors:?}");
    let error = detect("{\"prompt\": \"a\", \"chosen\": \"b\"}\n").unwrap_err().to_string();
    assert!(error.contains("line 1: the record has `chosen` and no `rejected`"), "{error}");
    let error = detect("{\"a\": 1}\n").unwrap_err().to_string();
    assert!(error.contains("line 1: the fields are a; expected `messages`"), "{error}");
    let detected = detect("{\"a\": 1}\n{\"text\": \"t\"}\n").unwrap();
    assert_eq!(detected.formats, [(RecordFormat::Text, 1)], "who reads the first record gets its error");
    assert!(detect("\n").unwrap_err().to_string().contains("there is no record in it"));
    assert!(detect("{\n").unwrap_err().to_string().contains("line 1: not JSON"));
}

#[test]
fn templates_make_prompts_of_any_fields() {
    let record = |fields: Value| records::Record {
        fields: fields.as_object().unwrap().clone(),
        location: records::RecordLocation {
            path: Path::new("f").into(),
            unit: "line",
            number: 7,
            line: None,
        },
    };
    let templates = PromptTemplates::new("{{n}} = {n}\n{query }?", " {response}!").unwrap();
    assert_eq!(templates.fields().collect::<Vec<_>>(), ["n", "query", "response"]);
    let fields = json!({ "query": "Why {x}", "n": 3, "response": "So", "system": "Be brief." });
    let Content::Exchange { conversation, prompt, completion } = templates.content(&record(fields)).unwrap()
    else {
        panic!("an exchange");
    };
    assert_eq!((prompt.as_str(), completion.as_str()), ("{n} = 3\nWhy {x}?", " So!"));
    let roles: Vec<_> = conversation.messages.iter().map(dataloading::chat::Message::role).collect();
    assert_eq!(roles, ["system", "user", "assistant"]);
    assert_eq!(conversation.messages[2].fields["content"], "So!");
    for (fields, expected) in [
        (json!({ "n": 1, "query": "q" }), "f: line 7: no `response`; the fields here are: n, query"),
        (json!({ "n": [], "query": "q" }), "f: line 7: `n` is an array, expected a text or a number"),
    ] {
        assert_eq!(templates.content(&record(fields)).unwrap_err().to_string(), expected);
    }
    for (prompt, completion, expected) in [
        ("{a", "{b}", "prompt template: \"{a\": `{` has no partner; write `{{` for the character itself"),
        ("a}", "{b}", "prompt template: \"a}\": `}` has no partner; write `}}` for the character itself"),
        (
            "{a{b}}",
            "{b}",
            "prompt template: \"{a{b}}\": `{` has no partner; write `{{` for the character itself",
        ),
        ("{ }", "{b}", "prompt template: \"{ }\": `{}` names no field"),
        (
            "{a}",
            "b",
            "completion template: \"b\" names no field; write the one to be learned in braces, such as {answer}",
        ),
    ] {
        assert_eq!(PromptTemplates::new(prompt, completion).unwrap_err().to_string(), expected);
    }
}

/// Fields that nearly are those of a format, and a column of all.
#[test]
fn fields_that_nearly_fit_are_named() {
    let place = tempfile::tempdir().unwrap();
    let error = |name: &str, text: &str| {
        let path = place.path().join(name);
        std::fs::write(&path, text).unwrap();
        Detected::new(records::read_all(&[path]).unwrap(), "text").unwrap_err().to_string()
    };
    let null = error("null.jsonl", "{\"prompt\": null, \"completion\": \"b\"}\n");
    assert!(
        null.ends_with("line 1: `prompt` is null, expected a value; correct or remove the record"),
        "{null}"
    );
    let near = error("near.jsonl", "{\"prompt\": \"a\", \"completions\": \"b\"}\n");
    assert!(near.contains("did you mean `completion` instead of `completions`?"), "{near}");
    let line = error("semicolons.jsonl", "{\"a;b\": 1}\n");
    assert!(!line.contains("separated") && line.contains("the fields are a;b; expected"), "{line}");
    let semicolons = error("semicolons.csv", "prompt;completion\na;b\n");
    assert!(
        semicolons.contains("the only column is `prompt;completion`: values seem to be separated by ;"),
        "{semicolons}"
    );
    // Templates are suggested of fields that are there, or not at all.
    let alone = error("alone.jsonl", "{\"prompt\": \"a\"}\n");
    assert!(alone.contains("named with --field)") && !alone.contains("--prompt-template"), "{alone}");
    let others = error("others.jsonl", "{\"body\": \"a\", \"reply\": \"b\"}\n");
    assert!(others.contains("--prompt-template '{body}' --completion-template '{reply}'"), "{others}");
}
