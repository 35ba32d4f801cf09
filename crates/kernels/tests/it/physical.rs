//! What a device reaches at best.

use kernels::physical;
use runtime::measure::Work;
use runtime::random::RandomState;
use tch::{Device, Kind};

const CPU: Device = Device::Cpu;

#[test]
fn products_that_do_not_exist_are_refused() {
    let error = physical::gemm_rate(CPU, Kind::Float, 0, 1, 1).unwrap_err().to_string();
    assert_eq!(error, "gemm_rate: sizes m 0, n 1, k 1; expected each from 1 on");
    assert!(physical::gemm_rate(CPU, Kind::Bool, 2, 2, 2).is_err());
    assert!(physical::gemm_rate(CPU, Kind::Float, i64::MAX, 2, 2).is_err());
}

#[test]
fn device_limits_are_measured() {
    let before = RandomState::capture(CPU).unwrap();
    let product = physical::gemm_rate(CPU, Kind::Float, 33, 17, 5).unwrap();
    assert!(RandomState::capture(CPU).unwrap() == before, "the operands come from a generator of their own");
    assert_eq!(product.work, Some(Work::flops(2.0 * 33.0 * 17.0 * 5.0)));
    assert!(product.rate().unwrap() > 0.0);
}
