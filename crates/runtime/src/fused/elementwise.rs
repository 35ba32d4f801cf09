//! Elementwise expressions, written once in Rust, as one pass over memory forward and one backward.
//!
//! For y = f(x₁ … xₙ) at each place of a tensor, and an upstream gradient g of y, backward is gᵢ = g·∂f/∂xᵢ, again an expression
//! at each place. [`Elementwise::new`] runs a closure on symbols, notes the operators, derives the gᵢ in reverse mode, and
//! compiles both to short lists of steps over tiles of 512 elements. A pass goes through memory tile by tile: what lies
//! between an expression's inputs and its outputs never leaves the core's own cache.
//!
//! - **Memory traffic** is that of the inputs and outputs, forward; of what the derivative reads, the upstream gradients and
//!   the gradients, backward. libtorch's operators read and write every intermediate.
//! - **Kept for backward** are inputs alone, those that the derivative reads ([`Elementwise::keeps`]), none twice; the rest is
//!   computed again in the tile. A gradient takes the memory of an upstream gradient that nobody else can see.
//! - **Broadcasting**: an input has the shape of the result, or is one vector for its last dimension, or one number. The
//!   gradients of the latter two are summed within the same pass, in f64 and in an order that the shape alone decides: equal
//!   runs give equal bits, with any number of threads.
//! - **Dtypes**: fp32, fp64, bf16, fp16, also mixed; the result has libtorch's promoted dtype. Low precision is computed in fp32
//!   and rounded once, at the end, where a chain of operators rounds after each.
//! - **NaN, infinity and kinks** are libtorch's: `relu`, `max` and `clamp` let NaN through, a tie of `max` gives each half.
//! - Inputs may be windows of rows (`narrow` on the last dimension); any other layout is copied first.
//! - **Beside the CPU** the same graph runs as a chain of libtorch's operators in fp32: the same values, not fused.
//!
//! How this differs from `torch.compile`: no Python and no compiler at run time, the expression is data in the program; but no
//! products, no reductions but those of broadcasting, and steps over tiles where a compiler would keep registers.
//!
//! ```
//! use runtime::fused::elementwise::Elementwise;
//! use tch::{Kind, Tensor, kind};
//!
//! let gated = Elementwise::new(|[x, gate, bias]| x * gate.sigmoid() + bias);
//! let (x, gate) = (Tensor::ones([2, 3], kind::FLOAT_CPU), Tensor::zeros([2, 3], kind::FLOAT_CPU));
//! let bias = Tensor::from_slice(&[1.0f32, 2.0, 3.0]).set_requires_grad(true);
//! let y = gated.apply([&x, &gate, &bias])?;
//! assert_eq!(Vec::<f32>::try_from(y.get(0))?, [1.5, 2.5, 3.5]);
//! runtime::autograd::backward(&[&y.sum(Kind::Float)])?;
//! assert_eq!(Vec::<f32>::try_from(bias.grad())?, [2.0, 2.0, 2.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tch::{Device, Kind, Tensor};

use crate::autograd;
use crate::error::{Error, Result};
use crate::sys::elementwise::NAME;

mod compile;
mod expr;
mod graph;
mod libtorch;
mod node;
mod operands;

pub use expr::{Expr, Mask, Term};

use compile::{Compiled, compile};
use graph::{Graph, Id};
use operands::Operands;

/// A compiled expression of `N` inputs and `M` outputs. See the [module](self). Cheap to clone; the clones share what was
/// compiled.
#[derive(Clone, Debug)]
pub struct Elementwise<const N: usize, const M: usize = 1> {
    compiled: Arc<Expression>,
}

impl<const N: usize> Elementwise<N, 1> {
    /// Compiles what `expression` computes of its inputs.
    pub fn new(expression: impl for<'g> FnOnce([Expr<'g>; N]) -> Expr<'g>) -> Self {
        let graph = RefCell::default();
        let root = expression(std::array::from_fn(|index| Expr::input(&graph, index))).id();
        Self { compiled: Arc::new(Expression::new(graph.into_inner(), N, vec![root])) }
    }

    /// Computes the expression, and connects it to libtorch's graph.
    ///
    /// # Errors
    /// As [`Elementwise::apply_all`].
    pub fn apply(&self, inputs: [&Tensor; N]) -> Result<Tensor> {
        let mut outputs = self.compiled.apply(&inputs)?;
        outputs.pop().ok_or_else(|| Error::invalid(NAME, "there is no output"))
    }
}

impl<const N: usize, const M: usize> Elementwise<N, M> {
    /// Compiles an expression of several outputs, which share what they have in common.
    pub fn many(expression: impl for<'g> FnOnce([Expr<'g>; N]) -> [Expr<'g>; M]) -> Self {
        let graph = RefCell::default();
        let roots = expression(std::array::from_fn(|index| Expr::input(&graph, index))).map(Expr::id);
        Self { compiled: Arc::new(Expression::new(graph.into_inner(), N, roots.to_vec())) }
    }

    /// Computes all outputs, and connects them to libtorch's graph. Each has the inputs' broadcast shape and promoted dtype,
    /// and is contiguous.
    ///
    /// # Errors
    /// No input; an input that is undefined, not floating-point, on another device than the first, or neither of the result's
    /// shape nor a vector for its last dimension nor one number. In backward, a second derivative.
    pub fn apply_all(&self, inputs: [&Tensor; N]) -> Result<[Tensor; M]> {
        let outputs = self.compiled.apply(&inputs)?;
        outputs.try_into().map_err(|_| Error::invalid(NAME, "the number of outputs is another"))
    }

    /// Which inputs a graph keeps for backward when gradients of `needed` are wanted. Nothing else is kept.
    pub fn keeps(&self, needed: [bool; N]) -> [bool; N] {
        let backward = self.compiled.backward(&needed, &[true; M]);
        std::array::from_fn(|input| backward.compiled.sources.contains(&input))
    }
}

/// The graph of an expression, and what was compiled from it.
#[derive(Debug)]
struct Expression {
    graph: Graph,
    inputs: usize,
    roots: Vec<Id>,
    forward: Compiled,
    backward: Mutex<HashMap<Wanted, Arc<Backward>>>,
}

/// The inputs whose gradients are wanted, and the outputs that have an upstream gradient.
type Wanted = (Vec<bool>, Vec<bool>);

/// A compiled derivative.
#[derive(Debug)]
struct Backward {
    compiled: Compiled,
    /// Of each target of the program: the input whose gradient it is.
    gradients: Vec<usize>,
    /// Inputs whose gradient is the very upstream gradient of an output.
    passed_on: Vec<(usize, usize)>,
}

impl Expression {
    fn new(graph: Graph, inputs: usize, roots: Vec<Id>) -> Self {
        let forward = compile(&graph, &roots, inputs);
        Self { graph, inputs, roots, forward, backward: Mutex::default() }
    }

    fn backward(&self, needed: &[bool], upstream: &[bool]) -> Arc<Backward> {
        let mut known = self.backward.lock();
        let key = (needed.to_vec(), upstream.to_vec());
        known.entry(key).or_insert_with(|| Arc::new(self.derive(needed, upstream))).clone()
    }

    fn derive(&self, needed: &[bool], upstream: &[bool]) -> Backward {
        let mut graph = self.graph.clone();
        let mut outputs = Vec::new();
        for (index, (&root, &given)) in self.roots.iter().zip(upstream).enumerate() {
            let gradient = given.then(|| graph.add(graph::Node::Input(self.inputs + index)));
            outputs.push((root, gradient));
        }
        let found = graph.differentiate(&outputs, self.inputs, needed);
        let passed_on = found.iter().enumerate().filter_map(|(input, root)| match graph.node((*root)?) {
            graph::Node::Input(source) => Some((input, source.checked_sub(self.inputs)?)),
            _ => None,
        });
        let passed_on = passed_on.collect();
        let (gradients, roots): (Vec<usize>, Vec<Id>) =
            found.into_iter().enumerate().filter_map(|(input, root)| Some((input, root?))).unzip();
        Backward { compiled: compile(&graph, &roots, self.inputs), gradients, passed_on }
    }

    fn apply(self: &Arc<Self>, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let operands = Operands::new(inputs)?;
        if inputs[0].device() == Device::Cpu {
            return autograd::apply(node::Pass::new(self.clone(), operands), inputs);
        }
        let compute = if operands.kind == Kind::Double { Kind::Double } else { Kind::Float };
        libtorch::run(&self.graph, &self.roots, inputs, compute, operands.kind, &operands.shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The chain for other devices, run on the CPU, where both can be.
    #[test]
    fn the_chain_of_operators_computes_the_same() {
        let expression = Elementwise::<3, 2>::many(|[x, y, bias]| {
            let inner = (x * y.sigmoid() + bias).clamp(-1.0, 1.0).gelu_tanh();
            [inner.max(y).powi(-2) - bias.abs().sqrt(), y.lt(0.5).select(inner, x.relu().erf()) / 2.0 + 1.5]
        });
        let value = |seed: i64, shape: &[i64], kind| {
            let count: i64 = shape.iter().product();
            let angles = Tensor::arange(count, (Kind::Float, Device::Cpu)) * (seed as f64 * 0.7);
            (angles.cos() * 1.5).reshape(shape).to_kind(kind)
        };
        for (kind, compute, tolerance) in
            [(Kind::Double, Kind::Double, 1e-13), (Kind::BFloat16, Kind::Float, 8e-3)]
        {
            let inputs = [value(1, &[6, 5], kind), value(2, &[6, 5], kind), value(3, &[5], kind)]
                .map(|input| input.set_requires_grad(true));
            let references: Vec<&Tensor> = inputs.iter().collect();
            let compiled = &expression.compiled;
            let fused = compiled.apply(&references).unwrap();
            let chain =
                libtorch::run(&compiled.graph, &compiled.roots, &references, compute, kind, &[6, 5]).unwrap();
            let slopes = |outputs: &[Tensor]| {
                let sum = outputs.iter().map(|y| y.sum(Kind::Double)).sum::<Tensor>();
                autograd::grad(&[&sum], &[None], &references, autograd::Keep::default()).unwrap()
            };
            let (ours, theirs) = (slopes(&fused), slopes(&chain));
            let pairs = ours.iter().flatten().zip(theirs.iter().flatten()).chain(fused.iter().zip(&chain));
            let mut compared = 0;
            for (ours, theirs) in pairs {
                let (ours, theirs) = (ours.to_kind(Kind::Double), theirs.to_kind(Kind::Double));
                let share =
                    ((&ours - &theirs).abs() / ((theirs.abs() + 1.0) * tolerance)).max().double_value(&[]);
                assert!(share <= 1.0, "{kind:?}: {share} of the tolerance");
                compared += 1;
            }
            assert_eq!(compared, 5);
        }
    }

    #[test]
    fn equal_values_are_one_node_and_constants_are_computed() {
        let f = Elementwise::new(|[x, y]| ((x + y) * (y + x)) / (1.0 / x * 0.0 + 2.0).ln().abs().exp() * 1.0);
        let loads = f.compiled.forward.sources.len();
        let steps = &f.compiled.forward.program.steps;
        // Two loads, x + y once, the square, 1/x, · 0 + 2 in one step, ln, |·|, exp, ÷, a store.
        assert_eq!((loads, steps.len()), (2, 11), "{steps:?}");
        let constant = Elementwise::new(|[x]| x * (x.powi(0) * 2.0 + 1.0).ln());
        assert_eq!(constant.compiled.forward.program.steps.len(), 3, "a load, a product, a store");
    }

    #[test]
    fn registers_are_used_again() {
        let long = Elementwise::new(|[x, y]| (0..500).fold(x, |sum, _| (sum + y).tanh()));
        assert!(long.compiled.forward.program.registers <= 3);
    }
}
