//! Blocks: the values of the Python package `gguf`, and the bytes of llama.cpp, bit for bit. `xtask/peers/gguf_blocks.py --write` made the cases.

use std::fmt::Write as _;
use std::path::Path;

use gguf::{Reader, TensorType, block};
use safetensors::SafeTensors;
use sha2::{Digest, Sha256};
use testing::fuzz::{self, Outcome};

const CASES: &[u8] = include_bytes!("../fixtures/blocks.safetensors");

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn blocks_are_decoded_bit_for_bit() {
    let cases = SafeTensors::deserialize(CASES).unwrap();
    for kind in TensorType::ALL {
        if kind == TensorType::F32 {
            continue;
        }
        let name = kind.name().to_uppercase();
        let bytes = cases.tensor(&format!("{name}.bytes")).unwrap();
        let expected = floats(cases.tensor(&format!("{name}.values")).unwrap().data());
        let mut values = vec![f32::NAN; expected.len()];
        block::dequantize(kind, bytes.data(), &mut values);
        assert_eq!(bits(&values), bits(&expected), "{kind}");
        // From an odd address, block by block.
        let shifted = [&[0], bytes.data()].concat();
        let mut again = vec![f32::NAN; expected.len()];
        for (bytes, values) in
            shifted[1..].chunks(kind.block_bytes()).zip(again.chunks_mut(kind.block_values()))
        {
            block::dequantize(kind, bytes, values);
        }
        assert_eq!(bits(&again), bits(&expected), "{kind}");
    }
}

#[test]
fn blocks_are_encoded_as_llama_cpp_encodes_them() {
    let cases = SafeTensors::deserialize(CASES).unwrap();
    let values = floats(cases.tensor("encoded.values").unwrap().data());
    for kind in TensorType::WRITTEN.into_iter().filter(|kind| kind.is_quantized()) {
        let expected = cases.tensor(&format!("{}.encoded", kind.name().to_uppercase())).unwrap();
        let mut bytes = vec![0xAA; expected.data().len()];
        block::quantize(kind, &values, &mut bytes);
        let blocks = bytes.chunks(kind.block_bytes()).zip(expected.data().chunks(kind.block_bytes()));
        let other: Vec<usize> =
            blocks.enumerate().filter(|(_, (x, y))| x != y).map(|(place, _)| place).collect();
        assert_eq!(other, [0; 0], "{kind}: blocks that differ");
    }
}

/// Any finite values of a size that a file may hold become finite values; none panics.
#[test]
fn any_values_encode() {
    fuzz::run("values", |random| {
        let kind = TensorType::WRITTEN[random.below(TensorType::WRITTEN.len())];
        let mut values = [0f32; 256];
        let (scale, is_sparse) = (10f32.powi(random.below(50) as i32 - 44), random.below(2) == 0);
        for x in &mut values {
            if !is_sparse || random.below(8) == 0 {
                *x = (random.below(20_001) as f32 - 10_000.0) * 1e-4 * scale;
            }
        }
        let (mut bytes, mut decoded) = (Vec::new(), Vec::new());
        kind.encode(&values, &mut bytes);
        kind.decode(&bytes, &mut decoded);
        // A value above the largest f16 is not for f16, q4_1 and q5_1.
        let is_large = scale > 6e4 && !decoded.iter().all(|x| x.is_finite());
        assert!(is_large || decoded.iter().all(|x| x.is_finite()), "{kind}, {scale:e}: {values:?}");
        if is_large { Outcome::Refused } else { Outcome::Read }
    });
}

/// A row is whole blocks, and any bytes are values: no pattern of scales or quants reads outside its block or overflows an integer.
#[test]
fn any_whole_blocks_decode() {
    fuzz::run("blocks", |random| {
        let kind = TensorType::ALL[random.below(TensorType::ALL.len())];
        let columns = [random.below(600), 32 * random.below(40)][random.below(2)];
        let Some(size) = kind.row_bytes(columns as u64) else { return Outcome::Refused };
        let bytes: Vec<u8> = (0..size).map(|_| random.below(256) as u8).collect();
        let mut values = vec![0.0; columns];
        block::dequantize(kind, &bytes, &mut values);
        Outcome::Read
    });
}

#[test]
#[should_panic(expected = "145 bytes of q4_K for 256 values")]
fn a_part_of_a_block_is_refused() {
    block::dequantize(TensorType::Q4K, &[0; 145], &mut [0.0; 256]);
}

/// Every tensor of a real file, against the digests that `xtask/peers/gguf_blocks.py --digests FILE` printed: `FRUGAL_GGUF_FILES` lists
/// files, separated by colons, with the digests in `FILE.digests`, or in the folder `FRUGAL_GGUF_DIGESTS`.
#[test]
fn the_tensors_of_real_files_are_decoded_bit_for_bit() {
    let Some(files) = std::env::var_os("FRUGAL_GGUF_FILES") else {
        eprintln!("skipped: FRUGAL_GGUF_FILES lists no files");
        return;
    };
    for file in std::env::split_paths(&files) {
        let mut digests = file.clone().into_os_string();
        if let Some(folder) = std::env::var_os("FRUGAL_GGUF_DIGESTS") {
            digests = Path::new(&folder).join(file.file_name().unwrap()).into_os_string();
        }
        digests.push(".digests");
        assert_eq!(digest_lines(&file), std::fs::read_to_string(digests).unwrap());
    }
}

/// A line for each tensor: name, type, number of values, SHA-256 of the values.
fn digest_lines(path: &Path) -> String {
    let file = Reader::open(path).unwrap();
    let mut lines = String::new();
    for (place, tensor) in file.header().tensors.iter().enumerate() {
        let rows: u64 = tensor.shape[..tensor.shape.len() - 1].iter().product();
        let (mut digest, mut count) = (Sha256::new(), 0);
        for row in (0..rows).step_by(256) {
            let values = file.rows(place, row..rows.min(row + 256)).unwrap();
            count += values.len();
            let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            digest.update(&bytes);
        }
        write!(lines, "{} {} {count} ", tensor.name, tensor.kind.name().to_uppercase()).unwrap();
        for byte in digest.finalize() {
            write!(lines, "{byte:02x}").unwrap();
        }
        lines.push('\n');
    }
    lines
}
