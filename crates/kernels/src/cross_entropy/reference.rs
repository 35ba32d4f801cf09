//! The passes as libtorch's operators, for devices without a kernel of this crate.

use runtime::Result;
use runtime::ops::TryScalar;
use tch::{Kind, Tensor};

use super::{Coefficients, LogitsPass, Statistics, Targets, TileInputs, Transform};

/// Chains of libtorch's operators, in place where possible; a tile in BFloat16 or Half is copied to fp32. Any device; no synchronisation.
#[derive(Clone, Copy, Debug)]
pub struct Reference;

impl LogitsPass for Reference {
    fn temporaries(&self, tile: Kind) -> u64 {
        // Two, and for a tile in 16 bits its copy in fp32, each of twice the tile's size.
        if is_narrow(tile) { 6 } else { 2 }
    }

    fn statistics(
        &self,
        tile: &mut Tensor,
        inputs: TileInputs<'_>,
        statistics: &mut Statistics,
    ) -> Result<()> {
        if tile.numel() == 0 {
            return Ok(());
        }
        let TileInputs { first, transform, targets, class_weights } = inputs;
        self.logits(tile, transform)?;
        if is_narrow(tile.kind()) {
            let mut stored = tile.f_to_kind(Kind::Float)?;
            let unchanged = TileInputs { transform: Transform::default(), ..inputs };
            return self.statistics(&mut stored, unchanged, statistics);
        }
        // argmax z, and m with the earlier tiles.
        let (largest, column) = tile.f_max_dim(1, false)?;
        if let Some(best) = &mut statistics.best {
            // Strictly larger, so that the first of equal ones stays.
            let column_of_maximum = column
                .try_add_scalar(first)?
                .f_where_self(&largest.f_gt_tensor(&statistics.maximum)?, best)?;
            best.f_copy_(&column_of_maximum)?;
        }
        let maximum = statistics.maximum.f_maximum(&largest)?;
        // While every class is impossible, exponentials are of z itself.
        let finite = |m: &Tensor| m.f_where_self(&m.try_ne(f64::NEG_INFINITY)?, &m.f_zeros_like()?);
        let reference = finite(&maximum)?;
        // Σ e^(z − m) and Σ e^(z − m)·z: the earlier sums are multiplied by e^(m before − m).
        let shrink = finite(&statistics.maximum)?.f_sub(&reference)?.f_exp()?;
        let powers = tile.f_sub(&reference.f_unsqueeze(1)?)?.f_exp_()?;
        let sums = powers.f_sum_dim_intlist(1, false, None::<Kind>)?;
        let sum = statistics.sum.f_mul(&shrink)?.f_add(&sums)?;
        statistics.sum.f_copy_(&sum)?;
        if let Some(moment) = &mut statistics.moment {
            let mut powers = powers;
            let possible = powers.try_ne(0.0)?;
            let products = powers
                .f_mul_(tile)?
                .f_where_self(&possible, &Tensor::f_zeros([], (tile.kind(), tile.device()))?)?;
            let sum = moment.f_mul(&shrink)?.f_add(&products.f_sum_dim_intlist(1, false, None::<Kind>)?)?;
            moment.f_copy_(&sum)?;
        }
        statistics.maximum.f_copy_(&maximum)?;
        // Σ t·z and Σ t.
        match targets {
            Targets::Columns(columns) => {
                let (within, index) = within(columns, tile.size()[1])?;
                let logit = tile.f_gather(1, &index.f_unsqueeze(1)?, false)?.f_squeeze_dim(1)?;
                let logit = logit.f_where_self(&within, &logit.f_zeros_like()?)?;
                let _ = statistics.target.f_add_(&logit)?;
            }
            Targets::Dense(distributions) => {
                let weighted = match class_weights {
                    Some(weights) => distributions.f_mul(weights)?,
                    None => distributions.shallow_clone(),
                };
                // An impossible class without target weight adds nothing: 0·(−∞) is 0 here.
                let products = weighted.f_mul(tile)?;
                let products = products.f_where_self(
                    &weighted.try_ne(0.0)?,
                    &Tensor::f_zeros([], (tile.kind(), tile.device()))?,
                )?;
                let _ = statistics.target.f_add_(&products.f_sum_dim_intlist(1, false, None::<Kind>)?)?;
                if let Some(mass) = &mut statistics.mass {
                    let _ = mass.f_add_(&weighted.f_sum_dim_intlist(1, false, None::<Kind>)?)?;
                }
            }
        }
        // Σ w·z.
        if let Some(total) = &mut statistics.total {
            let sums = match class_weights {
                Some(weights) => tile.f_mv(weights)?,
                None => tile.f_sum_dim_intlist(1, false, None::<Kind>)?,
            };
            let _ = total.f_add_(&sums)?;
        }
        Ok(())
    }

    fn logits(&self, tile: &mut Tensor, transform: Transform<'_>) -> Result<()> {
        if is_narrow(tile.kind()) && transform.changes() {
            let mut wide = tile.f_to_kind(Kind::Float)?;
            self.logits(&mut wide, transform)?;
            return Ok(tile.f_copy_(&wide)?);
        }
        if let Some(bias) = transform.bias {
            let _ = tile.f_add_(bias)?;
        }
        match transform.softcap {
            Some(cap) => {
                let _ = tile.try_mul_scalar_(transform.scale / cap)?;
                let _ = tile.f_tanh_()?;
                let _ = tile.try_mul_scalar_(cap)?;
            }
            None if transform.scale != 1.0 => {
                let _ = tile.try_mul_scalar_(transform.scale)?;
            }
            None => {}
        }
        Ok(())
    }

    fn gradient(
        &self,
        tile: &mut Tensor,
        inputs: TileInputs<'_>,
        coefficients: Coefficients<'_>,
    ) -> Result<()> {
        if tile.numel() == 0 {
            return Ok(());
        }
        if is_narrow(tile.kind()) {
            let mut wide = tile.f_to_kind(Kind::Float)?;
            self.gradient(&mut wide, inputs, coefficients)?;
            return Ok(tile.f_copy_(&wide)?);
        }
        let TileInputs { transform, targets, class_weights, .. } = inputs;
        let slope = match transform.softcap {
            // s·(1 − (z/k)²)
            Some(cap) => Some(
                tile.f_square()?
                    .try_mul_scalar_(-transform.scale / (cap * cap))?
                    .try_add_scalar_(transform.scale)?,
            ),
            None => None,
        };
        let column = |row: &Tensor| row.f_unsqueeze(1);
        let _ = tile.f_sub_(&column(coefficients.maximum)?)?;
        let _ = tile.f_exp_()?;
        let _ = tile.f_mul_(&column(coefficients.powers)?)?;
        if let Some(constant) = coefficients.constant {
            match class_weights {
                Some(weights) => {
                    let _ = tile.f_addr_(&constant.f_neg()?, weights)?;
                }
                None => {
                    let _ = tile.f_sub_(&column(constant)?)?;
                }
            }
        }
        match targets {
            Targets::Columns(columns) => {
                let (within, index) = within(columns, tile.size()[1])?;
                let amount = coefficients.target.f_neg()?;
                let amount = amount.f_where_self(&within, &amount.f_zeros_like()?)?;
                let _ = tile.f_scatter_add_(1, &column(&index)?, &column(&amount)?)?;
            }
            Targets::Dense(distributions) => {
                let weighted = distributions.f_mul(&column(coefficients.target)?)?;
                let weighted = match class_weights {
                    Some(weights) => weighted.f_mul(weights)?,
                    None => weighted,
                };
                let _ = tile.f_sub_(&weighted)?;
            }
        }
        match slope {
            Some(slope) => {
                let _ = tile.f_mul_(&slope)?;
            }
            None if transform.scale != 1.0 => {
                let _ = tile.try_mul_scalar_(transform.scale)?;
            }
            None => {}
        }
        Ok(())
    }
}

fn is_narrow(kind: Kind) -> bool {
    matches!(kind, Kind::BFloat16 | Kind::Half)
}

/// Returns which targets are columns of a tile of this width, and their index in it (0 for the others).
fn within(columns: &Tensor, width: i64) -> Result<(Tensor, Tensor)> {
    let within = columns.try_ge(0)?.f_logical_and(&columns.try_lt(width)?)?;
    let index = columns.try_clamp(0, width - 1)?;
    Ok((within, index))
}
