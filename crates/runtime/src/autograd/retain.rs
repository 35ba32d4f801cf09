//! Segments that keep their products and compute the rest again.
//!
//! A [`checkpoint`](super::checkpoint()) computes everything twice. Nearly all of that work is in matrix products and
//! attention, and nearly all bytes that a layer keeps are in between: norms, activations, sums, dropout's masks. With
//! [`Checkpoint::retain_products`](super::Checkpoint::retain_products) the first run keeps the products' results; the second
//! takes them from there, in the order in which they were made, and computes only what lies between. A product of the second
//! run is a node whose forward computes nothing and whose backward is the real one, of the input that was made again.
//!
//! So for y = f(x) with products P₁, P₂, … in f, a segment holds x and every Pᵢ, and pays the elementwise work of one forward.
//! PyTorch's selective checkpointing (`create_selective_checkpoint_contexts`) does this in the dispatcher; here the product
//! itself takes part: it is a [`Function`](super::Function) whose forward computes inside [`kept`]. [`linear`] and
//! [`causal_attention`] are such functions within a segment, and libtorch's own operators elsewhere.

mod attention;
mod linear;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::marker::PhantomData;

use tch::Tensor;

pub use attention::causal_attention;
pub use linear::linear;

use crate::error::{Error, Result};

/// What the run of a segment does with its products.
enum Tape {
    /// First run: notes each result, with its version.
    Record(Vec<Vec<(Tensor, i64)>>),
    /// Second run: hands them out.
    Replay(VecDeque<Vec<Tensor>>),
}

thread_local! {
    static TAPE: RefCell<Option<Tape>> = const { RefCell::new(None) };
}

/// Whether this thread runs a segment that keeps its products.
pub fn active() -> bool {
    TAPE.with_borrow(Option::is_some)
}

/// What `compute` gives: in a segment that keeps its products, the second run takes it from the first. Call it in the
/// forward of a [`Function`](super::Function), around the work that is not to be done twice; what it gives may then be saved
/// or returned as ever.
///
/// # Errors
/// Those of `compute`; a second run with more products than the first.
pub fn kept(compute: impl FnOnce() -> Result<Vec<Tensor>>) -> Result<Vec<Tensor>> {
    let replayed = TAPE.with_borrow_mut(|tape| match tape {
        Some(Tape::Replay(results)) => Some(results.pop_front()),
        _ => None,
    });
    match replayed {
        // Detached: it becomes the output of a node of the second run's own.
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

/// A tape is in place until this is dropped; then the one before it is again.
pub(super) struct Within {
    previous: Option<Tape>,
    thread: PhantomData<*const ()>,
}

impl Within {
    /// Nothing is kept and nothing taken: the second run of an ordinary segment.
    pub(super) fn none() -> Self {
        Self::enter(None)
    }

    /// A first run.
    pub(super) fn record() -> Self {
        Self::enter(Some(Tape::Record(Vec::new())))
    }

    /// A second run with the products of the first.
    pub(super) fn replay(products: Vec<Vec<Tensor>>) -> Self {
        Self::enter(Some(Tape::Replay(products.into())))
    }

    fn enter(tape: Option<Tape>) -> Self {
        Self { previous: TAPE.replace(tape), thread: PhantomData }
    }

    /// The products of the first run, after it.
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

    /// That the second run took every product, after it.
    pub(super) fn exhausted(self) -> Result<()> {
        match TAPE.take() {
            Some(Tape::Replay(results)) if !results.is_empty() => Err(differs("fewer")),
            _ => Ok(()),
        }
    }
}

impl Drop for Within {
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
