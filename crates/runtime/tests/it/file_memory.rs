//! Tensors whose memory is an unnamed file.

use runtime::file_memory::{fetch, is_in_file, release, zeros};
use tch::{Device, Kind, Tensor};

#[test]
fn values_stay_when_their_pages_go() {
    let folder = tempfile::tempdir().unwrap();
    // Several pages, and a part of one.
    let mut tensor = zeros(folder.path(), &[5001], Kind::Float).unwrap();
    let expected = Tensor::arange(5001, (Kind::Float, Device::Cpu));
    assert_eq!(tensor, Tensor::zeros([5001], (Kind::Float, Device::Cpu)));
    tensor.copy_(&expected);
    for part in [tensor.shallow_clone(), tensor.narrow(0, 3, 17), tensor.narrow(0, 1000, 3000)] {
        assert!(is_in_file(&part));
        release(&part).unwrap();
        assert_eq!(tensor, expected);
        fetch(&part).unwrap();
        assert_eq!(tensor, expected);
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "the file has no name");
}

#[test]
fn other_tensors_are_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let in_file = zeros(folder.path(), &[64, 64], Kind::Float).unwrap();
    let expected = Tensor::arange(9000, (Kind::Int64, Device::Cpu));
    let ordinary = expected.copy();
    for tensor in [&ordinary, &in_file.transpose(0, 1), &zeros(folder.path(), &[0, 3], Kind::Half).unwrap()] {
        assert!(!is_in_file(tensor));
        fetch(tensor).unwrap();
        release(tensor).unwrap();
    }
    assert_eq!(ordinary, expected);
    let address = in_file.data_ptr() as usize;
    drop(in_file);
    // What is at the address now is not in a file.
    let later: Vec<Tensor> = (0..64).map(|_| Tensor::ones([64, 64], (Kind::Float, Device::Cpu))).collect();
    for tensor in &later {
        assert!(!is_in_file(tensor), "{address:x}");
        release(tensor).unwrap();
        assert_eq!(tensor.sum(Kind::Float).double_value(&[]), 4096.0);
    }
}

/// Bytes of files' pages that the process uses.
#[cfg(target_os = "linux")]
fn used() -> i64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let of = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<i64>().unwrap() << 10
    };
    of("RssFile:") + of("RssShmem:")
}

#[test]
#[cfg(target_os = "linux")]
fn released_pages_count_no_more() {
    const BYTES: i64 = 256 << 20;
    let folder = tempfile::tempdir().unwrap();
    let tensor = zeros(folder.path(), &[BYTES], Kind::Uint8).unwrap();
    let before = used();
    let _ = tensor.shallow_clone().fill_(3);
    let filled = used();
    release(&tensor).unwrap();
    let after = used();
    // Other tests touch a few files meanwhile.
    assert!(filled - before > BYTES * 3 / 4, "{before} {filled}");
    assert!(after - before < BYTES / 4, "{before} {after}");
    // Saving reads the values and leaves no page behind.
    let mut sink = std::io::sink();
    runtime::file::write_values(&mut sink, &tensor).unwrap();
    assert!(used() - before < BYTES / 4);
    assert_eq!(tensor.max().int64_value(&[]), 3);
}

#[test]
fn a_folder_that_cannot_be_written_and_a_full_disk_are_errors() {
    let error = zeros(std::path::Path::new("/nowhere"), &[9], Kind::Float).unwrap_err().to_string();
    assert!(error.contains("/nowhere") && error.contains("36 bytes in a file in it"), "{error}");
    let folder = tempfile::tempdir().unwrap();
    let error = zeros(folder.path(), &[1 << 50], Kind::Float).unwrap_err().to_string();
    assert!(error.contains(&folder.path().display().to_string()), "{error}");
    let error = zeros(folder.path(), &[-1], Kind::Float).unwrap_err().to_string();
    assert!(error.contains("the shape [-1]"), "{error}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
