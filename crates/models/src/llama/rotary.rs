//! The rotary embeddings of a model's layers.

use decoder::rope::Frequencies;
use kernels::rope::RotaryTable;
use tch::{Device, Tensor};

use super::DecoderConfig;
use crate::attention::Documents;
use crate::error::{self, Result};
use crate::module::Context;

/// The tables of a model, shared by its layers.
#[derive(Debug)]
pub(super) struct Rotaries {
    all: Vec<(Frequencies, Rotary)>,
}

/// Widths of a layer's heads and of their columns that rotate.
fn widths(config: &DecoderConfig, layer: usize) -> [i64; 2] {
    match config.gemma4 {
        // Its scaling decides which pairs rotate.
        Some(_) => [config.layer_head_dim(layer); 2],
        None => [config.head_dim, config.rotary_dim()],
    }
}

impl Rotaries {
    /// Creates the tables that the layers use.
    pub(super) fn new(config: &DecoderConfig, device: Device) -> Result<Self> {
        let mut all: Vec<(Frequencies, Rotary)> = Vec::new();
        for layer in 0..usize::try_from(config.num_hidden_layers).unwrap_or(0) {
            let Some(frequencies) = config.layer_rope(layer) else { continue };
            let widths = widths(config, layer);
            if !all.iter().any(|(other, rotary)| other == frequencies && rotary.widths() == widths) {
                all.push((*frequencies, Rotary::new(config, frequencies, widths, device)?));
            }
        }
        Ok(Self { all })
    }

    /// Returns the rotary embedding of a layer; `None` for a layer without.
    pub(super) fn of_layer(&self, config: &DecoderConfig, layer: usize) -> Option<Rotary> {
        let frequencies = config.layer_rope(layer)?;
        let widths = widths(config, layer);
        let mut all = self.all.iter();
        let own = all.find(|(other, rotary)| *other == *frequencies && rotary.widths() == widths);
        own.map(|(_, rotary)| rotary.clone())
    }
}

/// The rotary embedding of a layer.
#[derive(Debug, Clone)]
pub(super) struct Rotary {
    table: RotaryTable,
    /// The table of rows with more than so many positions.
    long: Option<(i64, RotaryTable)>,
    /// Widths of a head and of its columns that rotate.
    head: i64,
    width: i64,
}

impl Rotary {
    fn new(
        config: &DecoderConfig,
        frequencies: &Frequencies,
        [head, width]: [i64; 2],
        device: Device,
    ) -> Result<Self> {
        let positions = config.max_position_embeddings;
        let angles = frequencies.angles(width).map_err(error::decoder)?;
        let Some(rope) = &config.long_rope else {
            let table = RotaryTable::from_angles(angles, frequencies.amplitude(), positions, device)?;
            return Ok(Self { table, long: None, head, width });
        };
        let amplitude = rope.amplitude(positions);
        let table = |factors: &[f64], positions: i64| {
            let angles = angles.iter().zip(factors).map(|(angle, factor)| angle / factor);
            RotaryTable::from_angles(angles.collect(), amplitude, positions, device)
        };
        let short = table(&rope.short_factor, positions.min(rope.original_positions))?;
        let long = (rope.original_positions, table(&rope.long_factor, positions)?);
        Ok(Self { table: short, long: Some(long), head, width })
    }

    fn widths(&self) -> [i64; 2] {
        [self.head, self.width]
    }

    /// Returns whether all columns of a head rotate.
    pub(super) fn turns_whole_heads(&self) -> bool {
        self.width == self.head
    }

    /// Rotates `q` `[b, t, heads, head]` and `k` `[b, t, kv_heads, head]` by their positions; where
    /// [whole heads](Self::turns_whole_heads) rotate also `[b, t, heads·head]`.
    pub(super) fn rotate(&self, (q, k): (Tensor, Tensor), context: &Context<'_>) -> Result<(Tensor, Tensor)> {
        let table = self.table(&q, context)?;
        if self.turns_whole_heads() {
            return table.rotate(&q, &k, context.positions);
        }
        let part = |x: &Tensor| x.f_narrow(3, 0, self.width);
        let (rotated_q, rotated_k) = table.rotate(&part(&q)?, &part(&k)?, context.positions)?;
        let joined = |rotated: Tensor, x: &Tensor| -> Result<Tensor> {
            let rest = x.f_narrow(3, self.width, self.head - self.width)?;
            Ok(Tensor::f_cat(&[rotated, rest], 3)?)
        };
        Ok((joined(rotated_q, &q)?, joined(rotated_k, &k)?))
    }

    /// Rotates `q` `[b, t, heads, head]`, whose whole heads rotate, alone.
    pub(super) fn rotate_queries(&self, q: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        self.table(q, context)?.rotate_queries(q, context.positions)
    }

    /// The table of this batch, whose longest row decides.
    fn table(&self, q: &Tensor, context: &Context<'_>) -> Result<&RotaryTable> {
        let Some((original, long)) = &self.long else { return Ok(&self.table) };
        let sequence = q.size()[1];
        if let Some(shard) = context.sequence {
            // The same one on every rank, wherever its part of the row is.
            let longest = context.documents.map_or(shard.length(), Documents::longest);
            return Ok(if longest > *original { long } else { &self.table });
        }
        let is_long = match (context.extension, context.positions) {
            // A cache's rows are as long as its longest, without reading the positions from the device.
            (Some(extension), _) => extension.end() > *original,
            (None, Some(positions)) if sequence > *original => {
                i64::try_from(positions.f_max()?)? >= *original
            }
            (None, _) => sequence > *original,
        };
        Ok(if is_long { long } else { &self.table })
    }
}
