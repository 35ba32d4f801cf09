//! The expression as a chain of libtorch's operators, for devices that no pass was written for: the same values, in as many
//! passes over memory as there are operators.

use tch::{Kind, Tensor};

use super::graph::{Graph, Id, Node};
use crate::error::{Error, Result};
use crate::sys::elementwise::program::{Binary, Ternary, Unary};

/// Computes `roots` in `compute`, and rounds to `kind`; libtorch's graph records it.
pub(super) fn run(
    graph: &Graph,
    roots: &[Id],
    inputs: &[&Tensor],
    compute: Kind,
    kind: Kind,
    shape: &[i64],
) -> Result<Vec<Tensor>> {
    let reached = graph.reachable(roots);
    let mut values: Vec<Option<Tensor>> = Vec::with_capacity(reached.len());
    let like = inputs.first().ok_or_else(|| Error::invalid("fused elementwise", "there is no input"))?;
    let constant =
        |value: f64| Ok::<_, Error>(Tensor::f_full([] as [i64; 0], value, (compute, like.device()))?);
    for (id, reached) in reached.into_iter().enumerate() {
        if !reached {
            values.push(None);
            continue;
        }
        let value = |id: Id| {
            values[id].as_ref().ok_or_else(|| Error::invalid("fused elementwise", "a value is missing"))
        };
        let computed = match graph.node(id) {
            Node::Input(input) => inputs[input].f_to_kind(compute)?,
            Node::Constant(bits) => constant(f64::from_bits(bits))?,
            Node::Unary(function, of) => unary(function, value(of)?)?,
            Node::Binary(function, a, b) => binary(function, value(a)?, value(b)?)?,
            Node::Power(of, exponent) => value(of)?.f_pow_tensor_scalar(i64::from(exponent))?,
            Node::Clamp(of, low, high) => value(of)?.f_clamp(f64::from_bits(low), f64::from_bits(high))?,
            Node::Ternary(function, a, b, c) => ternary(function, value(a)?, value(b)?, value(c)?)?,
        };
        values.push(Some(computed));
    }
    roots
        .iter()
        .map(|&root| {
            let value = values[root].as_ref().map(Tensor::shallow_clone);
            let value = value.ok_or_else(|| Error::invalid("fused elementwise", "an output is missing"))?;
            Ok(value.f_to_kind(kind)?.f_expand(shape, true)?.f_contiguous()?)
        })
        .collect()
}

fn unary(function: Unary, x: &Tensor) -> Result<Tensor> {
    Ok(match function {
        Unary::Negate => x.f_neg()?,
        Unary::Reciprocal => x.f_reciprocal()?,
        Unary::Sqrt => x.f_sqrt()?,
        Unary::Rsqrt => x.f_rsqrt()?,
        Unary::Exp => x.f_exp()?,
        Unary::Ln => x.f_log()?,
        Unary::Tanh => x.f_tanh()?,
        Unary::Sigmoid => x.f_sigmoid()?,
        Unary::Erf => x.f_erf()?,
        Unary::Relu => x.f_relu()?,
        Unary::Abs => x.f_abs()?,
        Unary::Sign => x.f_sign()?,
        Unary::Gelu => x.f_gelu("none")?,
        Unary::GeluSlope => x.f_ones_like()?.f_gelu_backward(x, "none")?,
        Unary::LogisticSlope => Tensor::f_sigmoid_backward(&x.f_ones_like()?, x)?,
    })
}

fn ternary(function: Ternary, a: &Tensor, b: &Tensor, c: &Tensor) -> Result<Tensor> {
    Ok(match function {
        Ternary::MultiplyAdd => a.f_mul(b)?.f_add(c)?,
        Ternary::MultiplySubtract => a.f_mul(b)?.f_sub(c)?,
        Ternary::SubtractProduct => c.f_sub(&a.f_mul(b)?)?,
        Ternary::Product => a.f_mul(b)?.f_mul(c)?,
        Ternary::Select => b.f_where_self(&a.f_ne(0.0)?, c)?,
    })
}

fn binary(function: Binary, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let flag = |mask: Tensor| mask.f_to_kind(a.kind());
    Ok(match function {
        Binary::Add => a.f_add(b)?,
        Binary::Subtract => a.f_sub(b)?,
        Binary::Multiply => a.f_mul(b)?,
        Binary::Divide => a.f_div(b)?,
        Binary::Maximum => a.f_maximum(b)?,
        Binary::Minimum => a.f_minimum(b)?,
        Binary::Less => flag(a.f_lt_tensor(b)?)?,
        Binary::LessEqual => flag(a.f_le_tensor(b)?)?,
        Binary::Equal => flag(a.f_eq_tensor(b)?)?,
        Binary::NotEqual => flag(a.f_ne_tensor(b)?)?,
    })
}
