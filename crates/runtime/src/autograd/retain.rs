//! Selective checkpointing: segments that keep the results of products and recompute the rest.
//!
//! A [`checkpoint`](super::checkpoint()) computes everything twice. Nearly all of that work is in matrix products and attention,
//! while nearly all bytes that a layer keeps are in between: norms, activations, sums, dropout masks. With
//! [`Checkpoint::retain_products`](super::Checkpoint::retain_products) the first run keeps the products' results; the second run
//! takes them in the same order and computes only what is between. A product of the second run is a node whose forward computes
//! nothing and whose backward is the ordinary one, with the recomputed input.
//!
//! For y = f(x) with products P₁, P₂, … in f, a segment keeps x and every Pᵢ, and repeats the elementwise work of one forward.
//! PyTorch's selective checkpointing (`create_selective_checkpoint_contexts`) does this in the dispatcher; here each product is a
//! [`Function`](super::Function) whose forward computes inside [`kept`], as the linear layer and the attention of the crate `kernels` do.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::marker::PhantomData;

use tch::Tensor;

use crate::error::{Error, Result};

/// The products of a segment's run.
enum Tape {
    /// First run: records each result and its version.
    Record(Vec<Vec<(Tensor, i64)>>),
    /// Second run: returns them.
    Replay(VecDeque<Vec<Tensor>>),
}

thread_local! {
    static TAPE: RefCell<Option<Tape>> = const { RefCell::new(None) };
}

/// Returns whether this thread runs a segment that keeps its products.
pub fn active() -> bool {
    TAPE.with_borrow(Option::is_some)
}

/// Returns the results of `compute`; in a segment that keeps its products, the second run takes them from the first. Call it in the
/// forward of a [`Function`](super::Function), around the work that should not run twice; its results may be saved or returned.
///
/// # Errors
/// Errors of `compute`; a second run with more products than the first.
pub fn kept(compute: impl FnOnce() -> Result<Vec<Tensor>>) -> Result<Vec<Tensor>> {
    let replayed = TAPE.with_borrow_mut(|tape| match tape {
        Some(Tape::Replay(results)) => Some(results.pop_front()),
        _ => None,
    });
    match replayed {
        // Detached, because it becomes the output of a node of the second run.
        Some(Some(results)) => Ok(results.iter().map(Tensor::f_detach).collect::<Result<_, _>>()?),
        Some(None) => Err(differs("more")),
        None => {
            let results = compute()?;
            TAPE.with_borrow_mut(|tape| {
                if let Some(Tape::Record(list)) = tape {
                    let noted = results
                        .iter()
                        .map(|tensor| Ok((tensor.shallow_clone(), tensor.f_internal_version()?)));
                    list.push(noted.collect::<Result<_>>()?);
                }
                Ok::<_, Error>(())
            })?;
            Ok(results)
        }
    }
}

/// A guard of this thread's tape; dropping it restores the previous one.
pub(super) struct TapeGuard {
    previous: Option<Tape>,
    thread: PhantomData<*const ()>,
}

impl TapeGuard {
    /// Neither keeps nor reuses products: the second run of an ordinary segment.
    pub(super) fn none() -> Self {
        Self::enter(None)
    }

    /// Records the products of a first run.
    pub(super) fn record() -> Self {
        Self::enter(Some(Tape::Record(Vec::new())))
    }

    /// Reuses the products of the first run.
    pub(super) fn replay(products: Vec<Vec<Tensor>>) -> Self {
        Self::enter(Some(Tape::Replay(products.into())))
    }

    fn enter(tape: Option<Tape>) -> Self {
        Self { previous: TAPE.replace(tape), thread: PhantomData }
    }

    /// Returns the recorded products.
    pub(super) fn recorded(self) -> Result<Vec<Vec<Tensor>>> {
        let Some(Tape::Record(list)) = TAPE.take() else { return Ok(Vec::new()) };
        let unchanged = |(tensor, version): (Tensor, i64)| {
            if tensor.f_internal_version()? == version {
                return Ok(tensor);
            }
            Err(Error::invalid(
                "checkpoint",
                format!(
                    "a product's result of shape {:?} was changed in place inside a segment that keeps its products, so \
                     the second run would change it twice; change a copy, or do not keep the products",
                    tensor.size()
                ),
            ))
        };
        list.into_iter().map(|results| results.into_iter().map(unchanged).collect()).collect()
    }

    /// Checks that the second run used every product.
    pub(super) fn exhausted(self) -> Result<()> {
        match TAPE.take() {
            Some(Tape::Replay(results)) if !results.is_empty() => Err(differs("fewer")),
            _ => Ok(()),
        }
    }
}

impl Drop for TapeGuard {
    fn drop(&mut self) {
        TAPE.set(self.previous.take());
    }
}

fn differs(how: &str) -> Error {
    Error::invalid(
        "checkpoint",
        format!(
            "the closure computed {how} products in backward than in forward; a segment that keeps its products must \
             compute the same ones in the same order each time"
        ),
    )
}
