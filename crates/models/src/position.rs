//! Positional encodings.
//!
//! Sinusoidal (Vaswani et al. 2017): for position p and even column 2i of E, PE[p, 2i] = sin(p·10000^(−2i/E)) and PE[p, 2i+1] =
//! cos of the same. A shift by s positions rotates each pair of columns, so it is a linear map. The table is not learned and
//! not in the state dict.

use runtime::ops::TryScalar;
use tch::{Device, Kind, Tensor};

use crate::error::{Result, wrong_shape};
use crate::init::Init;
use crate::linear::positive;
use crate::module::{Module, Visitor, VisitorMut};

/// Adds sinusoidal encodings of the positions. `PositionalEncoding` of the assignment.
#[derive(Debug)]
pub struct PositionalEncoding {
    table: Tensor,
}

impl PositionalEncoding {
    /// Creates a table of `max_length` positions, computed in f64 and rounded once.
    ///
    /// # Errors
    /// A size below 1.
    pub fn new(max_length: i64, width: i64, options: (Kind, Device)) -> Result<Self> {
        positive("positional encoding", &[("max_length", max_length), ("width", width)])?;
        let positions = Tensor::try_arange(max_length, (Kind::Double, Device::Cpu))?.f_unsqueeze(1)?;
        let pairs = (width + 1) / 2;
        let exponent =
            Tensor::try_arange(pairs, (Kind::Double, Device::Cpu))?.try_mul_scalar(-2.0 / width as f64)?;
        let angle = positions.f_mul(&exponent.try_mul_scalar(10_000f64.ln())?.f_exp()?)?;
        // [max_length, pairs, 2] laid out flat alternates sine and cosine; an odd width drops the last cosine.
        let table =
            Tensor::f_stack(&[angle.f_sin()?, angle.f_cos()?], 2)?.f_reshape([max_length, 2 * pairs])?;
        let table =
            table.f_narrow(1, 0, width)?.f_contiguous()?.f_to_kind(options.0)?.f_to_device(options.1)?;
        Ok(Self { table })
    }

    /// Adds the encoding of positions 0, 1, 2, …, or of the given positions `[batch, sequence]` (int64), to `[batch, sequence,
    /// width]`.
    ///
    /// # Errors
    /// A sequence longer than the table, another width.
    pub fn forward(&self, x_btd: &Tensor, positions_bt: Option<&Tensor>) -> Result<Tensor> {
        Ok(x_btd.f_add(&rows(&self.table, x_btd, positions_bt)?)?)
    }

    /// Returns the number of positions.
    pub fn max_length(&self) -> i64 {
        self.table.size()[0]
    }
}

/// Adds a learned row for each position.
#[derive(Debug)]
pub struct LearnedPositionalEmbedding {
    /// `[max_length, width]`.
    pub weight: Tensor,
}

impl LearnedPositionalEmbedding {
    /// Creates a table with the given initialisation.
    ///
    /// # Errors
    /// A size below 1.
    pub fn new(max_length: i64, width: i64, init: Init, options: (Kind, Device)) -> Result<Self> {
        positive("learned positions", &[("max_length", max_length), ("width", width)])?;
        Ok(Self { weight: init.parameter(&[max_length, width], options)? })
    }

    /// As [`PositionalEncoding::forward`].
    ///
    /// # Errors
    /// As [`PositionalEncoding::forward`].
    pub fn forward(&self, x_btd: &Tensor, positions_bt: Option<&Tensor>) -> Result<Tensor> {
        Ok(x_btd.f_add(&rows(&self.weight, x_btd, positions_bt)?)?)
    }
}

/// Selects the rows of `table` for the positions of `x`.
fn rows(table: &Tensor, x_btd: &Tensor, positions_bt: Option<&Tensor>) -> Result<Tensor> {
    let operation = "positions";
    let (length, width) = table.size2()?;
    let &[batch, sequence, found_width] = &x_btd.size()[..] else {
        let expected = "[batch, sequence, width]".to_owned();
        return Err(wrong_shape(operation, "x", x_btd.size(), expected));
    };
    if found_width != width {
        let expected = format!("[batch, sequence, {width}]");
        return Err(wrong_shape(operation, "x", x_btd.size(), expected));
    }
    match positions_bt {
        None if sequence > length => {
            let expected = format!(
                "at most {length} positions; shorten the rows, or create the model with a larger maximum"
            );
            Err(wrong_shape(operation, "x", x_btd.size(), expected))
        }
        None => Ok(table.f_narrow(0, 0, sequence)?),
        Some(positions) if positions.size() != [batch, sequence] => {
            let expected = format!("[{batch}, {sequence}], the shape of the tokens");
            Err(wrong_shape(operation, "positions", positions.size(), expected))
        }
        // `embedding` checks the range on the CPU, and its backward is that of a lookup table.
        Some(positions) => Ok(Tensor::f_embedding(table, positions, -1, false, false)?),
    }
}

impl Module for PositionalEncoding {
    fn visit<'a>(&'a self, _: &mut Visitor<'a, '_>) {}

    fn visit_mut(&mut self, _: &mut VisitorMut<'_>) -> Result<()> {
        Ok(())
    }
}

impl Module for LearnedPositionalEmbedding {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.parameter("weight", &self.weight);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        visitor.parameter("weight", &mut self.weight)
    }
}
