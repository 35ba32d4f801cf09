//! Optimizer steps in one call (`cpp/optimizer.cpp`).

use std::borrow::Borrow;

use tch::Tensor;
use torch_sys::C_tensor;

use super::{Status, check, pointers};
use crate::error::Result;

/// `rt_adam` of `cpp/optimizer.cpp`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RawAdam {
    pub(crate) lr: f64,
    pub(crate) beta1: f64,
    pub(crate) beta2: f64,
    pub(crate) weight_decay: f64,
    pub(crate) eps: f64,
    pub(crate) decoupled: i32,
    pub(crate) maximize: i32,
    pub(crate) as_operators: i32,
}

unsafe extern "C" {
    fn rt_fused_adam(
        options: *const RawAdam,
        count: usize,
        params: *const *const C_tensor,
        grads: *const *const C_tensor,
        exp_avgs: *const *const C_tensor,
        exp_avg_sqs: *const *const C_tensor,
        steps: *const *const C_tensor,
        rate: *const C_tensor,
        scale: *const C_tensor,
        found_inf: *const C_tensor,
    ) -> Status;
}

/// Runs a step over parameters, gradients, moments and step numbers: five lists of one length, which the caller has checked.
pub(crate) fn fused_adam<T: Borrow<Tensor>>(
    options: RawAdam,
    lists: [&[T]; 5],
    [rate, scale, found_inf]: [Option<&Tensor>; 3],
) -> Result<()> {
    let optional = |tensor: Option<&Tensor>| tensor.map_or(std::ptr::null(), Tensor::as_ptr);
    let count = lists[0].len();
    let lists = lists.map(pointers);
    let [params, grads, exp_avgs, exp_avg_sqs, steps] = lists.each_ref().map(|list| list.as_ptr());
    // SAFETY: each list has `count` tensors, which outlive the call, as do the options and the other tensors; null is no tensor.
    unsafe {
        check(rt_fused_adam(
            &raw const options,
            count,
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            steps,
            optional(rate),
            optional(scale),
            optional(found_inf),
        ))
    }
}
