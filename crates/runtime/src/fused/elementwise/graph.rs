//! The graph of an expression: every value once, constants computed in advance, and its derivatives.

use std::collections::HashMap;

use crate::sys::elementwise::program::{Binary, Ternary, Unary};

/// A node's index. Its operands have smaller ones.
pub(super) type Id = usize;

/// One value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Node {
    /// An input of the expression; those after the last are the upstream gradients of its outputs.
    Input(usize),
    /// The bits of an f64.
    Constant(u64),
    Unary(Unary, Id),
    Binary(Binary, Id, Id),
    Power(Id, i32),
    /// Between two bounds, as `min(max(x, low), high)`.
    Clamp(Id, u64, u64),
    Ternary(Ternary, Id, Id, Id),
}

/// Nodes in an order in which each comes after its operands.
#[derive(Clone, Debug, Default)]
pub(super) struct Graph {
    nodes: Vec<Node>,
    known: HashMap<Node, Id>,
}

impl Graph {
    pub(super) fn node(&self, id: Id) -> Node {
        self.nodes[id]
    }

    pub(super) fn constant(&mut self, value: f64) -> Id {
        self.add(Node::Constant(value.to_bits()))
    }

    pub(super) fn value(&self, id: Id) -> Option<f64> {
        match self.nodes[id] {
            Node::Constant(bits) => Some(f64::from_bits(bits)),
            _ => None,
        }
    }

    pub(super) fn unary(&mut self, function: Unary, of: Id) -> Id {
        self.add(Node::Unary(function, of))
    }

    pub(super) fn binary(&mut self, function: Binary, a: Id, b: Id) -> Id {
        self.add(Node::Binary(function, a, b))
    }

    /// `yes` where `mask` is not 0, else `no`.
    pub(super) fn select(&mut self, mask: Id, yes: Id, no: Id) -> Id {
        self.add(Node::Ternary(Ternary::Select, mask, yes, no))
    }

    /// The node, or the one that is there already with the same value for every input.
    ///
    /// Only what holds for NaN, infinities and signed zeros too is simplified.
    pub(super) fn add(&mut self, node: Node) -> Id {
        let node = match node {
            Node::Unary(function, of) => match (function, self.nodes[of]) {
                (Unary::Negate, Node::Unary(Unary::Negate, inner)) => return inner,
                (_, Node::Constant(bits)) => Node::Constant(function.of(f64::from_bits(bits)).to_bits()),
                _ => node,
            },
            Node::Binary(function, a, b) => match (self.value(a), self.value(b)) {
                (Some(a), Some(b)) => Node::Constant(function.of(a, b).to_bits()),
                (Some(1.0), _) if function == Binary::Multiply => return b,
                (_, Some(1.0)) if matches!(function, Binary::Multiply | Binary::Divide) => return a,
                _ if function.commutes() && b < a => Node::Binary(function, b, a),
                _ => node,
            },
            Node::Power(_, 0) => Node::Constant(1.0f64.to_bits()),
            Node::Power(of, 1) => return of,
            Node::Ternary(Ternary::Select, mask, yes, no) => match self.value(mask) {
                Some(mask) => return if mask == 0.0 { no } else { yes },
                None if yes == no => return yes,
                None => node,
            },
            other => other,
        };
        if let Some(&id) = self.known.get(&node) {
            return id;
        }
        self.nodes.push(node);
        self.known.insert(node, self.nodes.len() - 1);
        self.nodes.len() - 1
    }

    pub(super) fn operands(&self, id: Id) -> Vec<Id> {
        match self.nodes[id] {
            Node::Input(_) | Node::Constant(_) => Vec::new(),
            Node::Unary(_, of) | Node::Power(of, _) | Node::Clamp(of, ..) => vec![of],
            Node::Binary(_, a, b) => vec![a, b],
            Node::Ternary(_, a, b, c) => vec![a, b, c],
        }
    }

    /// For every node up to the last: whether one of `roots` depends on it.
    pub(super) fn reachable(&self, roots: &[Id]) -> Vec<bool> {
        let mut reached = vec![false; self.nodes.len()];
        roots.iter().for_each(|&root| reached[root] = true);
        for id in (0..self.nodes.len()).rev() {
            if reached[id] {
                self.operands(id).into_iter().for_each(|operand| reached[operand] = true);
            }
        }
        reached
    }

    /// The gradients of the first `inputs` inputs, from the gradient of each output where there is one; `None` for an input
    /// that no such output depends on. Reverse mode: from the outputs on, each node hands its gradient to its operands.
    pub(super) fn differentiate(
        &mut self,
        outputs: &[(Id, Option<Id>)],
        inputs: usize,
        needed: &[bool],
    ) -> Vec<Option<Id>> {
        let roots: Vec<Id> = outputs.iter().map(|(output, _)| *output).collect();
        let leads = self.leads_to(needed);
        let mut gradients: Vec<Option<Id>> = vec![None; self.nodes.len()];
        for &(output, upstream) in outputs {
            if let Some(upstream) = upstream {
                self.accumulate(&mut gradients, output, upstream);
            }
        }
        let mut found = vec![None; inputs];
        for id in (0..=roots.into_iter().max().unwrap_or(0)).rev() {
            let Some(gradient) = gradients[id] else { continue };
            if let Node::Input(input) = self.nodes[id] {
                found[input] = Some(gradient);
                continue;
            }
            for (operand, part) in self.parts(id, gradient, &leads) {
                self.accumulate(&mut gradients, operand, part);
            }
        }
        found
    }

    /// For every node: whether it depends on an input that is needed.
    fn leads_to(&self, needed: &[bool]) -> Vec<bool> {
        let mut leads = Vec::with_capacity(self.nodes.len());
        for id in 0..self.nodes.len() {
            let through = self.operands(id).into_iter().any(|operand| leads[operand]);
            leads.push(match self.nodes[id] {
                Node::Input(input) => needed.get(input).copied().unwrap_or(false),
                _ => through,
            });
        }
        leads
    }

    fn accumulate(&mut self, gradients: &mut [Option<Id>], id: Id, part: Id) {
        gradients[id] = Some(match gradients[id] {
            Some(sum) => self.binary(Binary::Add, sum, part),
            None => part,
        });
    }

    /// What the gradient `g` of node `id` gives to each operand that leads to an input. At a kink as libtorch has it.
    fn parts(&mut self, id: Id, g: Id, leads: &[bool]) -> Vec<(Id, Id)> {
        use Binary::{Add, Divide, Equal, Less, LessEqual, Multiply, Subtract};
        let node = self.nodes[id];
        let mut parts = Vec::new();
        match node {
            Node::Input(_) | Node::Constant(_) => {}
            _ if !self.operands(id).iter().any(|&operand| leads[operand]) => {}
            Node::Unary(function, x) => {
                let slope = match function {
                    Unary::Negate => {
                        parts.push((x, self.unary(Unary::Negate, g)));
                        return parts;
                    }
                    Unary::Sign => return parts,
                    Unary::Relu => {
                        let zero = self.constant(0.0);
                        let off = self.binary(LessEqual, x, zero);
                        parts.push((x, self.select(off, zero, g)));
                        return parts;
                    }
                    Unary::Ln => {
                        parts.push((x, self.binary(Divide, g, x)));
                        return parts;
                    }
                    Unary::Sqrt => {
                        let two = self.constant(2.0);
                        let twice = self.binary(Multiply, two, id);
                        parts.push((x, self.binary(Divide, g, twice)));
                        return parts;
                    }
                    Unary::Reciprocal => {
                        let square = self.binary(Multiply, id, id);
                        self.unary(Unary::Negate, square)
                    }
                    Unary::Rsqrt => {
                        let (square, factor) = (self.binary(Multiply, id, id), self.constant(-0.5));
                        let cube = self.binary(Multiply, square, id);
                        self.binary(Multiply, factor, cube)
                    }
                    Unary::Exp => id,
                    Unary::Tanh => {
                        let (square, one) = (self.binary(Multiply, id, id), self.constant(1.0));
                        self.binary(Subtract, one, square)
                    }
                    Unary::Sigmoid => self.unary(Unary::LogisticSlope, id),
                    Unary::LogisticSlope => {
                        let (one, minus_two) = (self.constant(1.0), self.constant(-2.0));
                        let less = self.binary(Multiply, minus_two, x);
                        self.binary(Add, one, less)
                    }
                    Unary::Gelu => self.unary(Unary::GeluSlope, x),
                    // φ(x)·(2 − x²).
                    Unary::GeluSlope => {
                        let (square, half) = (self.binary(Multiply, x, x), self.constant(-0.5));
                        let exponent = self.binary(Multiply, square, half);
                        let (bell, two) = (self.unary(Unary::Exp, exponent), self.constant(2.0));
                        let rest = self.binary(Subtract, two, square);
                        let height = self.constant((std::f64::consts::TAU).sqrt().recip());
                        let density = self.binary(Multiply, height, bell);
                        self.binary(Multiply, density, rest)
                    }
                    Unary::Erf => {
                        let square = self.binary(Multiply, x, x);
                        let exponent = self.unary(Unary::Negate, square);
                        let bell = self.unary(Unary::Exp, exponent);
                        let height = self.constant(std::f64::consts::FRAC_2_SQRT_PI);
                        self.binary(Multiply, height, bell)
                    }
                    Unary::Abs => self.unary(Unary::Sign, x),
                };
                parts.push((x, self.binary(Multiply, g, slope)));
            }
            Node::Binary(function, a, b) => {
                let mut give = |operand: Id, part: &mut dyn FnMut(&mut Self) -> Id, graph: &mut Self| {
                    if leads[operand] {
                        let part = part(graph);
                        parts.push((operand, part));
                    }
                };
                match function {
                    Add => {
                        give(a, &mut |_| g, self);
                        give(b, &mut |_| g, self);
                    }
                    Subtract => {
                        give(a, &mut |_| g, self);
                        give(b, &mut |graph| graph.unary(Unary::Negate, g), self);
                    }
                    Multiply => {
                        give(a, &mut |graph| graph.binary(Multiply, g, b), self);
                        give(b, &mut |graph| graph.binary(Multiply, g, a), self);
                    }
                    Divide => {
                        give(a, &mut |graph| graph.binary(Divide, g, b), self);
                        let mut of_divisor = |graph: &mut Self| {
                            let part = graph.binary(Divide, g, b);
                            let part = graph.binary(Multiply, part, id);
                            graph.unary(Unary::Negate, part)
                        };
                        give(b, &mut of_divisor, self);
                    }
                    Binary::Maximum | Binary::Minimum => {
                        let larger = function == Binary::Maximum;
                        for (mine, other) in [(a, b), (b, a)] {
                            let mut of_winner = |graph: &mut Self| {
                                let (half, zero) = (graph.constant(0.5), graph.constant(0.0));
                                let (small, large) = if larger { (mine, other) } else { (other, mine) };
                                let lost = graph.binary(Less, small, large);
                                let tie = graph.binary(Equal, mine, other);
                                let halved = graph.binary(Multiply, g, half);
                                let kept = graph.select(tie, halved, g);
                                graph.select(lost, zero, kept)
                            };
                            give(mine, &mut of_winner, self);
                        }
                    }
                    Less | LessEqual | Equal | Binary::NotEqual => {}
                }
            }
            Node::Power(x, exponent) => {
                let factor = self.constant(f64::from(exponent));
                let power = self.add(Node::Power(x, exponent.saturating_sub(1)));
                let slope = self.binary(Multiply, factor, power);
                parts.push((x, self.binary(Multiply, g, slope)));
            }
            Node::Clamp(x, low, high) => {
                let (low, high) = (self.add(Node::Constant(low)), self.add(Node::Constant(high)));
                let zero = self.constant(0.0);
                let above = self.binary(LessEqual, low, x);
                let below = self.binary(LessEqual, x, high);
                let inner = self.select(above, g, zero);
                parts.push((x, self.select(below, inner, zero)));
            }
            // Made of a graph that has its derivatives already.
            Node::Ternary(
                Ternary::MultiplyAdd
                | Ternary::MultiplySubtract
                | Ternary::SubtractProduct
                | Ternary::Product,
                ..,
            ) => {}
            Node::Ternary(Ternary::Select, mask, yes, no) => {
                let zero = self.constant(0.0);
                if leads[yes] {
                    parts.push((yes, self.select(mask, g, zero)));
                }
                if leads[no] {
                    parts.push((no, self.select(mask, zero, g)));
                }
            }
        }
        parts
    }
}
