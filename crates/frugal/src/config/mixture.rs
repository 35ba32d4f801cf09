//! The sources of a mixture.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use training::masked_rows::Mixture;

use super::DataConfig;
use crate::error::{Error, Result};

/// A source of a mixture with its weight, written `PATH=WEIGHT`, or as a table of `source` and `weight`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "String")]
pub struct MixtureSource {
    /// A file or folder, as [`DataConfig::source`].
    pub source: String,
    /// Its share of the rows, relative to the other weights.
    pub weight: f64,
}

/// How a source may be written.
#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    Text(String),
    Table(Table),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    source: String,
    weight: f64,
}

impl FromStr for MixtureSource {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let split =
            text.rsplit_once('=').and_then(|(source, weight)| Some((source, weight.trim().parse().ok()?)));
        let Some((source, weight)) = split.filter(|(source, _): &(&str, f64)| !source.is_empty()) else {
            return Err(format!("`{text}`: expected PATH=WEIGHT, such as code.jsonl=0.3"));
        };
        Self::checked(source.to_owned(), weight)
    }
}

impl TryFrom<Written> for MixtureSource {
    type Error = String;

    fn try_from(written: Written) -> Result<Self, String> {
        match written {
            Written::Text(text) => text.parse(),
            Written::Table(Table { source, weight }) => Self::checked(source, weight),
        }
    }
}

impl From<MixtureSource> for String {
    fn from(source: MixtureSource) -> Self {
        source.to_string()
    }
}

impl fmt::Display for MixtureSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.source, self.weight)
    }
}

impl MixtureSource {
    fn checked(source: String, weight: f64) -> Result<Self, String> {
        match Mixture::new(&[weight]) {
            Ok(_) => Ok(Self { source, weight }),
            Err(error) => Err(format!("{source}: {error}")),
        }
    }
}

impl DataConfig {
    /// Returns the order of the mixture's sources, if there is a mixture.
    ///
    /// # Errors
    /// Weights without an order ([`Mixture::new`]).
    pub fn mixed(&self) -> Result<Option<Mixture>> {
        if self.mixture.is_empty() {
            return Ok(None);
        }
        let weights: Vec<f64> = self.mixture.iter().map(|source| source.weight).collect();
        Ok(Some(Mixture::new(&weights)?))
    }

    /// Returns the sources: that of [`DataConfig::source`], or those of the mixture.
    ///
    /// # Errors
    /// Both, or neither.
    pub fn sources(&self) -> Result<Vec<&str>> {
        match (self.source.as_str(), &self.mixture[..]) {
            ("", []) => Err(Error::Toml(
                "`data.source` is missing; give the training data as --data, or several sources with weights as --mixture PATH=WEIGHT"
                    .to_owned(),
            )),
            (source, []) => Ok(vec![source]),
            ("", mixture) => Ok(mixture.iter().map(|source| source.source.as_str()).collect()),
            (source, _) => Err(Error::Toml(format!(
                "the data are {source} (`data.source`, --data) and a mixture (`data.mixture`, --mixture); give one of them: a source of \
                 a mixture is --mixture {source}=WEIGHT"
            ))),
        }
    }

    /// Returns what the data are, in one line.
    pub fn described(&self) -> String {
        match &self.mixture[..] {
            [] => self.source.clone(),
            mixture => mixture.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_is_a_path_with_a_weight() {
        let source = |text: &str| text.parse::<MixtureSource>();
        let expected = MixtureSource { source: "a=b.jsonl".to_owned(), weight: 0.25 };
        assert_eq!(source("a=b.jsonl=0.25").unwrap(), expected);
        assert_eq!(serde_json::to_string(&expected).unwrap(), "\"a=b.jsonl=0.25\"");
        for written in ["\"a=b.jsonl=0.25\"", r#"{"source": "a=b.jsonl", "weight": 0.25}"#] {
            assert_eq!(serde_json::from_str::<MixtureSource>(written).unwrap(), expected);
        }
        for (text, reason) in [
            ("a.jsonl", "expected PATH=WEIGHT"),
            ("=1", "expected PATH=WEIGHT"),
            ("a=b", "expected PATH=WEIGHT"),
            ("a=0", "a weight is 0; expected a number above 0"),
            ("a=-1", "a weight is -1"),
            ("a=NaN", "a weight is NaN"),
            ("a=0.33333333", "at most 6 digits"),
        ] {
            let error = source(text).unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn data_have_one_source_or_a_mixture() {
        let mut data = DataConfig::default();
        assert!(data.sources().unwrap_err().to_string().contains("`data.source` is missing"));
        data.mixture = vec!["a=1".parse().unwrap(), "b=2".parse().unwrap()];
        assert_eq!(data.sources().unwrap(), ["a", "b"]);
        assert_eq!(data.described(), "a=1, b=2");
        data.source = "c".to_owned();
        assert!(data.sources().unwrap_err().to_string().contains("--mixture c=WEIGHT"));
        data.mixture.clear();
        assert_eq!((data.sources().unwrap(), data.described()), (vec!["c"], "c".to_owned()));
    }
}
