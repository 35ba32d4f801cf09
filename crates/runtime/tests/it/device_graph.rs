//! Captured steps: what is said where there is no CUDA, and a step of training where there is.

use std::io::Write;

use expect_test::expect;
use runtime::Error;
use runtime::autograd::{self, GradMode, Keep};
use runtime::device::graph::Step;
use runtime::device::{self, cuda_count};
use tch::{Device, Kind, Tensor};

#[test]
fn a_cpu_has_none_and_says_what_to_do() {
    let error = Step::capture(Device::Cpu, 1, || panic!("it must not run")).unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }));
    expect![
        "a captured step is not available here: a graph of launches exists on CUDA devices alone; call the step itself, whose launches are calls on a CPU, and see fused::elementwise"
    ]
    .assert_eq(&error.to_string());
}

#[test]
fn a_device_that_is_not_there_is_unavailable_and_nothing_runs() {
    let count = cuda_count().unwrap();
    let error = Step::capture(Device::Cuda(count), 1, || panic!("it must not run")).unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
}

#[test]
fn a_captured_step_computes_what_the_step_itself_does() {
    if cuda_count().unwrap() == 0 {
        // Not through a macro, whose words the test harness keeps to itself.
        writeln!(std::io::stderr(), "skipped: no CUDA device").unwrap();
        return;
    }
    let device = device::select("cuda").unwrap();
    let losses: Vec<Vec<f64>> =
        [false, true].into_iter().map(|captured| losses(device, captured).unwrap()).collect();
    assert_eq!(losses[0], losses[1]);
}

/// One step of gradient descent, which leaves its loss in `loss`.
fn step(weight: &Tensor, x: &Tensor, loss: &Tensor) -> impl FnMut() -> runtime::Result<()> + 'static {
    let (mut weight, x, mut loss) = (weight.shallow_clone(), x.shallow_clone(), loss.shallow_clone());
    move || {
        let error = x.f_mm(&weight)?.f_square()?.f_mean(Kind::Float)?;
        let gradient = autograd::grad(&[&error], &[None], &[&weight], Keep::default())?;
        let _no_grad = GradMode::off();
        if let [Some(gradient)] = &gradient[..] {
            let _ = weight.f_sub_(&gradient.f_mul_scalar(1e-3)?)?;
        }
        loss.f_copy_(&error.f_reshape([1])?)?;
        Ok(())
    }
}

/// The losses of plain gradient descent on y = x·w, over five batches.
fn losses(device: Device, captured: bool) -> runtime::Result<Vec<f64>> {
    let batch = |step: i64| {
        Ok::<_, Error>(
            Tensor::f_arange(64, (Kind::Float, device))?.f_remainder(step as f64 + 3.0)?.f_reshape([8, 8])?,
        )
    };
    let weight = Tensor::f_full([8, 1], 0.125, (Kind::Float, device))?.f_set_requires_grad(true)?;
    let (x, loss) = (batch(0)?, Tensor::f_zeros([1], (Kind::Float, device))?);
    let mut plain = step(&weight, &x, &loss);
    let mut graph = captured.then(|| Step::capture(device, 2, step(&weight, &x, &loss))).transpose()?;
    if graph.is_none() {
        plain()?;
        plain()?;
    }
    let mut losses = Vec::new();
    for index in 0..5 {
        let mut input = x.shallow_clone();
        input.f_copy_(&batch(index)?)?;
        match &mut graph {
            Some(graph) => graph.replay()?,
            None => plain()?,
        }
        device::synchronize(device)?;
        losses.push(loss.f_double_value(&[0])?);
    }
    Ok(losses)
}
