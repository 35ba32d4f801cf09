//! Under a mixed-precision policy: the dtype's numerics, at every level, wherever backward runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kernels::linear::linear;
use runtime::autograd::{Keep, backward_with};
use runtime::precision::{self, Policy, Product};
use runtime::random::Generator;
use swiglu_ckpt::{CheckpointLevel, SwigluMlp, swiglu};
use tch::{Device, Kind, Tensor};

/// Rounds operands and results, multiplies in fp32, and counts requested weights.
#[derive(Debug)]
struct Rounded(Kind, AtomicUsize);

impl Rounded {
    fn new(kind: Kind) -> Arc<Self> {
        Arc::new(Self(kind, AtomicUsize::new(0)))
    }
}

impl Policy for Rounded {
    fn linear(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _: Option<&Tensor>,
        _: Product<'_>,
    ) -> runtime::Result<Tensor> {
        let wide = |t: &Tensor| t.to_kind(self.0).to_kind(Kind::Float);
        Ok(wide(x).f_linear(&wide(weight), None::<Tensor>)?.f_to_kind(self.0)?)
    }
    fn operand(&self, x: &Tensor) -> runtime::Result<Tensor> {
        Ok(x.f_to_kind(self.0)?)
    }
    fn weight(&self, weight: &Tensor) -> runtime::Result<Tensor> {
        self.1.fetch_add(1, Ordering::SeqCst);
        Ok(weight.f_to_kind(self.0)?)
    }
}

const LOW: [Kind; 2] = [Kind::BFloat16, Kind::Half];

fn levels() -> impl Iterator<Item = CheckpointLevel> {
    // A few tokens in a tile, so that there are several.
    let tiled = CheckpointLevel::InputOnlyTiled { bytes: 7 * (3 * 80 + 3 * 48) * 4 };
    [
        CheckpointLevel::SaveAll,
        CheckpointLevel::SaveGateUp,
        CheckpointLevel::SaveOne,
        CheckpointLevel::InputOnly,
        tiled,
    ]
    .into_iter()
}

/// x, W, V, U in fp32, as leaves.
fn arguments() -> [Tensor; 4] {
    let mut generator = Generator::new(3).unwrap();
    let mut draw = |size: &[i64], scale: f64| {
        let drawn = generator.normal(size, (Kind::Float, Device::Cpu)).unwrap();
        (drawn * scale).set_requires_grad(true)
    };
    let (h, f) = (48f64.powf(-0.5), 80f64.powf(-0.5));
    [draw(&[3, 11, 48], 1.0), draw(&[48, 80], h), draw(&[48, 80], h), draw(&[80, 48], f)]
}

fn twins(arguments: &[Tensor; 4], kind: Kind) -> [Tensor; 4] {
    arguments.each_ref().map(|t| t.detach().to_kind(kind).copy().set_requires_grad(true))
}

fn composition([x, w, v, u]: &[Tensor; 4]) -> Tensor {
    let linear = |x: &Tensor, w: &Tensor| linear(x, &w.tr(), None).unwrap();
    linear(&(linear(x, w).silu() * linear(x, v)), u)
}

/// Output and gradients in fp64, from an upstream gradient that every dtype can hold.
fn run(arguments: &[Tensor; 4], y: &Tensor) -> Vec<Tensor> {
    let upstream = (Tensor::arange(y.numel() as i64, (Kind::Double, Device::Cpu)) * 12.9898).sin();
    let upstream = upstream.to_kind(Kind::BFloat16).to_kind(y.kind()).view_as(y);
    backward_with(&[y], &[Some(&upstream)], Keep::default()).unwrap();
    let grads = arguments.iter().map(Tensor::grad);
    [y.detach()].into_iter().chain(grads).map(|t| t.to_kind(Kind::Double)).collect()
}

#[test]
fn each_level_is_as_accurate_as_linear_layers() {
    let fp32 = arguments();
    for dtype in LOW {
        let exact = twins(&fp32, Kind::Double);
        let exact = run(&exact, &composition(&exact));
        let theirs = twins(&fp32, Kind::Float);
        let y = {
            let _within = precision::enter(Some(Rounded::new(dtype)));
            composition(&theirs)
        };
        let theirs = run(&theirs, &y);
        for level in levels() {
            for fused in [false, true] {
                let ours = twins(&fp32, Kind::Float);
                let [x, w, v, u] = &ours;
                let policy = Rounded::new(dtype);
                let y = {
                    let _within = precision::enter(Some(policy.clone()));
                    if fused {
                        // Both are parts of one tensor.
                        let both = Tensor::cat(&[w, v], 1);
                        let mlp = SwigluMlp::from_fused_weights(both, u.shallow_clone(), level).unwrap();
                        mlp.forward(x).unwrap()
                    } else {
                        swiglu(x, w, v, u, level).unwrap()
                    }
                };
                assert_eq!(y.kind(), dtype, "{level}");
                assert_eq!(
                    policy.1.load(Ordering::SeqCst),
                    if fused { 2 } else { 3 },
                    "each weight is cast once"
                );
                let ours_now = run(&ours, &y);
                assert!(
                    ours.iter().all(|t| t.grad().kind() == Kind::Float),
                    "gradients are of the weights' dtype"
                );
                let names = ["y", "dx", "dW", "dV", "dU"];
                for (((name, ours), theirs), exact) in names.iter().zip(&ours_now).zip(&theirs).zip(&exact) {
                    let norm = exact.norm().double_value(&[]);
                    let off = |t: &Tensor| (t - exact).norm().double_value(&[]) / norm;
                    let epsilon = if dtype == Kind::Half { 2f64.powi(-11) } else { 2f64.powi(-8) };
                    let (ours, theirs) = (off(ours), off(theirs));
                    // A twentieth of a rounding: what the order of sums may do.
                    assert!(
                        ours <= theirs + epsilon / 20.0,
                        "{dtype:?} {level} {name}: {ours:e}, not {theirs:e}"
                    );
                    assert!(ours > 0.0, "{dtype:?} {level} {name}: nothing was rounded");
                }
            }
        }
    }
}

#[test]
fn backward_uses_the_dtype_of_forward_on_any_thread() {
    let fp32 = arguments();
    for dtype in LOW {
        for level in levels() {
            let results = [false, true].map(|elsewhere| {
                let ours = twins(&fp32, Kind::Float);
                let [x, w, v, u] = &ours;
                let policy = Rounded::new(dtype);
                let within = precision::enter(Some(policy.clone()));
                let y = swiglu(x, w, v, u, level).unwrap();
                let sum = y.sum(Kind::Float);
                if elsewhere {
                    drop(within);
                    std::thread::spawn(move || runtime::autograd::backward(&[&sum]).unwrap()).join().unwrap();
                } else {
                    runtime::autograd::backward(&[&sum]).unwrap();
                    drop(within);
                }
                assert_eq!(policy.1.load(Ordering::SeqCst), 3, "{level}: backward casts nothing again");
                ours.each_ref().map(Tensor::grad)
            });
            assert_eq!(results[0], results[1], "{dtype:?} {level}: to the bit");
        }
    }
}

#[test]
fn fp64_is_not_cast_and_undefined_tensors_are_errors() {
    #[derive(Debug)]
    struct Narrow;
    impl Policy for Narrow {
        fn operand(&self, x: &Tensor) -> runtime::Result<Tensor> {
            Ok(if x.kind() == Kind::Float { x.f_to_kind(Kind::Half)? } else { x.shallow_clone() })
        }
    }
    let _within = precision::enter(Some(Arc::new(Narrow)));
    let [x, w, v, u] = twins(&arguments(), Kind::Double);
    assert_eq!(swiglu(&x, &w, &v, &u, CheckpointLevel::InputOnly).unwrap().kind(), Kind::Double);
    let error = swiglu(&x, &Tensor::new(), &v, &u, CheckpointLevel::InputOnly).unwrap_err();
    assert_eq!(error.to_string(), "swiglu: `gate` is an undefined tensor; give one with values");
}
