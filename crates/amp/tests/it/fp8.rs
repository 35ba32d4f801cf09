//! fp8 linear layers: scales, saturation, and the numerics of the dtype.

use amp::Autocast;
use amp::autocast::fp8_linear::{max_value, quantize};
use kernels::linear::linear;
use tch::{Device, Kind, Tensor, kind};

const BOTH: [Kind; 2] = [Kind::Float8e4m3fn, Kind::Float8e5m2];

#[test]
fn quantization_maps_the_maximum_to_the_dtypes_maximum() {
    for dtype in BOTH {
        for magnitude in [1e-30, 3e-3, 1.0, 7.7e4, 3e38] {
            let t = Tensor::from_slice(&[0.25f32, -1.0, 0.0, 0.5]) * magnitude;
            let q = quantize(&t, dtype).unwrap();
            let values = Vec::<f32>::try_from(q.values.to_kind(Kind::Float)).unwrap();
            assert!(values.iter().all(|value| value.is_finite()), "{dtype:?} {magnitude}: {values:?}");
            if magnitude > 1e-10 {
                assert_eq!(values[1], -max_value(dtype) as f32, "{dtype:?} {magnitude}");
                assert_eq!(values[0], max_value(dtype) as f32 / 4.0);
            }
        }
        // Zeros stay zeros; an infinity becomes NaN.
        let q = quantize(&Tensor::zeros([3], kind::FLOAT_CPU), dtype).unwrap();
        assert_eq!(Vec::<f32>::try_from(q.values.to_kind(Kind::Float)).unwrap(), [0.0; 3]);
        let q = quantize(&Tensor::from_slice(&[1.0f32, f32::INFINITY]), dtype).unwrap();
        let back = Vec::<f32>::try_from(q.values.to_kind(Kind::Float) / q.scale).unwrap();
        assert!(back.iter().any(|value| value.is_nan()), "{back:?}");
    }
}

#[test]
fn quantization_errors_match_the_mantissa() {
    let t = Tensor::randn([4096], kind::FLOAT_CPU);
    for (dtype, bits) in [(Kind::Float8e4m3fn, 3), (Kind::Float8e5m2, 2)] {
        let q = quantize(&t, dtype).unwrap();
        let back = q.values.to_kind(Kind::Float) / &q.scale;
        // Half a unit in the last place of the mantissa, or of the smallest subnormal number.
        let least = if dtype == Kind::Float8e5m2 { 2f64.powi(-16) } else { 2f64.powi(-9) };
        let allowed = (t.abs() * 0.5f64.powi(bits + 1)).maximum(&(q.scale.reciprocal() * (least / 2.0)));
        let worst = ((&back - &t).abs() / allowed).max().double_value(&[]);
        assert!(worst <= 1.0001, "{dtype:?}: {worst}");
        assert!(worst > 0.85, "{dtype:?}: too good to be {bits} bits: {worst}");
    }
}

#[test]
fn an_fp8_layer_multiplies_quantized_operands() {
    for (rows, inner, outer, bias) in [(vec![32, 48], 48, 16, true), (vec![2, 5, 19], 19, 7, false)] {
        let x = Tensor::randn(&rows, kind::FLOAT_CPU).set_requires_grad(true);
        let w = (Tensor::randn([outer, inner], kind::FLOAT_CPU) * 0.1).set_requires_grad(true);
        let b = bias.then(|| Tensor::randn([outer], kind::FLOAT_CPU).set_requires_grad(true));
        let y = {
            let _scope = Autocast::fp8().enter();
            linear(&x, &w, b.as_ref()).unwrap()
        };
        assert_eq!(y.kind(), Kind::BFloat16);
        let upstream = Tensor::randn(y.size(), kind::FLOAT_CPU).to_kind(Kind::BFloat16);
        runtime::autograd::backward(&[&(&y * &upstream).sum(Kind::Float)]).unwrap();

        let back = |t: &Tensor, dtype| {
            let q = quantize(&t.detach(), dtype).unwrap();
            q.values.to_kind(Kind::Double) / q.scale.to_kind(Kind::Double)
        };
        let (x8, w8) = (back(&x, Kind::Float8e4m3fn).view([-1, inner]), back(&w, Kind::Float8e4m3fn));
        let g8 = back(&upstream, Kind::Float8e5m2).view([-1, outer]);
        let mut exact = x8.matmul(&w8.tr());
        if let Some(b) = &b {
            exact += b.to_kind(Kind::Double);
        }
        let close = |name: &str, found: &Tensor, exact: &Tensor, tolerance: f64| {
            let exact = exact.view(found.size().as_slice());
            let off = (found.to_kind(Kind::Double) - &exact).abs().max() / exact.abs().max();
            let off = off.double_value(&[]);
            assert!(off < tolerance, "{name}: {off}");
        };
        close("y", &y, &exact, 4.1e-3);
        // Gradients of fp32 inputs are rounded to fp8 only.
        close("x", &x.grad(), &g8.matmul(&w8), 1e-5);
        close("w", &w.grad(), &g8.tr().matmul(&x8), 1e-5);
        if let Some(b) = &b {
            let sum = upstream.to_kind(Kind::Double).view([-1, outer]).sum_dim_intlist(
                [0].as_slice(),
                false,
                Kind::Double,
            );
            close("b", &b.grad(), &sum, 1e-5);
        }
        // All results are close to fp32.
        let full = x.detach().linear(&w.detach(), b.as_ref().map(Tensor::detach).as_ref());
        let off = (y.to_kind(Kind::Float) - &full).norm() / full.norm();
        assert!(off.double_value(&[]) < 0.06, "{off:?}");
    }
}

#[test]
fn results_with_and_without_native_fp8_agree() {
    let Ok(device) = runtime::device::select("cuda") else {
        eprintln!("skipped: no CUDA device");
        return;
    };
    // Multiples of 16, and sizes that are not, which are padded.
    for (rows, inner, outer) in [(64, 128, 32), (10, 19, 7), (33, 100, 30_522)] {
        let leaf = |size: [i64; 2], scale: f64| Tensor::randn(size, kind::FLOAT_CPU) * scale;
        let (x, w, b) = (leaf([rows, inner], 1.0), leaf([outer, inner], 0.1), leaf([1, outer], 1.0).view(-1));
        let upstream = leaf([rows, outer], 1.0).to_kind(Kind::BFloat16);
        let run = |device: Device| -> Vec<Tensor> {
            let leaves = [&x, &w, &b].map(|tensor| tensor.to_device(device).detach().set_requires_grad(true));
            let y = {
                let _scope = Autocast::fp8().enter();
                linear(&leaves[0], &leaves[1], Some(&leaves[2])).unwrap()
            };
            runtime::autograd::backward(&[&(&y * upstream.to_device(device)).sum(Kind::Float)]).unwrap();
            let results = std::iter::once(y.detach()).chain(leaves.iter().map(Tensor::grad));
            results.map(|tensor| tensor.to_device(Device::Cpu).to_kind(Kind::Float)).collect()
        };
        for (index, (here, there)) in run(Device::Cpu).iter().zip(run(device)).enumerate() {
            let off = ((here - there).norm() / here.norm()).double_value(&[]);
            assert!(off < 5e-3, "{rows}, {inner}, {outer}: {index} is off by {off}");
        }
    }
}
