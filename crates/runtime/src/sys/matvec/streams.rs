//! How threads and streams divide the rows of a weight.

use super::results::Results;
use crate::error::Result;
use crate::sys::parallel;

/// Parts of a task's rows that are read in parallel. Each is one sequential stream, which the processor prefetches; four adjacent
/// rows at a time were read at half the rate.
pub(in crate::sys) const STREAMS: usize = 4;
/// Vectors that are multiplied at once with the weights that were read.
pub(in crate::sys) const VECTORS: usize = 4;

/// Products of the rows of a weight with vectors.
pub(in crate::sys) trait Products: Sync {
    /// What the rows of a task have in common.
    type Task;
    fn task(&self, first: usize, end: usize) -> Self::Task;
    /// Products of four rows with the `number`-th [`VECTORS`] vectors, or as many as there are.
    fn of_rows(&self, task: &Self::Task, rows: [usize; STREAMS], number: usize) -> [[f32; VECTORS]; STREAMS];
}

/// Computes the products of all rows, about `of_task` in each task.
pub(in crate::sys) fn run(products: &impl Products, results: &Results, of_task: usize) -> Result<()> {
    let [vectors, rows] = results.size();
    let threads = usize::try_from(tch::get_num_threads()).unwrap_or(1).max(1);
    let of_task = of_task.min(rows.div_ceil(threads)).max(STREAMS);
    parallel::for_each(rows.div_ceil(of_task), |task| {
        let first = task * of_task;
        let end = rows.min(first + of_task);
        let count = end - first;
        let of_stream = count.div_ceil(STREAMS);
        let shared = products.task(first, end);
        let mut sums = vec![0f32; vectors * count];
        for step in 0..of_stream {
            // The last stream may be shorter: its last row is read again, and those sums are dropped.
            let mut of_streams = [0; STREAMS];
            for (stream, row) in of_streams.iter_mut().enumerate() {
                *row = end.min(first + stream * of_stream + step + 1) - 1;
            }
            for number in 0..vectors.div_ceil(VECTORS) {
                let found = products.of_rows(&shared, of_streams, number);
                for (stream, found) in found.iter().enumerate() {
                    let row = stream * of_stream + step;
                    if row >= count {
                        break;
                    }
                    for vector in number * VECTORS..vectors.min((number + 1) * VECTORS) {
                        sums[vector * count + row] = found[vector - number * VECTORS];
                    }
                }
            }
        }
        for (vector, sums) in sums.chunks_exact(count).enumerate() {
            // SAFETY: both are among the results, and no other task has these rows.
            unsafe { results.put(vector, first, sums) };
        }
    })
}
