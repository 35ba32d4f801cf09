//! From a graph to the steps of a pass.
//!
//! Powers and bounds become multiplications and comparisons, what no target needs falls away, and registers are given by
//! liveness: a register is free again after the last step that reads its value. An input is loaded just before its first use.

use super::graph::{Graph, Id, Node};
use crate::sys::elementwise::program::{Binary, Operand, Program, Register, Step, Ternary, Unary};

/// A program and what it reads.
#[derive(Clone, Debug)]
pub(super) struct Compiled {
    pub(super) program: Program,
    /// Of each source of the program, which input it is.
    pub(super) sources: Vec<usize>,
}

/// A program that computes `roots`, one for each target, in the order of the targets. Inputs from `first` on are loaded before
/// anything is written, so that a target may take their memory.
pub(super) fn compile(graph: &Graph, roots: &[Id], first: usize) -> Compiled {
    let mut simple = Graph::default();
    let roots = lower(graph, roots, &mut simple);
    let (lowered, roots) = join(&simple, &roots);
    let reached = lowered.reachable(&roots);
    let count = reached.len();

    let mut last_use = vec![0; count];
    for id in (0..count).filter(|&id| reached[id]) {
        lowered.operands(id).into_iter().for_each(|operand| last_use[operand] = id);
    }
    let mut state = Emitter {
        steps: Vec::new(),
        sources: Vec::new(),
        place: vec![None; count],
        free: Vec::new(),
        registers: 0,
    };
    for id in (0..count).filter(|&id| reached[id]) {
        if matches!(lowered.node(id), Node::Input(input) if input >= first) {
            state.load(&lowered, id);
        }
    }
    for id in (0..count).filter(|&id| reached[id]) {
        let operands = lowered.operands(id);
        for &operand in &operands {
            state.load(&lowered, operand);
        }
        if !operands.is_empty() {
            state.compute(&lowered, id);
        }
        for (target, _) in roots.iter().enumerate().filter(|(_, root)| **root == id) {
            state.load(&lowered, id);
            let from = state.operand(&lowered, id);
            state.steps.push(Step::Store { from, target });
        }
        // A root that nothing else reads dies with its store.
        for of in operands.into_iter().chain([id]).filter(|&of| last_use[of] <= id) {
            if let Some(register) = state.place[of].take() {
                state.free.push(register);
            }
        }
    }
    Compiled { program: Program { steps: state.steps, registers: state.registers }, sources: state.sources }
}

/// Adds what `roots` need to `lowered`, in steps that a program has.
fn lower(graph: &Graph, roots: &[Id], lowered: &mut Graph) -> Vec<Id> {
    let reached = graph.reachable(roots);
    let mut new = vec![0; reached.len()];
    for id in (0..reached.len()).filter(|&id| reached[id]) {
        new[id] = match graph.node(id) {
            node @ (Node::Input(_) | Node::Constant(_)) => lowered.add(node),
            Node::Unary(function, of) => lowered.unary(function, new[of]),
            Node::Binary(function, a, b) => lowered.binary(function, new[a], new[b]),
            Node::Ternary(function, a, b, c) => lowered.add(Node::Ternary(function, new[a], new[b], new[c])),
            Node::Clamp(of, low, high) => {
                let (low, high) = (lowered.add(Node::Constant(low)), lowered.add(Node::Constant(high)));
                let above = lowered.binary(Binary::Maximum, new[of], low);
                lowered.binary(Binary::Minimum, above, high)
            }
            Node::Power(of, exponent) => power(lowered, new[of], exponent),
        };
    }
    roots.iter().map(|&root| new[root]).collect()
}

/// The same graph with products joined to what is computed of them, where nothing else reads them: one step for two.
fn join(graph: &Graph, roots: &[Id]) -> (Graph, Vec<Id>) {
    let reached = graph.reachable(roots);
    let count = reached.len();
    let mut reads = vec![0; count];
    roots.iter().for_each(|&root| reads[root] += 1);
    for id in (0..count).filter(|&id| reached[id]) {
        graph.operands(id).into_iter().for_each(|operand| reads[operand] += 1);
    }
    // From the results on: a product that is joined itself joins no other one's step.
    let mut joined: Vec<Option<Node>> = vec![None; count];
    let mut gone = vec![false; count];
    for id in (0..count).rev().filter(|&id| reached[id]) {
        let product = |of: Id| match graph.node(of) {
            Node::Binary(Binary::Multiply, a, b) if reads[of] == 1 => Some((a, b)),
            _ => None,
        };
        let Node::Binary(function, a, b) = graph.node(id) else { continue };
        let (of, node) = match (function, product(a), product(b)) {
            _ if gone[id] => continue,
            (Binary::Add, Some((x, y)), _) => (a, Node::Ternary(Ternary::MultiplyAdd, x, y, b)),
            (Binary::Add, None, Some((x, y))) => (b, Node::Ternary(Ternary::MultiplyAdd, x, y, a)),
            (Binary::Subtract, _, Some((x, y))) => (b, Node::Ternary(Ternary::SubtractProduct, x, y, a)),
            (Binary::Subtract, Some((x, y)), None) => (a, Node::Ternary(Ternary::MultiplySubtract, x, y, b)),
            (Binary::Multiply, Some((x, y)), _) => (a, Node::Ternary(Ternary::Product, x, y, b)),
            (Binary::Multiply, None, Some((x, y))) => (b, Node::Ternary(Ternary::Product, x, y, a)),
            _ => continue,
        };
        joined[id] = Some(node);
        gone[of] = true;
    }
    let mut new = vec![0; count];
    let mut result = Graph::default();
    for id in (0..count).filter(|&id| reached[id] && !gone[id]) {
        new[id] = result.add(match joined[id].unwrap_or_else(|| graph.node(id)) {
            Node::Unary(function, of) => Node::Unary(function, new[of]),
            Node::Binary(function, a, b) => Node::Binary(function, new[a], new[b]),
            Node::Ternary(function, a, b, c) => Node::Ternary(function, new[a], new[b], new[c]),
            Node::Power(of, exponent) => Node::Power(new[of], exponent),
            Node::Clamp(of, low, high) => Node::Clamp(new[of], low, high),
            leaf @ (Node::Input(_) | Node::Constant(_)) => leaf,
        });
    }
    (result, roots.iter().map(|&root| new[root]).collect())
}

/// xⁿ by squaring, and its reciprocal for a negative n.
fn power(graph: &mut Graph, x: Id, exponent: i32) -> Id {
    let (mut left, mut square, mut product) = (exponent.unsigned_abs(), x, None);
    while left > 0 {
        if left & 1 == 1 {
            product = Some(product.map_or(square, |product| graph.binary(Binary::Multiply, product, square)));
        }
        left >>= 1;
        if left > 0 {
            square = graph.binary(Binary::Multiply, square, square);
        }
    }
    let product = product.unwrap_or_else(|| graph.constant(1.0));
    if exponent < 0 { graph.unary(Unary::Reciprocal, product) } else { product }
}

struct Emitter {
    steps: Vec<Step>,
    sources: Vec<usize>,
    /// The register of each node whose value is there.
    place: Vec<Option<Register>>,
    free: Vec<Register>,
    registers: Register,
}

impl Emitter {
    /// A register for node `id`. Those of its operands are still taken, so it is none of them.
    fn take(&mut self, id: Id) -> Register {
        let register = self.free.pop().unwrap_or_else(|| {
            self.registers += 1;
            self.registers - 1
        });
        self.place[id] = Some(register);
        register
    }

    /// Loads node `id` if it is an input that is not there yet.
    fn load(&mut self, graph: &Graph, id: Id) {
        if let (Node::Input(input), None) = (graph.node(id), self.place[id]) {
            let to = self.take(id);
            let known = self.sources.iter().position(|&source| source == input);
            let source = known.unwrap_or(self.sources.len());
            if known.is_none() {
                self.sources.push(input);
            }
            self.steps.push(Step::Load { to, source });
        }
    }

    fn operand(&self, graph: &Graph, id: Id) -> Operand {
        match (graph.value(id), self.place[id]) {
            (Some(value), _) => Operand::Constant(value),
            (None, register) => Operand::Register(register.expect("a value is computed before it is read")),
        }
    }

    fn register(&self, graph: &Graph, id: Id) -> Register {
        match self.operand(graph, id) {
            Operand::Register(register) => register,
            Operand::Constant(_) => unreachable!("functions of constants are constants"),
        }
    }

    fn compute(&mut self, graph: &Graph, id: Id) {
        let step = match graph.node(id) {
            Node::Unary(function, of) => {
                let of = self.register(graph, of);
                Step::Unary { function, to: self.take(id), of }
            }
            Node::Binary(function, a, b) => {
                let (a, b) = (self.operand(graph, a), self.operand(graph, b));
                Step::Binary { function, to: self.take(id), a, b }
            }
            Node::Ternary(function, a, b, c) => {
                let operands = [a, b, c].map(|id| self.operand(graph, id));
                Step::Ternary { function, to: self.take(id), operands }
            }
            Node::Input(_) | Node::Constant(_) | Node::Power(..) | Node::Clamp(..) => return,
        };
        self.steps.push(step);
    }
}
