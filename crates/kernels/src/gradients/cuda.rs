//! Passes over many gradients as CUDA kernels: their 2-norm and an overflow check, after a factor or without one, and their
//! multiplication by a scalar of the device.

use runtime::Result;
use runtime::tensor_layout::TensorLayout;
use runtime::tensor_memory::bump_version;
use tch::{Device, Kind, Tensor};

use super::reference::Reference;
use super::{GradientPass, Unscaled};
use crate::cuda::{Argument, Source, are_ready, launch, optional, pointer, table, type_of, width};
use crate::operands::has_no_gaps;

pub(crate) const SOURCE: Source = Source(include_str!("gradients.cuh"));

/// Threads and numbers of a block, all of one gradient: few enough parts for one block to add up, and many blocks.
const THREADS: u32 = 256;
const CHUNK: u64 = 16_384;
/// Threads of the block that adds up the parts.
const NORM_THREADS: u32 = 1024;

/// The kernels in CUDA C++, and [`Reference`] for other dtypes and layouts, and without NVRTC.
pub(super) struct Cuda;

impl GradientPass for Cuda {
    fn unscale(&self, grads: &[&Tensor], factor: &Tensor, norm: bool) -> Result<Unscaled> {
        match super::on_cuda(grads, Some(factor))? {
            Some(survey) => Ok(Unscaled { found_inf: survey.found_inf, norm: norm.then_some(survey.norm) }),
            None => Reference.unscale(grads, factor, norm),
        }
    }
}

/// The result of a pass, on the device.
pub(crate) struct Survey {
    /// Double, no dimension.
    pub(crate) norm: Tensor,
    /// Float, `[1]`: 1 if a gradient is not finite, else 0.
    pub(crate) found_inf: Tensor,
}

/// A launch over gradients of one dtype and alignment.
type Group = table::Launch<(&'static str, i64)>;

/// Computes the 2-norm of all gradients and whether they are finite; with a factor, an fp32 scalar of the device, they are multiplied by
/// it in place before. `None` if the kernel does not support the gradients or the factor.
pub(crate) fn survey(gradients: &[&Tensor], factor: Option<&Tensor>) -> Result<Option<Survey>> {
    let Some((device, groups)) = groups(gradients, factor) else { return Ok(None) };
    let count: i64 = groups.iter().map(|group| group.blocks).sum();
    let parts = Tensor::f_empty([count], (Kind::Double, device))?;
    let mut first = 0;
    for group in &groups {
        let (Group { blocks, .. }, (kind, width)) = (group, group.kind);
        let group_parts = parts.f_narrow(0, first, *blocks)?;
        let scaled = factor.is_some();
        let expression = format!("gradient_squares<{kind}, {width}, {scaled}, {THREADS}, {CHUNK}>");
        let [table, entries] = group.arguments();
        let arguments = [table, entries, optional(factor), pointer(&group_parts)];
        launch(SOURCE, &expression, device, (*blocks, THREADS), &arguments)?;
        first += blocks;
    }
    let norm = Tensor::f_empty([0i64; 0], (Kind::Double, device))?;
    let found_inf = Tensor::f_empty([1], (Kind::Float, device))?;
    let arguments = [pointer(&parts), Argument::I64(count), pointer(&norm), pointer(&found_inf)];
    launch(SOURCE, &format!("gradient_norm<{NORM_THREADS}>"), device, (1, NORM_THREADS), &arguments)?;
    if factor.is_some() {
        gradients.iter().try_for_each(|gradient| bump_version(gradient))?;
    }
    Ok(Some(Survey { norm, found_inf }))
}

/// Multiplies all gradients by a factor, an fp32 scalar of the device, in place; returns false, with nothing changed, if the kernel does
/// not support them. If the factor is 1, it costs a launch and no pass over memory.
pub(crate) fn scale_many(gradients: &[&Tensor], factor: &Tensor) -> Result<bool> {
    let Some((device, groups)) = groups(gradients, Some(factor)) else { return Ok(false) };
    for group in &groups {
        let (Group { blocks, .. }, (kind, width)) = (group, group.kind);
        let expression = format!("scale_many<{kind}, {width}, {THREADS}, {CHUNK}>");
        let [table, entries] = group.arguments();
        launch(SOURCE, &expression, device, (*blocks, THREADS), &[table, entries, pointer(factor)])?;
    }
    gradients.iter().try_for_each(|gradient| bump_version(gradient))?;
    Ok(true)
}

/// Divides the gradients among launches; `None` if one of them or the factor is not supported.
fn groups(gradients: &[&Tensor], factor: Option<&Tensor>) -> Option<(Device, Vec<Group>)> {
    let device = gradients.first()?.device();
    let fits = |factor: &Tensor| {
        (factor.kind(), factor.device(), factor.numel()) == (Kind::Float, device, 1) && !factor.is_neg()
    };
    if !are_ready(device) || !factor.is_none_or(fits) {
        return None;
    }
    let entry = |gradient: &&Tensor| {
        let layout = TensorLayout::of(gradient).ok()?;
        let kind = type_of(layout.kind())?;
        if layout.device() != device || !layout.is_strided() || layout.is_neg() || !has_no_gaps(&layout) {
            return None;
        }
        let alike = (kind, width(&[layout.kind()], &[gradient], &[]));
        Some((alike, [layout.range().ok()?.start as u64], layout.numel()))
    };
    let entries: Vec<_> = gradients.iter().map(entry).collect::<Option<_>>()?;
    Some((device, table::launches(entries, CHUNK)))
}
