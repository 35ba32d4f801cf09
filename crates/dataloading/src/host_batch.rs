//! The host memory of a batch: one block, which becomes the tensors of the batch.
//!
//! All parts of a batch lie in one block: one allocation, one copy to a device, and no copy on the CPU, where the tensors
//! are views of the block. Each part starts at a multiple of 64 bytes.

use runtime::device::{PinnedBuffer, Stream};
use tch::{Device, Kind, Tensor};

use crate::batch::{Batch, Counts, IGNORE_INDEX, Packing};
use crate::error::{Error, Result};

/// 8-byte elements in 64 bytes.
const LINE: usize = 8;

/// The memory to which a [`BatchSource`](crate::BatchSource) writes a batch.
#[derive(Debug)]
pub struct HostBatch {
    /// The concatenated documents of the batch, before the layout.
    pub(crate) scratch: Vec<u32>,
    /// The sample indices of the batch.
    pub(crate) chosen: Vec<u32>,
    /// The ends of the documents in `scratch`.
    pub(crate) ends: Vec<usize>,
    device: Device,
    /// Whether the block is page-locked, so that a device can copy from it asynchronously.
    pinned: bool,
    block: Option<PinnedBuffer>,
    layout: Layout,
    counts: Counts,
    starts: Vec<i32>,
    /// Positions of padding at the end of each row.
    padding: Vec<i64>,
    longest: i64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Layout {
    rows: usize,
    length: usize,
    packed: bool,
    /// Documents including padding; only for a packed batch.
    documents: usize,
}

impl Layout {
    /// Refuses a layout whose byte count, with room to grow, does not fit `i64`.
    fn check(&self) -> Result<()> {
        let numbers = self.rows.checked_mul(self.length).and_then(|positions| positions.checked_mul(64));
        if numbers.is_some_and(|bytes| i64::try_from(bytes).is_ok()) {
            return Ok(());
        }
        Err(Error::Config {
            what: "host batch",
            reason: format!("{} rows of {} positions exceed the memory; use fewer", self.rows, self.length),
        })
    }

    fn positions(&self) -> usize {
        self.rows * self.length
    }

    /// 8-byte elements from one part to the next.
    fn part(&self) -> usize {
        self.positions().next_multiple_of(LINE)
    }

    /// 8-byte elements of the block.
    fn numbers(&self) -> usize {
        if !self.packed {
            return 2 * self.part();
        }
        4 * self.part() + (self.documents + 1).div_ceil(2).next_multiple_of(LINE)
    }
}

impl HostBatch {
    /// Creates an empty batch for `device`, in page-locked memory if it is a CUDA device.
    pub fn new(device: Device) -> Self {
        Self::in_memory(device, true)
    }

    /// Same as [`HostBatch::new`]; without `pinned` in pageable memory, from which copies to a device are synchronous.
    pub(crate) fn in_memory(device: Device, pinned: bool) -> Self {
        Self {
            scratch: Vec::new(),
            chosen: Vec::new(),
            ends: Vec::new(),
            device,
            pinned,
            block: None,
            layout: Layout::default(),
            counts: Counts::default(),
            starts: Vec::new(),
            padding: Vec::new(),
            longest: 0,
        }
    }

    /// Returns the current block of memory and allocates another for the next batch.
    pub(crate) fn exchange(&mut self, block: Option<PinnedBuffer>) -> Option<PinnedBuffer> {
        std::mem::replace(&mut self.block, block)
    }

    /// Lays out one document per row, truncated to `length` and padded to it with `pad`.
    ///
    /// # Errors
    /// There is not enough memory, or the batch is too large.
    pub fn write_rows<'a>(
        &mut self,
        documents: impl ExactSizeIterator<Item = &'a [u32]>,
        length: usize,
        pad: u32,
        dropped: usize,
    ) -> Result<()> {
        let layout = Layout { rows: documents.len(), length, packed: false, documents: 0 };
        layout.check()?;
        let mut counts = Counts { documents: layout.rows, dropped, ..Counts::default() };
        let mut padding_of_rows = std::mem::take(&mut self.padding);
        padding_of_rows.clear();
        let numbers = self.numbers(layout)?;
        let (tokens, labels) = numbers.split_at_mut(layout.part());
        if length > 0 {
            let rows = tokens.chunks_exact_mut(length).zip(labels.chunks_exact_mut(length));
            for (document, (tokens, labels)) in documents.zip(rows) {
                let kept = document.len().min(length);
                counts.dropped += document.len() - kept;
                counts.tokens += kept;
                counts.padding += length - kept;
                padding_of_rows.push((length - kept) as i64);
                counts.targets += kept.saturating_sub(1);
                let (inside, padding) = tokens.split_at_mut(kept);
                write_document(&document[..kept], inside, &mut labels[..kept]);
                padding.fill(i64::from(pad));
                labels[kept..].fill(IGNORE_INDEX);
            }
        }
        self.counts = counts;
        self.padding = padding_of_rows;
        Ok(())
    }

    /// Lays out `rows` rows of `length` positions with several documents each; `documents` yields the row of each document,
    /// in order of rows. The rest of a row is padded with `pad`.
    ///
    /// # Errors
    /// A document does not fit its row, the batch has more positions than an `i32`, or there is not enough memory.
    pub fn write_packed<'a>(
        &mut self,
        documents: impl Iterator<Item = (usize, &'a [u32])> + Clone,
        rows: usize,
        length: usize,
        pad: u32,
        dropped: usize,
    ) -> Result<()> {
        // The size of the batch.
        let positions = rows.checked_mul(length).filter(|&positions| i32::try_from(positions).is_ok());
        let Some(positions) = positions else {
            return Err(Error::Config {
                what: "packed batch",
                reason: format!(
                    "{rows} rows of {length} positions exceed the range of cu_seqlens (int32); use fewer"
                ),
            });
        };
        // The start of each document and of each row's padding.
        let mut counts = Counts { dropped, ..Counts::default() };
        self.starts.clear();
        self.padding.clear();
        self.padding.resize(rows.min(positions), length as i64);
        let (mut at, mut longest) = (0, 0);
        for (row, document) in documents.clone() {
            // For a row that does not exist, the start may overflow.
            let begin = if row < rows { at.max(row * length) } else { positions };
            if row >= rows || document.len() > ((row + 1) * length).saturating_sub(begin) {
                return Err(Error::Config {
                    what: "packed batch",
                    reason: format!(
                        "a document of {} tokens does not fit into row {row} of {rows} rows of {length}",
                        document.len()
                    ),
                });
            }
            pad_starts(&mut self.starts, at, begin, length, &mut longest);
            self.starts.push(begin as i32);
            at = begin + document.len();
            longest = longest.max(document.len());
            if let Some(padding) = self.padding.get_mut(row) {
                *padding -= document.len() as i64;
            }
            counts.documents += 1;
            counts.tokens += document.len();
            counts.targets += document.len().saturating_sub(1);
        }
        pad_starts(&mut self.starts, at, positions, length, &mut longest);
        counts.padding = positions - counts.tokens;
        let layout = Layout { rows, length, packed: true, documents: self.starts.len() };
        self.starts.push(positions as i32);

        // Tokens, labels, positions and document numbers, segment by segment.
        let starts = std::mem::take(&mut self.starts);
        let numbers = self.numbers(layout)?;
        let (tokens, rest) = numbers.split_at_mut(layout.part());
        let (labels, rest) = rest.split_at_mut(layout.part());
        let (positions, rest) = rest.split_at_mut(layout.part());
        let (ids, cu_seqlens) = rest.split_at_mut(layout.part());
        let mut documents = documents.peekable();
        let mut document_at = 0;
        for (id, ends) in starts.windows(2).enumerate() {
            let range = ends[0] as usize..ends[1] as usize;
            positions[range.clone()].iter_mut().zip(0..).for_each(|(position, number)| *position = number);
            ids[range.clone()].fill(id as i64);
            let begins_here = |&(row, _): &(usize, &[u32])| range.start == document_at.max(row * length);
            match documents.next_if(begins_here) {
                Some((_, document)) => {
                    document_at = range.end;
                    write_document(document, &mut tokens[range.clone()], &mut labels[range]);
                }
                None => {
                    tokens[range.clone()].fill(i64::from(pad));
                    labels[range].fill(IGNORE_INDEX);
                }
            }
        }
        // The starts: two 4-byte numbers as one 8-byte element, in native byte order.
        for (number, pair) in cu_seqlens.iter_mut().zip(starts.chunks(2)) {
            let mut bytes = [0; 8];
            bytes[..4].copy_from_slice(&pair[0].to_ne_bytes());
            bytes[4..].copy_from_slice(&pair.get(1).unwrap_or(&0).to_ne_bytes());
            *number = i64::from_ne_bytes(bytes);
        }
        self.starts = starts;
        self.longest = longest as i64;
        self.counts = counts;
        Ok(())
    }

    /// Returns the layout of the batch.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Returns the block, large enough for `layout`. A block that tensors still view is replaced by a new one.
    fn numbers(&mut self, layout: Layout) -> Result<&mut [i64]> {
        self.layout = layout;
        let bytes = layout.numbers() * 8;
        let usable = self
            .block
            .as_mut()
            .is_some_and(|block| block.len() >= bytes && block.as_mut_slice::<i64>().is_ok());
        if !usable {
            // Room for somewhat longer batches, so that a few blocks serve all of them.
            let room = (bytes + bytes / 4).next_multiple_of(4096);
            let memory_for = if self.pinned { self.device } else { Device::Cpu };
            self.block = Some(PinnedBuffer::new(room, memory_for)?);
        }
        let block = self.block.as_mut().expect("made above");
        Ok(&mut block.as_mut_slice::<i64>()?[..layout.numbers()])
    }

    /// Returns the batch on the host, as views of this memory.
    ///
    /// # Errors
    /// Nothing was written; errors of libtorch.
    pub fn finish(&mut self) -> Result<Batch> {
        let bytes = self.layout.numbers() * 8;
        let block = self.written()?.view(0, &[bytes as i64], Kind::Uint8)?;
        self.over(&block)
    }

    /// Returns the batch on the stream's device, copied asynchronously on `stream`. Before writing to the memory again,
    /// wait for the copy.
    pub(crate) fn finish_in(&mut self, stream: &Stream) -> Result<Batch> {
        let bytes = self.layout.numbers() * 8;
        let device = self.device;
        let block = self.written()?;
        let target = {
            // CUDA memory belongs to the stream that writes it; CPU memory belongs to none.
            let _current = device.is_cuda().then(|| stream.enter()).transpose()?;
            Tensor::f_empty([bytes as i64], (Kind::Uint8, device))?
        };
        block.copy_to(&target, stream)?;
        self.over(&target)
    }

    fn written(&mut self) -> Result<&mut PinnedBuffer> {
        self.block.as_mut().ok_or_else(|| Error::Config {
            what: "host batch",
            reason: "it is empty; write a batch to it first".into(),
        })
    }

    /// Creates the batch from views of `block`.
    fn over(&self, block: &Tensor) -> Result<Batch> {
        let layout = self.layout;
        let shape = [layout.rows as i64, layout.length as i64];
        let part = |number: usize| -> Result<Tensor> {
            let bytes = layout.positions() as i64 * 8;
            let start = (number * layout.part() * 8) as i64;
            Ok(block.f_narrow(0, start, bytes)?.f_view_dtype(Kind::Int64)?.f_view(shape)?)
        };
        let packing = if layout.packed {
            let bytes = (layout.documents + 1) as i64 * 4;
            let start = (4 * layout.part() * 8) as i64;
            Some(Packing {
                positions: part(2)?,
                document_ids: part(3)?,
                cu_seqlens: block.f_narrow(0, start, bytes)?.f_view_dtype(Kind::Int)?,
                starts: self.starts.clone(),
                longest: self.longest,
                is_padding_free: false,
            })
        } else {
            None
        };
        let padding = if self.counts.padding > 0 { self.padding.clone() } else { Vec::new() };
        Ok(Batch {
            tokens: part(0)?,
            labels: part(1)?,
            packing,
            padding,
            sequences: None,
            taught: None,
            weights: None,
            counts: self.counts,
        })
    }
}

fn write_document(document: &[u32], tokens: &mut [i64], labels: &mut [i64]) {
    for (position, &token) in tokens.iter_mut().zip(document) {
        *position = i64::from(token);
    }
    if let Some((last, rest)) = labels.split_last_mut() {
        for (position, &token) in rest.iter_mut().zip(&document[1..]) {
            *position = i64::from(token);
        }
        *last = IGNORE_INDEX;
    }
}

/// Appends the starts of padding documents from `at` to `to`, one per row.
fn pad_starts(starts: &mut Vec<i32>, at: usize, to: usize, length: usize, longest: &mut usize) {
    let mut at = at;
    while at < to {
        starts.push(at as i32);
        let end = ((at / length + 1) * length).min(to);
        *longest = (*longest).max(end - at);
        at = end;
    }
}

#[cfg(test)]
mod tests;
