//! The norms as CUDA kernels.

use runtime::tensor_memory::{bump_version, dense, is_sole_owner};
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

use super::reference::Reference;
use super::{Gradients, Inputs, Norm, NormPass, Normalized, Requested, Saved};
use crate::cuda::{
    Source, are_ready, expect, float, int, launch, launch_with, optional, pointer, shared_memory, type_of,
    width,
};

const NAME: &str = "fused norm";

pub(crate) const SOURCE: Source = Source(include_str!("norm.cuh"));

/// Packs of a row that one thread has, and the most packs of a row that is divided so. As many threads share it as it needs, in whole
/// warps. The fastest on an H200 over rows of 896 to 16,384 columns.
type Division = &'static [(i64, i64)];

const FORWARD: Division = &[(1, 128), (2, 2048), (4, 4096)];
const BACKWARD: Division = &[(2, 1024), (4, 4096)];

/// Processors of a GPU. A constant, because their number must not affect the order of summation.
const PROCESSORS: i64 = 132;
/// Bytes of rows of each input that the blocks of one processor work on, if one row is not more, and that they work on or read ahead:
/// more blocks than that keep each other from the memory, and have more partial sums.
const AT_WORK: i64 = 24 << 10;
const AHEAD: i64 = 48 << 10;
/// Maximum threads and blocks of a processor.
const RESIDENT: (i64, i64) = (2048, 32);

/// The division of a row among a block's threads.
struct Row {
    rows: i64,
    columns: i64,
    width: i64,
    threads: u32,
    packs: i64,
    blocks: i64,
    /// Rows in shared memory, and its bytes.
    stages: i64,
    shared: u32,
}

impl Row {
    /// `inputs`: bytes of a number of each input that is read ahead. Nothing is read ahead if the shared memory of a block is too small,
    /// or the numbers cannot be read 16 bytes at a time; the results are the same. `sums`: of two sums for each number, one is in shared
    /// memory if a block has more than [`IN_REGISTERS`] numbers; `None` if it does not fit.
    fn new(
        division: Division,
        size: &[i64],
        width: i64,
        inputs: &[usize],
        sums: bool,
        device: Device,
    ) -> Result<Option<Self>> {
        let Some(&columns) = size.last() else { return Ok(None) };
        let needed = (columns + width - 1) / width;
        let Some(&(packs, _)) = division.iter().find(|(_, most)| needed <= *most) else { return Ok(None) };
        // With four packs not every number of warps leaves each thread the registers that it needs.
        let step = if packs == 4 { 128 } else { 32 };
        let threads = ((needed + packs - 1) / packs + step - 1) / step * step;
        let rows: i64 = size[..size.len() - 1].iter().product();
        let numbers = threads * packs * width;
        let bytes = inputs.iter().sum::<usize>() as i64;
        let (stage, beside) = (numbers * bytes, if sums && numbers > IN_REGISTERS { 4 * numbers } else { 0 });
        let room = if width == 1 { 0 } else { i64::from(shared_memory(device)?) - STATIC - beside };
        if room < 0 {
            return Ok(None);
        }
        let row = (columns * bytes / inputs.len().max(1) as i64).max(1);
        // Two sums for each number leave registers for two thirds of the blocks.
        let at_work = if sums { AT_WORK * 2 / 3 } else { AT_WORK };
        let processor_blocks = (at_work / row).min(RESIDENT.0 / threads.max(1)).clamp(1, RESIDENT.1);
        let wanted = (AHEAD / (processor_blocks * row)).clamp(2, 3);
        let stages = (2..=wanted).rev().find(|stages| stages * stage <= room).unwrap_or(0);
        let blocks = rows.min(PROCESSORS * processor_blocks);
        let shared = u32::try_from(stages * stage + beside).unwrap_or(0);
        let threads = u32::try_from(threads).unwrap_or(0);
        Ok(Some(Self { rows, columns, width, threads, packs, blocks, stages, shared }))
    }
}

/// Maximum bytes of static shared memory of a kernel.
const STATIC: i64 = 1024;
/// Maximum numbers of a row whose gradients of weight and bias are both summed in registers, as in `norm.cuh`.
const IN_REGISTERS: i64 = 16_384;

/// The kernels in CUDA C++, and [`Reference`] for f64, for very wide rows, and without NVRTC.
pub(super) struct Cuda;

impl NormPass for Cuda {
    fn forward(&self, inputs: &Inputs<'_>) -> Result<Normalized> {
        match forward(inputs)? {
            Some(normalized) => Ok(normalized),
            None => Reference.forward(inputs),
        }
    }

    fn backward(&self, saved: &Saved<'_>, upstream: Tensor, requested: Requested<'_>) -> Result<Gradients> {
        match backward(saved, upstream, requested)? {
            Ok(gradients) => Ok(gradients),
            Err(upstream) => Reference.backward(saved, upstream, requested),
        }
    }
}

/// See [`super::forward`]; `None` if the kernels do not support it. Always returns the means of the layer norm.
fn forward(inputs: &Inputs<'_>) -> Result<Option<Normalized>> {
    let &Inputs { norm, x, residual, weight, bias, options, .. } = inputs;
    let (size, kind, device) = (x.size(), x.kind(), x.device());
    let output = options.output.unwrap_or(kind);
    let (Some(x_type), Some(y_type), true) = (type_of(kind), type_of(output), are_ready(device)) else {
        return Ok(None);
    };
    let (x, residual) = (dense(x)?, residual.map(dense).transpose()?);
    let (parameter_type, weight, bias) = parameters(weight, bias)?;
    let columns = size.last().copied().unwrap_or(1);
    let all: Vec<&Tensor> =
        [Some(&*x), residual.as_deref(), weight.as_ref(), bias.as_ref()].into_iter().flatten().collect();
    let kinds: Vec<Kind> = all.iter().map(|tensor| tensor.kind()).chain([output]).collect();
    let width = width(&kinds, &all, &[columns]);
    let ahead = vec![kind.elt_size_in_bytes(); if residual.is_some() { 2 } else { 1 }];
    let Some(row) = Row::new(FORWARD, &size, width, &ahead, false, device)? else { return Ok(None) };
    let empty = |size: &[i64], kind| Tensor::f_empty(size, (kind, device));
    let y = empty(&size, output)?;
    let sum = residual.as_ref().map(|_| empty(&size, kind)).transpose()?;
    let mean = (norm == Norm::Layer).then(|| empty(&[row.rows], Kind::Float)).transpose()?;
    let rstd = empty(&[row.rows], Kind::Float)?;
    if row.rows > 0 {
        let arguments = [
            pointer(&x),
            optional(residual.as_deref()),
            optional(sum.as_ref()),
            optional(weight.as_ref()),
            optional(bias.as_ref()),
            pointer(&y),
            optional(mean.as_ref()),
            pointer(&rstd),
            int(NAME, "the number of rows", row.rows)?,
            int(NAME, "the width", row.columns)?,
            float(options.eps),
        ];
        let Row { width, threads, packs, stages, blocks, shared, .. } = row;
        let center = norm == Norm::Layer;
        let types = format!("{x_type}, {parameter_type}, {y_type}");
        let expression = format!("norm_forward<{types}, {width}, {threads}, {packs}, {stages}, {center}>");
        launch_with(SOURCE, &expression, device, (blocks, threads, shared), &arguments)?;
    }
    Ok(Some(Normalized { y, sum, mean, rstd }))
}

/// See [`super::backward`], with a saved input; returns `upstream` if the kernels do not support it. The gradients of weight
/// and bias have the parameters' dtypes `parameter_kinds` if these are the same and the kernels support it, else fp32.
fn backward(
    saved: &Saved<'_>,
    upstream: Tensor,
    requested: Requested<'_>,
) -> Result<std::result::Result<Gradients, Tensor>> {
    let Requested { norm, added, wanted, kinds: parameter_kinds } = requested;
    let (size, kind, device) = (upstream.size(), saved.kind, upstream.device());
    let types = type_of(kind).zip(type_of(upstream.kind()));
    let (Some((x_type, upstream_type)), true) = (types, are_ready(device)) else { return Ok(Err(upstream)) };
    let is_plain = upstream.is_contiguous() && !upstream.is_neg();
    let upstream = if is_plain { upstream } else { dense(&upstream)?.into_tensor() };
    // How a row is divided among threads: by the types, and by how many numbers a thread loads at once.
    let (kept, added) = (dense(saved.kept)?, added.map(dense).transpose()?);
    let (weight_type, weight, _) = parameters(saved.weight, None)?;
    let columns = size.last().copied().unwrap_or(1);
    let all: Vec<&Tensor> =
        [Some(&*kept), Some(&upstream), added.as_deref(), weight.as_ref()].into_iter().flatten().collect();
    let kinds: Vec<Kind> = all.iter().map(|tensor| tensor.kind()).collect();
    let width = width(&kinds, &all, &[columns]);
    let ahead = [kind, upstream.kind()].map(|kind| kind.elt_size_in_bytes());
    let Some(row) = Row::new(BACKWARD, &size, width, &ahead, wanted.bias, device)? else {
        return Ok(Err(upstream));
    };
    // The operands: the tensors that forward saved, and the outputs.
    expect(NAME, "kept", &*kept, &size, (kind, device))?;
    expect(NAME, "added", added.as_deref(), &size, (kind, device))?;
    let weight_kind = weight.as_ref().map_or(Kind::Float, Tensor::kind);
    expect(NAME, "weight", weight.as_ref(), &[columns], (weight_kind, device))?;
    // libtorch's operators, which may have run forward, return them with one more dimension.
    let flat = |tensor: &Tensor| tensor.f_reshape([-1]);
    let (rstd, mean) = (flat(saved.rstd)?, saved.mean.map(flat).transpose()?);
    expect(NAME, "rstd", &rstd, &[row.rows], (Kind::Float, device))?;
    expect(NAME, "mean", mean.as_ref(), &[row.rows], (Kind::Float, device))?;
    if norm == Norm::Layer && mean.is_none() {
        return Err(Error::invalid(NAME, "the means that forward saved are gone"));
    }
    let in_place = kind == upstream.kind() && is_sole_owner(&upstream)?;
    let grad = match wanted.x {
        false => None,
        true if in_place => Some(upstream.shallow_clone()),
        true => Some(Tensor::f_empty(&size, (kind, device))?),
    };
    let parts = row.blocks;
    let partial =
        |wanted: bool| wanted.then(|| Tensor::f_empty([parts, columns], (Kind::Float, device))).transpose();
    let (weight_parts, bias_parts) = (partial(wanted.weight)?, partial(wanted.bias)?);
    if row.rows > 0 {
        let arguments = [
            pointer(&kept),
            pointer(&upstream),
            optional(added.as_deref()),
            optional(weight.as_ref()),
            optional(mean.as_ref()),
            pointer(&rstd),
            optional(grad.as_ref()),
            optional(weight_parts.as_ref()),
            optional(bias_parts.as_ref()),
            int(NAME, "the number of rows", row.rows)?,
            int(NAME, "the width", columns)?,
        ];
        let Row { width, threads, packs, stages, shared, .. } = row;
        let (center, biased) = (norm == Norm::Layer, wanted.bias);
        let types = format!("{x_type}, {weight_type}, {upstream_type}");
        let expression =
            format!("norm_backward<{types}, {width}, {threads}, {packs}, {stages}, {center}, {biased}>");
        launch_with(SOURCE, &expression, device, (parts, threads, shared), &arguments)?;
        grad.as_ref().map_or(Ok(()), bump_version)?;
    }
    let [weight, bias] = column_sums([weight_parts, bias_parts], parameter_kinds)?;
    Ok(Ok(Gradients { x: grad, weight, bias }))
}

/// Returns the column sums of each given matrix, all of one size, in one launch: in `kinds` if the dtypes of the given ones are
/// the same and have a kernel, else in fp32.
fn column_sums(partial: [Option<Tensor>; 2], kinds: [Kind; 2]) -> Result<[Option<Tensor>; 2]> {
    let mut matrices =
        partial.iter().zip(kinds).filter_map(|(partial, kind)| Some((partial.as_ref()?, kind)));
    let Some((first, first_kind)) = matrices.next() else { return Ok([None, None]) };
    let second = matrices.next();
    let alike = second.is_none_or(|(_, second_kind)| second_kind == first_kind);
    let kind = Some(first_kind).filter(|kind| alike && type_of(*kind).is_some()).unwrap_or(Kind::Float);
    let [parts, columns] = first.size()[..] else {
        return Err(Error::invalid(NAME, "partial sums that are no matrix"));
    };
    let sums = || Tensor::f_zeros([columns], (kind, first.device()));
    if parts == 0 {
        let zeros = |partial: &Option<Tensor>| partial.as_ref().map(|_| sums()).transpose();
        return Ok([zeros(&partial[0])?, zeros(&partial[1])?]);
    }
    let empty = || Tensor::f_empty([columns], (kind, first.device()));
    let sums = (empty()?, second.map(|_| empty()).transpose()?);
    let arguments = [
        pointer(first),
        pointer(&sums.0),
        optional(second.map(|(partial, _)| partial)),
        optional(sums.1.as_ref()),
        int(NAME, "the number of parts", parts)?,
        int(NAME, "the width", columns)?,
    ];
    let blocks = (columns + 31) / 32 * if second.is_some() { 2 } else { 1 };
    let expression = format!("column_sums<{}>", type_of(kind).unwrap_or("float"));
    launch(SOURCE, &expression, first.device(), (blocks, 256), &arguments)?;
    Ok(match partial {
        [Some(_), _] => [Some(sums.0), sums.1],
        [None, _] => [None, Some(sums.0)],
    })
}

/// Returns the C++ type of the parameters, and the parameters: converted to fp32 if their types differ.
fn parameters(
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
) -> Result<(&'static str, Option<Tensor>, Option<Tensor>)> {
    let kinds: Vec<Kind> = [weight, bias].into_iter().flatten().map(Tensor::kind).collect();
    let alike = kinds.windows(2).all(|pair| pair[0] == pair[1]);
    let kind = kinds.first().copied().filter(|kind| alike && type_of(*kind).is_some()).unwrap_or(Kind::Float);
    let plain = |p: &Tensor| -> Result<Tensor> { Ok(dense(&p.f_detach()?.f_to_kind(kind)?)?.into_tensor()) };
    let plain = |p: Option<&Tensor>| p.map(plain).transpose();
    Ok((type_of(kind).unwrap_or("float"), plain(weight)?, plain(bias)?))
}
