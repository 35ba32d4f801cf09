//! Valid device flags, and the errors for invalid ones.

use expect_test::{Expect, expect};
use runtime::device::{self, Event, Stream};
use tch::Device;

fn check(flag: &str, expected: Expect) {
    expected.assert_eq(&match device::select(flag) {
        Ok(device) => device::flag(device),
        Err(error) => error.to_string(),
    });
}

/// Whether this machine has a CUDA device; the messages below are those of a machine without one.
fn cuda() -> bool {
    device::cuda_count().unwrap() > 0
}

#[test]
fn the_cpu_is_always_available() {
    check("cpu", expect!["cpu"]);
}

#[test]
fn flags_of_missing_devices_are_refused() {
    if cuda() {
        eprintln!("skipped: the words are those of a machine without CUDA");
        return;
    }
    check(
        "gpu",
        expect![[
            r#"device: "gpu" is not a device; expected auto, cpu, cuda or cuda:N with N from 0, and this machine has cpu and no CUDA device"#
        ]],
    );
    check(
        "",
        expect![[
            r#"device: "" is not a device; expected auto, cpu, cuda or cuda:N with N from 0, and this machine has cpu and no CUDA device"#
        ]],
    );
    check(
        "CPU",
        expect![[
            r#"device: "CPU" is not a device; expected auto, cpu, cuda or cuda:N with N from 0, and this machine has cpu and no CUDA device"#
        ]],
    );
    check(
        "mps",
        expect![[
            r#"device: "mps" is not a device; expected auto, cpu, cuda or cuda:N with N from 0, and this machine has cpu and no CUDA device"#
        ]],
    );
    check(
        "cpu:0",
        expect![[
            r#"device: "cpu:0" is not a device; expected auto, cpu, cuda or cuda:N with N from 0, and this machine has cpu and no CUDA device"#
        ]],
    );
    for flag in ["cuda:", "cuda:x", "cuda:-1", "cuda:+1", "cuda:1.0", "cuda: 1", "cuda:99999999999999999999"]
    {
        let expected = format!(
            "device: {flag:?} has no device index after the colon; expected auto, cpu, cuda or cuda:N with N from 0, and this \
             machine has cpu and no CUDA device"
        );
        assert_eq!(device::select(flag).unwrap_err().to_string(), expected);
    }
    check(
        "cuda",
        expect![
            "cuda:0 is not available here: no NVIDIA driver is visible on this machine; run on one with an NVIDIA GPU and its driver, or use cpu"
        ],
    );
    check(
        "cuda:3",
        expect![
            "cuda:3 is not available here: no NVIDIA driver is visible on this machine; run on one with an NVIDIA GPU and its driver, or use cpu"
        ],
    );
}

#[test]
fn every_constructor_refuses_a_missing_device() {
    if cuda() {
        eprintln!("skipped: the words are those of a machine without CUDA");
        return;
    }
    let cuda = Device::Cuda(0);
    let none = "cuda:0 is not available here: no NVIDIA driver is visible on this machine; run on one with an NVIDIA \
                GPU and its driver, or use cpu";
    let mps = "mps is not available here: streams, events and memory figures exist for cpu and cuda";
    for (device, words) in [(cuda, none), (Device::Mps, mps)] {
        let errors = [
            Stream::new(device).map(drop),
            Stream::high_priority(device).map(drop),
            Stream::current(device).map(drop),
            Event::new(device).map(drop),
            Event::untimed(device).map(drop),
            device::name(device).map(drop),
            device::synchronize(device),
            device::memory_info(device).map(drop),
            device::pinned_bytes(device).map(drop),
            device::pinned_empty(&[1], tch::Kind::Float, device).map(drop),
            device::PinnedBuffer::new(1, device).map(drop),
        ];
        for error in errors {
            assert_eq!(error.unwrap_err().to_string(), words);
        }
    }
}

#[test]
fn the_machine_reports_its_name_and_memory() {
    assert!(!device::name(Device::Cpu).unwrap().is_empty());
    let memory = device::memory_info(Device::Cpu).unwrap();
    assert!(0 < memory.free && memory.free <= memory.total, "{memory:?}");
    let before = device::resident_memory().unwrap();
    assert!(0 < before.current && before.current <= before.peak, "{before:?}");
    // The kernel counts a page at its first access.
    let block = std::hint::black_box(vec![1_u8; 64 << 20]);
    let held = device::resident_memory().unwrap();
    assert!(held.current >= before.current + (32 << 20), "{before:?} then {held:?}");
    // What a vector holds is anonymous, and no page of a file.
    assert!(held.anonymous >= before.anonymous + (32 << 20), "{before:?} then {held:?}");
    assert!(held.file < before.file + (32 << 20) && held.file > 0, "{before:?} then {held:?}");
    drop(block);
    // The kernel counts pages in batches for each processor, so its figures may differ by that much.
    let after = device::resident_memory().unwrap();
    assert!(after.peak + (16 << 20) >= held.current, "{held:?} then {after:?}");
}
