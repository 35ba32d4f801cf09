//! The update of a dynamic loss scale as a CUDA kernel.

use runtime::Result;
use tch::{Kind, Tensor};

use super::{Dynamic, Updated};
use crate::cuda::{Argument, Source, are_ready, expect, launch, pointer};

pub(crate) const SOURCE: Source = Source(include_str!("loss_scale.cuh"));

const NAME: &str = "loss scale";

/// See [`super::update`]; `None` if kernels cannot run on the state's device.
pub(crate) fn update(state: &Tensor, found_inf: &Tensor, options: &Dynamic) -> Result<Option<Updated>> {
    let device = state.device();
    if !are_ready(device) {
        return Ok(None);
    }
    expect(NAME, "state", state, &[5], (Kind::Double, device))?;
    expect(NAME, "found_inf", found_inf, &[1], (Kind::Float, device))?;
    let updated = Tensor::f_empty([5], (Kind::Double, device))?;
    let factors = Tensor::f_empty([2], (Kind::Float, device))?;
    let &Dynamic { growth_factor, backoff_factor, growth_interval, min_scale, max_scale, hysteresis } =
        options;
    let arguments = [
        pointer(state),
        pointer(found_inf),
        Argument::F64(growth_factor),
        Argument::F64(backoff_factor),
        Argument::F64(growth_interval.into()),
        Argument::F64(min_scale.into()),
        Argument::F64(max_scale.into()),
        Argument::F64(hysteresis.into()),
        pointer(&updated),
        pointer(&factors),
    ];
    launch(SOURCE, "update_loss_scale", device, (1, 32), &arguments)?;
    Ok(Some(Updated { state: updated, factors }))
}
