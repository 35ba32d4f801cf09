//! Mutations of JSON that keep most of its structure.

use serde_json::{Map, Value};

use super::bytes::bytes;
use super::random::Random;

/// Opens a marker in a string for text that no [`Value`] can hold; [`CLOSE`] ends it.
const OPEN: &str = "<<raw ";
const CLOSE: &str = " raw>>";
/// A suffix of a key that is removed in the text, so that the key is duplicated.
const TWICE: &str = "<<twice>>";

/// Numbers as text, including ones that no [`Value`] can hold.
const NUMBERS: [&str; 24] = [
    "0",
    "-0",
    "-0.0",
    "1",
    "-1",
    "2",
    "3",
    "7",
    "2.5",
    "0.5",
    "1e-320",
    "1e30",
    "1e308",
    "1e400",
    "-1e400",
    "NaN",
    "65537",
    "2147483648",
    "4294967296",
    "1000000000000000",
    "9223372036854775807",
    "-9223372036854775808",
    "9223372036854775808",
    "18446744073709551616",
];

/// Makes one to three changes: a number becomes an extreme one; a value changes its type, or is deleted, duplicated,
/// swapped with another or nested deeply; a key is duplicated or renamed; or the bytes of the text change.
pub fn json(random: &mut Random, good: &Value) -> String {
    let mut value = good.clone();
    for _ in 0..=random.below(3) {
        let count = nodes(&value);
        let at = random.below(count);
        let donor = node(&mut value, &mut random.below(count)).cloned().unwrap_or_default();
        if let Some(node) = node(&mut value, &mut { at }) {
            change(random, node, donor);
        }
    }
    let text = value.to_string().replace(TWICE, "");
    let text = text.replace(&format!("\"{OPEN}"), "").replace(&format!("{CLOSE}\""), "");
    if random.once_in(6) {
        return String::from_utf8_lossy(&bytes(random, text.as_bytes())).into_owned();
    }
    text
}

fn raw(text: &str) -> Value {
    Value::String(format!("{OPEN}{text}{CLOSE}"))
}

fn change(random: &mut Random, node: &mut Value, donor: Value) {
    match (random.below(8), &mut *node) {
        (0..4, Value::Object(fields)) if !fields.is_empty() => change_fields(random, fields),
        (0..4, Value::Array(items)) if !items.is_empty() => {
            let at = random.below(items.len());
            match random.below(3) {
                0 => drop(items.remove(at)),
                1 => items.push(items[at].clone()),
                _ => items.extend(std::iter::repeat_n(items[at].clone(), 1 << random.below(10))),
            }
        }
        (0..4, Value::Number(_)) => *node = raw(random.pick(&NUMBERS)),
        (0..4, Value::String(text)) => {
            let end =
                (0..=random.below(text.len() + 1)).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
            text.truncate(end);
            text.push_str(
                random.pick(&["", "\u{0}", "ä", "../x", "/etc/x", ".", "\u{202e}", "(", "[", "*", "\n"]),
            );
        }
        (4, _) => *node = donor,
        (5, _) => {
            // Up to 2¹⁷ levels, sometimes unclosed.
            let depth = 1 << random.below(18);
            let (open, close) = random.pick(&[("[", "]"), ("{\"a\":", "}")]);
            let inner = node.to_string();
            let closed = if random.once_in(3) { 0 } else { depth };
            *node = raw(&format!("{}{}{}", open.repeat(depth), plain(&inner), close.repeat(closed)));
        }
        (6, _) => *node = raw(random.pick(&NUMBERS)),
        _ => {
            let other = ["null", "true", "\"\"", "\"x\"", "[]", "{}", "[null]", "{\"\":0}", "\"\\ud800\""];
            *node = raw(random.pick(&other));
        }
    }
}

/// Removes the markers of an inner replacement, which is outside of a string then.
fn plain(text: &str) -> String {
    text.replace(&format!("\"{OPEN}"), "").replace(&format!("{CLOSE}\""), "").replace('\\', "")
}

fn change_fields(random: &mut Random, fields: &mut Map<String, Value>) {
    let key = fields.keys().nth(random.below(fields.len())).cloned().unwrap_or_default();
    let Some(value) = fields.get(&key).cloned() else { return };
    match random.below(4) {
        0 => drop(fields.remove(&key)),
        1 => {
            // The same value or another: a reader may use either.
            let again = if random.once_in(2) { value } else { raw(random.pick(&NUMBERS)) };
            fields.insert(format!("{key}{TWICE}"), again);
        }
        2 => {
            fields.remove(&key);
            fields.insert(format!("{key}{}", random.pick(&["_", " ", ".weight", "\u{0}"])), value);
        }
        _ => {
            let other = fields.keys().nth(random.below(fields.len())).cloned().unwrap_or_default();
            let exchanged = fields.insert(other, value).unwrap_or_default();
            fields.insert(key, exchanged);
        }
    }
}

fn nodes(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(nodes).sum(),
        Value::Object(fields) => fields.values().map(nodes).sum(),
        _ => 0,
    }
}

/// Returns the node with this index, in the order of the text.
fn node<'a>(value: &'a mut Value, number: &mut usize) -> Option<&'a mut Value> {
    if *number == 0 {
        return Some(value);
    }
    *number -= 1;
    match value {
        Value::Array(items) => items.iter_mut().find_map(|item| node(item, number)),
        Value::Object(fields) => fields.values_mut().find_map(|field| node(field, number)),
        _ => None,
    }
}
