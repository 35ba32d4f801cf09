//! The weights of the examples of a batch.

use dataloading::ExampleWeights;
use tch::{Device, Tensor};

use super::batch::Item;
use super::{Grouping, positions};
use crate::error::Result;

/// Returns the weights of rows of `length` positions. An example's weight is the magnitude of its row's, whose sign says whether an answer is
/// desirable; a pair has that of its chosen row.
pub(super) fn of(
    rows: &[Vec<Item>],
    length: usize,
    grouping: Grouping,
    device: Device,
) -> Result<ExampleWeights> {
    let (mut of_positions, mut examples) = (Vec::with_capacity(rows.len() * length), Vec::new());
    let (mut of_targets, mut chosen_targets) = (0.0, 0.0);
    for (row, end) in rows.iter().zip(1..) {
        for item in row {
            let weight = item.row.weight.abs();
            of_positions.extend(std::iter::repeat_n(weight, positions(&item.row)));
            let targets = f64::from(weight) * item.targets() as f64;
            of_targets += targets;
            if item.is_chosen || grouping == Grouping::Rated {
                examples.push(weight);
            }
            if item.is_chosen {
                chosen_targets += targets;
            }
        }
        of_positions.resize(end * length, 0.0);
    }
    let on_device = |values: &[f32]| Tensor::f_from_slice(values)?.f_to_device(device);
    let positions = on_device(&of_positions)?.f_reshape([rows.len() as i64, length as i64])?;
    let (examples, total) = match grouping {
        Grouping::Rows => (None, of_targets),
        Grouping::Pairs { .. } | Grouping::Rated => {
            let total = examples.iter().map(|weight| f64::from(*weight)).sum();
            (Some(on_device(&examples)?), total)
        }
    };
    Ok(ExampleWeights { positions, examples, total, chosen_targets })
}
