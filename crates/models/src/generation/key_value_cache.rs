//! What attention keeps of the tokens that were read, so that the next one costs one token.
//!
//! Rows are aligned at their ends: each has read, and will read, in step with the others, and a shorter prompt stands behind
//! padding that no query sees. Per token a layer keeps 2·g·e elements (keys and values of g heads of width e); nothing else
//! of the past is needed, because a causal query never changes what came before it.

use std::cell::Cell;

use tch::{Device, Kind, Tensor};

use crate::attention::cached_attention;
use crate::error::{Error, Result};

const WHAT: &str = "key-value cache";

/// What a model's layers keep of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheShape {
    /// Layers with attention.
    pub layers: usize,
    /// Heads of keys, and of values, in each.
    pub heads: i64,
    /// Width of a head.
    pub head: i64,
    /// In which dtype.
    pub kind: Kind,
    /// Where.
    pub device: Device,
}

impl CacheShape {
    /// Bytes for each token of a row: 2·layers·heads·head elements.
    pub fn bytes_per_token(&self) -> u64 {
        let elements = 2 * self.layers as i64 * self.heads * self.head;
        u64::try_from(elements).unwrap_or(0) * self.kind.elt_size_in_bytes() as u64
    }
}

/// Keys and values of the tokens read so far, of every layer.
#[derive(Debug)]
pub struct KeyValueCache {
    shape: CacheShape,
    /// Of each layer, keys then values: `[rows, heads, capacity, head]`, so that a head's tokens lie side by side.
    layers: Vec<[Tensor; 2]>,
    /// `[rows, capacity]`, bool: where a token is, and not padding. `None` where there is no padding.
    tokens: Option<Tensor>,
    rows: i64,
    capacity: i64,
    length: i64,
}

impl KeyValueCache {
    /// An empty cache for so many rows of at most `capacity` tokens. All of its memory is taken at once.
    ///
    /// # Errors
    /// No row, no capacity, too little memory.
    pub fn new(shape: CacheShape, rows: i64, capacity: i64) -> Result<Self> {
        if rows < 1 || capacity < 1 {
            let reason = format!("{rows} rows of {capacity} tokens; expected at least one of each");
            return Err(Error::Config { what: WHAT, reason });
        }
        let make = || Tensor::f_empty([rows, shape.heads, capacity, shape.head], (shape.kind, shape.device));
        let layers = (0..shape.layers).map(|_| Ok([make()?, make()?])).collect::<Result<_>>()?;
        Ok(Self { shape, layers, tokens: None, rows, capacity, length: 0 })
    }

    /// Tokens read so far by each row, padding included.
    pub fn len(&self) -> i64 {
        self.length
    }

    /// Whether nothing was read yet.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Rows.
    pub fn rows(&self) -> i64 {
        self.rows
    }

    /// Room for `new` more tokens in each row, which one forward pass fills ([`Context::extension`]); [`KeyValueCache::commit`]
    /// then makes them part of what was read.
    ///
    /// `real`, `[rows, new]`, bool, says where a token is and not padding; `None`: everywhere.
    ///
    /// # Errors
    /// More tokens than the capacity has left; `real` of another shape, dtype or device.
    ///
    /// [`Context::extension`]: crate::module::Context::extension
    pub fn extend(&mut self, new: i64, real: Option<&Tensor>) -> Result<Extension<'_>> {
        let end = self.length + new;
        if new < 1 || end > self.capacity {
            let reason = format!(
                "{new} more tokens after {}; there is room for {} in all",
                self.length, self.capacity
            );
            return Err(Error::Config { what: WHAT, reason });
        }
        self.note_padding(new, real)?;
        let mask = self.mask(new)?;
        Ok(Extension { cache: self, new, mask, written: Cell::new(0) })
    }

    fn note_padding(&mut self, new: i64, real: Option<&Tensor>) -> Result<()> {
        if let Some(real) = real {
            let (kind, device) = (Kind::Bool, self.shape.device);
            if real.size() != [self.rows, new] || real.kind() != kind || real.device() != device {
                let (size, of) = (real.size(), real.kind());
                let reason = format!(
                    "`real` is {of:?} {size:?} on {:?}; expected Bool [{}, {new}] on {device:?}",
                    real.device(),
                    self.rows
                );
                return Err(Error::Config { what: WHAT, reason });
            }
            if self.tokens.is_none() {
                self.tokens = Some(Tensor::f_ones([self.rows, self.capacity], (kind, device))?);
            }
        }
        if let Some(tokens) = &self.tokens {
            let mut place = tokens.f_narrow(1, self.length, new)?;
            match real {
                Some(real) => place.f_copy_(real)?,
                None => drop(place.f_fill_(1)?),
            }
        }
        Ok(())
    }

    /// Which of the tokens, old and new, each new one sees, `[rows or 1, 1, new, length + new]`; `None` where causality alone
    /// decides and the kernel knows that by itself.
    fn mask(&self, new: i64) -> Result<Option<Tensor>> {
        let end = self.length + new;
        let causal = || -> Result<Tensor> {
            let all = Tensor::f_ones([new, end], (Kind::Bool, self.shape.device))?;
            Ok(all.f_tril(self.length)?.f_view([1, 1, new, end])?)
        };
        Ok(match &self.tokens {
            None if new == 1 || self.length == 0 => None,
            None => Some(causal()?),
            Some(tokens) => {
                let seen = tokens.f_narrow(1, 0, end)?.f_view([self.rows, 1, 1, end])?;
                if new == 1 {
                    return Ok(Some(seen));
                }
                // Padding sees itself: a softmax over nothing is NaN, which would come back as 0·NaN in other rows' sums.
                let itself = Tensor::f_eye_m(new, end, (Kind::Bool, self.shape.device))?;
                let itself = itself.f_roll([self.length], [1])?.f_view([1, 1, new, end])?;
                Some(seen.f_logical_and(&causal()?)?.f_logical_or(&itself)?)
            }
        })
    }

    /// Makes the tokens of the forward pass that `extension` was given to part of what was read.
    ///
    /// # Errors
    /// A layer that did not take part: one that forgot the cache would compute as if there were no past.
    pub fn commit(&mut self, receipt: Receipt) -> Result<()> {
        if receipt.written != self.layers.len() {
            let reason = format!(
                "{} of {} layers wrote their keys and values; a block in the model does not hand `Context` on whole",
                receipt.written,
                self.layers.len()
            );
            return Err(Error::Config { what: WHAT, reason });
        }
        self.length += receipt.new;
        Ok(())
    }

    /// A cache of `rows` rows that all begin with what the only row of this one has read.
    ///
    /// # Errors
    /// A cache of several rows, a capacity below its length, too little memory.
    pub fn repeat(&self, rows: i64, capacity: i64) -> Result<Self> {
        if self.rows != 1 || capacity < self.length {
            let reason = format!(
                "{} rows of {} tokens cannot begin rows of {capacity}; expected one row that is no longer",
                self.rows, self.length
            );
            return Err(Error::Config { what: WHAT, reason });
        }
        let mut copy = Self::new(self.shape, rows, capacity)?;
        for (from, to) in self.layers.iter().flatten().zip(copy.layers.iter().flatten()) {
            to.f_narrow(2, 0, self.length)?.f_copy_(&from.f_narrow(2, 0, self.length)?)?;
        }
        copy.length = self.length;
        Ok(copy)
    }

    /// Drops `row`; the last row takes its number. No memory is given back before the cache is dropped.
    ///
    /// # Errors
    /// A row that is not there, the only row.
    pub fn swap_remove(&mut self, row: i64) -> Result<()> {
        let last = self.rows - 1;
        if !(0..=last).contains(&row) || last == 0 {
            let reason = format!("row {row} of {} cannot be dropped", self.rows);
            return Err(Error::Config { what: WHAT, reason });
        }
        let take = |of: &Tensor, length: i64, dim: i64| -> Result<()> {
            let read = of.f_narrow(dim, 0, length)?;
            read.f_select(0, row)?.f_copy_(&read.f_select(0, last)?)?;
            Ok(())
        };
        if row != last {
            for tensor in self.layers.iter().flatten() {
                take(tensor, self.length, 2)?;
            }
            if let Some(tokens) = &self.tokens {
                take(tokens, self.length, 1)?;
            }
        }
        self.rows = last;
        for layer in &mut self.layers {
            for tensor in layer {
                *tensor = tensor.f_narrow(0, 0, last)?;
            }
        }
        if let Some(tokens) = &mut self.tokens {
            *tokens = tokens.f_narrow(0, 0, last)?;
        }
        Ok(())
    }
}

/// Room for the tokens of one forward pass, which each layer fills.
#[derive(Debug)]
pub struct Extension<'c> {
    cache: &'c KeyValueCache,
    new: i64,
    mask: Option<Tensor>,
    written: Cell<usize>,
}

impl Extension<'_> {
    /// Writes the keys and values `[rows, new, heads, head]` of `layer`, and attends `q` `[rows, new, query heads, head]` to all
    /// that the layer has: `[rows, new, query heads·head]`.
    ///
    /// # Errors
    /// A layer that the cache does not have, shapes that do not fit.
    pub fn attend(&self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let KeyValueCache { layers, length, rows, shape, .. } = self.cache;
        let Some(stored) = layers.get(layer) else {
            let reason = format!("layer {layer} of {}", layers.len());
            return Err(Error::Config { what: WHAT, reason });
        };
        for (name, x) in [("k", k), ("v", v)] {
            let expected = [*rows, self.new, shape.heads, shape.head];
            if x.size() != expected {
                let expected = format!("{expected:?}, as the cache has room for");
                return Err(Error::Shape { operation: WHAT, name, found: x.size(), expected });
            }
        }
        for (stored, x) in stored.iter().zip([k, v]) {
            stored.f_narrow(2, *length, self.new)?.f_copy_(&x.f_transpose(1, 2)?)?;
        }
        self.written.set(self.written.get() + 1);
        let [k, v] = [&stored[0], &stored[1]].map(|stored| stored.f_narrow(2, 0, length + self.new));
        cached_attention(&q.f_to_kind(shape.kind)?, &k?, &v?, self.mask.as_ref())
    }

    /// Ends the pass: what [`KeyValueCache::commit`] takes.
    pub fn finish(self) -> Receipt {
        Receipt { new: self.new, written: self.written.get() }
    }
}

/// What a forward pass wrote.
#[derive(Debug)]
#[must_use = "what was written counts once it is committed"]
pub struct Receipt {
    new: i64,
    written: usize,
}
