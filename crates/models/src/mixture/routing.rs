//! The experts of each token, and the order in which rows are computed.

use std::ops::Range;

use runtime::device::graph::operators_only;
use tch::Tensor;

use crate::error::{Error, Result};

/// Returns the indices `[n, k]` of the largest probabilities `[n, e]` of each token, the largest first, of equal ones the lowest index.
pub(super) fn choose(probabilities_ne: &Tensor, per_token: i64) -> Result<Tensor> {
    let _no_grad = tch::no_grad_guard();
    let (_, order) = probabilities_ne.f_sort_stable(true, -1, true)?;
    Ok(order.f_narrow(-1, 0, per_token)?.f_contiguous()?)
}

/// Returns the weights `[n, k]` of the chosen experts, with a graph to the probabilities.
pub(super) fn weights_of(probabilities_ne: &Tensor, chosen_nk: &Tensor, normalizes: bool) -> Result<Tensor> {
    let weights = probabilities_ne.f_gather(-1, chosen_nk, false)?;
    if !normalizes {
        return Ok(weights);
    }
    let sum = weights.f_sum_dim_intlist([-1].as_slice(), true, weights.kind())?;
    Ok(weights.f_div(&sum)?)
}

/// The rows of a batch sorted by expert: one for each token and each of its experts.
#[derive(Debug)]
pub(super) struct Routing {
    /// The experts that have rows, ascending, with the range of their rows.
    ranges: Vec<(usize, Range<i64>)>,
    /// The slot (token·k + j) of each row, `[n·k]`.
    slots: Tensor,
    /// The token of each row, `[n·k]`.
    tokens: Tensor,
    /// The row of each slot, `[n·k]`.
    rows: Tensor,
    /// Experts of a token.
    per_token: i64,
}

impl Routing {
    /// Sorts the rows of `chosen_nk` `[n, k]`, numbers of experts below `experts`. Reads them from their device, so a captured step cannot
    /// have experts.
    pub(super) fn new(chosen_nk: &Tensor, experts: usize) -> Result<Self> {
        if operators_only() {
            let reason =
                "a recorded step cannot repeat a choice of experts, which the host reads; do not capture it";
            return Err(Error::invalid("mixture of experts", reason.to_owned()));
        }
        let per_token = chosen_nk.size().last().copied().unwrap_or(1);
        let chosen: Vec<i64> = Vec::try_from(&chosen_nk.f_flatten(0, -1)?)?;
        // A stable counting sort: the rows of an expert are in the order of their tokens.
        let mut starts = vec![0i64; experts + 1];
        for &expert in &chosen {
            starts[expert as usize + 1] += 1;
        }
        for expert in 0..experts {
            starts[expert + 1] += starts[expert];
        }
        let used = (0..experts).map(|expert| (expert, starts[expert]..starts[expert + 1]));
        let ranges = used.filter(|(_, range)| !range.is_empty()).collect();
        let (mut slots, mut rows) = (vec![0i64; chosen.len()], vec![0i64; chosen.len()]);
        for (slot, &expert) in chosen.iter().enumerate() {
            let row = &mut starts[expert as usize];
            (slots[*row as usize], rows[slot]) = (slot as i64, *row);
            *row += 1;
        }
        let tokens: Vec<i64> = slots.iter().map(|slot| slot / per_token).collect();
        let device = chosen_nk.device();
        let tensor = |list: &[i64]| Tensor::from_slice(list).f_to_device(device);
        let (slots, tokens, rows) = (tensor(&slots)?, tensor(&tokens)?, tensor(&rows)?);
        Ok(Self { ranges, slots, tokens, rows, per_token })
    }

    /// The experts that have rows, ascending, with the range of their rows.
    pub(super) fn ranges(&self) -> &[(usize, Range<i64>)] {
        &self.ranges
    }

    /// Returns each row's token of `x_nh`, `[n·k, h]`.
    pub(super) fn dispatch(&self, x_nh: &Tensor) -> runtime::Result<Tensor> {
        Ok(x_nh.f_index_select(0, &self.tokens)?)
    }

    /// Returns the numbers of the slots `[n, k]` by row, `[n·k, 1]`.
    pub(super) fn by_row(&self, numbers_nk: &Tensor) -> runtime::Result<Tensor> {
        Ok(numbers_nk.f_reshape([-1, 1])?.f_index_select(0, &self.slots)?)
    }

    /// Returns rows `[n·k, …]` by slot, `[n, k, width]`.
    pub(super) fn by_slot(&self, rows: &Tensor) -> runtime::Result<Tensor> {
        let width = rows.size().last().copied().unwrap_or(1);
        Ok(rows.f_index_select(0, &self.rows)?.f_view([-1, self.per_token, width])?)
    }
}

#[cfg(test)]
mod tests {
    use tch::Tensor;

    use super::*;

    #[test]
    fn rows_are_sorted_by_expert_and_token() {
        let probabilities =
            Tensor::from_slice2(&[[0.1f32, 0.4, 0.1, 0.4], [0.7, 0.1, 0.1, 0.1], [0.2, 0.2, 0.2, 0.4]]);
        let chosen = choose(&probabilities, 2).unwrap();
        // Of equal probabilities the lowest index.
        assert_eq!(chosen, Tensor::from_slice2(&[[1i64, 3], [0, 1], [3, 0]]));
        let routing = Routing::new(&chosen, 5).unwrap();
        assert_eq!(routing.ranges(), [(0, 0..2), (1, 2..4), (3, 4..6)]);
        let x = Tensor::from_slice2(&[[10.0], [11.0], [12.0]]);
        let rows = routing.dispatch(&x).unwrap();
        assert_eq!(Vec::<f64>::try_from(rows.flatten(0, -1)).unwrap(), [11.0, 12.0, 10.0, 11.0, 10.0, 12.0]);
        let numbers = Tensor::arange(6, tch::kind::FLOAT_CPU).view([3, 2]);
        let by_row = routing.by_row(&numbers).unwrap();
        assert_eq!(routing.by_slot(&by_row).unwrap().squeeze_dim(-1), numbers);
        let weights = weights_of(&probabilities, &chosen, true).unwrap();
        assert!((weights.get(2).double_value(&[0]) - 2.0 / 3.0).abs() < 1e-6);
    }
}
