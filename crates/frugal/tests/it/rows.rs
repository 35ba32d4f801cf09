//! Rows of records and of texts, and which of their tokens are learned.

use std::path::PathBuf;

use dataloading::chat::{ChatTemplate, Mask, TemplateConfig};
use dataloading::{IGNORE_INDEX, Tokenizer};
use frugal::rows::{self, Cached, Counts, Found, Overlong, RowConfig, RowEncoder};
use frugal::training::masked_rows::MaskedRow;
use serde_json::json;

const END: u32 = 0;

#[derive(Debug)]
struct Read {
    rows: Vec<MaskedRow>,
    counts: Counts,
}

struct Setting {
    folder: tempfile::TempDir,
    options: RowConfig,
    template: Option<ChatTemplate>,
}

impl Setting {
    fn new() -> Self {
        let options = RowConfig {
            longest: 40,
            overlong: Overlong::Error,
            mask: Mask::Answers,
            begin: None,
            end: END,
            vocabulary: 4096,
            field: "text".to_owned(),
            templates: None,
        };
        Self { folder: tempfile::tempdir().unwrap(), options, template: None }
    }

    fn tokenizer() -> Tokenizer {
        Tokenizer::from_file(&dataloading::embedded::folder().unwrap().join("tokenizer.json")).unwrap()
    }

    fn encoder(&self) -> RowEncoder {
        RowEncoder::new(Self::tokenizer(), self.template.clone(), &[END], self.options.clone())
    }

    fn files(&self, name: &str, text: &str) -> Vec<PathBuf> {
        let path = self.folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        vec![path]
    }

    fn read(&self, lines: &str) -> Result<Read, String> {
        let files = self.files("rows.jsonl", lines);
        let detected =
            rows::detect_records(&files, &self.options.field).map_err(|error| error.to_string())?;
        let rows = rows::prepare(&files, &self.encoder(), &detected, None);
        let rows = rows.map_err(|error| error.to_string())?;
        Ok(Read { rows: rows.rows.to_vec().unwrap(), counts: rows.counts })
    }

    /// The text of the learned tokens of each row.
    fn learned(&self, lines: &str) -> Vec<String> {
        let tokenizer = Self::tokenizer();
        let of = |labels: &[i64]| {
            let ids: Vec<u32> =
                labels.iter().filter(|id| **id != IGNORE_INDEX).map(|id| *id as u32).collect();
            tokenizer.decode(&ids).unwrap()
        };
        self.read(lines).unwrap().rows.iter().map(|row| of(&row.labels)).collect()
    }
}

#[test]
fn completions_are_learned_and_prompts_are_not() {
    let setting = Setting::new();
    let lines = "{\"prompt\": \"How many pears?\", \"completion\": \" Five.\"}\n\n{\"text\": \"A pear.\"}\n";
    assert_eq!(setting.learned(lines), [" Five.<|endoftext|>", "A pear.<|endoftext|>"]);
    let Read { rows, counts } = setting.read(lines).unwrap();
    assert_eq!((counts.records, counts.rows, counts.skipped, counts.without_label), (2, 2, 0, 0));
    let prompt = Setting::tokenizer().encode("How many pears?").unwrap();
    assert!(rows[0].tokens[..prompt.len()].iter().copied().eq(prompt.iter().map(|id| i64::from(*id))));
    assert!(rows.iter().all(|row| row.tokens.last() == Some(&i64::from(END))));
    assert_eq!(
        counts.trained,
        rows.iter()
            .map(|row| row.labels[1..].iter().filter(|label| **label != IGNORE_INDEX).count())
            .sum::<usize>()
    );

    let mut setting = setting;
    setting.options.begin = Some(1);
    setting.options.mask = Mask::All;
    let Read { rows, .. } = setting.read(lines).unwrap();
    assert!(rows.iter().all(|row| row.tokens[0] == 1 && row.labels == row.tokens));
}

#[test]
fn questions_follow_the_template_where_there_is_one() {
    let mut setting = Setting::new();
    let lines = json!({ "instruction": "Add.", "input": "1 1", "output": "2" }).to_string();
    assert_eq!(setting.learned(&lines), ["2<|endoftext|>"]);
    let source = "{% for m in messages %}{{ m.role }}:\n{{ m.content }}<|endoftext|>\n{% endfor %}\
                  {% if add_generation_prompt %}assistant:\n{% endif %}";
    setting.template = Some(ChatTemplate::new("t", source, TemplateConfig::default()).unwrap());
    setting.options.begin = Some(1);
    let Read { rows, .. } = setting.read(&lines).unwrap();
    let tokenizer = Setting::tokenizer();
    let ids: Vec<u32> = rows[0].tokens.iter().map(|id| *id as u32).collect();
    assert_eq!(
        tokenizer.decode(&ids).unwrap(),
        "user:\nAdd.\n\n1 1<|endoftext|>\nassistant:\n2<|endoftext|>\n",
        "the template writes the begin token, if there is one"
    );
    assert_eq!(setting.learned(&lines), ["2<|endoftext|>\n"]);
    // The prompt's tokens are those that inference has, whatever follows.
    let prompt = tokenizer.encode("user:\nAdd.\n\n1 1<|endoftext|>\nassistant:\n").unwrap();
    assert_eq!(ids[..prompt.len()], prompt);
}

#[test]
fn tokens_are_learned_as_their_labels_say() {
    let setting = Setting::new();
    let Read { rows, .. } = setting.read("{\"input_ids\": [5, 6, 7], \"labels\": [-100, 6, 7]}").unwrap();
    assert_eq!((rows[0].tokens.as_slice(), rows[0].labels.as_slice()), (&[5, 6, 7][..], &[-100, 6, 7][..]));
    let error = setting.read("{\"input_ids\": [5, 4096]}").unwrap_err();
    assert!(error.contains("line 1: token 4096 is beyond the model's vocabulary of 4096"), "{error}");
}

#[test]
fn every_token_of_a_text_is_predicted_once() {
    let mut setting = Setting::new();
    setting.options.longest = 16;
    let text = "Ann has 5 pears and buys 3 more. ".repeat(9);
    let files = setting.files("plain.txt", &text);
    assert_eq!(rows::detect(&files, "text").unwrap(), Found::Text);
    let rows = rows::texts(&files, &setting.encoder(), None).unwrap().to_vec().unwrap();
    let ids = Setting::tokenizer().encode(&text).unwrap();
    let all: Vec<i64> = ids.into_iter().chain([END]).map(i64::from).collect();
    let predicted: Vec<i64> = rows.iter().flat_map(|row| row.labels[1..].to_vec()).collect();
    assert_eq!(predicted, all[1..]);
    assert!(rows.iter().all(|row| row.tokens.len() <= 16));
}

/// Also where the text has the begin token itself.
#[test]
fn every_row_of_a_text_begins_with_the_begin_token_of_the_model() {
    const BEGIN: u32 = 1;
    let mut setting = Setting::new();
    (setting.options.longest, setting.options.begin) = (16, Some(BEGIN));
    let text = "Ann has 5 pears and buys 3 more. ".repeat(9);
    let ids = Setting::tokenizer().encode(&text).unwrap();
    let all: Vec<i64> = ids.into_iter().chain([END]).map(i64::from).collect();
    for text in [text.clone(), format!("<|padding|>{text}")] {
        let files = setting.files("plain.txt", &text);
        let rows = rows::texts(&files, &setting.encoder(), None).unwrap().to_vec().unwrap();
        assert!(rows.iter().all(|row| row.tokens[0] == i64::from(BEGIN) && row.labels == row.tokens));
        let (last, full) = rows.split_last().unwrap();
        assert!(full.iter().all(|row| row.tokens.len() == 16) && (2..=16).contains(&last.tokens.len()));
        let predicted: Vec<i64> = rows.iter().flat_map(|row| row.labels[1..].to_vec()).collect();
        assert_eq!(predicted, all);
    }
    let error = rows::texts(&setting.files("empty.txt", ""), &setting.encoder(), None).unwrap_err();
    assert!(error.to_string().contains("no text in it"), "{error}");
}

#[test]
fn bad_lines_are_named() {
    let mut setting = Setting::new();
    let long = format!("{{\"text\": \"{}\"}}", "pears ".repeat(60));
    for (line, said) in [
        ("{", "line 2: not JSON"),
        ("{\"a\": 1}", "line 2: the fields are a; expected `messages`"),
        ("{\"text\": 5}", "line 2: `text` is a number, expected a text"),
        (long.as_str(), "line 2: 123 tokens are more than the longest row of 40; shorten it, or choose"),
    ] {
        let error = setting.read(&format!("{{\"text\": \"a\"}}\n{line}\n")).unwrap_err();
        assert!(error.contains(said), "{error}");
    }
    setting.options.overlong = Overlong::Skip;
    assert_eq!(setting.read(&format!("{{\"text\": \"a\"}}\n{long}\n")).unwrap().counts.skipped, 1);
}

/// With and without a begin token.
#[test]
fn a_divided_record_has_the_rows_of_a_text_file() {
    for begin in [None, Some(7)] {
        let mut setting = Setting::new();
        (setting.options.begin, setting.options.overlong) = (begin, Overlong::Split);
        let text = "Twelve pears, and then some. ".repeat(30);
        let of_record = setting.read(&json!({ "text": text }).to_string()).unwrap().rows;
        let file = setting.files("plain.txt", &text);
        let of_file = rows::texts(&file, &setting.encoder(), None).unwrap().to_vec().unwrap();
        assert!(of_record.len() > 3 && of_record == of_file, "{of_record:?} {of_file:?}");
        let begins = of_record.iter().filter(|row| row.tokens[0] == 7).count();
        assert_eq!(begins, if begin.is_some() { of_record.len() } else { 0 });
    }
}

#[test]
fn rows_without_a_text_are_left_out_and_counted() {
    let mut setting = Setting::new();
    setting.options.overlong = Overlong::Skip;
    let Read { rows, counts } = setting.read("{\"text\": \"\"}\n{\"text\": \"a pear\"}\n").unwrap();
    assert_eq!((rows.len(), counts.without_label), (1, 1));
    let error = setting.read("{\"text\": \"\"}\n").unwrap_err();
    assert!(error.contains("none of its 1 rows has a text to learn"), "{error}");
    setting.options.longest = 1;
    let error = setting.read("{\"text\": \"a pear\"}\n").unwrap_err();
    assert!(error.contains("1 rows are longer than 1 tokens, and no other is left"), "{error}");
}

#[test]
fn an_answer_with_a_heading_is_one_as_any_other() {
    let setting = Setting::new();
    let problem = json!({ "question": "q", "answer": "1\n#### 1" }).to_string();
    let found = rows::detect(&setting.files("a.jsonl", &problem), "text").unwrap();
    assert!(matches!(found, Found::Records(_)), "{found:?}");
    let question = json!({ "question": "q", "answer": "a" }).to_string();
    assert_eq!(setting.learned(&question), [" a<|endoftext|>"]);
}

#[test]
fn prepared_rows_are_those_of_the_same_data_and_settings_only() {
    let mut setting = Setting::new();
    let cache = setting.folder.path().join("cache");
    let lines = "{\"prompt\": \"How many pears?\", \"completion\": \" Five.\"}\n";
    let files = setting.files("rows.jsonl", lines);
    let detected = rows::detect_records(&files, "text").unwrap();
    let prepare = |setting: &Setting| {
        rows::prepare_cached(&files, &setting.encoder(), &detected, None, &cache).unwrap()
    };
    let (first, cached) = prepare(&setting);
    assert!(matches!(cached, Cached::Written(_)), "{cached:?}");
    let (again, cached) = prepare(&setting);
    let Cached::Read(path) = cached else { panic!("{cached:?}") };
    assert_eq!(first, again);
    let is_new = |setting: &Setting| matches!(prepare(setting).1, Cached::Written(_));
    setting.options.mask = Mask::All;
    assert!(is_new(&setting), "another mask");
    setting.options.mask = Mask::Answers;
    setting.options.longest = 39;
    assert!(is_new(&setting), "another length");
    setting.options.longest = 40;
    setting.template = Some(ChatTemplate::new("t", "a", TemplateConfig::default()).unwrap());
    assert!(is_new(&setting), "another template");
    setting.template = Some(ChatTemplate::new("t", "b", TemplateConfig::default()).unwrap());
    assert!(is_new(&setting), "another template");
    setting.template = None;
    assert!(!is_new(&setting));
    std::fs::write(&files[0], lines.replace("Five", "Four")).unwrap();
    assert!(is_new(&setting), "other data");
    std::fs::write(&files[0], lines).unwrap();
    std::fs::write(&path, "damaged").unwrap();
    assert!(is_new(&setting), "a damaged file is made again");
    assert_eq!(prepare(&setting).0, first);
}

/// In a process of its own, whose memory is the rows' alone.
#[test]
fn rows_of_large_data_are_on_the_disk() {
    const CACHE: &str = "FRUGAL_CACHE";
    const ALONE: &str = "FRUGAL_TEST_LARGE_DATA";
    let setting =
        Setting { options: RowConfig { longest: 4096, ..Setting::new().options }, ..Setting::new() };
    if std::env::var_os(ALONE).is_none() {
        let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
        alone.args(["--exact", "rows::rows_of_large_data_are_on_the_disk"]).env(ALONE, "1");
        let output = alone.env(CACHE, setting.folder.path().join("cache")).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        return;
    }
    const ROWS: usize = 3000;
    let ids: Vec<i64> = (0..4000).collect();
    let line = json!({ "input_ids": ids, "labels": ids }).to_string() + "\n";
    let files = setting.files("rows.jsonl", &line.repeat(ROWS));
    let detected = rows::detect_records(&files, "text").unwrap();
    let memory = || runtime::device::resident_memory().unwrap().anonymous;
    let before = memory();
    let prepared = rows::prepare(&files, &setting.encoder(), &detected, None).unwrap();
    runtime::memory::release_freed_pages();
    // 12 million tokens: 48 MB of ids, and 192 MB as two lists of i64.
    assert_eq!((prepared.rows.len(), prepared.counts.tokens), (ROWS, 4000 * ROWS));
    assert!(memory() < before + (40 << 20), "{} and {}", before, memory());
    assert_eq!(prepared.rows.row(ROWS - 1).unwrap(), MaskedRow::new(ids.clone(), ids));
    let (train, held) = rows::hold_out(&prepared.rows, 1, 0.02).unwrap();
    assert_eq!((train.len(), held.len()), (ROWS, 0), "equal rows stay together");

    // Kept rows are read from their file.
    let folder = setting.folder.path().join("kept");
    let read = || rows::prepare_cached(&files, &setting.encoder(), &detected, None, &folder).unwrap();
    assert!(matches!(read().1, Cached::Written(_)));
    let (again, cached) = read();
    assert!(matches!(cached, Cached::Read(_)) && again == prepared);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let Cached::Read(path) = cached else { unreachable!() };
        assert_eq!((mode(&path), mode(&folder)), (0o600, 0o700), "training data is private");
    }
}
