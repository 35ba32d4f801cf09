//! Samples that are tokenized each time they are read.

use dataloading::{Error, Result, Samples, Tokenizer};

/// Texts with a tokenizer. Lengths are known, as a sampler needs them; tokens are made anew for each reading, as a data set
/// does that calls its tokenizer in `__getitem__`.
#[derive(Debug)]
pub struct TokenizePerItem {
    texts: Vec<String>,
    lengths: Vec<usize>,
    tokenizer: Tokenizer,
    max_length: usize,
}

impl TokenizePerItem {
    /// Tokenizes all texts once, for their lengths, and drops the tokens. Each is cut to `max_length` tokens.
    ///
    /// # Errors
    /// Errors of the tokenizer.
    pub fn new(texts: Vec<String>, tokenizer: Tokenizer, max_length: usize) -> Result<Self> {
        let lengths = tokenizer.encode_batch(&texts)?.iter().map(|ids| ids.len().min(max_length)).collect();
        Ok(Self { texts, lengths, tokenizer, max_length })
    }
}

impl Samples for TokenizePerItem {
    fn len(&self) -> usize {
        self.texts.len()
    }

    fn length(&self, index: usize) -> usize {
        self.lengths[index]
    }

    fn read(&self, index: usize, out: &mut Vec<u32>) -> Result<()> {
        let _range = runtime::profile::range("tokenize");
        let text = self.texts.get(index).ok_or_else(|| Error::Record {
            from: "texts".into(),
            location: format!("sample {index}"),
            reason: format!("there are {}", self.texts.len()),
        })?;
        let ids = self.tokenizer.encode(text)?;
        out.extend_from_slice(&ids[..ids.len().min(self.max_length)]);
        Ok(())
    }
}
