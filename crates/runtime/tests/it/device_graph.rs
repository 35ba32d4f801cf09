//! Captured steps: the error without CUDA, and a training step with CUDA.

use expect_test::expect;
use runtime::Error;
use runtime::autograd::{self, GradMode, Keep};
use runtime::device::graph::CapturedStep;
use runtime::device::{self, Stream, cuda_count};
use tch::{Device, Kind, Tensor};

#[test]
fn a_cpu_returns_an_error_with_the_remedy() {
    let error = CapturedStep::capture(Device::Cpu, || panic!("it must not run")).unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }));
    expect![
        "a captured step is not available here: a graph of launches exists on CUDA devices alone; call the step itself, whose launches are calls on a CPU"
    ]
    .assert_eq(&error.to_string());
}

#[test]
fn a_missing_device_is_an_error_and_nothing_runs() {
    let count = cuda_count().unwrap();
    let error = CapturedStep::capture(Device::Cuda(count), || panic!("it must not run")).unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
}

#[test]
fn a_captured_step_computes_the_same_as_the_step() {
    if cuda_count().unwrap() == 0 {
        eprintln!("skipped: no CUDA device");
        return;
    }
    let device = device::select("cuda").unwrap();
    let losses: Vec<Vec<f64>> =
        [false, true].into_iter().map(|captured| losses(device, captured).unwrap()).collect();
    assert_eq!(losses[0], losses[1]);
}

#[test]
fn after_a_failed_capture_the_device_works_as_before() {
    if cuda_count().unwrap() == 0 {
        eprintln!("skipped: no CUDA device");
        return;
    }
    let device = device::select("cuda").unwrap();
    let side = Stream::new(device).unwrap();
    // Free bytes of the driver after another stream used and freed blocks of 8 MiB, one after the other.
    let left = || {
        for _ in 0..64 {
            let block = Tensor::zeros([2 << 20], (Kind::Float, device));
            device::record_stream(&block, &side).unwrap();
            drop(block);
            device::synchronize(device).unwrap();
        }
        device::memory_info(device).unwrap().free
    };
    let before = left();
    let x = Tensor::ones([8], (Kind::Float, device));
    let inside = x.shallow_clone();
    let error = CapturedStep::capture(device, move || {
        // The host reads a value, which cannot be captured but is allowed in the warm-up.
        inside.f_sum(Kind::Float)?.f_double_value(&[])?;
        Ok(())
    })
    .unwrap_err();
    assert!(error.to_string().contains("captur"), "{error}");
    // A step that fails without CUDA returns its own error.
    let mut runs = 0;
    let error = CapturedStep::capture(device, move || {
        runs += 1;
        if runs == 2 { Err(Error::Other("no data".into())) } else { Ok(()) }
    })
    .unwrap_err();
    assert_eq!(error.to_string(), "no data");
    assert!(before.abs_diff(left()) < 64 << 20, "blocks that another stream used are used again");
    assert_eq!(losses(device, false).unwrap(), losses(device, true).unwrap(), "another capture works");
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
    let mut graph = captured.then(|| CapturedStep::capture(device, step(&weight, &x, &loss))).transpose()?;
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
