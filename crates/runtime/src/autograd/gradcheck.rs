//! Compares a backward with central differences of its forward.
//!
//! For each input element xᵢ and each output element yⱼ: |∂yⱼ/∂xᵢ − (yⱼ(xᵢ+ε) − yⱼ(xᵢ−ε)) / 2ε| ≤ atol + rtol·|numeric|,
//! in f64, where truncation (ε²) and rounding (10⁻¹⁶/ε) are both under 10⁻⁹ for values near one.

use std::fmt;

use tch::{Kind, Tensor};

use super::engine::{GradMode, Keep, backward_with};
use crate::error::{Error, Result};
use crate::ops::TryScalar;

/// Tolerances of [`gradcheck`].
#[derive(Clone, Copy, Debug)]
pub struct GradcheckConfig {
    /// Step of the central difference.
    pub epsilon: f64,
    /// Absolute tolerance.
    pub atol: f64,
    /// Relative tolerance, against the numeric derivative.
    pub rtol: f64,
}

impl Default for GradcheckConfig {
    fn default() -> Self {
        Self { epsilon: 1e-6, atol: 1e-6, rtol: 1e-6 }
    }
}

/// The element with the largest error, relative to its tolerance.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GradcheckReport {
    /// Index of the output, and of the element in it (row-major).
    pub output: (usize, usize),
    /// Index of the input, and of the element in it (row-major).
    pub input: (usize, usize),
    /// The derivative by backward.
    pub analytic: f64,
    /// The central difference.
    pub numeric: f64,
    /// |analytic − numeric| over its tolerance, in percent; NaN where either is.
    pub percent_of_tolerance: f64,
    /// Number of derivatives compared.
    pub compared: usize,
}

impl fmt::Display for GradcheckReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { output, input, analytic, numeric, percent_of_tolerance, compared } = self;
        write!(
            f,
            "worst of {compared}: d output {}[{}] / d input {}[{}] is {analytic:e} by backward and {numeric:e} by central \
             differences, {percent_of_tolerance:.3} % of the tolerance",
            output.0, output.1, input.0, input.1
        )
    }
}

/// Compares the backward of `f` with central differences at `inputs`, for every element of every input that requires a
/// gradient.
///
/// `f` must be deterministic. Inputs are f64, of any shape and number, contiguous or not; they are copied first.
///
/// # Errors
/// An input that is not f64; no input that requires a gradient; what `f` or its backward returns; two backward passes
/// through one retained graph that differ; a derivative outside its tolerance, with the worst element named.
pub fn gradcheck<F>(f: F, inputs: &[&Tensor], options: GradcheckConfig) -> Result<GradcheckReport>
where
    F: Fn(&[Tensor]) -> Result<Vec<Tensor>>,
{
    let refuse = |reason: String| Err(Error::invalid("gradcheck", reason));
    if let Some((index, input)) = inputs.iter().enumerate().find(|(_, input)| input.kind() != Kind::Double) {
        return refuse(format!("input {index} is {:?}; central differences need Double", input.kind()));
    }
    if !inputs.iter().any(|input| input.requires_grad()) {
        return refuse("no input requires a gradient, so there is nothing to check".to_owned());
    }
    let leaves: Vec<Tensor> = inputs
        .iter()
        .map(|input| Ok(copied(&input.f_detach()?)?.f_set_requires_grad(input.requires_grad())?))
        .collect::<Result<_>>()?;
    let outputs = {
        let _grad = GradMode::on();
        f(&leaves)?
    };

    let mut worst = GradcheckReport { percent_of_tolerance: -1.0, ..GradcheckReport::default() };
    for (i, leaf) in leaves.iter().enumerate().filter(|(_, leaf)| leaf.requires_grad()) {
        let numeric = numeric_jacobian(&f, &leaves, i, &outputs, options.epsilon)?;
        for (j, output) in outputs.iter().enumerate() {
            for element in 0..output.numel() {
                let analytic = analytic_row(&leaves, leaf, output, element)?;
                for (position, &analytic) in analytic.iter().enumerate() {
                    let numeric = numeric[position][j][element];
                    let tolerance = options.atol + options.rtol * numeric.abs();
                    let percent = (analytic - numeric).abs() / tolerance * 100.0;
                    worst.compared += 1;
                    // This form makes NaN the worst.
                    if !(percent <= worst.percent_of_tolerance || worst.percent_of_tolerance.is_nan()) {
                        worst = GradcheckReport {
                            output: (j, element),
                            input: (i, position),
                            analytic,
                            numeric,
                            percent_of_tolerance: percent,
                            compared: worst.compared,
                        };
                    }
                }
            }
        }
    }
    if worst.percent_of_tolerance <= 100.0 { Ok(worst) } else { refuse(worst.to_string()) }
}

/// Returns row `element` of the output's Jacobian with respect to `leaf` by backward, which runs twice through the
/// retained graph.
fn analytic_row(leaves: &[Tensor], leaf: &Tensor, output: &Tensor, element: usize) -> Result<Vec<f64>> {
    let numel = leaf.numel();
    if !output.requires_grad() {
        return Ok(vec![0.0; numel]);
    }
    let upstream = Tensor::f_zeros([output.numel() as i64], (Kind::Double, output.device()))?;
    let _ = upstream.f_narrow(0, element as i64, 1)?.try_fill_(1.0)?;
    let upstream = upstream.f_view_as(output)?;
    let once = || -> Result<Vec<f64>> {
        for leaf in leaves.iter().filter(|leaf| leaf.requires_grad()) {
            leaf.shallow_clone().zero_grad();
        }
        backward_with(&[output], &[Some(&upstream)], Keep { graph: true, derivative: false })?;
        let grad = leaf.grad();
        if grad.defined() { values(&grad) } else { Ok(vec![0.0; numel]) }
    };
    let (first, second) = (once()?, once()?);
    if first.iter().zip(&second).any(|(a, b)| a != b && !(a.is_nan() && b.is_nan())) {
        let reason = "two backward passes through one retained graph differ; backward changes what it saved";
        return Err(Error::invalid("gradcheck", reason));
    }
    Ok(first)
}

/// Returns, for each element of input `index`, the derivative of each element of each output.
fn numeric_jacobian<F>(
    f: &F,
    leaves: &[Tensor],
    index: usize,
    outputs: &[Tensor],
    epsilon: f64,
) -> Result<Vec<Vec<Vec<f64>>>>
where
    F: Fn(&[Tensor]) -> Result<Vec<Tensor>>,
{
    let _no_grad = GradMode::off();
    let at = |position: usize, step: f64| -> Result<Vec<Vec<f64>>> {
        let mut moved: Vec<Tensor> = leaves.iter().map(Tensor::detach).collect();
        moved[index] = copied(&moved[index])?;
        let _ = moved[index].f_view([-1])?.f_narrow(0, position as i64, 1)?.try_add_scalar_(step)?;
        let results = f(&moved)?;
        if results.len() != outputs.len() {
            return Err(Error::invalid(
                "gradcheck",
                "the function returns another number of outputs each time",
            ));
        }
        results.iter().map(values).collect()
    };
    (0..leaves[index].numel())
        .map(|position| {
            let (above, below) = (at(position, epsilon)?, at(position, -epsilon)?);
            let difference = |(a, b): (Vec<f64>, Vec<f64>)| {
                a.iter().zip(&b).map(|(a, b)| (a - b) / (2.0 * epsilon)).collect::<Vec<f64>>()
            };
            Ok(above.into_iter().zip(below).map(difference).collect())
        })
        .collect()
}

fn copied(tensor: &Tensor) -> Result<Tensor> {
    let mut copy = tensor.f_empty_like()?;
    copy.f_copy_(tensor)?;
    Ok(copy)
}

fn values(tensor: &Tensor) -> Result<Vec<f64>> {
    Ok(Vec::<f64>::try_from(tensor.f_detach()?.f_contiguous()?.f_view([-1])?)?)
}
