//! The detectors on CUDA events. The traces are written here in Kineto's format, because the machines that run the
//! tests have no device: synthetic steps of 100 ms with known figures.

use serde_json::{Value, json};
use trace::{Diagnosis, Profile, TrainingFacts};

fn event(cat: &str, name: &str, thread: i64, start: f64, length: f64, args: Value) -> Value {
    json!({ "ph": "X", "cat": cat, "name": name, "pid": 1, "tid": thread, "ts": 4.4e12 + start, "dur": length, "args": args })
}

/// Three steps of 100 ms. In each the device runs these events: category, name, start and length in ms.
fn diagnose(device: &[(&str, &str, f64, f64)], facts: &TrainingFacts) -> Diagnosis {
    let mut events = Vec::new();
    for step in 0..3 {
        let start = f64::from(step) * 100e3;
        events.push(event("user_annotation", "step", 1, start, 100e3, json!({})));
        events.push(event("cuda_runtime", "cudaLaunchKernel", 1, start, 5.0, json!({})));
        for &(cat, name, from, length) in device {
            let args = json!({ "device": 0, "stream": 7, "bytes": 1 << 20 });
            events.push(event(cat, name, 7, start + from * 1e3, length * 1e3, args));
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    std::fs::write(&path, json!({ "traceEvents": events }).to_string()).unwrap();
    Diagnosis::new(&Profile::read(&path).unwrap(), facts).unwrap()
}

fn names(diagnosis: &Diagnosis) -> Vec<&str> {
    diagnosis.findings.iter().map(|finding| finding.name).collect()
}

#[test]
fn a_busy_device_with_tensor_cores_has_no_findings() {
    let device = [
        ("kernel", "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n", 1.0, 60.0),
        ("kernel", "vectorized_elementwise_kernel", 61.0, 38.0),
        ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 0.0, 1.0),
    ];
    assert_eq!(names(&diagnose(&device, &TrainingFacts::default())), [] as [&str; 0]);
}

#[test]
fn copies_from_pageable_memory_are_found() {
    let device = [("kernel", "k", 20.0, 80.0), ("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 0.0, 20.0)];
    let diagnosis = diagnose(&device, &TrainingFacts::default());
    assert_eq!(names(&diagnosis), ["pageable copies"]);
    let finding = &diagnosis.findings[0];
    assert_eq!(finding.per_step, 1.0);
    assert!((finding.share.unwrap() - 0.2).abs() < 1e-9, "{finding:?}");
    assert_eq!(
        finding.evidence,
        "copies with pageable memory 1 × in a step, 1.00 MiB in a step: Memcpy HtoD (Pageable -> Device)"
    );
    let pinned = diagnose(&device, &TrainingFacts { pinned: Some(true), ..TrainingFacts::default() });
    assert_ne!(pinned.findings[0].remedy, finding.remedy);
}

#[test]
fn products_without_tf32_are_found() {
    let device = [("kernel", "ampere_sgemm_128x64_nn", 0.0, 50.0), ("kernel", "k", 50.0, 50.0)];
    let diagnosis = diagnose(&device, &TrainingFacts::default());
    assert_eq!(names(&diagnosis), ["fp32 without TF32"]);
    assert_eq!(diagnosis.findings[0].share, Some(0.5));
}

#[test]
fn an_idle_device_is_found() {
    let device = [("kernel", "k", 0.0, 25.0), ("kernel", "k", 50.0, 25.0)];
    let diagnosis = diagnose(&device, &TrainingFacts::default());
    assert_eq!(names(&diagnosis), ["idle device"]);
    assert_eq!(diagnosis.findings[0].share, Some(0.5));
}

#[test]
fn short_kernels_are_found() {
    let device: Vec<_> = (0..32).map(|index| ("kernel", "k", 3.0 * f64::from(index), 0.005)).collect();
    let diagnosis = diagnose(&device, &TrainingFacts::default());
    assert_eq!(names(&diagnosis), ["tiny operators", "idle device"]);
    assert!(
        diagnosis.findings[0].evidence.starts_with("32 kernels in a step, half of them shorter than 5.0 µs")
    );
}
