//! The values of a GGUF file's metadata.

use std::io::{self, Write};

/// A value of the metadata.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs, reason = "each variant is named by its type")]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    U64(u64),
    I64(i64),
    F64(f64),
    Array(Array),
}

/// An array of values of one type. Arrays of arrays, which no writer uses, are not supported.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs, reason = "each variant is named by its elements' type")]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    String(Vec<String>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

/// The number of the type of an array.
pub(crate) const ARRAY: u32 = 9;

impl Value {
    /// The number of the value's type in the format.
    pub(crate) fn type_number(&self) -> u32 {
        match self {
            Self::U8(_) => 0,
            Self::I8(_) => 1,
            Self::U16(_) => 2,
            Self::I16(_) => 3,
            Self::U32(_) => 4,
            Self::I32(_) => 5,
            Self::F32(_) => 6,
            Self::Bool(_) => 7,
            Self::String(_) => 8,
            Self::Array(_) => ARRAY,
            Self::U64(_) => 10,
            Self::I64(_) => 11,
            Self::F64(_) => 12,
        }
    }

    /// Returns the text, if this is one.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    /// Returns the strings, if this is an array of them.
    pub fn as_strings(&self) -> Option<&[String]> {
        match self {
            Self::Array(Array::String(texts)) => Some(texts),
            _ => None,
        }
    }

    pub(crate) fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        match self {
            Self::U8(x) => out.write_all(&x.to_le_bytes()),
            Self::I8(x) => out.write_all(&x.to_le_bytes()),
            Self::U16(x) => out.write_all(&x.to_le_bytes()),
            Self::I16(x) => out.write_all(&x.to_le_bytes()),
            Self::U32(x) => out.write_all(&x.to_le_bytes()),
            Self::I32(x) => out.write_all(&x.to_le_bytes()),
            Self::F32(x) => out.write_all(&x.to_le_bytes()),
            Self::Bool(x) => out.write_all(&[u8::from(*x)]),
            Self::String(x) => write_string(out, x),
            Self::U64(x) => out.write_all(&x.to_le_bytes()),
            Self::I64(x) => out.write_all(&x.to_le_bytes()),
            Self::F64(x) => out.write_all(&x.to_le_bytes()),
            Self::Array(array) => array.write(out),
        }
    }
}

impl Array {
    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        match self {
            Self::U8(items) => elements(out, 0, items, |out, x| out.write_all(&x.to_le_bytes())),
            Self::I8(items) => elements(out, 1, items, |out, x| out.write_all(&x.to_le_bytes())),
            Self::U16(items) => elements(out, 2, items, |out, x| out.write_all(&x.to_le_bytes())),
            Self::I16(items) => elements(out, 3, items, |out, x| out.write_all(&x.to_le_bytes())),
            Self::U32(items) => elements(out, 4, items, |out, x| out.write_all(&x.to_le_bytes())),
            Self::I32(items) => elements(out, 5, items, |out, x| out.write_all(&x.to_le_bytes())),
            Self::F32(items) => elements(out, 6, items, |out, x| out.write_all(&x.to_le_bytes())),
            Self::Bool(items) => elements(out, 7, items, |out, x| out.write_all(&[u8::from(*x)])),
            Self::String(items) => elements(out, 8, items, |out, x| write_string(out, x)),
            Self::U64(items) => elements(out, 10, items, |out, x| out.write_all(&x.to_le_bytes())),
            Self::I64(items) => elements(out, 11, items, |out, x| out.write_all(&x.to_le_bytes())),
            Self::F64(items) => elements(out, 12, items, |out, x| out.write_all(&x.to_le_bytes())),
        }
    }
}

fn elements<T>(
    out: &mut dyn Write,
    type_number: u32,
    items: &[T],
    write: impl Fn(&mut dyn Write, &T) -> io::Result<()>,
) -> io::Result<()> {
    out.write_all(&type_number.to_le_bytes())?;
    out.write_all(&(items.len() as u64).to_le_bytes())?;
    items.iter().try_for_each(|item| write(out, item))
}

pub(crate) fn write_string(out: &mut dyn Write, text: &str) -> io::Result<()> {
    out.write_all(&(text.len() as u64).to_le_bytes())?;
    out.write_all(text.as_bytes())
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::String(text.to_owned())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::String(text)
    }
}

impl From<u32> for Value {
    fn from(number: u32) -> Self {
        Self::U32(number)
    }
}

impl From<f32> for Value {
    fn from(number: f32) -> Self {
        Self::F32(number)
    }
}

impl From<bool> for Value {
    fn from(flag: bool) -> Self {
        Self::Bool(flag)
    }
}
