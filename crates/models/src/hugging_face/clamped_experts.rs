//! gpt-oss's files, which have all experts of a layer in one tensor, transposed, and gate and up in turns.
//!
//! | in the file | its parts in the model, for expert N |
//! |---|---|
//! | `experts.gate_up_proj` `[experts, hidden, 2·inner]`, columns g₀ u₀ g₁ u₁ … | `N.gate_proj.weight`, `N.up_proj.weight` `[inner, hidden]` |
//! | `experts.gate_up_proj_bias` `[experts, 2·inner]`, g₀ u₀ g₁ u₁ … | `N.gate_proj.bias`, `N.up_proj.bias` `[inner]` |
//! | `experts.down_proj` `[experts, inner, hidden]` | `N.down_proj.weight` `[hidden, inner]` |
//! | `experts.down_proj_bias` `[experts, hidden]` | `N.down_proj.bias` `[hidden]` |
//!
//! In a model in MXFP4 a matrix is two tensors of bytes, not transposed: `gate_up_proj_blocks` `[experts, 2·inner, hidden/32, 16]` and
//! `gate_up_proj_scales` `[experts, 2·inner, hidden/32]`, and likewise those of `down_proj`, with rows of `inner`.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;

use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::llama::DecoderConfig;
use crate::tensors_file::{Entry, Layout, LazyTensor, MXFP4_BLOCK, TensorsFile};

/// The most experts that a layer has; a tensor of more is left as it is.
const MAX_EXPERTS: i64 = 1 << 11;
const GATE_UP: &str = "gate_up_proj";
const DOWN: &str = "down_proj";
const BIAS: &str = "_bias";
const BLOCKS: &str = "_blocks";
const SCALES: &str = "_scales";

/// Returns whether files are of this layout: the other one has no biases.
pub(super) fn have_layout(files: &[TensorsFile]) -> bool {
    let mut names = files.iter().flat_map(TensorsFile::entries).map(|entry| &*entry.name);
    names.any(|name| split(name).is_some_and(|(_, _, suffix)| suffix == BIAS))
}

/// Splits the name of such a tensor into `….mlp.experts`, its projection, and what follows it.
fn split(name: &str) -> Option<(&str, &str, &str)> {
    let (experts, rest) = name.rsplit_once('.')?;
    let projection = [GATE_UP, DOWN].into_iter().find(|projection| rest.starts_with(projection))?;
    let suffix = &rest[projection.len()..];
    let is_known = experts.ends_with(".mlp.experts") && ["", BIAS, BLOCKS, SCALES].contains(&suffix);
    is_known.then_some((experts, projection, suffix))
}

/// Returns the name of the first part of such a tensor, or the name of any other.
pub(super) fn first_part(name: &str) -> String {
    match split(name) {
        Some((layer, projection, suffix)) => {
            let projection = if projection == GATE_UP { "gate_proj" } else { DOWN };
            format!("{layer}.0.{projection}.{}", if suffix == BIAS { "bias" } else { "weight" })
        }
        None => name.to_owned(),
    }
}

/// Divides the tensors that hold all experts of a layer.
///
/// # Errors
/// Blocks without their scales in the same file.
pub(super) fn divide(file: &mut TensorsFile) -> Result<()> {
    let path = file.path().to_owned();
    file.replace(|entries| {
        let scales: BTreeMap<String, Entry> = entries
            .iter()
            .filter_map(|entry| Some((entry.name.strip_suffix(SCALES)?.to_owned(), entry.clone())))
            .collect();
        let mut divided = Vec::new();
        for entry in entries {
            match split(&entry.name) {
                Some((_, _, SCALES)) => {}
                Some((_, _, BLOCKS)) => {
                    let scales = entry.name.strip_suffix(BLOCKS).and_then(|name| scales.get(name));
                    let parts = scales.and_then(|scales| of_blocks(&entry, scales));
                    divided.extend(parts.ok_or_else(|| {
                        let reason = format!(
                            "`{}` is {:?} and has no scales of these sizes in the same file; get the files again",
                            entry.name, entry.shape
                        );
                        Error::file(&path, reason)
                    })?);
                }
                Some(_) => match parts(&entry) {
                    Some(parts) => divided.extend(parts),
                    None => divided.push(entry),
                },
                None => divided.push(entry),
            }
        }
        Ok(divided)
    })
}

/// The projections of a tensor of this name: their names, and the index and the distance of their rows among those of all.
fn projections(projection: &str) -> &'static [(&'static str, usize)] {
    if projection == GATE_UP { &[("gate_proj", 0), ("up_proj", 1)] } else { &[(DOWN, 0)] }
}

/// Returns the parts of a tensor with all experts of a layer; `None` for another shape.
fn parts(entry: &Entry) -> Option<Vec<Entry>> {
    let (layer, projection, suffix) = split(&entry.name)?;
    let projections = projections(projection);
    let step = projections.len() as i64;
    let (experts, inner, width) = match (suffix, &entry.shape[..]) {
        (BIAS, &[experts, width]) => (experts, None, width),
        ("", &[experts, inner, width]) => (experts, Some(inner), width),
        _ => return None,
    };
    if !(1..=MAX_EXPERTS).contains(&experts)
        || width < 1
        || width % step != 0
        || inner.is_some_and(|size| size < 1)
    {
        return None;
    }
    let kind = if inner.is_some() { "weight" } else { "bias" };
    let (shape, strides) = match inner {
        Some(inner) => (vec![width / step, inner], vec![step, width]),
        None => (vec![width / step], vec![step]),
    };
    let part = |expert: i64, &(name, offset): &(&str, usize)| {
        let layout = Layout::Strided { offset: offset as i64, strides: strides.clone() };
        let name = format!("{layer}.{expert}.{name}.{kind}");
        entry.part(name, shape.clone(), (expert, experts), layout)
    };
    (0..experts)
        .flat_map(|expert| projections.iter().map(move |one| (expert, one)))
        .map(|(expert, one)| part(expert, one))
        .collect()
}

/// Returns the parts of a matrix in MXFP4.
fn of_blocks(entry: &Entry, scales: &Entry) -> Option<Vec<Entry>> {
    let (layer, projection, _) = split(&entry.name)?;
    let projections = projections(projection);
    let &[experts, rows, blocks, bytes] = &entry.shape[..] else { return None };
    let [values, block_bytes] = MXFP4_BLOCK;
    let is_valid =
        (1..=MAX_EXPERTS).contains(&experts) && rows >= 1 && blocks >= 1 && bytes == block_bytes as i64;
    let step = projections.len();
    if !is_valid
        || scales.shape != entry.shape[..3]
        || rows % step as i64 != 0
        || [entry.kind, scales.kind] != [Kind::Uint8; 2]
    {
        return None;
    }
    let shape = vec![rows / step as i64, blocks.checked_mul(values as i64)?];
    let part = |expert: i64, &(name, first): &(&str, usize)| {
        let layout = Layout::Mxfp4 { scales: scales.bytes_of((expert, experts))?, first, step };
        let name = format!("{layer}.{expert}.{name}.weight");
        entry.part(name, shape.clone(), (expert, experts), layout)
    };
    (0..experts)
        .flat_map(|expert| projections.iter().map(move |one| (expert, one)))
        .map(|(expert, one)| part(expert, one))
        .collect()
}

/// Returns the tensors of a model as files have them: each layer's experts in four.
pub(super) fn join<'a>(config: &DecoderConfig, tensors: Vec<LazyTensor<'a>>) -> Result<Vec<LazyTensor<'a>>> {
    let Some(mixture) = config.mixture.as_ref().filter(|mixture| mixture.clamped.is_some()) else {
        return Ok(tensors);
    };
    let (mut joined, mut parts): (Vec<LazyTensor<'a>>, BTreeMap<String, Vec<LazyTensor<'a>>>) =
        Default::default();
    for tensor in tensors {
        let of_expert = tensor.name().split_once(".mlp.experts.").and_then(|(layer, rest)| {
            let (_, rest) = rest.split_once('.')?;
            let (projection, kind) = rest.split_once('.')?;
            let projection = if projection == DOWN { DOWN } else { GATE_UP };
            let suffix = if kind == "bias" { BIAS } else { "" };
            Some(format!("{layer}.mlp.experts.{projection}{suffix}"))
        });
        match of_expert {
            Some(name) => parts.entry(name).or_default().push(tensor),
            None => joined.push(tensor),
        }
    }
    for (name, parts) in parts {
        joined.push(joint(name, mixture.experts, parts)?);
    }
    Ok(joined)
}

/// Returns a tensor of all experts from their parts, in order of the experts, of each gate before up. A piece takes the memory of an expert.
fn joint<'a>(name: String, experts: i64, parts: Vec<LazyTensor<'a>>) -> Result<LazyTensor<'a>> {
    let per_expert = parts.len() / usize::try_from(experts).unwrap_or(1).max(1);
    let Some(first) = parts.first().filter(|_| (1..=2).contains(&per_expert)) else {
        return Err(Error::invalid("hugging_face::save", format!("`{name}` has no parts")));
    };
    let (kind, mut shape) = (first.kind(), first.shape().to_vec());
    if let Some(rows) = shape.first_mut() {
        *rows *= per_expert as i64;
    }
    shape.reverse();
    let of_expert: i64 = shape.iter().product();
    shape.insert(0, experts);
    // The expert that the last piece was of, without values on a process that gives its parts to another.
    let current: RefCell<Option<(i64, Option<Tensor>)>> = RefCell::new(None);
    let values = move |range: Range<i64>| -> runtime::Result<Option<Tensor>> {
        let _no_grad = tch::no_grad_guard();
        let mut pieces = Vec::new();
        let mut current = current.borrow_mut();
        let mut start = range.start;
        while start < range.end {
            let expert = start / of_expert;
            if current.as_ref().is_none_or(|(known, _)| *known != expert) {
                let own = &parts[expert as usize * per_expert..(expert as usize + 1) * per_expert];
                // Every process brings every part.
                let whole: Vec<Option<Tensor>> =
                    own.iter().map(LazyTensor::whole).collect::<runtime::Result<_>>()?;
                let whole: Option<Vec<Tensor>> = whole.into_iter().collect();
                // Rows of the parts in turns, then transposed.
                let flat = whole.map(|whole| -> runtime::Result<Tensor> {
                    let turns = Tensor::f_stack(&whole, 1)?.f_flatten(0, 1)?;
                    let transposed = if turns.dim() == 2 { turns.f_tr()? } else { turns };
                    Ok(transposed.f_contiguous()?.f_view([-1])?)
                });
                *current = Some((expert, flat.transpose()?));
            }
            let end = range.end.min((expert + 1) * of_expert);
            let (first, count) = (start - expert * of_expert, end - start);
            let piece = current
                .as_ref()
                .and_then(|(_, flat)| flat.as_ref())
                .map(|flat| flat.f_narrow(0, first, count));
            pieces.push(piece.transpose()?);
            start = end;
        }
        let pieces: Option<Vec<Tensor>> = pieces.into_iter().collect();
        Ok(pieces.map(|pieces| Tensor::f_cat(&pieces, 0)).transpose()?)
    };
    Ok(LazyTensor::new(name, kind, &shape, values))
}
