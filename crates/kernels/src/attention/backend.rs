//! The kernel of libtorch's attention on a GPU, chosen by measurement.
//!
//! cuDNN's attention, FlashAttention-2 and the memory-efficient kernel compute the same function. Which is the fastest depends on the GPU,
//! its driver, the version of libtorch, the dtype, the width of a head, the lengths, the mask and the group of queries that share keys: a [`Class`]. The
//! first attention of a class runs forward and backward with each backend that takes its operands, and the fastest is used from then on. The
//! choice is kept in `attention.txt` in the cache folder (`FRUGAL_CACHE`, else the user's), so that later processes on the machine compute
//! with the same kernel; delete the file to measure again. `FRUGAL_ATTENTION=cudnn|flash|efficient` chooses a backend for every class that it
//! takes, and `FRUGAL_ATTENTION=libtorch` leaves the choice to libtorch's own order.
//!
//! It applies to bf16 and fp16 without dropout on CUDA; fp32 and f64 have one kernel there. While a graph is captured nothing is measured:
//! the steps before the capture have done it.
//!
//! # Equal bits
//!
//! The backward passes of these kernels add up the gradients of queries in the order in which blocks finish (FlashAttention-2 and cuDNN
//! always, the memory-efficient kernel where it divides the keys), so that two runs on a GPU may differ in the last bits. What this project
//! promises of equal bits, under every activation plan and after a resume, holds there with
//! [`Determinism::Require`](runtime::ops::settings::Determinism): libtorch then uses slower kernels with one order, and refuses cuDNN's. Such
//! classes are measured by themselves.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, Once, OnceLock, PoisonError};

use files::atomic_write;
use runtime::autograd::{GradMode, Keep, grad};
use runtime::device::{Event, Stream};
use runtime::ops::attention::backend::{Backend, Call, beginning_with, chosen, order, set_order};
use runtime::ops::settings::is_deterministic;
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

use crate::cuda::{cache, is_capturing};

const NAME: &str = "attention backend";
const VARIABLE: &str = "FRUGAL_ATTENTION";
/// The backends that are measured. The others have the scores in memory, or do not exist on CUDA.
const CANDIDATES: [Backend; 3] = [Backend::CuDnn, Backend::Flash, Backend::Efficient];
/// Measured runs of a backend, and the milliseconds after which no further one begins.
const RUNS: (usize, f64) = (5, 500.0);

/// What decides which backend is the fastest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Class {
    device: usize,
    kind: Kind,
    /// Width of a head.
    head: i64,
    /// The numbers of queries and of keys, each up to a power of two.
    lengths: [u64; 2],
    /// Query heads that share a head of keys.
    group: i64,
    masked: bool,
    deterministic: bool,
}

impl Class {
    /// Returns the class of an attention on CUDA; `None` where there is no choice.
    fn of([q, k, _]: [&Tensor; 3], call: Call<'_>) -> Result<Option<Self>> {
        let (Device::Cuda(device), kind) = (q.device(), q.kind()) else { return Ok(None) };
        if call.dropout != 0.0 || !matches!(kind, Kind::BFloat16 | Kind::Half) {
            return Ok(None);
        }
        Self::on(device, [q, k], call.mask.is_some()).map(Some)
    }

    fn on(device: usize, [q, k]: [&Tensor; 2], masked: bool) -> Result<Self> {
        let ((_, heads, queries, head), (_, kv_heads, keys, _)) = (q.size4()?, k.size4()?);
        let lengths = [queries, keys].map(|length| length.unsigned_abs().next_power_of_two());
        let (group, deterministic) = (heads / kv_heads.max(1), is_deterministic()?);
        Ok(Self { device, kind: q.kind(), head, lengths, group, masked, deterministic })
    }

    /// The class on this machine, as a line of the file of choices names it.
    fn key(&self) -> Result<String> {
        let name = runtime::device::name(Device::Cuda(self.device))?;
        let driver = runtime::device::driver_version().unwrap_or_else(|| "unknown".into());
        Ok(self.key_with(&name, &driver, runtime::torch_version()))
    }

    fn key_with(&self, name: &str, driver: &str, version: &str) -> String {
        let Self { device: _, kind, head, lengths: [queries, keys], group, masked, deterministic } = *self;
        let mask = if masked { "masked" } else { "causal" };
        let deterministic = if deterministic { ", deterministic" } else { "" };
        format!(
            "{name}, driver {driver}, libtorch {version}, {kind:?}, head {head}, {queries} queries, {keys} keys, \
             group {group}, {mask}{deterministic}"
        )
    }
}

/// Computes an attention with the backend of its class first in libtorch's order.
pub(super) fn with_fastest(
    qkv: [&Tensor; 3],
    call: Call<'_>,
    attend: impl Fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    let [q, k, v] = qkv;
    let Some(class) = Class::of(qkv, call)? else { return attend(q, k, v) };
    let backend = match forced()? {
        Forced::Libtorch => None,
        Forced::Backend(backend) => Some(backend),
        Forced::No => choice(class, qkv, call, &attend)?,
    };
    let _first = backend.map(First::new).transpose()?;
    attend(q, k, v)
}

/// The value of the variable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Forced {
    No,
    Libtorch,
    Backend(Backend),
}

fn forced() -> Result<Forced> {
    static FORCED: OnceLock<std::result::Result<Forced, String>> = OnceLock::new();
    let read = || parse_forced(std::env::var(VARIABLE).ok().as_deref());
    FORCED.get_or_init(read).clone().map_err(|reason| Error::invalid(NAME, reason))
}

fn parse_forced(value: Option<&str>) -> std::result::Result<Forced, String> {
    match value {
        None | Some("") => Ok(Forced::No),
        Some("libtorch") => Ok(Forced::Libtorch),
        Some(name) => match Backend::from_name(name).filter(|backend| CANDIDATES.contains(backend)) {
            Some(backend) => Ok(Forced::Backend(backend)),
            None => {
                Err(format!("{VARIABLE} is `{name}`; expected `cudnn`, `flash`, `efficient` or `libtorch`"))
            }
        },
    }
}

/// A guard with a backend first in libtorch's order, which belongs to the process: other threads wait for it.
struct First {
    before: [Backend; 5],
    _alone: MutexGuard<'static, ()>,
}

impl First {
    fn new(backend: Backend) -> Result<Self> {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let before = order()?;
        set_order(beginning_with(backend, before))?;
        Ok(Self { before, _alone: alone })
    }
}

impl Drop for First {
    fn drop(&mut self) {
        // A permutation, which libtorch accepts.
        let _ = set_order(self.before);
    }
}

/// Returns the backend of a class: known in this process, kept in the file, or measured; `None` where none of the candidates takes it, or
/// nothing can be measured now.
fn choice(
    class: Class,
    qkv: [&Tensor; 3],
    call: Call<'_>,
    attend: &dyn Fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>,
) -> Result<Option<Backend>> {
    static KNOWN: Mutex<Vec<(Class, Option<Backend>)>> = Mutex::new(Vec::new());
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, backend)) = known().iter().find(|(other, _)| *other == class) {
        return Ok(*backend);
    }
    if is_capturing(qkv[0].device())? {
        return Ok(None);
    }
    let file = cache::folder().map(|folder| folder.join("attention.txt"));
    let backend = kept_or_measured(file, &class.key()?, || measured(qkv, call, attend))?;
    known().push((class, backend));
    Ok(backend)
}

/// Returns the choice that the file has for a class, or the fastest of those measured, which is then kept.
fn kept_or_measured(
    file: Option<PathBuf>,
    key: &str,
    measure: impl FnOnce() -> Result<Vec<(Backend, f64)>>,
) -> Result<Option<Backend>> {
    let text = file.as_ref().and_then(|file| std::fs::read_to_string(file).ok()).unwrap_or_default();
    let kept = text.lines().filter_map(|line| line.split_once(": ")).find(|(name, _)| *name == key);
    if let Some(backend) = kept.and_then(|(_, name)| Backend::from_name(name)) {
        return Ok(Some(backend));
    }
    let seconds = measure()?;
    let Some(&(fastest, _)) = seconds.iter().min_by(|a, b| a.1.total_cmp(&b.1)) else { return Ok(None) };
    if let Some(file) = file {
        // A line of the class that has no known backend is replaced.
        let others = text.lines().filter(|line| line.split_once(": ").is_none_or(|(name, _)| name != key));
        let lines: String = others.map(|line| format!("{line}\n")).collect();
        let written = std::fs::create_dir_all(atomic_write::parent(&file)).and_then(|()| {
            let line = format!("{key}: {}\n", fastest.name());
            atomic_write::file(&file, |out| out.write_all([lines, line].concat().as_bytes()))
        });
        // On failure, the next process measures again.
        drop(written);
    }
    Ok(Some(fastest))
}

/// Returns the seconds of forward and backward with each candidate that takes the operands and has the memory for it.
fn measured(
    qkv: [&Tensor; 3],
    call: Call<'_>,
    attend: &dyn Fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>,
) -> Result<Vec<(Backend, f64)>> {
    // libtorch replaces the order in the first attention on a GPU.
    static INITIALISED: Once = Once::new();
    INITIALISED.call_once(|| drop(chosen(qkv[0], qkv[1], qkv[2], call)));
    let mut seconds = Vec::new();
    for backend in CANDIDATES {
        let takes = {
            let _first = First::new(backend)?;
            chosen(qkv[0], qkv[1], qkv[2], call)? == Some(backend)
        };
        // A backend without memory, or without a plan for these operands, is no candidate.
        let time = takes.then(|| time(backend, qkv, attend));
        seconds.extend(time.and_then(Result::ok).map(|time| (backend, time)));
    }
    Ok(seconds)
}

/// Returns the shortest seconds of a forward and a backward with a backend. No gradient reaches the operands.
fn time(
    backend: Backend,
    qkv: [&Tensor; 3],
    attend: &dyn Fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>,
) -> Result<f64> {
    let device = qkv[0].device();
    let leaf = |tensor: &Tensor| -> Result<Tensor> { Ok(tensor.f_detach()?.f_set_requires_grad(true)?) };
    let [q, k, v] = [leaf(qkv[0])?, leaf(qkv[1])?, leaf(qkv[2])?];
    let _grad = GradMode::on();
    let stream = Stream::current(device)?;
    let (runs, budget) = RUNS;
    let (mut shortest, mut spent) = (f64::INFINITY, 0.0);
    // The first run loads the kernels.
    for run in 0..=runs {
        let (begin, end) = (Event::new(device)?, Event::new(device)?);
        stream.record(&begin)?;
        let o = {
            // Not during backward: a thread of the engine that recomputes another attention may wait for the order.
            let _first = First::new(backend)?;
            attend(&q, &k, &v)?
        };
        let upstream = o.f_detach()?;
        drop(grad(&[&o], &[Some(&upstream)], &[&q, &k, &v], Keep::default())?);
        stream.record(&end)?;
        end.synchronize()?;
        let seconds = begin.elapsed(&end)?;
        if run > 0 {
            shortest = shortest.min(seconds);
            spent += 1e3 * seconds;
        }
        if spent > budget {
            break;
        }
    }
    Ok(shortest)
}

#[cfg(test)]
mod tests;
