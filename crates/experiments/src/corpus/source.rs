//! Texts by name: WikiText-103 and WikiText-2 from a folder or the hub's cache, and the embedded encyclopedia in their place.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::Result;
use models::hub::{Hub, RepositoryKind};
use report::cli::Scale;

/// The variable that names a folder with real data: `wikitext-103/`, `wikitext-2/`.
pub const VARIABLE: &str = "FRUGAL_DATA";

/// The data set on the hub that has both.
const HUB: &str = "Salesforce/wikitext";

/// The texts that an experiment trains on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Data {
    /// The first that is on this machine: WikiText-2, WikiText-103, the embedded encyclopedia; at the scale `paper` WikiText-103
    /// before WikiText-2, at `smoke` the embedded encyclopedia.
    #[default]
    Auto,
    /// WikiText-103, 103 million words.
    WikiText103,
    /// WikiText-2, 2 million words.
    WikiText2,
    /// The embedded encyclopedia, 0.2 million words.
    Embedded,
    /// A folder with texts in WikiText's format.
    Folder(PathBuf),
}

/// Files of texts in WikiText's format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Texts {
    /// The name of the data set, with the split that is trained on where that is not the training split.
    pub name: String,
    /// The files to train on.
    pub train: Vec<PathBuf>,
    /// The files to measure on.
    pub validation: Vec<PathBuf>,
}

impl FromStr for Data {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let named = [Self::Auto, Self::WikiText103, Self::WikiText2, Self::Embedded];
        if let Some(named) = named.into_iter().find(|data| data.to_string() == text) {
            return Ok(named);
        }
        let folder = PathBuf::from(text);
        if folder.is_dir() {
            return Ok(Self::Folder(folder));
        }
        Err(format!(
            "no data named `{text}`: expected auto, wikitext-103, wikitext-2, embedded, or a folder with train.txt and valid.txt"
        ))
    }
}

impl fmt::Display for Data {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::WikiText103 => f.write_str("wikitext-103"),
            Self::WikiText2 => f.write_str("wikitext-2"),
            Self::Embedded => f.write_str("embedded"),
            Self::Folder(folder) => write!(f, "{}", folder.display()),
        }
    }
}

impl Data {
    /// The data sets that have a name of their own, the largest first.
    pub const NAMED: [Self; 3] = [Self::WikiText103, Self::WikiText2, Self::Embedded];

    /// Their names in reports.
    pub fn title(&self) -> String {
        match self {
            Self::Auto => "the largest data set on this machine".into(),
            Self::WikiText103 => "WikiText-103".into(),
            Self::WikiText2 => "WikiText-2".into(),
            Self::Embedded => "embedded encyclopedia".into(),
            Self::Folder(folder) => folder.file_name().unwrap_or(folder.as_os_str()).to_string_lossy().into(),
        }
    }

    /// The data set that `self` means at `scale`: [`Data::Auto`] becomes one of those that are on this machine.
    ///
    /// # Errors
    /// A checkout without `data/`.
    pub fn choose(&self, scale: Scale) -> Result<Self> {
        let order = match (self, scale) {
            (Self::Auto, Scale::Smoke) => return Ok(Self::Embedded),
            (Self::Auto, Scale::Paper) => [Self::WikiText103, Self::WikiText2],
            (Self::Auto, _) => [Self::WikiText2, Self::WikiText103],
            _ => return Ok(self.clone()),
        };
        for data in order {
            if data.texts(Network::Never)?.is_ok() {
                return Ok(data);
            }
        }
        Ok(Self::Embedded)
    }

    /// The files, or why they cannot be had. Of a named data set offline, the reason names no folder of this machine: reports show it.
    ///
    /// # Errors
    /// A checkout without `data/`.
    pub fn texts(&self, network: Network) -> Result<Result<Texts, String>> {
        let (folder, repository) = match self {
            Self::Auto => return self.choose(Scale::default())?.texts(network),
            Self::Embedded => {
                let folder = dataloading::embedded::folder()?;
                let file = |name: &str| vec![folder.join(name)];
                let (train, validation) =
                    (file(dataloading::embedded::CORPUS_TRAIN), file(dataloading::embedded::CORPUS_VALID));
                return Ok(Ok(Texts { name: self.title(), train, validation }));
            }
            Self::Folder(folder) => {
                let texts = of_folder(folder, &self.title());
                return Ok(texts.map_err(|why| format!("{} {why}", folder.display())));
            }
            Self::WikiText103 => ("wikitext-103", "wikitext-103-raw-v1"),
            Self::WikiText2 => ("wikitext-2", "wikitext-2-raw-v1"),
        };
        let root = std::env::var_os(VARIABLE).filter(|root| !root.is_empty()).map(PathBuf::from);
        let missing = match root {
            Some(root) => match of_folder(&root.join(folder), &self.title()) {
                Ok(texts) => return Ok(Ok(texts)),
                Err(why) => format!("{folder}/ in the folder of {VARIABLE} {why}"),
            },
            None => format!("{VARIABLE} names no folder with {folder}/train.txt and {folder}/valid.txt"),
        };
        let hub = Hub::from_env(network == Network::Never);
        let patterns = ["train", "validation"].map(|split| format!("{repository}/{split}-*.parquet"));
        let patterns = patterns.each_ref().map(String::as_str);
        Ok(match hub.fetch_files(RepositoryKind::Dataset, HUB, None, &patterns) {
            Ok(cache) => of_folder(&cache.join(repository), &self.title())
                .map_err(|why| format!("{repository} in the hub's cache {why}")),
            Err(_) if network == Network::Never => {
                Err(format!("{missing}, and the cache of the Hugging Face hub has no {HUB}"))
            }
            Err(error) => Err(format!("{missing}; {error}")),
        })
    }
}

/// Whether a missing data set is downloaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    /// Only what is on this machine.
    Never,
    /// Downloaded from the hub, unless `HF_HUB_OFFLINE` forbids it.
    IfMissing,
}

/// The files of a folder, by the names that WikiText's archives and the hub give them; else what it lacks. Where there is no training
/// split, the test split takes its place.
fn of_folder(folder: &Path, name: &str) -> Result<Texts, String> {
    let split = |names: &[&str]| {
        let plain = names.iter().flat_map(|name| {
            [format!("{name}.txt"), format!("wiki.{name}.tokens"), format!("wiki.{name}.raw")]
        });
        let file = plain.map(|file| folder.join(file)).find(|file| file.is_file());
        file.map_or_else(|| names.iter().flat_map(|name| shards(folder, name)).collect(), |file| vec![file])
    };
    let (train, test) = (split(&["train"]), split(&["test"]));
    let validation: Vec<PathBuf> = split(&["valid", "validation"]);
    let (train, name) = match train.is_empty() {
        true => (test, format!("{name} (test split)")),
        false => (train, name.to_owned()),
    };
    match (train.is_empty(), validation.is_empty()) {
        (false, false) => Ok(Texts { name, train, validation }),
        (true, _) => Err("has no train.txt and no test.txt".to_owned()),
        (false, true) => Err("has no valid.txt".to_owned()),
    }
}

/// The Parquet files of a split, as the hub has them: `train-00000-of-00002.parquet`.
fn shards(folder: &Path, split: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut shards: Vec<PathBuf> = entries
        .map(|entry| entry.path())
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with(&format!("{split}-")) && name.ends_with(".parquet")
        })
        .collect();
    shards.sort();
    shards
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_sets_have_names_and_folders_are_data_sets_too() {
        for data in [Data::Auto, Data::WikiText103, Data::WikiText2, Data::Embedded] {
            assert_eq!(data.to_string().parse(), Ok(data));
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().display().to_string();
        assert_eq!(path.parse(), Ok(Data::Folder(folder.path().into())));
        let error = "wikitext-104".parse::<Data>().unwrap_err();
        assert!(error.contains("no data named `wikitext-104`: expected auto, wikitext-103"), "{error}");
    }

    #[test]
    fn files_of_a_folder_are_found_by_their_usual_names() {
        let folder = tempfile::tempdir().unwrap();
        let data = Data::Folder(folder.path().into());
        let texts = || data.texts(Network::Never).unwrap();
        let write = |name: &str| std::fs::write(folder.path().join(name), " = A = \n").unwrap();
        let names = |paths: &[PathBuf]| -> Vec<String> {
            paths.iter().map(|path| path.file_name().unwrap().to_string_lossy().into()).collect()
        };
        assert!(texts().unwrap_err().ends_with("has no train.txt and no test.txt"));
        write("test.txt");
        assert!(texts().unwrap_err().ends_with("has no valid.txt"));
        write("wiki.valid.tokens");
        let of_test = texts().unwrap();
        assert!(of_test.name.ends_with(" (test split)"), "{}", of_test.name);
        assert_eq!(names(&of_test.train), ["test.txt"]);
        write("train-00001-of-00002.parquet");
        write("train-00000-of-00002.parquet");
        let of_shards = texts().unwrap();
        assert_eq!(names(&of_shards.train), ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]);
        write("train.txt");
        assert_eq!(names(&texts().unwrap().train), ["train.txt"]);
        assert_eq!(names(&texts().unwrap().validation), ["wiki.valid.tokens"]);
    }
}
