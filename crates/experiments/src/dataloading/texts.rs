//! Texts whose lines are measured, by the embedded tokenizer.

use std::path::{Path, PathBuf};

use dataloading::Result;
use dataloading::embedded;
use dataloading::text::{Corpus, Format};
use dataloading::token_store::{TokenStore, TokenizeConfig, Writer, WriterConfig, tokenize};
use dataloading::tokenizer::Tokenizer;

use crate::corpus::VARIABLE;

/// A text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Text {
    /// The training articles of the embedded corpus.
    Embedded,
    /// Its validation articles: a tenth of that.
    EmbeddedValid,
    /// The test set of WikiText-2, in the folder that `FRUGAL_DATA` names.
    WikiText2,
}

impl Text {
    /// The measured ones.
    pub const ALL: [Self; 2] = [Self::Embedded, Self::WikiText2];

    /// The name in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Embedded => "embedded",
            Self::EmbeddedValid => "embedded, validation",
            Self::WikiText2 => "WikiText-2 test",
        }
    }

    fn file(self) -> Result<std::result::Result<PathBuf, String>> {
        let name = match self {
            Self::Embedded => embedded::CORPUS_TRAIN,
            Self::EmbeddedValid => embedded::CORPUS_VALID,
            Self::WikiText2 => {
                const NAME: &str = "wikitext-2/test.txt";
                let Some(folder) = std::env::var_os(VARIABLE).filter(|folder| !folder.is_empty()) else {
                    return Ok(Err(format!("{VARIABLE} names no folder with {NAME}")));
                };
                let path = PathBuf::from(folder).join(NAME);
                let there = path.is_file();
                return Ok(if there { Ok(path) } else { Err(format!("there is no {}", path.display())) });
            }
        };
        Ok(Ok(embedded::folder()?.join(name)))
    }

    /// The ids of each line that is not empty, headings included, as the assignment reads them; or why they cannot be had
    /// here.
    ///
    /// # Errors
    /// Data that is there and cannot be read.
    pub fn lines(self) -> Result<std::result::Result<Vec<Vec<u32>>, String>> {
        let path = match self.file()? {
            Ok(path) => path,
            Err(why) => return Ok(Err(why)),
        };
        let records = Corpus::new([path], Format::Lines).records()?;
        let mut lines = Vec::new();
        let options = TokenizeConfig::default();
        tokenize(
            records,
            &tokenizer()?,
            &options,
            |_| {},
            |ids| {
                lines.push(ids.to_vec());
                Ok(())
            },
        )?;
        Ok(Ok(lines))
    }
}

fn tokenizer() -> Result<Tokenizer> {
    Tokenizer::from_file(&embedded::folder()?.join(embedded::TOKENIZER))
}

/// A store at `path` of the lines of the embedded corpus, again and again until there are `tokens`.
///
/// # Errors
/// No embedded data; the folder cannot be written to.
pub fn repeated(path: &Path, tokens: u64) -> Result<TokenStore> {
    let mut writer = Writer::create(path, &WriterConfig::new(tokenizer()?.vocabulary()))?;
    let lines = Text::Embedded.lines()?.unwrap_or_default();
    let mut written = 0;
    for line in lines.iter().cycle() {
        if written >= tokens {
            break;
        }
        written += line.len() as u64;
        writer.push(line)?;
    }
    writer.finish()
}
