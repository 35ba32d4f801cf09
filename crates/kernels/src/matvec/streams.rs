//! How threads and streams divide the rows of a weight.

use pulp::{Simd, WithSimd};
use runtime::Result;
use runtime::parallel;

use super::results::Results;
use crate::simd::arch;

/// Parts of a task's rows that are read in parallel. Each is one sequential stream, which the processor prefetches; four adjacent
/// rows at a time were read at half the rate.
pub(crate) const STREAMS: usize = 4;
/// Vectors that are multiplied at once with the weights that were read.
pub(crate) const VECTORS: usize = 4;

/// The sums of four rows, one of each stream, with up to [`VECTORS`] vectors.
pub(crate) type Sums = [[f32; VECTORS]; STREAMS];

/// Products of the rows of a weight with vectors.
pub(crate) trait Products: Sync {
    /// State that the rows of a task share.
    type Task;
    fn task(&self, first: usize, end: usize) -> Self::Task;
    /// Writes the products of four rows with the `number`-th [`VECTORS`] vectors, or as many as there are, number by number: a vector
    /// that is read before its numbers are in the cache waits for them.
    fn multiply<S: Simd>(
        &self,
        simd: S,
        task: &Self::Task,
        rows: [usize; STREAMS],
        number: usize,
        sums: &mut Sums,
    );
}

/// Computes the products of all rows, about `task_rows` in each task.
pub(crate) fn run(products: &impl Products, results: &Results, task_rows: usize) -> Result<()> {
    let [vectors, rows] = results.size();
    let threads = usize::try_from(tch::get_num_threads()).unwrap_or(1).max(1);
    let task_rows = task_rows.min(rows.div_ceil(threads)).max(STREAMS);
    let arch = arch();
    parallel::for_each(rows.div_ceil(task_rows), |task| {
        let first = task * task_rows;
        let end = rows.min(first + task_rows);
        let mut sums = vec![0f32; vectors * (end - first)];
        arch.dispatch(Rows { products, vectors, first, end, sums: &mut sums });
        for (vector, sums) in sums.chunks_exact(end - first).enumerate() {
            // SAFETY: both are among the results, and no other task has these rows.
            unsafe { results.put(vector, first, sums) };
        }
    })
}

/// The rows of a task, and the sums of each vector with them.
struct Rows<'a, P> {
    products: &'a P,
    vectors: usize,
    first: usize,
    end: usize,
    sums: &'a mut [f32],
}

impl<P: Products> WithSimd for Rows<'_, P> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { products, vectors, first, end, sums } = self;
        let count = end - first;
        let stream_rows = count.div_ceil(STREAMS);
        let shared = products.task(first, end);
        let mut products_of_rows = [[0.0; VECTORS]; STREAMS];
        for step in 0..stream_rows {
            // The last stream may be shorter: its last row is read again, and those sums are dropped.
            let mut rows = [0; STREAMS];
            for (stream, row) in rows.iter_mut().enumerate() {
                *row = end.min(first + stream * stream_rows + step + 1) - 1;
            }
            for number in 0..vectors.div_ceil(VECTORS) {
                products.multiply(simd, &shared, rows, number, &mut products_of_rows);
                for (stream, products_of_rows) in products_of_rows.iter().enumerate() {
                    let row = stream * stream_rows + step;
                    if row >= count {
                        break;
                    }
                    for vector in number * VECTORS..vectors.min((number + 1) * VECTORS) {
                        sums[vector * count + row] = products_of_rows[vector - number * VECTORS];
                    }
                }
            }
        }
    }
}
