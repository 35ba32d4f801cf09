//! How fast this machine is at what a step consists of.

use accounting::offload::Rates;
use anyhow::Context;
use models::LlamaConfig;
use models::init::Init;
use models::module::{Input, LanguageModel};
use offload::{Method, Offload, Options, Tier};
use runtime::device;
use runtime::measure::{Samples, physical};
use tch::{Device, Kind, Tensor};

use super::predicted::Speed;
use super::spans;

/// What was measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Measured {
    pub(crate) speed: Speed,
    pub(crate) rates: Rates,
}

/// Measures products of the model's own shape for so many tokens, the memory, and loads of a layer that is large enough to show the
/// link's rate.
///
/// # Errors
/// A device that is not there; too little memory, or room on the disk.
pub(crate) fn measure(
    config: &LlamaConfig,
    (kind, device): (Kind, Device),
    tokens: i64,
    tier: &Tier,
) -> anyhow::Result<Measured> {
    // Before the first product, when they can be told from the rest.
    runtime::device::product_workspaces(device)?;
    // On a CPU products of low precision run in fp32.
    let compute = runtime::matmul::compute_kind(device, kind);
    let product = physical::gemm_rate(device, compute, tokens, config.intermediate_size, config.hidden_size)?;
    let flops = product.rate().context("the rate of a product")?;
    let bandwidth = physical::copy_bandwidth(device)?.rate().context("the rate of a copy")?;
    let host = physical::copy_bandwidth(Device::Cpu)?.rate().context("the rate of a copy")?;
    let load = link(device, tier)?;
    // The same link the other way, and the same threads.
    let rates = Rates::of_memory(load, host, bandwidth);
    Ok(Measured { speed: Speed { flops, bandwidth }, rates })
}

/// Bytes per second at which layers come from a tier: of two layers of 32 MiB each, brought one at a time.
///
/// # Errors
/// As [`measure`].
pub(crate) fn link(device: Device, tier: &Tier) -> anyhow::Result<f64> {
    let config = LlamaConfig::llama(64, 1024, 1365, 2, 8);
    let options = Options { device, method: Method::OneLayer, tier: tier.clone(), ..Options::default() };
    let (model, offload) = Offload::assemble(&config, Init::Constant(0.01), Kind::Float, &options)?;
    let tokens = Tensor::from_slice(&[1i64]).view([1, 1]).f_to_device(device)?;
    let _no_grad = tch::no_grad_guard();
    let mut samples = Vec::new();
    for round in 0..6 {
        offload.start_trace()?;
        let _hidden = model.hidden(&Input::new(&tokens))?;
        let trace = offload.take_trace()?;
        if round > 0 {
            samples.extend(spans::link_rate(&trace));
        }
    }
    device::synchronize(device)?;
    Ok(Samples { samples }.median())
}
