//! What the inputs of an expression must be: shapes that broadcast, one device, floating-point dtypes.

use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::sys::elementwise::{NAME, takes};

/// Inputs that fit each other.
#[derive(Clone, Debug)]
pub(super) struct Operands {
    /// Of the outputs.
    pub(super) shape: Vec<i64>,
    /// Of the outputs.
    pub(super) kind: Kind,
    /// Size and dtype of each input.
    pub(super) given: Vec<(Vec<i64>, Kind)>,
}

impl Operands {
    pub(super) fn new(inputs: &[&Tensor]) -> Result<Self> {
        let refuse = |reason: String| Err(Error::invalid(NAME, reason));
        let Some(first) = inputs.first() else {
            return refuse("the expression has no input, so its result has no shape; give it one".into());
        };
        for (index, input) in inputs.iter().enumerate() {
            if !input.defined() {
                return refuse(format!("input {index} is undefined"));
            }
            if !takes(input.kind()) {
                return refuse(format!(
                    "input {index} is {:?}; expected Float, Double, BFloat16 or Half: convert it with `to_kind`",
                    input.kind()
                ));
            }
            if input.device() != first.device() {
                return refuse(format!(
                    "input {index} is on {:?} and input 0 on {:?}; move them to one device",
                    input.device(),
                    first.device()
                ));
            }
        }
        let sizes: Vec<Vec<i64>> = inputs.iter().map(|input| input.size()).collect();
        let shape = broadcast(&sizes)?;
        for (index, size) in sizes.iter().enumerate() {
            let vector: Vec<i64> = size.iter().copied().skip_while(|&n| n == 1).collect();
            let fits = *size == shape
                || size.iter().all(|&n| n == 1)
                || vector.as_slice() == &shape[shape.len() - 1..];
            if !fits {
                return refuse(format!(
                    "input {index} is {size:?} and the result {shape:?}; expected that shape, [{}] for the last \
                     dimension, or one number: `expand` it",
                    shape[shape.len() - 1]
                ));
            }
        }
        let kinds: Vec<Kind> = inputs.iter().map(|input| input.kind()).collect();
        let kind = promoted(&sizes, &kinds);
        Ok(Self { shape, kind, given: sizes.into_iter().zip(kinds).collect() })
    }
}

/// libtorch's rule: numbers without a dimension count only among themselves; bf16 with fp16 is fp32.
fn promoted(sizes: &[Vec<i64>], kinds: &[Kind]) -> Kind {
    let any = sizes.iter().any(|size| !size.is_empty());
    let counted =
        || sizes.iter().zip(kinds).filter(|(size, _)| !any || !size.is_empty()).map(|(_, &kind)| kind);
    let first = counted().next().unwrap_or(Kind::Float);
    if counted().any(|kind| kind == Kind::Double) {
        Kind::Double
    } else if counted().all(|kind| kind == first) {
        first
    } else {
        Kind::Float
    }
}

fn broadcast(sizes: &[Vec<i64>]) -> Result<Vec<i64>> {
    let dimensions = sizes.iter().map(Vec::len).max().unwrap_or(0);
    let mut shape = vec![1; dimensions];
    for size in sizes {
        for (have, &want) in shape[dimensions - size.len()..].iter_mut().zip(size) {
            if *have == 1 {
                *have = want;
            } else if want != 1 && want != *have {
                let reason = format!("the inputs are {sizes:?}, which do not broadcast to one shape");
                return Err(Error::invalid(NAME, reason));
            }
        }
    }
    Ok(shape)
}
