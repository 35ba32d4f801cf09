//! Tokenizers, and stores made with them.

use std::path::PathBuf;

use dataloading::text::{Corpus, Format};
use dataloading::token_store::{
    TokenizeConfig, Tokenized, TooLong, WriterConfig, tokenize, tokenize_to_store,
};
use dataloading::tokenizer::TrainConfig;
use dataloading::{Samples, Tokenizer};
use expect_test::expect;

const TEXTS: [&str; 4] =
    ["the cat sat on the mat .", "a cat and a dog sat .", "the dog 's mat @-@ like hat", "on and on"];

fn train_json(texts: &[&str], vocabulary: usize) -> dataloading::Result<String> {
    let options = TrainConfig { vocabulary, ..TrainConfig::default() };
    Tokenizer::train_json(texts.iter().map(|text| Ok((*text).to_owned())), &options)
}

fn small() -> Tokenizer {
    Tokenizer::from_bytes(train_json(&TEXTS, 270).unwrap().as_bytes()).unwrap()
}

/// Returns the folder of real data, if it exists.
pub(crate) fn real(path: &str) -> Option<PathBuf> {
    let file = std::env::var_os("FRUGAL_DATA").map(|folder| PathBuf::from(folder).join(path));
    let file = file.filter(|file| file.is_file());
    if file.is_none() {
        eprintln!("skipped: set FRUGAL_DATA to a folder that has {path}");
    }
    file
}

#[test]
fn training_gives_the_same_bytes_in_any_order_and_on_any_number_of_threads() {
    let many: Vec<String> = (0..3000).map(|i| format!("{} {i} {}", TEXTS[i % 4], TEXTS[i * 7 % 4])).collect();
    let mut texts: Vec<&str> = many.iter().map(String::as_str).collect();
    let one = train_json(&texts, 600).unwrap();
    texts.reverse();
    for threads in [1, 3] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        assert_eq!(pool.install(|| train_json(&texts, 600).unwrap()), one);
    }
    // The `tokenizers` crate writes back the content it reads.
    let read = tokenizers::Tokenizer::from_bytes(&one).unwrap().to_string(false).unwrap();
    let value = |json: &str| serde_json::from_str::<serde_json::Value>(json).unwrap();
    assert_eq!(value(&read), value(&one));
}

#[test]
fn any_text_round_trips_and_batches_equal_single_texts() {
    let tokenizer = small();
    assert_eq!(tokenizer.vocabulary(), 270);
    let texts = ["", "the cat", "naïve — 数 🦀\n\ttab", "<|endoftext|>the<|padding|>", "  spaces  "];
    let batch = tokenizer.encode_batch(&texts).unwrap();
    for (text, ids) in texts.iter().zip(&batch) {
        assert_eq!(&tokenizer.encode(text).unwrap(), ids);
        assert_eq!(tokenizer.decode(ids).unwrap(), *text);
    }
    assert_eq!((tokenizer.end_of_text().unwrap(), tokenizer.padding().unwrap()), (0, 1));
    assert_eq!((batch[3][0], *batch[3].last().unwrap()), (0, 1));
    assert!(tokenizer.encode(" the").unwrap().len() < 4, "nothing was merged");
}

#[test]
fn an_incomplete_tokenizer_is_an_error_with_the_remedy() {
    let options = TrainConfig { special_tokens: Vec::new(), vocabulary: 260, ..TrainConfig::default() };
    let bare = Tokenizer::train(TEXTS.map(|text| Ok(text.into())), &options).unwrap();
    expect!["padding token: the tokenizer has none of <|padding|> <pad> [PAD] <|pad|> <PAD> <|pad_token|> <|finetune_right_pad_id|>; pass the id of the end-of-text token as padding id: padding has no label and is masked"]
        .assert_eq(&bare.padding().unwrap_err().to_string());
    expect!["end-of-text token: the tokenizer has none of <|endoftext|> </s> <|end_of_text|> <eos> <|eot_id|> [SEP] <|im_end|>; pass the id of the end token of the model, or append none"]
        .assert_eq(&bare.end_of_text().unwrap_err().to_string());
    expect![
        "tokenizer: there is no token 260: the vocabulary has 260 ids; use the tokenizer that made the tokens"
    ]
    .assert_eq(&bare.decode(&[1, 260]).unwrap_err().to_string());
    expect!["tokenizer training: a vocabulary of 257 cannot hold the 256 bytes and 2 special tokens; ask for 258 or more"]
        .assert_eq(&train_json(&TEXTS, 257).unwrap_err().to_string());
    expect!["texts for a tokenizer: there is nothing to count; give texts that are not empty"]
        .assert_eq(&train_json(&[""], 300).unwrap_err().to_string());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    std::fs::write(&path, "{}").unwrap();
    let error = Tokenizer::from_file(&path).unwrap_err().to_string();
    assert!(error.ends_with("use the tokenizer.json of the model"), "{error}");
}

#[test]
fn the_tokenizer_of_gpt2_is_read() {
    let Some(path) = real("gpt2-tokenizer/tokenizer.json") else { return };
    let tokenizer = Tokenizer::from_file(&path).unwrap();
    assert_eq!(tokenizer.vocabulary(), 50_257);
    assert_eq!(tokenizer.encode("Hello world").unwrap(), [15_496, 995]);
    assert_eq!(tokenizer.end_of_text().unwrap(), 50_256);
    assert!(tokenizer.padding().is_err());
}

#[test]
fn wikitext_2_has_its_articles_and_lines() {
    for (file, lines) in [("wikitext-2/valid.txt", 2461), ("wikitext-2/test.txt", 2891)] {
        let Some(path) = real(file) else { return };
        let count =
            |format| Corpus::new([path.clone()], format).records().unwrap().filter(Result::is_ok).count();
        assert_eq!((count(Format::Articles), count(Format::Lines)), (60, lines), "{file}");
    }
}

fn documents(options: &TokenizeConfig, text: &str) -> (Vec<Vec<u32>>, Tokenized) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("text.jsonl");
    std::fs::write(&path, text).unwrap();
    let records = Corpus::new([path], Format::JsonLines("t".into())).records().unwrap();
    let mut documents = Vec::new();
    let keep = |ids: &[u32]| {
        documents.push(ids.to_vec());
        Ok(())
    };
    let counts = tokenize(records, &small(), options, |_| (), keep).unwrap();
    (documents, counts)
}

#[test]
fn long_documents_are_split_cut_or_dropped_and_empty_ones_skipped() {
    let text = "{\"t\": \"abc\"}\n{\"t\": \"\"}\n{\"t\": \"vwxyz\"}\n";
    let id = |byte: char| small().id(&byte.to_string()).unwrap();
    let ids = |text: &str| text.chars().map(|c| if c == '.' { 0 } else { id(c) }).collect::<Vec<u32>>();
    let base = Tokenized { records: 3, empty: 1, bytes: text.len() as u64, ..Tokenized::default() };
    for (too_long, expected, dropped_tokens) in [
        (TooLong::Split, vec!["abc.", "vwxy", "z."], 0),
        (TooLong::Truncate, vec!["abc.", "vwxy"], 2),
        (TooLong::Drop, vec!["abc."], 6),
    ] {
        let options = TokenizeConfig { end_of_text: Some(0), longest: Some(4), too_long };
        let (texts, counts) = documents(&options, text);
        assert_eq!(texts, expected.iter().map(|text| ids(text)).collect::<Vec<_>>());
        let tokens = expected.iter().map(|text| text.len() as u64).sum();
        let documents = expected.len() as u64;
        assert_eq!(counts, Tokenized { documents, tokens, too_long: 1, dropped_tokens, ..base });
    }
    let (texts, counts) = documents(&TokenizeConfig::default(), text);
    assert_eq!((texts.len(), counts.tokens, counts.too_long), (2, 8, 0));
}

#[test]
fn the_store_of_a_corpus_does_not_depend_on_the_threads() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("corpus.txt");
    let text: String = (0..9000).map(|i| format!("{i} {}\n", TEXTS[i % 4])).collect();
    std::fs::write(&path, &text).unwrap();
    let tokenizer = small();
    let corpus = Corpus::new([path], Format::Lines);
    let options = TokenizeConfig { end_of_text: Some(0), ..TokenizeConfig::default() };
    let make = |threads: usize| {
        let store = folder.path().join(format!("store-{threads}"));
        let writer = WriterConfig { shard_bytes: 100_000, ..WriterConfig::new(tokenizer.vocabulary()) };
        let mut calls = 0;
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let progress = |_: &Tokenized| calls += 1;
        let made =
            pool.install(|| tokenize_to_store(&corpus, &tokenizer, &options, &store, &writer, progress));
        let (store, counts) = made.unwrap();
        assert_eq!(calls, 3, "chunks of 4096 records");
        (store, counts)
    };
    let ((one, counts), (three, same)) = (make(1), make(3));
    assert_eq!((one.fingerprint(), counts), (three.fingerprint(), same));
    assert!(one.shards() > 1);
    assert_eq!((one.len(), counts.documents, counts.bytes), (9000, 9000, text.len() as u64));
    let last = tokenizer.decode(&one.document(8999).unwrap().iter().collect::<Vec<_>>()).unwrap();
    assert_eq!(last, "8999 on and on<|endoftext|>");
}

#[test]
fn a_corpus_without_documents_creates_no_store() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("corpus.txt");
    std::fs::write(&path, "the cat sat on the mat . the dog\n").unwrap();
    let (corpus, tokenizer, target) =
        (Corpus::new([path], Format::Lines), small(), folder.path().join("store"));
    let make = |options: TokenizeConfig, vocabulary| {
        let store = WriterConfig::new(vocabulary);
        let made = tokenize_to_store(&corpus, &tokenizer, &options, &target, &store, |_| ());
        made.unwrap_err().to_string()
    };
    let drop = TokenizeConfig { longest: Some(2), too_long: TooLong::Drop, ..TokenizeConfig::default() };
    let error = make(drop, 270);
    assert!(error.ends_with("of 1 records 0 are empty and 1 longer than allowed, so there is nothing to store; allow longer ones"), "{error}");
    let end = TokenizeConfig { end_of_text: Some(270), ..TokenizeConfig::default() };
    assert_eq!(make(end, 270), "tokenize: the end-of-text id 270 is not among the tokenizer's 270");
    let none = TokenizeConfig { longest: Some(0), ..TokenizeConfig::default() };
    assert_eq!(make(none, 270), "tokenize: the maximum length is 0 tokens; expected at least 1");
    let small = make(TokenizeConfig::default(), 269);
    assert_eq!(
        small,
        "token store: the vocabulary is 269, but the tokenizer has 270 ids; use at least as many"
    );
    assert!(!target.exists() && !folder.path().join(".store.partial").exists());
}
