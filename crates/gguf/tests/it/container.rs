//! The container: bytes of a small file, every type of value, and what the writer and the reader refuse.

use std::fs;

use expect_test::{Expect, expect};
use gguf::{Array, Header, Reader, TensorInfo, TensorType, Value, Writer};

fn bytes(header: &Header, values: &[&[u8]]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut writer = Writer::new(&mut bytes, header).unwrap();
    for values in values {
        // In two parts, which must make no difference.
        let (one, other) = values.split_at(values.len() / 2);
        writer.write(one).unwrap();
        writer.write(other).unwrap();
        writer.end_tensor().unwrap();
    }
    writer.finish().unwrap();
    bytes
}

fn read(bytes: &[u8]) -> gguf::Result<Reader> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file.gguf");
    fs::write(&path, bytes).unwrap();
    Reader::open(&path)
}

fn tensor(name: &str, shape: &[u64], kind: TensorType) -> TensorInfo {
    TensorInfo { name: name.to_owned(), shape: shape.to_vec(), kind }
}

/// Byte for byte what the specification says: sizes innermost first, offsets and the end padded to 32.
#[test]
fn a_small_file_has_the_bytes_of_the_specification() {
    let header = Header {
        metadata: vec![("a".to_owned(), Value::U32(7)), ("b".to_owned(), "xy".into())],
        tensors: vec![tensor("t", &[3, 1], TensorType::F16), tensor("u", &[2], TensorType::F32)],
    };
    let values: [&[u8]; 2] = [&[1, 2, 3, 4, 5, 6], &[9; 8]];
    let written = bytes(&header, &values);
    let number = |x: u64| x.to_le_bytes();
    let word = |x: u32| x.to_le_bytes();
    let mut expected: Vec<u8> = [
        &b"GGUF"[..],
        &word(3),
        &number(2),
        &number(2),
        &number(1),
        b"a",
        &word(4),
        &word(7),
        &number(1),
        b"b",
        &word(8),
        &number(2),
        b"xy",
        &number(1),
        b"t",
        &word(2),
        &number(1),
        &number(3),
        &word(1),
        &number(0),
        &number(1),
        b"u",
        &word(1),
        &number(2),
        &word(0),
        &number(32),
    ]
    .concat();
    expected.resize(expected.len().next_multiple_of(32), 0);
    expected.extend([1, 2, 3, 4, 5, 6]);
    expected.resize(expected.len().next_multiple_of(32), 0);
    expected.extend([9; 8]);
    expected.resize(expected.len().next_multiple_of(32), 0);
    assert_eq!(written, expected);
}

#[test]
fn every_type_of_value_is_read_as_it_was_written() {
    let values = [
        Value::U8(200),
        Value::I8(-100),
        Value::U16(60_000),
        Value::I16(-30_000),
        Value::U32(4_000_000_000),
        Value::I32(-2_000_000_000),
        Value::F32(-1.5e-30),
        Value::Bool(true),
        Value::String("é\u{1f600}".to_owned()),
        Value::U64(u64::MAX),
        Value::I64(i64::MIN),
        Value::F64(1e300),
        Value::Array(Array::U8(vec![1, 2])),
        Value::Array(Array::I8(vec![-1])),
        Value::Array(Array::U16(vec![3, 4])),
        Value::Array(Array::I16(vec![-3])),
        Value::Array(Array::U32(vec![5])),
        Value::Array(Array::I32(vec![-5, 6])),
        Value::Array(Array::F32(vec![0.5, -0.0])),
        Value::Array(Array::Bool(vec![true, false])),
        Value::Array(Array::String(vec![String::new(), "x".to_owned()])),
        Value::Array(Array::U64(vec![7])),
        Value::Array(Array::I64(vec![-7])),
        Value::Array(Array::F64(Vec::new())),
    ];
    let metadata: Vec<_> =
        values.into_iter().enumerate().map(|(n, value)| (format!("key.{n}"), value)).collect();
    let header = Header { metadata, tensors: Vec::new() };
    assert_eq!(*read(&bytes(&header, &[])).unwrap().header(), header);
}

#[test]
fn rows_are_read_by_place() {
    let header = Header {
        metadata: Vec::new(),
        tensors: vec![tensor("x", &[4, 3], TensorType::F32), tensor("q", &[2, 32], TensorType::Q8_0)],
    };
    let x: Vec<f32> = (0..12).map(|n| n as f32).collect();
    let q: Vec<f32> = (0..64).map(|n| (n - 31) as f32 * 127.0 / 32.0).collect();
    let encoded = |kind: TensorType, values: &[f32]| {
        let mut bytes = Vec::new();
        kind.encode(values, &mut bytes);
        bytes
    };
    let parts = [encoded(TensorType::F32, &x), encoded(TensorType::Q8_0, &q)];
    let file = bytes(&header, &[&parts[0], &parts[1]]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.gguf");
    fs::write(&path, file).unwrap();
    let file = Reader::open(&path).unwrap();
    assert_eq!(file.rows(file.position("x").unwrap(), 1..3).unwrap(), x[3..9]);
    let second = file.rows(file.position("q").unwrap(), 1..2).unwrap();
    // The second row's largest magnitude is 32 · 127 / 32 = 127, so its scale is 1.
    assert!(second.iter().zip(&q[32..]).all(|(x, y)| (x - y).abs() <= 0.5 && x.fract() == 0.0));
    assert!(file.rows(0, 3..5).is_err());
    assert!(file.rows(2, 0..1).is_err());
}

fn refused(bytes: &[u8], expected: Expect) {
    let error = read(bytes).unwrap_err().to_string();
    expected.assert_eq(error.split_once(": ").unwrap().1);
}

#[test]
fn damaged_files_are_refused_in_words() {
    let header = Header {
        metadata: vec![("general.architecture".to_owned(), "llama".into())],
        tensors: vec![tensor("t", &[8], TensorType::F32)],
    };
    let good = bytes(&header, &[&[0; 32]]);
    assert!(read(&good).is_ok());
    refused(&[b"GGML", &good[4..]].concat(), expect!["not a GGUF file: it does not start with `GGUF`"]);
    refused(
        &[&good[..4], &1u32.to_le_bytes(), &good[8..]].concat(),
        expect!["version 1 of GGUF; expected 2 or 3: convert the model again with llama.cpp"],
    );
    refused(
        &[&good[..4], &3u32.to_be_bytes(), &good[8..]].concat(),
        expect!["a big-endian file; convert it to little-endian with `gguf_convert_endian.py` of llama.cpp"],
    );
    assert!(read(&[&good[..4], &2u32.to_le_bytes(), &good[8..]].concat()).is_ok(), "version 2");
    for end in [3, 10, 30, 70, good.len() - 33, good.len() - 1] {
        refused(
            &good[..end],
            expect!["the file ends within its header or its tensors; copy or export it again"],
        );
    }
    let number = good.windows(5).position(|part| part == [b't', 1, 0, 0, 0]).unwrap() + 13;
    let mut other = good.clone();
    for (unreadable, start) in [
        (34, "`t` is tq1_0, which cannot be read; convert the file with llama.cpp: "),
        (99, "`t` has the type 99 of ggml, which is unknown; readable are f32, f16, "),
    ] {
        other[number] = unreadable;
        let error = read(&other).unwrap_err().to_string();
        assert!(error.split_once(": ").unwrap().1.starts_with(start), "{error}");
    }
    let twice =
        Header { tensors: vec![header.tensors[0].clone(), tensor("u", &[8], TensorType::F32)], ..header };
    let mut overlapping = bytes(&twice, &[&[0; 32], &[0; 32]]);
    let offset = overlapping.windows(5).position(|part| part == [b'u', 1, 0, 0, 0]).unwrap() + 17;
    overlapping[offset] = 0;
    refused(&overlapping, expect!["`t` and `u` overlap"]);
}

#[test]
fn the_writer_refuses_what_ggml_does_not_read() {
    let refuse = |tensors: Vec<TensorInfo>, expected: Expect| {
        let header = Header { metadata: Vec::new(), tensors };
        expected.assert_eq(&Writer::new(&mut Vec::new(), &header).map(drop).unwrap_err().to_string());
    };
    let long = "x".repeat(64);
    refuse(
        vec![tensor(&long, &[1], TensorType::F32)],
        expect![
            "the name `xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx` has 64 bytes; ggml reads at most 63"
        ],
    );
    refuse(
        vec![tensor("t", &[1, 2, 3, 4, 5], TensorType::F32)],
        expect!["`t` has the shape [1, 2, 3, 4, 5]; ggml has one to 4 sizes"],
    );
    refuse(
        vec![tensor("t", &[3, 33], TensorType::Q8_0)],
        expect!["`t`, of shape [3, 33], cannot be stored as q8_0"],
    );
    let same = tensor("t", &[1], TensorType::F32);
    refuse(vec![same.clone(), same.clone()], expect!["the tensor `t` occurs twice"]);

    let header = Header { metadata: Vec::new(), tensors: vec![same] };
    let mut out = Vec::new();
    let mut writer = Writer::new(&mut out, &header).unwrap();
    assert!(writer.write(&[0; 5]).is_err());
    writer.write(&[0; 3]).unwrap();
    assert_eq!(writer.end_tensor().unwrap_err().to_string(), "`t` takes 4 bytes; 3 were written");
    assert_eq!(writer.finish().unwrap_err().to_string(), "`t` has no values yet");
}
