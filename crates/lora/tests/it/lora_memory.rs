//! Exact bytes of adapted projections between forward and backward, and at the peak of a backward. The counts are
//! the whole process's, so no other test may run at the same time.

use lora::{LoraLinear, LoraLinearConfig};
use models::Linear;
use models::module::{Context, Projection};
use runtime::autograd::backward;
use runtime::memory::{Region, live_bytes, track_cpu};
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

#[test]
fn the_input_is_saved_once_and_no_mask_is_saved() {
    track_cpu().unwrap();
    let context = Context { training: true, ..Context::default() };
    let live = || live_bytes(Device::Cpu).unwrap();
    let (tokens, width, out, r) = (96u64, 128u64, 160u64, 4u64);
    for dropout in [0.0, 0.25] {
        let options = LoraLinearConfig { r: r as i64, alpha: 8.0, dropout, ..LoraLinearConfig::default() };
        let layers: Vec<LoraLinear> = (0..3)
            .map(|_| {
                let linear = Linear::new(width as i64, out as i64, false, F32).unwrap();
                LoraLinear::new(linear, &options).unwrap()
            })
            .collect();
        let x = Tensor::ones([2, tokens as i64 / 2, width as i64], F32).set_requires_grad(true);

        let before = live();
        let outputs: Vec<Tensor> = layers.iter().map(|layer| layer.forward(&x, &context).unwrap()).collect();
        // x belongs to the caller; each layer adds u, and its output, which is not kept.
        assert_eq!(live() - before, 3 * 4 * tokens * (out + r), "dropout {dropout}");
        drop(outputs);
        assert_eq!(live(), before, "dropout {dropout}");

        let first = &layers[0];
        let y = first.forward(&x, &context).unwrap();
        let upstream = Tensor::ones_like(&y);
        let before = live();
        let region = Region::start(Device::Cpu).unwrap();
        runtime::autograd::backward_with(&[&y], &[Some(&upstream)], runtime::autograd::Keep::default())
            .unwrap();
        let peak = region.finish().unwrap().peak_above_start();
        // dx and, with dropout, one more tensor of its size plus the mask's bytes during conversion; du and the gradients of A and
        // B, of r columns or rows.
        let small = 4 * (2 * tokens * r + r * width + 2 * r * out);
        let wide = 4 * tokens * width;
        let most = if dropout > 0.0 { 2 * wide + tokens * width } else { wide } + small;
        assert!(peak <= most, "dropout {dropout}: {peak} of {most}");
        assert!(peak >= wide, "dropout {dropout}: {peak}");
        drop((y, upstream));
        let gradients = 4 * (tokens * width + r * width + r * out);
        // y and its gradient are freed; only the gradients remain.
        assert_eq!(live() + 4 * tokens * (2 * out + r), before + gradients);
        runtime::autograd::set_grad(&x, None).unwrap();
    }

    // dx is not needed: W is not kept for it, and no product is computed.
    let layer =
        LoraLinear::new(Linear::new(128, 160, true, F32).unwrap(), &LoraLinearConfig::default()).unwrap();
    let x = Tensor::ones([tokens as i64, width as i64], F32);
    let y = layer.forward(&x, &context).unwrap().sum(Kind::Float);
    backward(&[&y]).unwrap();
    assert!(!x.grad().defined());
}
