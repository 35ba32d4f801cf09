//! Counting the work of dispatched operators.

use super::counts::{Counts, Flops};
use crate::error::Result;
use crate::ops;
use crate::sys::profile as sys;

/// Counts floating-point operations and bytes of the operators that run between its start and [`Counter::finish`].
///
/// It observes the dispatcher, including backward, hand-written backward passes, recomputation and other threads. Without a counter
/// there is no overhead; with one, an operator takes about half a microsecond longer (a product of 8 × 8: 0.8 µs without, 1.4 µs
/// with; `cargo run --release -p runtime --example counter_overhead` measures it). Counters may overlap.
///
/// # FLOPs
/// Exact, from shapes, for operators that contract an index; a multiply-add is two. Everything else (elementwise,
/// softmax, normalisation, optimizers) counts as none, as in the field's formulas.
///
/// | operators | FLOPs |
/// |---|---|
/// | `[m, k] · [k, n]`: `mm`, `addmm`, `_addmm_activation`, `_scaled_mm`, …; `bmm`, `baddbmm` per matrix | 2·m·k·n |
/// | `mv`, `addmv` with `[m, k]`; `dot` with `[k]` | 2·m·k; 2·k |
/// | `convolution`, taps on the padding included; its backward for each of the gradients of input and weight | 2·outputs·(channels in / groups)·taps |
/// | attention forward, for each head and each pair of a query and a key, with head size d and value size dᵥ | 2·d + 2·dᵥ |
/// | attention backward, which recomputes the scores | 6·d + 4·dᵥ |
///
/// [`Flops`] gives attention in two conventions. `dense` has all pairs, as PaLM (arXiv:2204.02311, appendix B) and
/// PyTorch's `FlopCounterMode` count; `causal` has only the pairs that a causal mask or a window keeps, T·(T+1)/2 of T²
/// (FlashAttention's benchmark and Megatron-LM halve instead). Packed sequences count by their own lengths in both, for
/// which the starts are read from the device, which synchronises. A mask given as a tensor, and attention that
/// decomposes into matrix products, is dense in both, as that is what runs.
///
/// # Bytes
/// Each operand counts as read once and each result as written once, with the memory that it spans: an expanded tensor
/// counts once, and temporaries inside an operator do not count. An in-place operand is read and written; gathers
/// (`embedding`, `index_select`, …) read as much as they return. Views move nothing. This is the minimum that the
/// operators must move between memory and caches, not what the hardware did move.
///
/// # Composite operators
/// An operator that only calls others (its `CompositeImplicitAutograd` kernel runs) is not counted itself; one with a formula, or
/// known not to contract, includes all that it calls. So nothing counts twice, such as SDPA and its flash kernel, `convolution` and
/// its `mm`, `linear` and its `addmm`. Other operators are listed in [`Counts::unknown`], and printing [`Counts`] warns about them.
#[must_use = "a counter that is dropped at once counts nothing"]
pub struct Counter {
    counter: sys::Counter,
}

impl Counter {
    /// Counts every thread of the process.
    ///
    /// # Errors
    /// [`Error::Torch`](crate::Error::Torch) if libtorch refuses the callback.
    pub fn start() -> Result<Self> {
        Ok(Self { counter: sys::start_counter(false)? })
    }

    /// Counts this thread, and the threads of the autograd engine while they run a backward pass that this thread
    /// started.
    ///
    /// # Errors
    /// As [`Counter::start`].
    pub fn on_this_thread() -> Result<Self> {
        Ok(Self { counter: sys::start_counter(true)? })
    }

    /// Returns the counts so far.
    ///
    /// # Errors
    /// [`Error::Torch`](crate::Error::Torch) when memory runs out.
    pub fn counts(&self) -> Result<Counts> {
        Ok(Counts::from_rows(self.counter.rows()?))
    }

    /// Stops counting and returns the counts.
    ///
    /// # Errors
    /// As [`Counter::counts`].
    pub fn finish(self) -> Result<Counts> {
        self.counts()
    }
}

impl std::fmt::Debug for Counter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Counter").finish_non_exhaustive()
    }
}

/// A guard during which this thread's work also counts as recomputed.
#[must_use = "nothing counts as recomputed once the guard is dropped"]
pub struct Recompute {
    _recompute: sys::Recompute,
}

impl std::fmt::Debug for Recompute {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recompute").finish_non_exhaustive()
    }
}

/// Marks the work of this thread as recomputation until the guard is dropped: it counts in [`Counts::recomputed`] as well as in
/// [`Counts::total`]. Hold it around what a backward pass runs again, not around the gradients. Guards nest.
pub fn recompute() -> Recompute {
    Recompute { _recompute: sys::recompute() }
}

/// Adds the work of code that bypasses the dispatcher, such as a hand-written kernel, to the counters of this thread as
/// one call of `name`. Has negligible cost without a counter.
///
/// ```
/// use runtime::profile::{Counter, Flops, record_external};
///
/// let counter = Counter::on_this_thread()?;
/// record_external("my_kernel", Flops::from(2 * 64 * 64), 4 * 3 * 64)?;
/// assert_eq!(counter.finish()?.total.flops.dense, 8192);
/// # Ok::<(), runtime::Error>(())
/// ```
///
/// # Errors
/// [`Error::Torch`](crate::Error::Torch) when memory runs out.
pub fn record_external(name: &str, flops: Flops, bytes: u64) -> Result<()> {
    if !sys::is_counting() {
        return Ok(());
    }
    sys::record(name, flops.dense, flops.causal, bytes)
}

/// Returns whether a counter runs, for kernels whose FLOPs or bytes take time to compute: without one, [`record_external`] does nothing.
pub fn is_counting() -> bool {
    sys::is_counting()
}

/// Returns the FLOPs of a call of an operator by the counter's formula, without calling it; `None` without a formula.
/// For operators that have no kernel on this machine. Arguments are those of [`ops::call`].
///
/// ```
/// use runtime::profile::{Flops, flops_of};
/// use tch::{Tensor, kind::FLOAT_CPU};
///
/// let x = Tensor::zeros([8, 8], FLOAT_CPU);
/// assert_eq!(flops_of("aten::mm", "", &[(&x).into(), (&x).into()], &[])?, Some(Flops::from(1024)));
/// # Ok::<(), runtime::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) for an unknown operator or arguments that do not match its schema.
pub fn flops_of(
    name: &str,
    overload: &str,
    positional: &[ops::Value],
    named: &[(&str, ops::Value)],
) -> Result<Option<Flops>> {
    let flops = crate::sys::ops::flops(name, overload, positional, named)?;
    Ok(flops.map(|(dense, causal)| Flops { dense, causal }))
}
