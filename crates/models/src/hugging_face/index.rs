//! `model.safetensors.index.json`: which shard has which tensor.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::path::Path;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

use super::contents;
use crate::error::Result;
use crate::strict_json;
use crate::tensors_file::file_error;

/// Tensors with the shard that each lies in.
#[derive(Debug, Deserialize)]
pub(super) struct Index {
    weight_map: Places,
}

impl Index {
    /// Reads an index and sees that its shards are there.
    pub(super) fn read(path: &Path, folder: &Path) -> Result<Self> {
        let refuse = |reason: String| file_error(path, reason);
        let text = fs::read_to_string(path).map_err(|cause| refuse(cause.to_string()))?;
        let index: Self = strict_json::from_str(&text).map_err(|cause| refuse(cause.to_string()))?;
        let shards = index.shards();
        if shards.is_empty() {
            return Err(refuse("`weight_map` is empty; expected every tensor with its shard".to_owned()));
        }
        // A shard lies beside its index: a name that leads elsewhere is no shard's.
        if let Some(name) = shards
            .iter()
            .find(|name| Path::new(name).file_name().is_none_or(|file| file != std::ffi::OsStr::new(name)))
        {
            return Err(refuse(format!("`{name}` is no file name; expected a shard beside the index")));
        }
        let missing: Vec<&str> = shards.into_iter().filter(|name| !folder.join(name).is_file()).collect();
        if !missing.is_empty() {
            let reason = format!("shards are missing: {}; {}", missing.join(", "), contents(folder));
            return Err(refuse(reason));
        }
        Ok(index)
    }

    /// The shards' file names, each once.
    pub(super) fn shards(&self) -> BTreeSet<&str> {
        self.weight_map.0.values().map(|name| &**name).collect()
    }

    /// Tensors and their shards' file names.
    pub(super) fn places(&self) -> impl Iterator<Item = (&str, &str)> {
        self.weight_map.0.iter().map(|(tensor, shard)| (&**tensor, &**shard))
    }
}

/// A map in which a name that comes twice is an error, where a JSON reader would keep the last.
#[derive(Debug)]
struct Places(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Places {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;

        impl<'de> Visitor<'de> for Collect {
            type Value = Places;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map from tensors to the file names of their shards")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Places, A::Error> {
                let mut places = BTreeMap::new();
                while let Some((tensor, shard)) = map.next_entry::<String, String>()? {
                    if let Some(other) = places.get(&tensor) {
                        return Err(A::Error::custom(format!(
                            "`{tensor}` is listed twice, in `{other}` and `{shard}`"
                        )));
                    }
                    places.insert(tensor, shard);
                }
                Ok(Places(places))
            }
        }

        deserializer.deserialize_map(Collect)
    }
}
