//! An event of the file.

use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};

use super::Thread;

#[derive(Debug, Deserialize)]
pub(super) struct Event {
    #[serde(default)]
    pub(super) ph: String,
    #[serde(default)]
    pub(super) cat: String,
    #[serde(default)]
    pub(super) name: String,
    #[serde(default)]
    pub(super) tid: Thread,
    #[serde(default)]
    pub(super) ts: f64,
    #[serde(default)]
    pub(super) dur: f64,
    #[serde(default)]
    pub(super) args: Args,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct Args {
    #[serde(default, rename = "Input Dims")]
    pub(super) dims: Vec<Dims>,
    #[serde(default, rename = "Input type")]
    pub(super) kinds: Vec<String>,
    /// Bytes of a `[memory]` event.
    #[serde(default, rename = "Bytes")]
    pub(super) bytes: i64,
    /// Bytes of a copy or fill on a device.
    #[serde(default, rename = "bytes")]
    pub(super) copied: i64,
}

/// The shape of an input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Dims {
    /// The shape of one tensor; empty for a scalar, and for an input that is not a tensor.
    One(Box<[i64]>),
    /// The shapes of a list of tensors.
    List(Vec<Box<[i64]>>),
}

impl Dims {
    /// Returns the shape of a single tensor; empty for a list.
    #[must_use]
    pub fn shape(&self) -> &[i64] {
        match self {
            Self::One(shape) => shape,
            Self::List(_) => &[],
        }
    }

    /// Returns all shapes: one, or those of the list.
    #[must_use]
    pub fn shapes(&self) -> &[Box<[i64]>] {
        match self {
            Self::One(shape) => std::slice::from_ref(shape),
            Self::List(shapes) => shapes,
        }
    }
}

/// A number, or a list of numbers.
#[derive(Deserialize)]
#[serde(untagged)]
enum Entry {
    Number(i64),
    Shape(Box<[i64]>),
}

impl<'de> Deserialize<'de> for Dims {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct DimsVisitor;
        impl<'de> Visitor<'de> for DimsVisitor {
            type Value = Dims;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a shape or a list of shapes")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<Dims, A::Error> {
                let (mut shape, mut shapes) = (Vec::new(), Vec::new());
                while let Some(entry) = entries.next_element::<Entry>()? {
                    match entry {
                        Entry::Number(size) => shape.push(size),
                        Entry::Shape(one) => shapes.push(one),
                    }
                }
                match (shape.is_empty(), shapes.is_empty()) {
                    (_, true) => Ok(Dims::One(shape.into())),
                    (true, false) => Ok(Dims::List(shapes)),
                    (false, false) => Err(A::Error::custom("a shape mixes numbers and lists")),
                }
            }
        }
        deserializer.deserialize_seq(DimsVisitor)
    }
}
