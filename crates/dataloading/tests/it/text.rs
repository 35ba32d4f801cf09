//! Reading text: each format, and each invalid file.

use std::path::{Path, PathBuf};

use dataloading::Result;
use dataloading::text::{Corpus, Encoding, Format, Record};
use expect_test::{Expect, expect};

const WIKI: &str = " \n = Arden = \n \n Arden has 4 @,@ 300 people . \n A line where = 1 m / s = \n \n = = History = = \n \
                    \n It is old @-@ ish . \n \n = Brum = \n \n = = Name = = \n \n Brum . \n";

fn write(folder: &Path, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, content).unwrap();
    path
}

fn read(content: &[u8], format: Format) -> Result<Vec<Record>> {
    let folder = tempfile::tempdir().unwrap();
    Corpus::new([write(folder.path(), "corpus", content)], format).records()?.collect()
}

fn check(content: &str, format: Format, expected: &[(u64, &str)]) {
    let records = read(content.as_bytes(), format).unwrap();
    let texts: Vec<(u64, &str)> = records.iter().map(|r| (r.location.line, &*r.text)).collect();
    assert_eq!(texts, expected);
}

#[test]
fn an_article_starts_at_its_title() {
    let arden = "= Arden = \n \n Arden has 4 @,@ 300 people . \n A line where = 1 m / s = \n \n = = History = = \n \n It is \
                 old @-@ ish .";
    check(WIKI, Format::Articles, &[(2, arden), (11, "= Brum = \n \n = = Name = = \n \n Brum .")]);
    check("No title . \n \n = A = \n", Format::Articles, &[(1, "No title ."), (3, "= A =")]);
    // Formulas on a line of their own, and titles without blank lines around them.
    check(
        " = A = \n \n text \n = 1 m / s = \n text \n",
        Format::Articles,
        &[(1, "= A = \n \n text \n = 1 m / s = \n text")],
    );
    check(" = A = \n\n = B = \n\n", Format::Articles, &[(1, "= A ="), (3, "= B =")]);
}

#[test]
fn empty_lines_are_skipped() {
    check(
        WIKI,
        Format::Lines,
        &[
            (2, "= Arden ="),
            (4, "Arden has 4 @,@ 300 people ."),
            (5, "A line where = 1 m / s ="),
            (7, "= = History = ="),
            (9, "It is old @-@ ish ."),
            (11, "= Brum ="),
            (13, "= = Name = ="),
            (15, "Brum ."),
        ],
    );
}

#[test]
fn plain_text_by_paragraphs_or_whole() {
    let text = "\u{feff}one\r\ntwo\n\n \nthree\nfour";
    check(text, Format::Paragraphs, &[(1, "one\ntwo"), (5, "three\nfour")]);
    check(text, Format::Files, &[(1, "one\ntwo\n\n \nthree\nfour")]);
}

#[test]
fn json_lines_give_the_field() {
    let text = "{\"question\": \"a\\nb\", \"n\": 1}\n\n{\"n\": 2, \"question\": \"\"}\n";
    check(text, Format::JsonLines("question".into()), &[(1, "a\nb"), (3, "")]);
}

#[test]
fn files_are_read_in_order_and_records_name_theirs() {
    let folder = tempfile::tempdir().unwrap();
    let files = [
        write(folder.path(), "b", "1\n2\n"),
        write(folder.path(), "empty", ""),
        write(folder.path(), "a", "3"),
    ];
    let mut records = Corpus::new(files.clone(), Format::Lines).records().unwrap();
    let texts: Vec<_> =
        records.by_ref().map(|r| r.map(|r| (r.text, r.location.path.to_path_buf())).unwrap()).collect();
    let record = |text: &str, file: usize| (text.to_owned(), files[file].clone());
    assert_eq!(texts, [record("1", 0), record("2", 0), record("3", 2)]);
    assert_eq!((records.bytes(), records.replaced()), (5, 0));
}

#[test]
fn lossy_replacement_is_counted() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), "latin1", b"caf\xe9\n\xff\xff\nfine\n");
    let corpus = Corpus { encoding: Encoding::Lossy, ..Corpus::new([path], Format::Lines) };
    let mut records = corpus.records().unwrap();
    let texts: Vec<String> = records.by_ref().map(|record| record.unwrap().text).collect();
    assert_eq!(texts, ["caf\u{fffd}", "\u{fffd}\u{fffd}", "fine"]);
    assert_eq!(records.replaced(), 3);
}

fn check_error(content: &[u8], format: Format, expected: Expect) {
    let error = read(content, format).unwrap_err().to_string();
    let (_, words) = error.split_once("corpus: ").unwrap();
    expected.assert_eq(words);
}

#[test]
fn errors_name_the_line_and_the_remedy() {
    let json = || Format::JsonLines("question".into());
    check_error(
        b"fine\ncaf\xe9\n",
        Format::Lines,
        expect!["line 2, byte 8 of the file (0xe9): not UTF-8; convert the file (iconv -f LATIN1 -t UTF-8)"],
    );
    check_error(b" \n\n", Format::Lines, expect!["there is no text; check the files and their format"]);
    check_error(b"", Format::Articles, expect!["there is no text; check the files and their format"]);
    check_error(
        b"{\"question\": 1}\n",
        json(),
        expect!["line 1: field 'question' is a number, expected a string"],
    );
    check_error(
        b"\n{\"a\": 1, \"b\": 2}\n",
        json(),
        expect!["line 2: no field 'question'; the fields here are: a, b"],
    );
    check_error(
        b"[1]\n",
        json(),
        expect!["line 1: expected an object, found an array; one line is one object"],
    );
    check_error(
        b"{\"question\": \"a\"}\n{\"question\": \n",
        json(),
        expect![
            "line 2: not JSON (EOF while parsing a value, column 13); an object is on one line in such a file (`jq -c . FILE` writes it so); join its lines, or correct the line"
        ],
    );
}

#[test]
fn unreadable_files_are_errors_before_reading_starts() {
    let folder = tempfile::tempdir().unwrap();
    let there = write(folder.path(), "a", "text");
    let missing = Corpus::new([there.clone(), folder.path().join("b")], Format::Lines).records().unwrap_err();
    assert!(missing.to_string().ends_with("b: there is no such file or folder"), "{missing}");
    let of_folder = Corpus::new([there, folder.path().into()], Format::Lines).records().unwrap_err();
    assert!(of_folder.to_string().ends_with("not a regular file; pass text files"));
    let none = Corpus::new([], Format::Lines).records().unwrap_err();
    assert_eq!(none.to_string(), "corpus: the list of files is empty; pass at least one");
}

#[test]
fn after_an_error_there_are_no_more_records() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), "bad", b"a\n\xff\nb\n");
    let records: Vec<bool> =
        Corpus::new([path], Format::Lines).records().unwrap().map(|r| r.is_ok()).collect();
    assert_eq!(records, [true, false]);
}
