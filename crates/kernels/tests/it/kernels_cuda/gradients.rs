//! Norm, overflow check and scaling of many gradients.

use kernels::gradients;
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

use super::{cuda, normal};

/// One pass over more gradients than fit one launch, against f64; no write without a factor or with a factor of 1.
#[test]
fn norms_and_checks_of_many_gradients_match_the_cpu() {
    let Some(device) = cuda() else { return };
    let mut generator = Generator::new(10).unwrap();
    let sizes = [1, 7, 8, 4096, 16_384, 16_385, 50_001];
    for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
        let drawn: Vec<Tensor> =
            (0..170).map(|i| normal(&mut generator, &[sizes[i % 7]], kind).to_kind(kind)).collect();
        for number in [1.0, 0.37, 1e30] {
            let gradients: Vec<Tensor> = drawn.iter().map(|one| one.to_device(device)).collect();
            let factor = Tensor::full([1], number, (Kind::Float, device));
            let scale = factor.to_device(Device::Cpu);
            let expected: Vec<Tensor> =
                drawn.iter().map(|one| (one.to_kind(Kind::Float) * &scale).to_kind(kind)).collect();
            let squares = expected.iter().map(|one| one.to_kind(Kind::Double).square().sum(Kind::Double));
            let norm = squares.map(|sum| sum.double_value(&[])).sum::<f64>().sqrt();
            let scaled: Vec<Tensor> = gradients.iter().map(Tensor::copy).collect();
            assert!(gradients::scale_many_(&scaled, &factor).unwrap());
            let found = gradients::unscale_(&gradients, &factor, true).unwrap();
            let flag = if norm.is_finite() { 0.0 } else { 1.0 };
            assert_eq!(found.found_inf.double_value(&[0]), flag, "{kind:?} × {number}");
            let alone = gradients::norm_many(&gradients).unwrap().unwrap().double_value(&[]);
            let found = found.norm.unwrap().double_value(&[]);
            assert_eq!((found, found.is_finite()), (alone, norm.is_finite()), "{kind:?} × {number}");
            assert!(flag == 1.0 || (found / norm - 1.0).abs() < 1e-7, "{kind:?} × {number}: {found} {norm}");
            for ((one, other), expected) in gradients.iter().zip(&scaled).zip(&expected) {
                let (one, other) = (one.to_device(Device::Cpu), other.to_device(Device::Cpu));
                assert!(one.equal(expected) && other.equal(expected), "{kind:?} × {number}");
            }
        }
    }
    let gradients = [Tensor::full([100], 1e30, (Kind::Float, device))];
    let norm = gradients::norm_many(&gradients).unwrap().unwrap().double_value(&[]);
    assert!((norm / 1e31 - 1.0).abs() < 1e-6, "{norm}");
    // Without gaps in any order of the dimensions; others are left to libtorch.
    let whole = Tensor::ones([8, 6], (Kind::Float, device));
    let norm = gradients::norm_many(&[whole.tr()]).unwrap().unwrap().double_value(&[]);
    assert_eq!(norm, 48f64.sqrt());
    assert!(gradients::norm_many(&[whole.narrow(1, 0, 3)]).unwrap().is_none());
}
