//! The assignment of documents to rows.

use super::patterns::Packed;
use super::{Algorithm, LongDocuments, WHAT, best_fit, check_capacity, first_fit};
use crate::error::{Error, Result};
use crate::length_order::LengthOrder;

/// Options of packing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackingConfig {
    /// Tokens per row.
    pub capacity: usize,
    /// The packing algorithm.
    pub algorithm: Algorithm,
    /// How documents longer than a row are handled.
    pub long: LongDocuments,
}

impl Default for PackingConfig {
    fn default() -> Self {
        Self { capacity: 512, algorithm: Algorithm::default(), long: LongDocuments::default() }
    }
}

/// A document, or a piece of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Its index in the data set.
    pub document: usize,
    /// The first token of the piece.
    pub start: usize,
    /// The number of tokens of the piece.
    pub length: usize,
}

/// The assignment of all documents to rows in compressed form: 4 bytes per document, 12 per further piece of a split
/// document, and a few kilobytes.
///
/// Documents without tokens are skipped. Piece indices below the number of documents are the first pieces of the documents;
/// higher ones are the further pieces of split documents.
#[derive(Debug, Clone)]
pub struct PackingPlan {
    capacity: u32,
    documents: usize,
    /// Pieces sorted by length.
    order: LengthOrder,
    /// Document and start of each piece beyond the first.
    further: Vec<(u32, u32)>,
    patterns: Vec<Pattern>,
    slots: Vec<Slots>,
    tokens: u64,
    split: usize,
    dropped: usize,
    dropped_tokens: u64,
    skipped: usize,
}

/// Rows of equal content.
#[derive(Debug, Clone, Copy)]
struct Pattern {
    first_row: u32,
    rows: u32,
    /// The index of its first slot; its slots end where those of the next begin.
    slots: u32,
}

/// `times` slots of one length in each row of a pattern.
#[derive(Debug, Clone, Copy)]
struct Slots {
    length: u32,
    times: u32,
    /// The rank, among the pieces of this length, of the first slot of the pattern's first row.
    base: u32,
}

/// All rows as lists: row `r` holds the pieces `pieces[offsets[r]..offsets[r + 1]]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assignment {
    /// The start of each row in `pieces`, and the end.
    pub offsets: Vec<u32>,
    /// Piece indices, see [`PackingPlan::piece`].
    pub pieces: Vec<u32>,
}

impl PackingPlan {
    /// Plans rows for documents of these lengths. Takes `O(n + C)` plus the time of the planner, which does not depend on
    /// `n`.
    ///
    /// # Errors
    /// The capacity is 0 or exceeds 2²⁸; no document has a token; there are more than 2³² − 2 pieces.
    pub fn new(lengths: &[u32], options: &PackingConfig) -> Result<Self> {
        let capacity = check_capacity(options.capacity)?;
        let too_many = |pieces: usize| Error::Config {
            what: WHAT,
            reason: format!("{pieces} pieces; at most {} are supported; split the data set", u32::MAX - 1),
        };
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let mut of_pieces = std::borrow::Cow::Borrowed(lengths);
        let mut further = Vec::new();
        let (mut split, mut dropped, mut dropped_tokens) = (0, 0, 0);
        if longest > capacity {
            let pieces = of_pieces.to_mut();
            for (document, &length) in (0..).zip(lengths).filter(|&(_, &length)| length > capacity) {
                if options.long == LongDocuments::Drop {
                    pieces[document as usize] = 0;
                    dropped += 1;
                    dropped_tokens += u64::from(length);
                    continue;
                }
                split += 1;
                pieces[document as usize] = capacity;
                let mut start = capacity;
                while start < length {
                    let rest = (length - start).min(capacity);
                    further.push((document, start));
                    pieces.push(rest);
                    start = start.saturating_add(capacity);
                }
                if pieces.len() >= u32::MAX as usize {
                    return Err(too_many(pieces.len()));
                }
            }
        }
        if of_pieces.len() >= u32::MAX as usize {
            return Err(too_many(of_pieces.len()));
        }
        let order = LengthOrder::new(&of_pieces, capacity);
        let counts: Vec<u32> = (0..=capacity).map(|length| order.count(length)).collect();
        let tokens = counts.iter().zip(0_u64..).map(|(&count, length)| u64::from(count) * length).sum();
        if tokens == 0 {
            return Err(Error::Empty {
                from: WHAT.into(),
                reason: format!(
                    "none of {} documents can be packed into rows of {capacity} tokens: {} have no token and {dropped} are \
                     longer than a row",
                    lengths.len(),
                    counts[0] as usize - dropped
                ),
            });
        }
        let packed = match options.algorithm {
            Algorithm::BestFitDecreasing => best_fit::pack(&counts, capacity),
            Algorithm::FirstFitDecreasing => first_fit::pack(&counts, capacity),
        };
        let (patterns, slots) = number(&packed, &order);
        let skipped = counts[0] as usize - dropped;
        Ok(Self {
            capacity,
            documents: lengths.len(),
            order,
            further,
            patterns,
            slots,
            tokens,
            split,
            dropped,
            dropped_tokens,
            skipped,
        })
    }

    /// Returns the tokens per row.
    pub fn capacity(&self) -> usize {
        self.capacity as usize
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.patterns.last().map_or(0, |last| (last.first_row + last.rows) as usize)
    }

    /// Returns the tokens in all rows.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Returns the share of positions that hold a token.
    pub fn fill(&self) -> f64 {
        self.tokens as f64 / (self.rows() as u64 * u64::from(self.capacity)) as f64
    }

    /// Returns the number of pieces.
    pub fn pieces(&self) -> usize {
        self.order.order.len() - self.skipped - self.dropped
    }

    /// Returns the number of documents split into pieces.
    pub fn split(&self) -> usize {
        self.split
    }

    /// Returns the number of documents dropped because they are longer than a row.
    pub fn dropped(&self) -> usize {
        self.dropped
    }

    /// Returns the tokens of the dropped documents.
    pub fn dropped_tokens(&self) -> u64 {
        self.dropped_tokens
    }

    /// Returns the number of documents skipped because they have no token.
    pub fn skipped(&self) -> usize {
        self.skipped
    }

    /// Returns the number of distinct row contents.
    pub fn patterns(&self) -> usize {
        self.patterns.len()
    }

    /// Calls `visit(piece)` for the pieces of a row, longest first. `fill` maps each slot to a piece: it receives the
    /// length, the number of pieces of that length, and the rank in the plan, and must be a bijection of ranks.
    pub(crate) fn visit_row(
        &self,
        row: usize,
        mut fill: impl FnMut(u32, u32, u32) -> u32,
        mut visit: impl FnMut(Piece),
    ) {
        let number = self.patterns.partition_point(|pattern| pattern.first_row as usize <= row) - 1;
        let pattern = self.patterns[number];
        let within = row as u32 - pattern.first_row;
        for slots in self.slots_of(number) {
            for slot in 0..slots.times {
                let rank = slots.base + within * slots.times + slot;
                let rank = fill(slots.length, self.order.count(slots.length), rank);
                let at = self.order.starts[slots.length as usize] + rank;
                visit(self.located(self.order.order[at as usize], slots.length as usize));
            }
        }
    }

    /// Returns the pieces of a row, longest first.
    ///
    /// # Errors
    /// The row does not exist.
    pub fn row(&self, row: usize) -> Result<Vec<Piece>> {
        if row >= self.rows() {
            return Err(Error::Config { what: WHAT, reason: format!("row {row} of {}", self.rows()) });
        }
        let mut pieces = Vec::new();
        self.visit_row(row, |_, _, rank| rank, |piece| pieces.push(piece));
        Ok(pieces)
    }

    fn located(&self, piece: u32, length: usize) -> Piece {
        match (piece as usize).checked_sub(self.documents) {
            None => Piece { document: piece as usize, start: 0, length },
            Some(further) => {
                let (document, start) = self.further[further];
                Piece { document: document as usize, start: start as usize, length }
            }
        }
    }

    fn slots_of(&self, pattern: usize) -> &[Slots] {
        let end = self.patterns.get(pattern + 1).map_or(self.slots.len(), |next| next.slots as usize);
        &self.slots[self.patterns[pattern].slots as usize..end]
    }

    /// Returns all rows as lists.
    pub fn assignment(&self) -> Assignment {
        let mut offsets = Vec::with_capacity(self.rows() + 1);
        let mut pieces = Vec::with_capacity(self.pieces());
        offsets.push(0);
        for (number, pattern) in self.patterns.iter().enumerate() {
            let slots = self.slots_of(number);
            let bases: Vec<(usize, usize)> = slots
                .iter()
                .map(|slots| {
                    ((self.order.starts[slots.length as usize] + slots.base) as usize, slots.times as usize)
                })
                .collect();
            for row in 0..pattern.rows as usize {
                for &(base, times) in &bases {
                    let start = base + row * times;
                    // Most slots are single, and a push is cheaper than a copy of one element.
                    if times == 1 {
                        pieces.push(self.order.order[start]);
                    } else {
                        pieces.extend_from_slice(&self.order.order[start..start + times]);
                    }
                }
                offsets.push(pieces.len() as u32);
            }
        }
        Assignment { offsets, pieces }
    }

    /// Returns the piece with this index.
    ///
    /// # Errors
    /// The index exceeds the last piece.
    pub fn piece(&self, lengths: &[u32], number: u32) -> Result<Piece> {
        let known =
            (number as usize) < self.documents + self.further.len() && lengths.len() == self.documents;
        if !known {
            return Err(Error::Config {
                what: WHAT,
                reason: format!(
                    "piece {number} of {} with {} lengths; expected a number below, and the {} lengths that were planned",
                    self.documents + self.further.len(),
                    lengths.len(),
                    self.documents
                ),
            });
        }
        let piece = self.located(number, 0);
        Ok(Piece { length: (lengths[piece.document] as usize - piece.start).min(self.capacity()), ..piece })
    }
}

/// Numbers the rows group by group, and the pieces of each length in the order of the rows.
fn number(packed: &Packed, order: &LengthOrder) -> (Vec<Pattern>, Vec<Slots>) {
    let mut used = vec![0_u32; order.starts.len()];
    let mut patterns = Vec::with_capacity(packed.groups.len());
    let mut slots = Vec::new();
    let mut first_row = 0;
    for group in &packed.groups {
        patterns.push(Pattern { first_row, rows: group.rows, slots: slots.len() as u32 });
        first_row += group.rows;
        for (length, times) in packed.contents.entries(group.content) {
            let base = &mut used[length as usize];
            slots.push(Slots { length, times, base: *base });
            *base += times * group.rows;
        }
    }
    (patterns, slots)
}
