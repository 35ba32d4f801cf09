//! FLOPs of products with their measured rate, gradients, and the FLOPs of a backward.

use std::time::Instant;

use accounting::hardware;
use kernels::physical;
use report::cli::Scale;
use runtime::autograd::{self, Keep};
use runtime::device::synchronize;
use runtime::profile::Counter;
use tch::{Device, Kind, Tensor};

use super::{Cell, values};
use crate::accounting::sections;

const FLOPS: &str = "7 FLOPs and MFU";
const GRADIENTS: &str = "8 gradients";
const BACKWARD: &str = "9 FLOPs of gradients";

/// The lecture's sizes without a GPU, and with one.
const SMALL: [i64; 3] = [1024, 256, 64];
const LARGE: [i64; 3] = [16_384, 32_768, 8192];

pub(super) fn cells(device: Device, scale: Scale) -> anyhow::Result<Vec<Cell>> {
    let mut cells = Vec::new();
    known_trainings(&mut cells)?;
    products(&mut cells, device, scale)?;
    gradients(&mut cells)?;
    backward(&mut cells, device)?;
    Ok(cells)
}

fn known_trainings(cells: &mut Vec<Cell>) -> anyhow::Result<()> {
    let gpt3 = sections::training_gpt3()?;
    let statement =
        "training GPT-3: 6 · 174.6e9 parameters · 300e9 tokens, to the digits of the lecture's 3.14e23";
    let half_a_digit = gpt3.last_digit / 2.0 / gpt3.published;
    cells.push(Cell::equal(FLOPS, statement, "FLOP", gpt3.published, gpt3.ours).near(half_a_digit));
    let a100 = hardware::find("a100")?.bf16;
    let days = 2e25 / (a100 * 0.5) / 86_400.0 / 25_000.0;
    let statement = "training GPT-4: 2e25 FLOP (speculated) on 25,000 A100 at an MFU of 0.5, in days";
    cells.push(Cell::measured(FLOPS, statement, "days", Ok(days)));
    cells.push(Cell::equal(FLOPS, "promised rate of an A100 in bf16", "FLOP/s", 312e12, a100));
    let h100 = hardware::find("h100")?.bf16;
    let statement = "promised rate of an H100 in bf16: half of the 1979 TFLOP/s with sparsity";
    cells.push(Cell::equal(FLOPS, statement, "FLOP/s", 1979e12 / 2.0, h100));
    Ok(())
}

fn products(cells: &mut Vec<Cell>, device: Device, scale: Scale) -> anyhow::Result<()> {
    let options = (Kind::Float, device);
    // The promised rate: a data sheet's for a GPU, the largest measured one for a processor.
    let promised = physical::gemm_rate(device, Kind::Float, 2048, 2048, 2048)?.rate().unwrap_or(0.0);
    cells.push(Cell::measured(
        FLOPS,
        "fp32 rate of a 2048³ product here, taken as promised",
        "FLOP/s",
        Ok(promised),
    ));
    for (name, [b, d, k]) in [("without a GPU", SMALL), ("with a GPU", LARGE)] {
        let flops = (2 * b * d * k) as f64;
        let statement = format!("x [{b}, {d}] @ w [{d}, {k}] ({name}): 2 · B · D · K, counted");
        let small = b == SMALL[0];
        if !small && !matches!(scale, Scale::Full | Scale::Paper) {
            let why = format!(
                "takes half a minute on a processor; scale {} leaves it out, `--scale full` measures it",
                scale.name()
            );
            cells.push(Cell::measured(FLOPS, &statement, "FLOP", Err(why.clone())));
            let statement = format!("its MFU: actual rate over promised rate ({name})");
            cells.push(Cell::measured(FLOPS, &statement, "ratio", Err(why)));
            continue;
        }
        let (x, w) = (Tensor::f_ones([b, d], options)?, Tensor::f_randn([d, k], options)?);
        let counter = Counter::on_this_thread()?;
        let _ = x.f_matmul(&w)?;
        let counted = counter.finish()?.total.flops.dense as f64;
        cells.push(Cell::equal(FLOPS, &statement, "FLOP", flops, counted));
        let repeats = if small { 50 } else { 1 };
        synchronize(device)?;
        let start = Instant::now();
        for _ in 0..repeats {
            let _ = x.f_matmul(&w)?;
        }
        synchronize(device)?;
        let rate = flops * f64::from(repeats) / start.elapsed().as_secs_f64();
        let statement = format!("its MFU: actual rate over promised rate ({name})");
        cells.push(Cell::measured(FLOPS, &statement, "ratio", Ok(rate / promised)));
    }
    Ok(())
}

/// y = ½·(x·w − 5)².
fn gradients(cells: &mut Vec<Cell>) -> anyhow::Result<()> {
    let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0]);
    let w = Tensor::from_slice(&[1.0f32, 1.0, 1.0]).f_set_requires_grad(true)?;
    let predicted = x.f_dot(&w)?;
    let loss = predicted.f_sub_scalar(5.0)?.f_square()?.f_mul_scalar(0.5)?;
    cells.push(Cell::equal(
        GRADIENTS,
        "y = ½·(x·w − 5)² at x = [1, 2, 3], w = [1, 1, 1]",
        "",
        0.5,
        f64::try_from(&loss)?,
    ));
    loss.f_backward()?;
    let none = [&x, &predicted, &loss].map(|tensor| !tensor.grad().defined());
    cells.push(Cell::holds(GRADIENTS, "x, x·w and y keep no gradient", none == [true; 3]));
    cells.push(Cell::holds(GRADIENTS, "w.grad is [1, 2, 3]", values(&w.grad())? == [1.0, 2.0, 3.0]));
    Ok(())
}

/// x · w1 · w2 with retained gradients of what is between.
fn backward(cells: &mut Vec<Cell>, device: Device) -> anyhow::Result<()> {
    let options = (Kind::Float, device);
    let [b, d, k] = SMALL;
    for of_input in [false, true] {
        let x = Tensor::f_ones([b, d], options)?.f_set_requires_grad(of_input)?;
        let w1 = Tensor::f_randn([d, d], options)?.f_set_requires_grad(true)?;
        let w2 = Tensor::f_randn([d, k], options)?.f_set_requires_grad(true)?;
        let counter = Counter::on_this_thread()?;
        let h1 = x.f_matmul(&w1)?;
        let h2 = h1.f_matmul(&w2)?;
        let loss = h2.f_square()?.f_mean(Kind::Float)?;
        let forward = counter.finish()?.total.flops.dense as f64;
        let counter = Counter::on_this_thread()?;
        let mut wanted = vec![&h1, &h2, &w1, &w2];
        wanted.extend(of_input.then_some(&x));
        let gradients = autograd::grad(&[&loss], &[None], &wanted, Keep::default())?;
        let counted = counter.finish()?.total.flops.dense as f64;
        if !of_input {
            let expected = (2 * b * d * d + 2 * b * d * k) as f64;
            cells.push(Cell::equal(
                BACKWARD,
                "forward of x·w1·w2: 2·B·D·D + 2·B·D·K, counted",
                "FLOP",
                expected,
                forward,
            ));
            let shapes = gradients.iter().zip(&wanted).all(|(gradient, weight)| {
                gradient.as_ref().is_some_and(|gradient| gradient.size() == weight.size())
            });
            cells.push(Cell::holds(BACKWARD, "h1, h2, w1 and w2 have gradients of their own shapes", shapes));
        }
        let (statement, expected) = if of_input {
            ("backward with x.grad: 4·B·D·D + 4·B·D·K, counted", 4 * b * d * d + 4 * b * d * k)
        } else {
            (
                "backward without x.grad, which x does not ask for and the lecture counts: 2·B·D·D less",
                2 * b * d * d + 4 * b * d * k,
            )
        };
        cells.push(Cell::equal(BACKWARD, statement, "FLOP", expected as f64, counted));
    }
    Ok(())
}
