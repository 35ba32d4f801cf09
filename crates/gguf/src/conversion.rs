//! A planned file: its metadata, and for each tensor where its values come from and what happens to them.

use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;

use rayon::prelude::*;

use crate::block;
use crate::error::{Error, Result, unsupported};
use crate::reader::Reader;
use crate::rounding::{first_difference, largest_value};
use crate::safetensors::{Location, Tensors};
use crate::tensor_type::TensorType;
use crate::value::Value;
use crate::value_heads::ValueHeads;
use crate::writer::{Header, TensorInfo, Writer};

/// Values that are converted at once.
const CHUNK: u64 = 1 << 18;

/// Values that a thread encodes at once, whole blocks of every type.
const PARALLEL: usize = 1 << 13;

/// The changes of a tensor's rows, or of a vector's elements, before they are written.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rows {
    /// For q and k of llama: the rows of a head of d; Hugging Face rotates i with i + d/2, and llama.cpp 2i with 2i + 1.
    pub(crate) interleaved: Option<u64>,
    /// Rows, or elements of a vector, that are value heads of linear attention.
    pub(crate) value_heads: Option<ValueHeads>,
    /// Columns that are.
    pub(crate) value_columns: Option<ValueHeads>,
    /// Whether a value x is stored as −eˣ: the logarithms of decays. No factor and no summand then.
    pub(crate) is_decay: bool,
    /// Added to each value.
    pub(crate) add: f32,
    /// Factor of each value.
    pub(crate) scale: f32,
}

impl Default for Rows {
    fn default() -> Self {
        Self {
            interleaved: None,
            value_heads: None,
            value_columns: None,
            is_decay: false,
            add: 0.0,
            scale: 1.0,
        }
    }
}

impl Rows {
    /// Whether the file has rows, or a vector's elements, in another order.
    pub(crate) fn is_reordered(&self) -> bool {
        self.interleaved.is_some() || self.value_heads.is_some()
    }

    /// Whether the file has the same values, in whatever order of rows.
    pub(crate) fn keeps_rows(&self) -> bool {
        let Self { value_columns, is_decay, add, scale, .. } = *self;
        value_columns.is_none() && !is_decay && add == 0.0 && scale == 1.0
    }

    /// Where a file has the row `row` of Hugging Face. Of interleaved heads of d rows, i is at 2i, and i + d/2 at 2i + 1.
    pub(crate) fn stored(&self, row: u64) -> u64 {
        match (self.interleaved, &self.value_heads) {
            (Some(head), _) => {
                let within = row % head;
                row - within + 2 * (within % (head / 2)) + within / (head / 2)
            }
            (None, Some(heads)) => heads.stored(row),
            (None, None) => row,
        }
    }

    /// The stored value.
    fn apply(&self, value: f32) -> f32 {
        if self.is_decay {
            -value.exp()
        } else if self.add == 0.0 {
            // −0 + 0 is +0, and llama.cpp stores the sign of a block's smallest value.
            self.scale * value
        } else {
            self.scale * value + self.add
        }
    }

    /// The value of Hugging Face.
    pub(crate) fn undo(&self, value: f32) -> f32 {
        if self.is_decay { (-value).ln() } else { (value - self.add) / self.scale }
    }
}

/// Where a tensor's values come from.
#[derive(Debug)]
pub(crate) enum Values {
    Computed(Vec<f32>),
    Stored {
        location: Location,
        rows: Rows,
    },
    /// Of each expert in turn.
    Experts(Vec<Location>),
    /// Columns of an adapter of all experts, by expert.
    ExpertColumns(ExpertColumns),
}

/// B of an adapter of all experts of a layer, `[out, rank·experts]`, whose column j·experts + e is column j of expert e; some of its rows, as
/// `[experts, rows, rank]`.
#[derive(Debug)]
pub(crate) struct ExpertColumns {
    pub(crate) location: Location,
    pub(crate) experts: u64,
    pub(crate) rank: u64,
    /// How many rows, the first one, and how far they are apart.
    pub(crate) rows: u64,
    pub(crate) first_row: u64,
    pub(crate) step: u64,
    /// Factor of each value.
    pub(crate) scale: f32,
}

impl ExpertColumns {
    /// Where the value at an index of the result is stored.
    fn source(&self, at: u64) -> u64 {
        let (row, column) = (at / self.rank, at % self.rank);
        let (expert, row) = (row / self.rows, row % self.rows);
        (self.first_row + self.step * row) * self.rank * self.experts + column * self.experts + expert
    }
}

#[derive(Debug)]
pub(crate) struct Planned {
    pub(crate) info: TensorInfo,
    pub(crate) values: Values,
}

/// A planned GGUF file.
#[derive(Debug)]
pub struct Conversion<'a> {
    header: Header,
    values: Vec<Values>,
    tensors: &'a Tensors,
    notes: Vec<String>,
}

impl<'a> Conversion<'a> {
    pub(crate) fn new(
        metadata: Vec<(String, Value)>,
        plan: Vec<Planned>,
        tensors: &'a Tensors,
        notes: Vec<String>,
    ) -> Self {
        let (infos, values) = plan.into_iter().map(|planned| (planned.info, planned.values)).unzip();
        Self { header: Header { metadata, tensors: infos }, values, tensors, notes }
    }

    /// Returns the metadata and the tensors.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Returns what the user should know: what llama.cpp leaves out, which tensors have another type, which tokens are not in the file.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns the bytes of all tensors' values.
    pub fn bytes(&self) -> u64 {
        self.header.tensors.iter().filter_map(TensorInfo::bytes).sum()
    }

    /// Writes the file. Tensors are read, converted and written in parts of about a mebibyte.
    ///
    /// # Errors
    /// A value that is not finite, or too large for the type, with the tensor's name; those of the files.
    pub fn write(&self, out: &mut dyn Write) -> Result<()> {
        let fault = |cause: io::Error| Error::Output { cause };
        let mut writer = Writer::new(out, &self.header).map_err(fault)?;
        let mut bytes = Vec::new();
        for (info, values) in self.header.tensors.iter().zip(&self.values) {
            for part in self.parts(info, values) {
                let chunk = self.converted(values, part, info)?;
                check_finite(info, &chunk)?;
                encode(info.kind, &chunk, &mut bytes);
                writer.write(&bytes).map_err(fault)?;
            }
            writer.end_tensor().map_err(fault)?;
        }
        writer.finish().map_err(fault)
    }

    /// Reads a written file again, and compares its metadata and every value with what was meant, within the rounding of each type.
    ///
    /// # Errors
    /// [`Error::Written`] for the first difference; a file that cannot be read.
    pub fn check(&self, path: &Path) -> Result<()> {
        let file = Reader::open(path)?;
        let wrong = |tensor: &str, reason: String| {
            Err(Error::Written { path: path.to_owned(), tensor: tensor.to_owned(), reason })
        };
        for (key, value) in &self.header.metadata {
            match file.header().get(key) {
                Some(written) if written == value => {}
                Some(_) => return wrong(key, "it has another value".to_owned()),
                None => return wrong(key, "it is missing".to_owned()),
            }
        }
        if file.header().tensors != self.header.tensors {
            return wrong("tensors", "their names, shapes or types are others".to_owned());
        }
        for (index, (info, values)) in self.header.tensors.iter().zip(&self.values).enumerate() {
            let (_, columns) = info.rows_and_columns().unwrap_or((0, 1));
            for part in self.parts(info, values) {
                let rows = match info.shape.len() {
                    1 => 0..1,
                    _ => part.start / columns..part.end / columns,
                };
                let mut written = file.rows(index, rows)?;
                if info.shape.len() == 1 {
                    written = written[part.start as usize..part.end as usize].to_vec();
                }
                let meant = self.meant(values, part.clone(), info)?;
                if let Some((x, y)) = first_difference(info.kind, &meant, &written) {
                    return wrong(&info.name, format!("{y} is in the file where {x} was meant"));
                }
            }
        }
        Ok(())
    }

    /// The ranges of values that are converted at once: whole rows, and for interleaved ones whole heads.
    fn parts(&self, info: &TensorInfo, values: &Values) -> impl Iterator<Item = Range<u64>> + use<> {
        let total: u64 = info.shape.iter().product();
        let columns = if info.shape.len() == 1 { 1 } else { info.shape.last().copied().unwrap_or(1) };
        let unit = match values {
            Values::Stored { rows: Rows { interleaved: Some(head), .. }, .. } => head * columns,
            _ => columns,
        };
        let step = unit * (CHUNK / unit.max(1)).max(1);
        (0..total.div_ceil(step.max(1))).map(move |part| part * step..((part + 1) * step).min(total))
    }

    /// The values of a range of the file.
    fn converted(&self, values: &Values, part: Range<u64>, info: &TensorInfo) -> Result<Vec<f32>> {
        let (location, rows) = match values {
            Values::Computed(all) => return Ok(all[part.start as usize..part.end as usize].to_vec()),
            Values::Stored { location, rows } => (location, rows),
            Values::Experts(locations) => return self.of_experts(locations, part),
            Values::ExpertColumns(columns) => return self.columns_by_expert(columns, part),
        };
        let columns = row_length(info);
        let mut chunk = match &rows.value_heads {
            Some(heads) => self.by_heads(location, heads, part, columns as u64)?,
            None => self.tensors.values(location, part)?,
        };
        if let Some(head) = rows.interleaved {
            chunk = interleave(&chunk, head as usize, columns);
        }
        if let Some(heads) = &rows.value_columns {
            heads.reorder_columns(&mut chunk, columns, false);
        }
        chunk.iter_mut().for_each(|value| *value = rows.apply(*value));
        Ok(chunk)
    }

    /// The values of a range of a tensor of all experts.
    fn of_experts(&self, locations: &[Location], part: Range<u64>) -> Result<Vec<f32>> {
        let each: u64 = locations.first().map_or(1, |location| location.shape.iter().product::<u64>().max(1));
        let (mut at, mut values) = (part.start, Vec::new());
        while at < part.end {
            let (expert, first) = (at / each, at % each);
            let end = each.min(first + part.end - at);
            let Some(location) = locations.get(expert as usize) else { break };
            values.extend(self.tensors.values(location, first..end)?);
            at += end - first;
        }
        Ok(values)
    }

    /// The values of a range of a tensor of an adapter's columns by expert.
    fn columns_by_expert(&self, columns: &ExpertColumns, part: Range<u64>) -> Result<Vec<f32>> {
        let all = self.tensors.values(&columns.location, 0..columns.location.shape.iter().product())?;
        Ok(part.map(|at| columns.scale * all[columns.source(at) as usize]).collect())
    }

    /// [`Conversion::columns_by_expert`] by where each stored value goes.
    fn meant_by_expert(&self, columns: &ExpertColumns, part: Range<u64>) -> Result<Vec<f32>> {
        let &ExpertColumns { experts, rank, rows, first_row, step, scale, .. } = columns;
        let mut meant = vec![0f32; (part.end - part.start) as usize];
        for row in 0..rows {
            let stored = (first_row + step * row) * rank * experts;
            let values = self.tensors.values(&columns.location, stored..stored + rank * experts)?;
            for (column, value) in (0..).zip(values) {
                let at = ((column % experts) * rows + row) * rank + column / experts;
                if part.contains(&at) {
                    meant[(at - part.start) as usize] = scale * value;
                }
            }
        }
        Ok(meant)
    }

    /// [`Conversion::of_experts`] by each element's place in the file.
    fn meant_of_experts(&self, locations: &[Location], part: Range<u64>) -> Result<Vec<f32>> {
        let mut meant = Vec::new();
        let each: u64 = locations.first().map_or(1, |location| location.shape.iter().product::<u64>().max(1));
        for (expert, location) in (0..).zip(locations) {
            let own = part.start.max(expert * each)..part.end.min((expert + 1) * each);
            if own.is_empty() {
                continue;
            }
            let Some(turns) = location.turns else {
                meant.extend(
                    self.tensors.values(location, own.start - expert * each..own.end - expert * each)?,
                );
                continue;
            };
            // Whole rows, column by column as the file has them: the rows of a column are `step` apart.
            let [rows, columns, first, step] =
                [turns.rows, turns.columns, turns.first, turns.step].map(|number| number as usize);
            let (start, count) =
                ((own.start - expert * each) as usize / columns, (own.end - own.start) as usize / columns);
            let begin = meant.len();
            meant.resize(begin + count * columns, 0f32);
            self.tensors.transposed(location, turns, |stored| {
                for (column, stored) in stored.chunks(rows).enumerate() {
                    let chosen = stored.iter().skip(first).step_by(step).skip(start).take(count);
                    for (row, value) in chosen.enumerate() {
                        meant[begin + row * columns + column] = *value;
                    }
                }
            })?;
        }
        Ok(meant)
    }

    /// Rows of the file that are value heads, by runs of rows that Hugging Face has after one another.
    fn by_heads(
        &self,
        location: &Location,
        heads: &ValueHeads,
        part: Range<u64>,
        columns: u64,
    ) -> Result<Vec<f32>> {
        let (mut row, end) = (part.start / columns, part.end / columns);
        let mut values = Vec::new();
        while row < end {
            let source = heads.source(row);
            let run = (1..end - row).find(|&next| heads.source(row + next) != source + next);
            let run = run.unwrap_or(end - row);
            values.extend(self.tensors.values(location, source * columns..(source + run) * columns)?);
            row += run;
        }
        Ok(values)
    }

    /// The values of a range of the file by another way than [`Conversion::converted`]: each source value's index is computed.
    fn meant(&self, values: &Values, part: Range<u64>, info: &TensorInfo) -> Result<Vec<f32>> {
        let (location, rows) = match values {
            Values::Computed(all) => return Ok(all[part.start as usize..part.end as usize].to_vec()),
            Values::Stored { location, rows } => (location, rows),
            Values::Experts(locations) => return self.meant_of_experts(locations, part),
            Values::ExpertColumns(columns) => return self.meant_by_expert(columns, part),
        };
        let columns = row_length(info);
        if rows.value_heads.is_some() || rows.value_columns.is_some() {
            return self.meant_by_heads(location, rows, part, columns as u64);
        }
        let source = self.tensors.values(location, part)?;
        let mut meant = vec![0f32; source.len()];
        for (at, value) in source.into_iter().enumerate() {
            let (row, column) = (at / columns, at % columns);
            let row = match rows.interleaved {
                None => row,
                Some(head) => {
                    let head = head as usize;
                    let (start, within) = (row - row % head, row % head);
                    // i goes to 2i, and i + d/2 to 2i + 1.
                    start + 2 * (within % (head / 2)) + within / (head / 2)
                }
            };
            meant[row * columns + column] = rows.apply(value);
        }
        Ok(meant)
    }

    /// [`Conversion::meant`] for value heads: from where each index of Hugging Face goes.
    fn meant_by_heads(
        &self,
        location: &Location,
        rows: &Rows,
        part: Range<u64>,
        columns: u64,
    ) -> Result<Vec<f32>> {
        let total: u64 = location.shape.iter().product::<u64>() / columns;
        let mut sources = vec![0; total as usize];
        (0..total).for_each(|row| sources[rows.stored(row) as usize] = row);
        let mut meant = Vec::new();
        for row in part.start / columns..part.end / columns {
            let source = sources[row as usize] * columns;
            let values = self.tensors.values(location, source..source + columns)?;
            let start = meant.len();
            meant.resize(start + columns as usize, 0f32);
            for (column, value) in (0..).zip(values) {
                let place = rows.value_columns.map_or(column, |heads| heads.stored(column));
                meant[start + place as usize] = rows.apply(value);
            }
        }
        Ok(meant)
    }
}

fn row_length(info: &TensorInfo) -> usize {
    if info.shape.len() == 1 { 1 } else { info.shape.last().map_or(1, |columns| *columns as usize) }
}

/// Returns rows of whole heads of `head` rows in llama.cpp's order: 0, d/2, 1, d/2 + 1, …
fn interleave(values: &[f32], head: usize, columns: usize) -> Vec<f32> {
    let mut interleaved = Vec::with_capacity(values.len());
    for rows in values.chunks(head * columns) {
        let (first, second) = rows.split_at(rows.len() / 2);
        for (one, other) in first.chunks(columns).zip(second.chunks(columns)) {
            interleaved.extend_from_slice(one);
            interleaved.extend_from_slice(other);
        }
    }
    interleaved
}

/// Encodes whole blocks on all threads.
fn encode(kind: TensorType, values: &[f32], bytes: &mut Vec<u8>) {
    let blocks = PARALLEL / kind.block_values();
    bytes.clear();
    bytes.resize(values.len() / kind.block_values() * kind.block_bytes(), 0);
    let parts = values.par_chunks(blocks * kind.block_values());
    let places = bytes.par_chunks_mut(blocks * kind.block_bytes());
    parts.zip(places).for_each(|(values, bytes)| block::quantize(kind, values, bytes));
}

fn check_finite(info: &TensorInfo, values: &[f32]) -> Result<()> {
    let limit = largest_value(info.kind);
    match values.iter().find(|value| value.is_nan() || value.abs() > limit) {
        None => Ok(()),
        Some(value) => Err(unsupported(
            format!("a value of `{}`", info.name),
            format!("{value} as {}", info.kind),
            match value.is_finite() {
                true => "export with --type bf16 or f32",
                false => "the weights are damaged; check the training, or take an earlier checkpoint",
            },
        )),
    }
}

/// Sorts tensors into the order of llama.cpp's own files: embedding, blocks by number, the rest.
pub(crate) fn sort(plan: &mut [Planned]) {
    plan.sort_by_cached_key(|planned| order(&planned.info.name));
}

/// The sort key of a tensor, by which the file is ordered.
fn order(name: &str) -> (u8, u32, String) {
    let block = name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse().ok());
    match block {
        Some(block) => (1, block, name.to_owned()),
        None if name.starts_with("token_embd") || name.starts_with("rope_") => (0, 0, name.to_owned()),
        None => (2, 0, name.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A block of q4_1 or q5_1 whose smallest value is −0 has it with its sign in llama.cpp's files.
    #[test]
    fn a_negative_zero_keeps_its_sign() {
        assert_eq!(Rows::default().apply(-0.0).to_bits(), (-0f32).to_bits());
        assert_eq!(Rows { add: 1.0, ..Rows::default() }.apply(-0.0), 1.0);
    }
}
