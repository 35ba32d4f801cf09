//! Seeding, capturing and restoring the random generators.

use std::sync::Mutex;

use runtime::random::{self, Generator, RandomState};
use tch::{Device, Kind, Tensor};

/// The default generators are shared by all threads, and so by all tests of this file.
static GENERATORS: Mutex<()> = Mutex::new(());

fn devices() -> Vec<Device> {
    let mut devices = vec![Device::Cpu];
    if runtime::device::cuda_count().unwrap() > 0 {
        devices.push(Device::Cuda(0));
    }
    devices
}

fn draw(device: Device) -> Tensor {
    Tensor::randn([37], (Kind::Float, device))
}

#[test]
fn a_seed_fixes_the_sequence() {
    let _lock = GENERATORS.lock();
    for device in devices() {
        random::seed(7).unwrap();
        let first = draw(device);
        random::seed(8).unwrap();
        assert_ne!(draw(device), first);
        random::seed(7).unwrap();
        assert_eq!(draw(device), first);
        for seed in [0, u64::MAX] {
            random::seed(seed).unwrap();
        }
    }
}

#[test]
fn a_state_can_be_restored_any_number_of_times() {
    let _lock = GENERATORS.lock();
    for device in devices() {
        // A normal sample leaves half of a pair behind in the CPU's generator: it belongs to the state.
        let _ = Tensor::randn([1], (Kind::Float, device));
        let state = RandomState::capture(device).unwrap();
        let first = draw(device);
        for _ in 0..3 {
            assert_ne!(draw(device), first);
            state.restore().unwrap();
            assert_eq!(draw(device), first);
        }
        assert_eq!(state.device(), device);
        assert_ne!(RandomState::capture(device).unwrap(), state);
    }
}

#[test]
fn a_replay_does_not_affect_the_sequence() {
    let _lock = GENERATORS.lock();
    for device in devices() {
        random::seed(1).unwrap();
        let state = RandomState::capture(device).unwrap();
        let (first, second) = (draw(device), draw(device));
        random::seed(1).unwrap();
        assert_eq!(draw(device), first);
        {
            let _replay = state.replay().unwrap();
            assert_eq!(draw(device), first);
            {
                let _preserve = RandomState::capture(device).unwrap().replay().unwrap();
                let _ = draw(device);
            }
            assert_eq!(draw(device), second);
        }
        assert_eq!(draw(device), second);
    }
}

#[test]
fn a_panic_restores_the_state() {
    let _lock = GENERATORS.lock();
    let before = RandomState::capture(Device::Cpu).unwrap();
    let panic = std::panic::catch_unwind(|| {
        let _preserve = RandomState::capture(Device::Cpu).unwrap().replay().unwrap();
        let _ = draw(Device::Cpu);
        panic!("on purpose");
    });
    assert!(panic.is_err());
    assert_eq!(RandomState::capture(Device::Cpu).unwrap(), before);
}

#[test]
fn a_missing_device_is_named() {
    let index = runtime::device::cuda_count().unwrap();
    for (device, name) in [(Device::Cuda(index), format!("cuda:{index}")), (Device::Mps, "mps".to_owned())] {
        let error = RandomState::capture(device).unwrap_err().to_string().to_lowercase();
        assert!(error.starts_with(&format!("{name} is not available here: ")), "{error}");
    }
    assert!(RandomState::capture(Device::Cuda(usize::MAX)).is_err());
}

#[test]
fn a_state_round_trips_through_bytes() {
    let _lock = GENERATORS.lock();
    for device in devices() {
        let state = RandomState::capture(device).unwrap();
        let bytes = state.to_bytes();
        let first = draw(device);
        let read = RandomState::from_bytes(&bytes).unwrap();
        assert_eq!(read, state);
        read.restore().unwrap();
        assert_eq!(draw(device), first);
        for length in (0..24).chain([bytes.len() - 1]) {
            let error = RandomState::from_bytes(&bytes[..length]).unwrap_err().to_string();
            assert!(error.contains("expected what RandomState::to_bytes gave"), "{length}: {error}");
        }
        let mut hostile = bytes.clone();
        hostile[16..24].fill(0xff);
        assert!(RandomState::from_bytes(&hostile).is_err());
    }
}

#[test]
fn an_unused_missing_device_is_ignored() {
    let _lock = GENERATORS.lock();
    let gone = runtime::device::cuda_count().unwrap();
    let mut bytes = RandomState::capture_on(&[Device::Cpu, Device::Cpu]).unwrap().to_bytes();
    bytes.extend((gone as u64 + 1).to_le_bytes());
    bytes.extend(16u64.to_le_bytes());
    bytes.extend([0; 16]);
    let state = RandomState::from_bytes(&bytes).unwrap();
    let first = draw(Device::Cpu);
    assert!(state.restore().is_err());
    assert_eq!(state.restore_on(&[Device::Cpu]).unwrap(), []);
    assert_eq!(draw(Device::Cpu), first);
    assert!(state.restore_on(&[Device::Cuda(gone)]).is_err());
    assert_eq!(state.restore_on(&[Device::Cpu, Device::Cuda(gone + 1)]).unwrap(), [Device::Cuda(gone + 1)]);
}

#[test]
fn a_separate_generator_has_pytorchs_numbers_and_is_independent() {
    let _lock = GENERATORS.lock();
    let f32s = (Kind::Float, Device::Cpu);
    let before = RandomState::capture(Device::Cpu).unwrap();
    let mut generator = Generator::new(7).unwrap();
    let normal = generator.normal(&[20], f32s).unwrap();
    let uniform = generator.uniform(&[3], (-1.0, 1.0), f32s).unwrap();
    assert_eq!(RandomState::capture(Device::Cpu).unwrap(), before, "the default generator did not move");
    random::seed(7).unwrap();
    assert_eq!(normal, Tensor::randn([20], f32s));
    assert_eq!(uniform, Tensor::rand([3], f32s) * 2.0 - 1.0);
    let long = generator.normal(&[20_000], (Kind::Double, Device::Cpu)).unwrap();
    assert!(long.mean(Kind::Double).double_value(&[]).abs() < 0.03);
    assert!((long.std(false).double_value(&[]) - 1.0).abs() < 0.02);
    let gone = Device::Cuda(runtime::device::cuda_count().unwrap());
    assert!(generator.normal(&[1], (Kind::Int64, Device::Cpu)).is_err());
    assert!(generator.normal(&[-1], f32s).is_err());
    assert!(generator.normal(&[1], (Kind::Float, gone)).is_err());
    assert!(generator.uniform(&[1], (1.0, 0.0), f32s).is_err());
}
