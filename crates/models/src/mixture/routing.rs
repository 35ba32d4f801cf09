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
    /// Experts of a token.
    per_token: i64,
}

/// The rows of one expert.
pub(super) struct Rows {
    tokens: Tensor,
    slots: Tensor,
}

impl Rows {
    /// Returns each row's token of `x_nh`, `[rows, h]`.
    pub(super) fn of_tokens(&self, x_nh: &Tensor) -> runtime::Result<Tensor> {
        Ok(x_nh.f_index_select(0, &self.tokens)?)
    }

    /// Returns each row's number of the slots `[n·k, 1]`.
    pub(super) fn of_slots(&self, numbers: &Tensor) -> runtime::Result<Tensor> {
        Ok(numbers.f_index_select(0, &self.slots)?)
    }

    /// Writes the rows to their slots of `target` `[n·k, width]`.
    pub(super) fn write(&self, rows: &Tensor, target: &mut Tensor) -> runtime::Result<()> {
        let _ = target.f_index_copy_(0, &self.slots, rows)?;
        Ok(())
    }
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
        let mut slots = vec![0i64; chosen.len()];
        for (slot, &expert) in chosen.iter().enumerate() {
            let row = &mut starts[expert as usize];
            slots[*row as usize] = slot as i64;
            *row += 1;
        }
        let tokens: Vec<i64> = slots.iter().map(|slot| slot / per_token).collect();
        let device = chosen_nk.device();
        let tensor = |list: &[i64]| Tensor::from_slice(list).f_to_device(device);
        Ok(Self { ranges, slots: tensor(&slots)?, tokens: tensor(&tokens)?, per_token })
    }

    /// The experts that have rows, ascending, with the range of their rows.
    pub(super) fn ranges(&self) -> &[(usize, Range<i64>)] {
        &self.ranges
    }

    /// The rows of an expert, by its index among those that have rows.
    pub(super) fn rows(&self, number: usize) -> runtime::Result<Rows> {
        let range = self.ranges.get(number).map_or(0..0, |(_, range)| range.clone());
        let of = |tensor: &Tensor| tensor.f_narrow(0, range.start, range.end - range.start);
        Ok(Rows { tokens: of(&self.tokens)?, slots: of(&self.slots)? })
    }

    /// Returns empty rows for all slots of tokens like `x_nh`, `[n·k, width]`.
    pub(super) fn empty_slots(&self, x_nh: &Tensor, width: i64) -> runtime::Result<Tensor> {
        let slots = x_nh.size().first().copied().unwrap_or(0) * self.per_token;
        Ok(Tensor::f_empty([slots, width], (x_nh.kind(), x_nh.device()))?)
    }

    /// Returns the slots `[n·k, width]` by token, `[n, k, width]`.
    pub(super) fn by_token(&self, slots: &Tensor) -> runtime::Result<Tensor> {
        let width = slots.size().last().copied().unwrap_or(1);
        Ok(slots.f_view([-1, self.per_token, width])?)
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
        let numbers = Tensor::arange(6, tch::kind::FLOAT_CPU).view([6, 1]);
        let mut slots = routing.empty_slots(&x, 1).unwrap();
        let mut written = routing.empty_slots(&numbers.narrow(0, 0, 3), 1).unwrap();
        let list = |tensor: &Tensor| Vec::<f64>::try_from(tensor.flatten(0, -1)).unwrap();
        for (number, tokens) in [[11.0, 12.0], [10.0, 11.0], [10.0, 12.0]].into_iter().enumerate() {
            let rows = routing.rows(number).unwrap();
            let x = rows.of_tokens(&x).unwrap();
            assert_eq!(list(&x), tokens);
            rows.write(&x, &mut slots).unwrap();
            rows.write(&rows.of_slots(&numbers).unwrap(), &mut written).unwrap();
        }
        assert_eq!(list(&slots), [10.0, 10.0, 11.0, 11.0, 12.0, 12.0]);
        assert_eq!(routing.by_token(&written).unwrap(), numbers.view([3, 2, 1]));
        let weights = weights_of(&probabilities, &chosen, true).unwrap();
        assert!((weights.get(2).double_value(&[0]) - 2.0 / 3.0).abs() < 1e-6);
    }
}
