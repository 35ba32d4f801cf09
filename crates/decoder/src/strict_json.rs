//! JSON without duplicate keys. Readers differ in which of two values they take, so a file with duplicates is ambiguous.
//!
//! ```
//! use decoder::strict_json::from_str;
//!
//! assert_eq!(from_str::<serde_json::Value>(r#"{ "r": 8 }"#)?["r"], 8);
//! let error = from_str::<serde_json::Value>(r#"{ "r": 8, "r": 4 }"#).unwrap_err();
//! assert_eq!(error.to_string(), "duplicate key `r` at line 1 column 13");
//! # Ok::<(), serde_json::Error>(())
//! ```

use std::collections::HashSet;
use std::fmt;

use serde::de::{Deserialize, DeserializeOwned, Deserializer, Error, MapAccess, SeqAccess, Visitor};

/// Parses a text.
///
/// # Errors
/// A duplicate key at any depth; those of `serde_json`.
pub fn from_str<T: DeserializeOwned>(text: &str) -> serde_json::Result<T> {
    let value = serde_json::from_str(text)?;
    serde_json::from_str::<Unique>(text)?;
    Ok(value)
}

/// Accepts any value with unique keys, and keeps nothing of it.
struct Unique;

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Self)
    }
}

impl<'de> Visitor<'de> for Unique {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_str<E>(self, _: &str) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self, A::Error> {
        while items.next_element::<Self>()?.is_some() {}
        Ok(self)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Self, A::Error> {
        let mut seen = HashSet::new();
        while let Some(key) = fields.next_key::<String>()? {
            if seen.contains(&key) {
                return Err(A::Error::custom(format!("duplicate key `{key}`")));
            }
            seen.insert(key);
            fields.next_value::<Self>()?;
        }
        Ok(self)
    }
}
