//! Rows of a batch, and the forward passes that read them.

use runtime::random::Generator as Random;
use tch::{Device, Kind, Tensor};

use super::sampling::Sampling;
use crate::attention::Documents;
use crate::error::Result;
use crate::key_value_cache::KeyValueCache;
use crate::module::{Context, Input, LanguageModel};

/// A prompt and the tokens generated after it.
#[derive(Debug)]
pub(super) struct Row {
    /// The prompt's number.
    pub(super) number: usize,
    /// Prompt and new tokens.
    pub(super) tokens: Vec<i64>,
    /// Number of prompt tokens.
    pub(super) prompt: usize,
    /// The row's own generator, so that its samples do not depend on other rows.
    pub(super) random: Option<Random>,
}

impl Row {
    /// Creates a row that is sampled as number `sampled_as`.
    pub(super) fn new(number: usize, sampled_as: usize, prompt: &[i64], sampling: &Sampling) -> Result<Self> {
        let random = sampling.random(sampled_as)?;
        Ok(Self { number, tokens: prompt.to_vec(), prompt: prompt.len(), random })
    }
}

/// Forward passes of a model over rows. Each returns the logits of every row's last token, `[rows, vocabulary]`.
pub(super) struct Reader<'m> {
    model: &'m dyn LanguageModel,
    device: Device,
}

impl<'m> Reader<'m> {
    pub(super) fn new(model: &'m dyn LanguageModel, device: Device) -> Self {
        Self { model, device }
    }

    /// Reads the rows from position `from` into the cache, padded on the left.
    pub(super) fn read(&self, cache: &mut KeyValueCache, rows: &[Row], from: usize) -> Result<Tensor> {
        let width = rows.iter().map(|row| row.tokens.len() - from).max().unwrap_or(0);
        let padding = |row: &Row| width + from - row.tokens.len();
        let grid = self.grid(rows, width, |row, place| match place.checked_sub(padding(row)) {
            Some(place) => row.tokens[from + place],
            None => 0,
        })?;
        let positions = self.grid(rows, width, |row, place| match place.checked_sub(padding(row)) {
            Some(place) => (from + place) as i64,
            None => 0,
        })?;
        let padded = rows.iter().any(|row| padding(row) > 0);
        let real = if padded {
            let real = self.grid(rows, width, |row, place| i64::from(place >= padding(row)))?;
            Some(real.f_to_kind(Kind::Bool)?)
        } else {
            None
        };
        self.forward(cache, &grid, &positions, real.as_ref())
    }

    /// Reads the last token of each row.
    pub(super) fn read_last(&self, cache: &mut KeyValueCache, rows: &[Row]) -> Result<Tensor> {
        let last = |row: &Row| row.tokens.len() - 1;
        let tokens = self.grid(rows, 1, |row, _| row.tokens[last(row)])?;
        let positions = self.grid(rows, 1, |row, _| last(row) as i64)?;
        self.forward(cache, &tokens, &positions, None)
    }

    /// Reads whole rows, without a cache.
    pub(super) fn read_whole(&self, rows: &[Row]) -> Result<Tensor> {
        let width = rows.iter().map(|row| row.tokens.len()).max().unwrap_or(0);
        let padding = |row: &Row| width - row.tokens.len();
        let tokens = self.grid(rows, width, |row, place| match place.checked_sub(padding(row)) {
            Some(place) => row.tokens[place],
            None => 0,
        })?;
        let positions = self.grid(rows, width, |row, place| place.saturating_sub(padding(row)) as i64)?;
        // Padding is a document of its own.
        let lengths: Vec<Vec<usize>> = rows
            .iter()
            .map(|row| [padding(row), row.tokens.len()].into_iter().filter(|&length| length > 0).collect())
            .collect();
        let documents = if rows.iter().any(|row| padding(row) > 0) {
            Some(Documents::new(&lengths, self.device)?)
        } else {
            None
        };
        let context = Context { documents: documents.as_ref(), ..Context::default() };
        let hidden = self.model.hidden(&Input { tokens: &tokens, positions: Some(&positions), context })?;
        self.last(hidden)
    }

    fn forward(
        &self,
        cache: &mut KeyValueCache,
        tokens: &Tensor,
        positions: &Tensor,
        real: Option<&Tensor>,
    ) -> Result<Tensor> {
        let extension = cache.extend(tokens.size()[1], real)?;
        let context = Context { extension: Some(&extension), ..Context::default() };
        let hidden = self.model.hidden(&Input { tokens, positions: Some(positions), context })?;
        let writes = extension.finish();
        cache.commit(writes)?;
        self.last(hidden)
    }

    fn last(&self, hidden_btd: Tensor) -> Result<Tensor> {
        let last = hidden_btd.f_narrow(1, hidden_btd.size()[1] - 1, 1)?;
        Ok(self.model.head().logits(&last, &Context::default())?.f_squeeze_dim(1)?)
    }

    fn grid(&self, rows: &[Row], width: usize, value: impl Fn(&Row, usize) -> i64) -> Result<Tensor> {
        let values: Vec<i64> = rows
            .iter()
            .flat_map(|row| (0..width).map(|place| value(row, place)).collect::<Vec<_>>())
            .collect();
        let grid = Tensor::f_from_slice(&values)?.f_view([rows.len() as i64, width as i64])?;
        Ok(grid.f_to_device(self.device)?)
    }
}
