//! Values of Thrift's compact protocol, in which Parquet describes itself.

use super::Reason;

/// How deep values may nest: Parquet's are half as deep.
const DEEPEST: usize = 16;

/// A value. Maps and floating-point numbers, of which Parquet reads none here, are passed over.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    Int(i64),
    Bool(bool),
    Bytes(Vec<u8>),
    List(Vec<Value>),
    Struct(Vec<(i64, Value)>),
    PassedOver,
}

impl Value {
    /// The field `id` of a structure.
    pub(super) fn field(&self, id: i64) -> Result<&Self, Reason> {
        let Self::Struct(fields) = self else { return Err("a description is not a structure".into()) };
        let found = fields.iter().find(|(have, _)| *have == id);
        found.map(|(_, value)| value).ok_or_else(|| format!("a description lacks its field {id}"))
    }

    /// The whole number in field `id`.
    pub(super) fn int(&self, id: i64) -> Result<i64, Reason> {
        match self.field(id)? {
            Self::Int(value) => Ok(*value),
            other => Err(format!("field {id} is {other:?}; expected a number")),
        }
    }

    /// The list in field `id`.
    pub(super) fn list(&self, id: i64) -> Result<&[Self], Reason> {
        match self.field(id)? {
            Self::List(values) => Ok(values),
            other => Err(format!("field {id} is {other:?}; expected a list")),
        }
    }

    /// The text in field `id`.
    pub(super) fn text(&self, id: i64) -> Result<String, Reason> {
        match self.field(id)? {
            Self::Bytes(bytes) => Ok(String::from_utf8_lossy(bytes).into_owned()),
            other => Err(format!("field {id} is {other:?}; expected a text")),
        }
    }
}

/// Reads a structure from the beginning of `bytes`, and leaves what follows it.
pub(super) fn parse(bytes: &mut &[u8]) -> Result<Value, Reason> {
    structure(bytes, 0)
}

/// A number of seven bits a byte, the lowest first.
pub(super) fn unsigned(bytes: &mut &[u8]) -> Result<u64, Reason> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = take(bytes, 1)?[0];
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err("a number has more than 64 bits".into())
}

/// The first `count` bytes, which are taken off.
pub(super) fn take<'a>(bytes: &mut &'a [u8], count: usize) -> Result<&'a [u8], Reason> {
    let (taken, rest) = bytes.split_at_checked(count).ok_or("the file ends within a value")?;
    *bytes = rest;
    Ok(taken)
}

fn signed(bytes: &mut &[u8]) -> Result<i64, Reason> {
    let value = unsigned(bytes)?;
    Ok((value >> 1) as i64 ^ -((value & 1) as i64))
}

fn structure(bytes: &mut &[u8], depth: usize) -> Result<Value, Reason> {
    let (mut fields, mut id) = (Vec::new(), 0i64);
    loop {
        let header = take(bytes, 1)?[0];
        if header == 0 {
            return Ok(Value::Struct(fields));
        }
        id = match header >> 4 {
            0 => signed(bytes)?,
            delta => id.saturating_add(i64::from(delta)),
        };
        let value = match header & 15 {
            1 => Value::Bool(true),
            2 => Value::Bool(false),
            kind => value(kind, bytes, depth + 1)?,
        };
        fields.push((id, value));
    }
}

fn value(kind: u8, bytes: &mut &[u8], depth: usize) -> Result<Value, Reason> {
    if depth > DEEPEST {
        return Err("a description is nested too deeply".into());
    }
    let length = |bytes: &mut &[u8]| usize::try_from(unsigned(bytes)?).map_err(|error| error.to_string());
    Ok(match kind {
        // Within a list a truth value is a byte.
        1 | 2 => Value::Bool(take(bytes, 1)?[0] == 1),
        3 => Value::Int(i64::from(take(bytes, 1)?[0] as i8)),
        4..=6 => Value::Int(signed(bytes)?),
        7 => {
            take(bytes, 8)?;
            Value::PassedOver
        }
        8 => {
            let length = length(bytes)?;
            Value::Bytes(take(bytes, length)?.to_vec())
        }
        9 | 10 => {
            let header = take(bytes, 1)?[0];
            let count = if header >> 4 == 15 { length(bytes)? } else { usize::from(header >> 4) };
            // Each element has a byte at least, so the list grows no longer than the file.
            (0..count)
                .map(|_| value(header & 15, bytes, depth + 1))
                .collect::<Result<_, _>>()
                .map(Value::List)?
        }
        11 => {
            let count = length(bytes)?;
            let kinds = if count == 0 { 0 } else { take(bytes, 1)?[0] };
            for _ in 0..count {
                value(kinds >> 4, bytes, depth + 1)?;
                value(kinds & 15, bytes, depth + 1)?;
            }
            Value::PassedOver
        }
        12 => structure(bytes, depth)?,
        other => return Err(format!("a description has a value of the unknown type {other}")),
    })
}
