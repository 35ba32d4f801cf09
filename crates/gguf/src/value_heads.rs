//! The order of the value heads of linear attention.
//!
//! Hugging Face has those of one key head together, (g, j) at g·per_key + j; llama.cpp repeats all key heads in turn, (g, j) at j·keys + g.

/// Rows, elements or columns from `start` on that are value heads of `width` each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ValueHeads {
    pub(crate) start: u64,
    pub(crate) width: u64,
    /// Key heads.
    pub(crate) keys: u64,
    /// Value heads of a key head.
    pub(crate) per_key: u64,
}

impl ValueHeads {
    /// Where the file has Hugging Face's index.
    pub(crate) fn stored(&self, index: u64) -> u64 {
        self.moved(index, self.per_key, self.keys)
    }

    /// Which of Hugging Face's indices the file has there.
    pub(crate) fn source(&self, index: u64) -> u64 {
        self.moved(index, self.keys, self.per_key)
    }

    /// From heads in rows of `inner` to heads in rows of `outer`.
    fn moved(&self, index: u64, inner: u64, outer: u64) -> u64 {
        let Some(within) = index.checked_sub(self.start) else { return index };
        let (head, offset) = (within / self.width, within % self.width);
        let (row, column) = (head / inner, head % inner);
        self.start + (column * outer + row) * self.width + offset
    }

    /// Returns rows of `columns` values with their columns in the file's order, or, for `back`, in Hugging Face's.
    pub(crate) fn reorder_columns(&self, values: &mut [f32], columns: usize, back: bool) {
        let mut row = vec![0f32; columns];
        for chunk in values.chunks_mut(columns) {
            for (at, place) in row.iter_mut().enumerate() {
                let from = if back { self.stored(at as u64) } else { self.source(at as u64) };
                *place = chunk[from as usize];
            }
            chunk.copy_from_slice(&row);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_of_one_key_are_apart_in_the_file() {
        // Two rows before, three value heads of two rows for each of two key heads.
        let heads = ValueHeads { start: 2, width: 2, keys: 2, per_key: 3 };
        let order: Vec<u64> = (0..14).map(|at| heads.source(at)).collect();
        assert_eq!(order, [0, 1, 2, 3, 8, 9, 4, 5, 10, 11, 6, 7, 12, 13]);
        assert!((0..14).all(|at| heads.source(heads.stored(at)) == at));
        let mut values: Vec<f32> = (0..28).map(|at| at as f32).collect();
        heads.reorder_columns(&mut values, 14, false);
        assert_eq!(values[14..20], [14.0, 15.0, 16.0, 17.0, 22.0, 23.0]);
        heads.reorder_columns(&mut values, 14, true);
        assert!(values.iter().enumerate().all(|(at, value)| *value == at as f32));
    }
}
