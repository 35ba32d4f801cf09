//! `model.safetensors.index.json`: which shard contains which tensor.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::path::Path;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

use super::contents;
use crate::error::{Error, Result};
use crate::strict_json;

/// Maps each tensor to its shard.
#[derive(Debug, Deserialize)]
pub(super) struct Index {
    weight_map: WeightMap,
}

impl Index {
    /// Reads an index and checks that its shards exist.
    pub(super) fn read(path: &Path, folder: &Path) -> Result<Self> {
        let refuse = |reason: String| Error::file(path, reason);
        let text = fs::read_to_string(path).map_err(|cause| refuse(cause.to_string()))?;
        let index: Self = strict_json::from_str(&text).map_err(|cause| refuse(cause.to_string()))?;
        let shards = index.shards();
        if shards.is_empty() {
            return Err(refuse("`weight_map` is empty; expected the shard of every tensor".to_owned()));
        }
        // A shard is in the index's folder: a path to another folder is refused.
        if let Some(name) = shards
            .iter()
            .find(|name| Path::new(name).file_name().is_none_or(|file| file != std::ffi::OsStr::new(name)))
        {
            return Err(refuse(format!(
                "`{name}` is not a file name; expected a shard in the folder of the index"
            )));
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

    /// Tensors and the file names of their shards.
    pub(super) fn locations(&self) -> impl Iterator<Item = (&str, &str)> {
        self.weight_map.0.iter().map(|(tensor, shard)| (&**tensor, &**shard))
    }
}

/// A map that refuses duplicate names, where a JSON reader would keep the last.
#[derive(Debug)]
struct WeightMap(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;

        impl<'de> Visitor<'de> for Collect {
            type Value = WeightMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map from tensors to the file names of their shards")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
                let mut locations = BTreeMap::new();
                while let Some((tensor, shard)) = map.next_entry::<String, String>()? {
                    if let Some(other) = locations.get(&tensor) {
                        return Err(A::Error::custom(format!(
                            "`{tensor}` is listed twice, in `{other}` and `{shard}`"
                        )));
                    }
                    locations.insert(tensor, shard);
                }
                Ok(WeightMap(locations))
            }
        }

        deserializer.deserialize_map(Collect)
    }
}
