//! Mutations of bytes, of text and of safetensors files.

use super::json::json;
use super::random::Random;

/// Values at which lengths and offsets overflow.
const EDGES: [u64; 12] = [
    0,
    1,
    7,
    0xff,
    0xffff,
    0x7fff_ffff,
    0xffff_ffff,
    1_000_000_000_000_000,
    i64::MAX as u64,
    1 << 63,
    u64::MAX - 7,
    u64::MAX,
];

/// Makes one to five random changes to bits, bytes and 4- or 8-byte fields (lengths, offsets), and truncates, duplicates,
/// inserts or deletes parts.
pub fn bytes(random: &mut Random, good: &[u8]) -> Vec<u8> {
    let mut bytes = good.to_vec();
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len());
        let end = (at + 1 + random.below(16)).min(bytes.len());
        match random.below(9) {
            _ if bytes.is_empty() => bytes.push(random.bits() as u8),
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = random.bits() as u8,
            2 => bytes.truncate(at),
            3 => bytes.extend((0..=random.below(16)).map(|_| 0)),
            4 => drop(bytes.drain(at..end)),
            5 => {
                let part = bytes[at..end].to_vec();
                bytes.splice(at..at, part);
            }
            6 => drop(bytes.splice(at..at, std::iter::repeat_n(random.bits() as u8, 3))),
            kind => {
                let width = if kind == 7 { 4 } else { 8 };
                let value = match random.below(3) {
                    0 => random.pick(&EDGES),
                    1 => random.bits(),
                    _ => bytes.len() as u64 + random.below(9) as u64,
                };
                // Fields are aligned to their width, mostly near the start.
                let field = if random.once_in(2) { random.below(16) } else { at / width };
                if let Some(field) = bytes.get_mut(field * width..(field + 1) * width) {
                    field.copy_from_slice(&value.to_le_bytes()[..width]);
                }
            }
        }
    }
    bytes
}

/// Mutates a text: its lines (deleted, duplicated, swapped), the numbers in it, or its bytes as [`bytes()`] does; invalid
/// UTF-8 is then replaced.
pub fn text(random: &mut Random, good: &str) -> String {
    const NUMBERS: [&str; 12] = [
        "0",
        "-1",
        "2.5",
        "nan",
        "inf",
        "-inf",
        "1e400",
        "1000000000000000",
        "9223372036854775808",
        "1e-320",
        "0x10",
        "\"7\"",
    ];
    if random.once_in(3) {
        return String::from_utf8_lossy(&bytes(random, good.as_bytes())).into_owned();
    }
    let mut lines: Vec<String> = good.lines().map(str::to_owned).collect();
    for _ in 0..=random.below(3) {
        let (at, other) = (random.below(lines.len()), random.below(lines.len()));
        if lines.is_empty() {
            break;
        }
        match random.below(6) {
            0 => drop(lines.remove(at)),
            1 => lines.insert(other, lines[at].clone()),
            2 => lines.swap(at, other),
            3 => lines[at] = lines[at].replace(['"', '[', '='], random.pick(&["", "[[", "{", "\"\"\""])),
            4 => {
                let depth = 1 << random.below(18);
                lines[at] = format!("x = {}{}", "[".repeat(depth), "]".repeat(depth));
            }
            _ => {
                let is_number = |c: char| c.is_ascii_digit() || c == '.';
                let with = random.pick(&NUMBERS);
                let mut parts: Vec<&str> =
                    lines[at].split(is_number).filter(|part| !part.is_empty()).collect();
                parts.insert(parts.len().min(1), with);
                lines[at] = parts.concat();
            }
        }
    }
    lines.join("\n")
}

/// Mutates a safetensors file: its header as [`json()`] does, with or without correcting the length of the header, or any
/// of its bytes as [`bytes()`] does.
///
/// # Panics
/// `good` is not a safetensors file.
pub fn safetensors(random: &mut Random, good: &[u8]) -> Vec<u8> {
    if random.once_in(3) {
        return bytes(random, good);
    }
    let length = u64::from_le_bytes(good[..8].try_into().expect("a length")) as usize;
    let header = serde_json::from_slice(&good[8..8 + length]).expect("a header");
    let text = json(random, &header);
    let stated = if random.once_in(8) { random.pick(&EDGES) } else { text.len() as u64 };
    [&stated.to_le_bytes()[..], text.as_bytes(), &good[8 + length..]].concat()
}
