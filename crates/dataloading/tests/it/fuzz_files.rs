//! Mutated stores and tokenizers: each is refused, or read correctly.

use std::fs;
use std::path::Path;

use dataloading::Samples;
use dataloading::token_store::{TokenStore, Writer, WriterConfig};
use dataloading::tokenizer::{Tokenizer, TrainConfig};
use sha2::{Digest, Sha256};
use testing::fuzz::{self, Outcome};

/// A folder in memory if possible: the tests write it tens of thousands of times.
fn scratch() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap()
}

/// Corrects the checksums of a header and a shard, as far as the shard is long enough, so that the other checks are tested
/// too.
fn sign(bytes: &mut [u8], payload: bool) {
    if bytes.len() < 128 {
        return;
    }
    if payload {
        let digest = Sha256::digest(&bytes[128..]);
        bytes[48..80].copy_from_slice(&digest);
        let of_all = Sha256::digest(&bytes[48..80]);
        bytes[80..112].copy_from_slice(&of_all);
    }
    let digest = Sha256::digest(&bytes[..112]);
    bytes[112..128].copy_from_slice(&digest[..16]);
}

#[test]
fn token_store() {
    for (name, vocabulary) in [("token store of 2 bytes", 100), ("token store of 4 bytes", 70_000)] {
        let folder = scratch();
        let path = folder.path().join("store");
        let mut writer = Writer::create(&path, &WriterConfig::new(vocabulary)).unwrap();
        let documents: [&[u32]; 3] = [&[1, 2, 3], &[], &[4, 5, 6, 99]];
        documents.iter().for_each(|document| writer.push(document).unwrap());
        writer.finish().unwrap();
        let shard = path.join("00000.tokens");
        let good = fs::read(&shard).unwrap();
        fuzz::run(name, |random| {
            let mut bytes = fuzz::bytes(random, &good);
            let signed = random.below(3);
            if signed > 0 {
                sign(&mut bytes, signed == 2);
            }
            // A new file each time, because a mapped file must not be truncated.
            fs::remove_file(&shard).unwrap();
            fs::write(&shard, &bytes).unwrap();
            // `verify` reads everything but holds none of it.
            let opened = fuzz::within(64 << 10, || {
                let store = TokenStore::open(&path).ok()?;
                let is_valid = store.verify().is_ok();
                Some((store, is_valid))
            });
            let Some((store, is_valid)) = opened else { return Outcome::Refused };
            // A damaged store that opens never returns ids outside the vocabulary, or more ids than the file has.
            assert!(store.len() <= bytes.len() && store.tokens() <= bytes.len() as u64);
            let mut read = Vec::new();
            for index in 0..store.len() {
                let mut ids = Vec::new();
                let result = store.read(index, &mut ids);
                assert!(ids.iter().all(|id| (*id as usize) < store.vocabulary()));
                assert!(result.is_ok() || !is_valid, "{result:?}");
                assert!(store.length(index) <= bytes.len());
                read.push(ids);
            }
            if !is_valid {
                return Outcome::Refused;
            }
            if signed == 0 {
                assert_eq!(bytes, good, "a change that the checksums do not show");
            }
            // An intact store returns what its bytes contain, parsed by the format's table.
            let word = |at: usize, width: usize| {
                bytes[at..at + width].iter().rev().fold(0u64, |word, byte| word << 8 | u64::from(*byte))
            };
            let (width, count, tokens) = (word(12, 4) as usize, word(24, 8) as usize, word(32, 8) as usize);
            let offsets = 128 + (tokens * width).next_multiple_of(8);
            for (index, ids) in read.iter().enumerate() {
                let (start, end) =
                    (word(offsets + 8 * index, 8) as usize, word(offsets + 8 * index + 8, 8) as usize);
                let expected: Vec<u32> =
                    (start..end).map(|at| word(128 + at * width, width) as u32).collect();
                assert_eq!(ids, &expected);
            }
            assert_eq!((read.len(), store.tokens()), (count, tokens as u64));
            Outcome::Read
        });
    }
}

#[test]
fn tokenizer() {
    let texts = ["the cat and the hat", "the mat", "äöü 123"].map(|text| Ok(text.to_owned()));
    let options = TrainConfig { vocabulary: 270, ..TrainConfig::default() };
    let ours = serde_json::from_str(&Tokenizer::train_json(texts, &options).unwrap()).unwrap();
    // Features of other tokenizers: a normalizer, several steps, a vocabulary with probabilities.
    let theirs: serde_json::Value = serde_json::json!({
        "version": "1.0", "truncation": null,
        "padding": {
            "strategy": { "Fixed": 8 }, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0,
            "pad_token": "<unk>",
        },
        "added_tokens": [{
            "id": 0, "content": "<unk>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": true,
        }],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                { "type": "NFC" }, { "type": "Prepend", "prepend": "▁" },
                { "type": "Replace", "pattern": { "Regex": " +" }, "content": "▁" },
            ],
        },
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                { "type": "Split", "pattern": { "Regex": "\\d{1,3}" }, "behavior": "Isolated", "invert": false },
                { "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true },
            ],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "SpecialToken": { "id": "<unk>", "type_id": 0 } }],
            "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
            "special_tokens": { "<unk>": { "id": "<unk>", "ids": [0], "tokens": ["<unk>"] } },
        },
        "decoder": { "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true },
        "model": {
            "type": "Unigram", "unk_id": 0, "byte_fallback": false,
            "vocab": [["<unk>", 0.0], ["▁the", -1.5], ["a", -2.0], ["t", -2.5], ["c", -3.0]],
        },
    });
    Tokenizer::from_bytes(theirs.to_string().as_bytes()).unwrap();
    fuzz::run("tokenizer.json", |random| {
        let good = if random.once_in(2) { &ours } else { &theirs };
        let text = fuzz::json(random, good);
        let read = fuzz::within(2000 * text.len() + (4 << 20), || Tokenizer::from_bytes(text.as_bytes()));
        let Ok(tokenizer) = read else { return Outcome::Refused };
        // It decodes what it encodes.
        if let Ok(ids) = tokenizer.encode("the cat 123 äö <unk>") {
            assert!(ids.iter().all(|id| (*id as usize) < tokenizer.vocabulary()), "{ids:?}");
            let _ = tokenizer.decode(&ids);
        }
        Outcome::Read
    });
}
