//! Passes over all gradients of a step.

use kernels::gradients::{norm_many, scale_many_, unscale_};
use report::cli::Scale;
use runtime::ops::{self, foreach};
use tch::{Device, Kind, Tensor};

use super::{Figures, KIND, Line, discard, measure_line, random, shared, sized};

/// Unscaling with the overflow check and the norm, the norm alone, and clipping's multiplication.
pub(super) fn gradients(device: Device, scale: Scale) -> anyhow::Result<Figures> {
    let (count, side) = sized(device, scale, [(12, 4096), (4, 1024), (4, 128)]);
    let all: Vec<Tensor> =
        (0..count).map(|_| random(&[side, side], device)).collect::<runtime::Result<_>>()?;
    let (shape, bytes) = (format!("{count} × {side} × {side}"), (count * side * side * 2) as f64);
    let number = |value: f64| Tensor::f_full([1], value, (Kind::Float, device));
    // Alternating, so that the gradients neither grow nor vanish.
    let factors = [number(2.0)?, number(0.5)?];
    let scalar = |factor: &Tensor| factor.f_to_kind(KIND)?.f_reshape([0i64; 0]);
    let narrow = factors.iter().map(scalar).collect::<Result<Vec<_>, _>>()?;
    let norm_of = |all: &[Tensor]| -> runtime::Result<()> {
        let norms = foreach::norm(all, 2.0)?;
        discard(Tensor::f_stack(&norms, 0)?.f_norm())
    };
    let mut figures = Vec::new();
    let (mine, theirs, found_inf) =
        (shared(&all), shared(&all), Tensor::f_zeros([1], (Kind::Float, device))?);
    let (of_ours, of_theirs) =
        (shared(&factors), shared(if device == Device::Cpu { &factors } else { &narrow }));
    let unscale = Line {
        what: "unscaling, overflow check and norm",
        shape: shape.clone(),
        bytes: 2.0 * bytes,
        ours: Box::new(move |index| unscale_(&mine, &of_ours[index % 2], true).map(drop)),
        libtorch: Some(Box::new(move |index| {
            // On CUDA the scaler's operator has no bf16; a norm that is not finite shows that a gradient is not.
            match device {
                Device::Cpu => {
                    ops::amp::non_finite_check_and_unscale_(&theirs, &found_inf, &of_theirs[index % 2])?
                }
                _ => foreach::mul_tensor_(&theirs, &of_theirs[index % 2])?,
            }
            norm_of(&theirs)
        })),
    };
    measure_line(unscale, device, scale, &mut figures)?;
    // The kernels of CUDA alone.
    if norm_many(&all)?.is_none() {
        return Ok(figures);
    }
    let (mine, theirs) = (shared(&all), shared(&all));
    let norm = Line {
        what: "norm of all gradients",
        shape: shape.clone(),
        bytes,
        ours: Box::new(move |_| norm_many(&mine).map(drop)),
        libtorch: Some(Box::new(move |_| norm_of(&theirs))),
    };
    measure_line(norm, device, scale, &mut figures)?;
    let (mine, theirs, of_ours) = (shared(&all), all, factors);
    let multiply = Line {
        what: "scaling of all gradients",
        shape,
        bytes: 2.0 * bytes,
        ours: Box::new(move |index| scale_many_(&mine, &of_ours[index % 2]).map(drop)),
        libtorch: Some(Box::new(move |index| foreach::mul_tensor_(&theirs, &narrow[index % 2]))),
    };
    measure_line(multiply, device, scale, &mut figures)?;
    Ok(figures)
}
