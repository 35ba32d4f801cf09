//! JSON lines: one object per line.

use serde_json::{Map, Value};

use super::Record;
use super::lines::Lines;
use crate::error::Result;

/// Returns the string in `field` of the next non-blank line.
pub(super) fn next_object(lines: &mut Lines, field: &str) -> Result<Option<Record>> {
    let line = loop {
        match lines.next()? {
            None => return Ok(None),
            Some(line) if line.text.trim().is_empty() => {}
            Some(line) => break line,
        }
    };
    let wrong = |reason| Err(lines.error(line.number, reason));
    let object = match parse_object(&line.text) {
        Ok(object) => object,
        Err(reason) => return wrong(reason),
    };
    match object.get(field) {
        Some(Value::String(text)) => Ok(Some(lines.record(text.clone(), line.number))),
        Some(other) => wrong(format!("field '{field}' is {}, expected a string", kind(other))),
        None => {
            let there: Vec<&str> = object.keys().map(String::as_str).collect();
            match there.is_empty() {
                true => wrong(format!("no field '{field}': the object is empty; correct or remove the line")),
                false => wrong(format!("no field '{field}'; the fields here are: {}", there.join(", "))),
            }
        }
    }
}

/// Parses a line that is an object.
///
/// # Errors
/// The type of the value that is there instead.
pub(crate) fn parse_object(line: &str) -> Result<Map<String, Value>, String> {
    match serde_json::from_str(line) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(other) => Err(format!("expected an object, found {}; one line is one object", kind(&other))),
        Err(cause) => {
            // serde_json parses a single line, so its column is that of the file but its line number is not.
            let column = cause.column();
            let cause_text = cause.to_string();
            let message = cause_text.split(" at line ").next().unwrap_or_default();
            let remedy = match cause.is_eof() && line.trim_start().starts_with('{') {
                true => {
                    "an object is on one line in such a file (`jq -c . FILE` writes it so); join its lines, or correct the line"
                }
                false => "correct or remove the line",
            };
            Err(format!("not JSON ({message}, column {column}); {remedy}"))
        }
    }
}

/// Returns what a value is, for errors.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}
