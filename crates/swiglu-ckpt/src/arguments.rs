//! The arguments of a SwiGLU, and their validation.

use tch::{Kind, Tensor};

use crate::error::{Result, dtype, refused, too_small};

/// The weights, as the function's inputs.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Weights<'a> {
    Separate { gate: &'a Tensor, up: &'a Tensor, down: &'a Tensor },
    Fused { gate_up: &'a Tensor, down: &'a Tensor },
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) tokens: i64,
    pub(crate) hidden: i64,
    pub(crate) features: i64,
}

/// Returns the weights by name, if they and x are defined.
pub(crate) fn defined<'a>(x: &Tensor, weights: Weights<'a>) -> Result<Vec<(&'static str, &'a Tensor)>> {
    let named: Vec<(&'static str, &Tensor)> = match weights {
        Weights::Separate { gate, up, down } => vec![("gate", gate), ("up", up), ("down", down)],
        Weights::Fused { gate_up, down } => vec![("gate_up", gate_up), ("down", down)],
    };
    match [("x", x)].iter().chain(&named).find(|(_, tensor)| !tensor.defined()) {
        Some(&(name, _)) => Err(refused(format!("`{name}` is an undefined tensor; give one with values"))),
        None => Ok(named),
    }
}

/// Validates the arguments, and returns the sizes.
pub(crate) fn check(x: &Tensor, weights: Weights<'_>) -> Result<Sizes> {
    let shape = |name: &str, tensor: &Tensor, expected: String| {
        Err(refused(format!("`{name}` has shape {:?}; expected {expected}", tensor.size())))
    };
    let named = defined(x, weights)?;
    let size = x.size();
    let Some((&hidden, leading)) = size.split_last() else {
        return shape("x", x, "[..., hidden]: at least one dimension".into());
    };
    let floating = [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half];
    if !floating.contains(&x.kind()) {
        return Err(dtype("x", x.kind(), "Float, Double, BFloat16 or Half"));
    }
    for (name, tensor) in &named {
        if tensor.kind() != x.kind() {
            return Err(dtype(name, tensor.kind(), format!("{:?} as `x`", x.kind())));
        }
        if tensor.device() != x.device() {
            let reason = format!("is on {:?} and `x` on {:?}", tensor.device(), x.device());
            return Err(refused(format!("`{name}` {reason}; move one with `to_device`")));
        }
    }
    let (down_name, down) = named[named.len() - 1];
    let &[features, down_hidden] = &down.size()[..] else {
        return shape(down_name, down, "[intermediate, hidden]: two dimensions".into());
    };
    for (name, count) in [("hidden", hidden), ("intermediate", features)] {
        if count < 1 {
            return Err(too_small(name, count));
        }
    }
    if down_hidden != hidden {
        return shape(
            down_name,
            down,
            format!("[intermediate, {hidden}], because the last dimension of `x` is {hidden}"),
        );
    }
    let columns = if named.len() == 2 { 2 * features } else { features };
    for (name, tensor) in &named[..named.len() - 1] {
        if tensor.size() != [hidden, columns] {
            return shape(
                name,
                tensor,
                format!(
                    "[{hidden}, {columns}], because `x` has {hidden} features and `down` is {:?}",
                    down.size()
                ),
            );
        }
    }
    Ok(Sizes { tokens: leading.iter().product(), hidden, features })
}
