//! The key-value cache: keys and values of earlier tokens, so that a new token costs one token's work.
//!
//! Rows are aligned at their ends, and shorter prompts are padded on the left; no query attends to padding. Per token a layer
//! keeps 2·g·e elements (keys and values of g heads of width e). Nothing else is needed, because attention is causal. A layer with linear
//! attention keeps a [`RecurrentShape`] for each row instead, and one that attends to the keys of another layer keeps nothing.

mod recurrent;

use std::cell::{Cell, RefCell};

use runtime::ops::TryScalar;
use runtime::tensor_layout::TensorLayout;
use tch::{Device, Kind, Tensor};

use crate::attention::{AttentionConfig, cached_attention, has_kernel, over_window};
use crate::error::{Error, Result, wrong_shape};
pub(crate) use recurrent::Recurrent;
pub use recurrent::RecurrentShape;

const WHAT: &str = "key-value cache";

/// The numbers that a model's layers cache for a token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheShape {
    /// Of each layer with keys and values: the number of key heads, which is that of value heads, and the width of a head.
    pub layers: Vec<[i64; 2]>,
    /// The layers with linear attention, if there are any.
    pub recurrent: Option<RecurrentShape>,
    /// The cache's dtype.
    pub kind: Kind,
    /// The cache's device.
    pub device: Device,
}

impl CacheShape {
    /// Returns the bytes per token of a row: 2·heads·head elements of each layer.
    pub fn bytes_per_token(&self) -> u64 {
        let elements = 2 * self.layers.iter().map(|[heads, head]| heads * head).sum::<i64>();
        u64::try_from(elements).unwrap_or(0) * self.kind.elt_size_in_bytes() as u64
    }
}

/// Keys and values of the tokens read so far, for every layer.
#[derive(Debug)]
pub struct KeyValueCache {
    shape: CacheShape,
    /// Per layer, keys then values: `[rows, heads, capacity, head]`, so that a head's tokens are contiguous.
    layers: Vec<[Tensor; 2]>,
    /// The states of the layers with linear attention.
    recurrent: Vec<Recurrent>,
    /// `[rows, capacity]`, bool: true for tokens, false for padding. `None` without padding.
    tokens: Option<Tensor>,
    rows: i64,
    capacity: i64,
    length: i64,
}

impl KeyValueCache {
    /// Creates an empty cache for `rows` rows of at most `capacity` tokens, and allocates all of its memory.
    ///
    /// # Errors
    /// No row, no capacity, too little memory.
    pub fn new(shape: CacheShape, rows: i64, capacity: i64) -> Result<Self> {
        if rows < 1 || capacity < 1 {
            let reason = format!("{rows} rows of {capacity} tokens; expected at least one of each");
            return Err(Error::invalid(WHAT, reason));
        }
        let of_layer = |&[heads, head]: &[i64; 2]| {
            let make = || Tensor::f_empty([rows, heads, capacity, head], (shape.kind, shape.device));
            Ok([make()?, make()?])
        };
        let layers = shape.layers.iter().map(of_layer).collect::<Result<_>>()?;
        let options = (shape.kind, shape.device);
        let recurrent = shape.recurrent.iter().flat_map(|shape| std::iter::repeat_n(shape, shape.layers));
        let recurrent =
            recurrent.map(|shape| Recurrent::empty(shape, rows, options)).collect::<Result<_>>()?;
        Ok(Self { shape, layers, recurrent, tokens: None, rows, capacity, length: 0 })
    }

    /// Returns the number of tokens read so far in each row, padding included.
    pub fn len(&self) -> i64 {
        self.length
    }

    /// Returns whether nothing was read yet.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> i64 {
        self.rows
    }

    /// Reserves `new` more positions in each row for one forward pass ([`Context::extension`]). [`KeyValueCache::commit`] then
    /// counts them as read.
    ///
    /// `real`, `[rows, new]`, bool, is true for tokens and false for padding; `None` if there is no padding.
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
            return Err(Error::invalid(WHAT, reason));
        }
        self.note_padding(new, real)?;
        let real = real.map(Tensor::shallow_clone);
        let (masks, recurrent) = (RefCell::default(), RefCell::default());
        Ok(Extension { cache: self, new, real, masks, recurrent, written: Cell::new(0) })
    }

    fn note_padding(&mut self, new: i64, real: Option<&Tensor>) -> Result<()> {
        if let Some(real) = real {
            let (kind, device) = (Kind::Bool, self.shape.device);
            if real.size() != [self.rows, new] || real.kind() != kind || real.device() != device {
                let (size, dtype) = (real.size(), real.kind());
                let reason = format!(
                    "`real` is {dtype:?} {size:?} on {:?}; expected Bool [{}, {new}] on {device:?}",
                    real.device(),
                    self.rows
                );
                return Err(Error::invalid(WHAT, reason));
            }
            if self.tokens.is_none() {
                self.tokens = Some(Tensor::f_ones([self.rows, self.capacity], (kind, device))?);
            }
        }
        if let Some(tokens) = &self.tokens {
            let mut added = tokens.f_narrow(1, self.length, new)?;
            match real {
                Some(real) => added.f_copy_(real)?,
                None => drop(added.try_fill_(1)?),
            }
        }
        Ok(())
    }

    /// Returns the mask of tokens that each new token attends to, within a window that is shorter than the cache or without one.
    fn mask(&self, new: i64, window: Option<i64>) -> Result<Mask> {
        let end = self.length + new;
        // The first key that a new token attends to.
        let first = window.map_or(0, |window| (self.length + 1 - window).max(0));
        let causal = || -> Result<Tensor> {
            let all = Tensor::f_ones([new, end], (Kind::Bool, self.shape.device))?.f_tril(self.length)?;
            let all = match window {
                Some(window) => all.f_triu(self.length + 1 - window)?,
                None => all,
            };
            Ok(all.f_narrow(1, first, end - first)?.f_view([1, 1, new, end - first])?)
        };
        let visible = match &self.tokens {
            None if new == 1 || self.length == 0 && window.is_none() => None,
            None => Some(causal()?),
            Some(tokens) => {
                let seen = tokens.f_narrow(1, first, end - first)?.f_view([self.rows, 1, 1, end - first])?;
                if new == 1 {
                    return Ok(Mask { window, first, visible: Some(seen) });
                }
                // Padding attends to itself: an empty softmax is NaN, which would reach other rows as 0·NaN.
                let itself = Tensor::f_eye_m(new, end, (Kind::Bool, self.shape.device))?;
                let itself = itself.f_roll([self.length], [1])?.f_narrow(1, first, end - first)?;
                let itself = itself.f_view([1, 1, new, end - first])?;
                Some(seen.f_logical_and(&causal()?)?.f_logical_or(&itself)?)
            }
        };
        Ok(Mask { window, first, visible })
    }

    /// Counts the tokens of a forward pass with [`KeyValueCache::extend`] as read.
    ///
    /// # Errors
    /// A layer that did not write: a block that ignores the cache would compute as if there were no past.
    pub fn commit(&mut self, mut writes: CacheWrites) -> Result<()> {
        let layers = self.layers.len() + self.recurrent.len();
        if writes.written != layers {
            let reason = format!(
                "{} of {layers} layers wrote their keys and values; a block of the model does not pass on its whole `Context`",
                writes.written,
            );
            return Err(Error::invalid(WHAT, reason));
        }
        self.take_recurrent(&mut writes);
        self.length += writes.new;
        Ok(())
    }

    /// Returns a cache whose rows are copies of those with these numbers, which may repeat.
    ///
    /// # Errors
    /// A row that does not exist, a capacity below the cache's length, too little memory.
    pub fn select(&self, rows: &[i64], capacity: i64) -> Result<Self> {
        if capacity < self.length || rows.iter().any(|row| !(0..self.rows).contains(row)) {
            let reason = format!(
                "{} rows of {} tokens cannot be copied as rows {rows:?} of {capacity}; expected rows that exist and are not longer",
                self.rows, self.length
            );
            return Err(Error::invalid(WHAT, reason));
        }
        let mut copy = Self::new(self.shape.clone(), rows.len() as i64, capacity)?;
        let index = Tensor::f_from_slice(rows)?.f_to_device(self.shape.device)?;
        for (from, to) in self.layers.iter().flatten().zip(copy.layers.iter().flatten()) {
            // Row by row, so that no second copy exists.
            for (number, row) in (0..).zip(rows) {
                let read = from.f_select(0, *row)?.f_narrow(1, 0, self.length)?;
                to.f_select(0, number)?.f_narrow(1, 0, self.length)?.f_copy_(&read)?;
            }
        }
        if let Some(tokens) = &self.tokens {
            let all = Tensor::f_ones([copy.rows, capacity], (Kind::Bool, self.shape.device))?;
            let read = tokens.f_narrow(1, 0, self.length)?.f_index_select(0, &index)?;
            all.f_narrow(1, 0, self.length)?.f_copy_(&read)?;
            copy.tokens = Some(all);
        }
        copy.recurrent = self.recurrent.iter().map(|state| state.select(&index)).collect::<Result<_>>()?;
        copy.length = self.length;
        Ok(copy)
    }

    /// Returns an empty cache of the same rows and capacity.
    ///
    /// # Errors
    /// Too little memory.
    pub fn emptied(&self) -> Result<Self> {
        Self::new(self.shape.clone(), self.rows, self.capacity)
    }

    /// Removes `row`; the last row takes its number. Memory is freed when the cache is dropped.
    ///
    /// # Errors
    /// A row that does not exist, or the only row.
    pub fn swap_remove(&mut self, row: i64) -> Result<()> {
        let last = self.rows - 1;
        if !(0..=last).contains(&row) || last == 0 {
            let reason = format!("row {row} of {} cannot be removed", self.rows);
            return Err(Error::invalid(WHAT, reason));
        }
        let take = |tensor: &Tensor, length: i64, dim: i64| -> Result<()> {
            let read = tensor.f_narrow(dim, 0, length)?;
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
        for state in &mut self.recurrent {
            state.swap_remove(row, last)?;
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

/// Reserved positions for the tokens of one forward pass; each layer writes its keys and values there.
#[derive(Debug)]
pub struct Extension<'c> {
    cache: &'c KeyValueCache,
    new: i64,
    /// Which of the new tokens are no padding; `None` if all are.
    real: Option<Tensor>,
    /// The states that layers with linear attention have written.
    recurrent: RefCell<Vec<Option<Recurrent>>>,
    /// A mask for each window of the model's layers, built when a layer first needs it.
    masks: RefCell<Vec<Mask>>,
    written: Cell<usize>,
}

/// The keys and values that the new tokens attend to.
#[derive(Debug)]
struct Mask {
    window: Option<i64>,
    /// The first key of `visible`: no query attends to those before.
    first: i64,
    /// `[rows or 1, 1, new, length + new − first]`; `None` if plain causality applies, which the kernel handles itself.
    visible: Option<Tensor>,
}

impl Extension<'_> {
    /// Returns the number of tokens in each row after this pass, padding included.
    pub fn end(&self) -> i64 {
        self.cache.length + self.new
    }

    /// Writes the keys and values `[rows, new, heads, head]` of `layer`, and computes attention of `q` `[rows, new, query
    /// heads, head]` over the layer's tokens. Returns `[rows, new, query heads·head]`. Of the options, the scale, the window, the
    /// cap and the sinks apply.
    ///
    /// # Errors
    /// A layer that the cache does not have, shapes that do not match.
    pub fn attend(
        &self,
        layer: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        options: &AttentionConfig<'_>,
    ) -> Result<Tensor> {
        let KeyValueCache { length, rows, .. } = self.cache;
        let stored = self.stored(layer)?;
        let (_, heads, _, head) = stored[0].size4()?;
        for (name, x) in [("k", k), ("v", v)] {
            let expected = [*rows, self.new, heads, head];
            if x.size() != expected {
                let expected = format!("{expected:?}, the shape of the reserved positions");
                return Err(wrong_shape(WHAT, name, x.size(), expected));
            }
        }
        for (stored, x) in stored.iter().zip([k, v]) {
            stored.f_narrow(2, *length, self.new)?.f_copy_(&x.f_transpose(1, 2)?)?;
        }
        self.written.set(self.written.get() + 1);
        self.attend_again(layer, q, options)
    }

    fn stored(&self, layer: usize) -> Result<&[Tensor; 2]> {
        let layers = &self.cache.layers;
        layers.get(layer).ok_or_else(|| Error::invalid(WHAT, format!("layer {layer} of {}", layers.len())))
    }

    /// Computes attention of `q` `[rows, new, query heads, head]` over the tokens of `layer`, whose keys and values this pass has written.
    ///
    /// # Errors
    /// A layer that the cache does not have, shapes that do not match.
    pub fn attend_again(&self, layer: usize, q: &Tensor, options: &AttentionConfig<'_>) -> Result<Tensor> {
        let KeyValueCache { length, rows, shape, .. } = self.cache;
        let stored = self.stored(layer)?;
        let q = q.f_to_kind(shape.kind)?;
        let end = self.end();
        let window = options.window.filter(|&window| window < end);
        let whole_rows = *length == 0 && self.cache.tokens.is_none() && self.new > 1;
        let without_pairs = options.is_plain() || has_kernel(&TensorLayout::of(&q)?, options);
        if whole_rows && without_pairs && (window.is_some() || !options.is_plain()) {
            // Instead of a mask of every pair, or their scores.
            let [k, v] = [&stored[0], &stored[1]].map(|stored| stored.f_narrow(2, 0, end));
            let o = over_window(&q.f_transpose(1, 2)?, &k?, &v?, options)?.f_transpose(1, 2)?;
            return Ok(o.f_reshape([*rows, self.new, -1])?);
        }
        let mut masks = self.masks.borrow_mut();
        let known = masks.iter().position(|mask| mask.window == window);
        let index = match known {
            Some(index) => index,
            None => {
                masks.push(self.cache.mask(self.new, window)?);
                masks.len() - 1
            }
        };
        let Mask { first, visible, .. } = &masks[index];
        let [k, v] = [&stored[0], &stored[1]].map(|stored| stored.f_narrow(2, *first, end - first));
        cached_attention(&q, &k?, &v?, visible.as_ref(), options)
    }

    /// Ends the pass. [`KeyValueCache::commit`] takes the result.
    pub fn finish(self) -> CacheWrites {
        CacheWrites { new: self.new, written: self.written.get(), recurrent: self.recurrent.into_inner() }
    }
}

/// How many tokens and layers a forward pass wrote.
#[derive(Debug)]
#[must_use = "the tokens count as read only after `commit`"]
pub struct CacheWrites {
    new: i64,
    written: usize,
    recurrent: Vec<Option<Recurrent>>,
}
