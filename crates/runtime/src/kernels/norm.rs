//! The norms as CUDA kernels.

use tch::{Kind, Tensor};

use super::{Source, are_ready, expect, float, int, launch, optional, pointer, type_of, width};
use crate::error::{Error, Result};
use crate::fused::norm::{Gradients, Norm, Normalized, Options, Saved, Wanted};
use crate::sys::tensor::{bump_version, is_sole_owner};

const NAME: &str = "fused norm";

pub(super) const SOURCE: Source = Source(include_str!("../../cpp/cuda/norm.cuh"));

/// Threads and packs of a thread, by rising size; the fastest of those that were tried on an H200. A thread with one pack reads the
/// next row's ahead, one with more has no registers for that.
const FORWARD: [(u32, i64); 6] = [(128, 1), (256, 1), (512, 1), (1024, 1), (512, 4), (512, 8)];
const BACKWARD: [(u32, i64); 6] = [(128, 1), (256, 1), (512, 1), (1024, 1), (1024, 2), (1024, 4)];
/// Threads that a pass has at most, all blocks together, where a block has several rows. A function of the shape: the number of
/// processors must not decide which rows are summed first.
const THREADS: i64 = 132 * 1024;

/// How a row is divided among a block's threads.
struct Row {
    rows: i64,
    columns: i64,
    width: i64,
    threads: u32,
    packs: i64,
}

impl Row {
    fn new(table: &[(u32, i64)], size: &[i64], width: i64) -> Option<Self> {
        let columns = *size.last()?;
        let needed = (columns + width - 1) / width;
        let &(threads, packs) =
            table.iter().find(|(threads, packs)| i64::from(*threads) * packs >= needed)?;
        let rows = size[..size.len() - 1].iter().product();
        Some(Self { rows, columns, width, threads, packs })
    }

    /// Blocks that divide the rows among them.
    fn blocks(&self) -> i64 {
        self.rows.min(THREADS / i64::from(self.threads))
    }
}

/// See [`crate::fused::norm::forward`]; `None` where the kernels do not take it (f64, very wide rows, no NVRTC).
pub(crate) fn forward(
    norm: Norm,
    x: &Tensor,
    residual: Option<&Tensor>,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    options: Options,
) -> Result<Option<Normalized>> {
    let (size, kind, device) = (x.size(), x.kind(), x.device());
    let output = options.output.unwrap_or(kind);
    let (Some(of_x), Some(of_y), true) = (type_of(kind), type_of(output), are_ready(device)) else {
        return Ok(None);
    };
    let (x, residual) = (x.f_contiguous()?, residual.map(Tensor::f_contiguous).transpose()?);
    let (of_parameters, weight, bias) = parameters(weight, bias)?;
    let columns = size.last().copied().unwrap_or(1);
    let all: Vec<&Tensor> =
        [Some(&x), residual.as_ref(), weight.as_ref(), bias.as_ref()].into_iter().flatten().collect();
    let kinds: Vec<Kind> = all.iter().map(|tensor| tensor.kind()).chain([output]).collect();
    let width = width(&kinds, &all, &[columns]);
    let Some(row) = Row::new(&FORWARD, &size, width) else { return Ok(None) };
    let empty = |size: &[i64], kind| Tensor::f_empty(size, (kind, device));
    let y = empty(&size, output)?;
    let sum = residual.as_ref().map(|_| empty(&size, kind)).transpose()?;
    let mean = (norm == Norm::Layer).then(|| empty(&[row.rows], Kind::Float)).transpose()?;
    let rstd = empty(&[row.rows], Kind::Float)?;
    if row.rows > 0 {
        let arguments = [
            pointer(&x),
            optional(residual.as_ref()),
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
        let Row { width, threads, packs, .. } = row;
        let center = norm == Norm::Layer;
        let types = format!("{of_x}, {of_parameters}, {of_y}");
        let expression = format!("norm_forward<{types}, {width}, {threads}, {packs}, {center}>");
        let blocks = if packs == 1 { row.blocks() } else { row.rows };
        launch(SOURCE, &expression, device, (blocks, threads), &arguments)?;
    }
    Ok(Some(Normalized { y, sum, mean, rstd }))
}

/// See [`crate::fused::norm::backward`], of a kept input; gives `upstream` back where the kernels do not take it.
pub(crate) fn backward(
    norm: Norm,
    saved: &Saved<'_>,
    upstream: Tensor,
    added: Option<&Tensor>,
    wanted: Wanted,
) -> Result<std::result::Result<Gradients, Tensor>> {
    let (size, kind, device) = (upstream.size(), saved.kind, upstream.device());
    let types = type_of(kind).zip(type_of(upstream.kind()));
    let (Some((of_x, of_upstream)), true) = (types, are_ready(device)) else { return Ok(Err(upstream)) };
    let upstream = if upstream.is_contiguous() { upstream } else { upstream.f_contiguous()? };
    let (kept, added) = (saved.kept.f_contiguous()?, added.map(Tensor::f_contiguous).transpose()?);
    let (of_weight_type, weight, _) = parameters(saved.weight, None)?;
    let columns = size.last().copied().unwrap_or(1);
    let all: Vec<&Tensor> =
        [Some(&kept), Some(&upstream), added.as_ref(), weight.as_ref()].into_iter().flatten().collect();
    let kinds: Vec<Kind> = all.iter().map(|tensor| tensor.kind()).collect();
    let width = width(&kinds, &all, &[columns]);
    let Some(row) = Row::new(&BACKWARD, &size, width) else { return Ok(Err(upstream)) };
    expect(NAME, "kept", &kept, &size, (kind, device))?;
    added.as_ref().map_or(Ok(()), |added| expect(NAME, "added", added, &size, (kind, device)))?;
    weight
        .as_ref()
        .map_or(Ok(()), |weight| expect(NAME, "weight", weight, &[columns], (weight.kind(), device)))?;
    let statistic = |name, tensor: &Tensor| expect(NAME, name, tensor, &[row.rows], (Kind::Float, device));
    // libtorch's operators, which may have run forward, give them a dimension more.
    let flat = |tensor: &Tensor| tensor.f_reshape([-1]);
    let (rstd, mean) = (flat(saved.rstd)?, saved.mean.map(flat).transpose()?);
    statistic("rstd", &rstd)?;
    mean.as_ref().map_or(Ok(()), |mean| statistic("mean", mean))?;
    if norm == Norm::Layer && mean.is_none() {
        return Err(Error::invalid(NAME, "the means that forward kept are gone"));
    }
    let in_place = kind == upstream.kind() && is_sole_owner(&upstream)?;
    let grad = match wanted.x {
        false => None,
        true if in_place => Some(upstream.shallow_clone()),
        true => Some(Tensor::f_empty(&size, (kind, device))?),
    };
    let parts = row.blocks();
    let partial =
        |wanted: bool| wanted.then(|| Tensor::f_empty([parts, columns], (Kind::Float, device))).transpose();
    let (of_weight, of_bias) = (partial(wanted.weight)?, partial(wanted.bias)?);
    if row.rows > 0 {
        let arguments = [
            pointer(&kept),
            pointer(&upstream),
            optional(added.as_ref()),
            optional(weight.as_ref()),
            optional(mean.as_ref()),
            pointer(&rstd),
            optional(grad.as_ref()),
            optional(of_weight.as_ref()),
            optional(of_bias.as_ref()),
            int(NAME, "the number of rows", row.rows)?,
            int(NAME, "the width", columns)?,
        ];
        let Row { width, threads, packs, .. } = row;
        let (center, biased) = (norm == Norm::Layer, wanted.bias);
        let types = format!("{of_x}, {of_weight_type}, {of_upstream}");
        let expression = format!("norm_backward<{types}, {width}, {threads}, {packs}, {center}, {biased}>");
        launch(SOURCE, &expression, device, (parts, threads), &arguments)?;
        grad.as_ref().map_or(Ok(()), bump_version)?;
    }
    let summed = |partial: Option<Tensor>| -> Result<Option<Tensor>> {
        let Some(partial) = partial else { return Ok(None) };
        let sums = Tensor::f_zeros([columns], (Kind::Float, device))?;
        if parts > 0 {
            let arguments = [
                pointer(&partial),
                pointer(&sums),
                int(NAME, "the number of parts", parts)?,
                int(NAME, "the width", columns)?,
            ];
            launch(SOURCE, "column_sums", device, ((columns + 31) / 32, 256), &arguments)?;
        }
        Ok(Some(sums))
    };
    Ok(Ok(Gradients { x: grad, weight: summed(of_weight)?, bias: summed(of_bias)? }))
}

/// The C++ type of the parameters, and they: as they are where that is one, in fp32 where not.
fn parameters(
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
) -> Result<(&'static str, Option<Tensor>, Option<Tensor>)> {
    let kinds: Vec<Kind> = [weight, bias].into_iter().flatten().map(Tensor::kind).collect();
    let alike = kinds.windows(2).all(|pair| pair[0] == pair[1]);
    let kind = kinds.first().copied().filter(|kind| alike && type_of(*kind).is_some()).unwrap_or(Kind::Float);
    let plain = |p: Option<&Tensor>| {
        p.map(|p| Ok::<_, Error>(p.f_detach()?.f_to_kind(kind)?.f_contiguous()?)).transpose()
    };
    Ok((type_of(kind).unwrap_or("float"), plain(weight)?, plain(bias)?))
}
