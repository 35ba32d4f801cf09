//! Dropout by the hash of a seed.

use kernels::dropout::Mask;
use tch::{Device, Kind, Tensor};

use super::cuda;

/// The mask and its products have the CPU's bits, aligned or not, beyond one pass of the grid, and by operators in f64.
#[test]
fn dropout_has_the_bits_of_the_cpu() {
    let Some(device) = cuda() else { return };
    let mask = Mask { rate: 0.05, seed: 0x0123_4567_89ab_cdef.into() };
    for kind in [Kind::Float, Kind::BFloat16, Kind::Half, Kind::Double] {
        for numbers in [1, 77, 8192, 5_000_001] {
            let x = Tensor::randn([numbers], (kind, Device::Cpu));
            for factor in [1.0, mask.scale()] {
                let found = mask.apply(&x.to_device(device), factor).unwrap().to_device(Device::Cpu);
                assert!(found.equal(&mask.apply(&x, factor).unwrap()), "{kind:?} {numbers} × {factor}");
            }
            let [found, expected] =
                [device, Device::Cpu].map(|on| mask.keep(&[numbers], (kind, on)).unwrap());
            assert!(found.to_device(Device::Cpu).equal(&expected), "{kind:?} {numbers}");
        }
    }
}
