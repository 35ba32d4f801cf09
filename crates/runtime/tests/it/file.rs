//! Tensors with values in a file.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use expect_test::{Expect, expect};
use runtime::Error;
use runtime::file::{forget, read_into, tensor_over, write_values};
use tch::{Device, Kind, Tensor};

/// A file of 4096 + 24 numbers, each its own index, after 8 other bytes.
fn numbers(kind: Kind) -> (tempfile::TempDir, PathBuf, Tensor) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("numbers");
    let values = Tensor::arange(4120, (Kind::Float, Device::Cpu)).to_kind(kind);
    let mut bytes = vec![0xffu8; 8];
    let raw = Vec::<u8>::try_from(values.view_dtype(Kind::Uint8).contiguous().view([-1])).unwrap();
    bytes.extend(raw);
    fs::write(&path, bytes).unwrap();
    (folder, path, values)
}

fn words(error: Error, path: &Path) -> String {
    error.to_string().replace(&path.parent().unwrap().display().to_string(), "DIR")
}

#[test]
fn a_tensor_over_a_file_has_its_values() {
    for kind in [Kind::Float, Kind::BFloat16, Kind::Double, Kind::Int64, Kind::Uint8] {
        let (_folder, path, values) = numbers(kind);
        let width = kind.elt_size_in_bytes() as u64;
        let over = tensor_over(&path, 8, &[40, 103], kind).unwrap();
        assert_eq!((over.size(), over.kind(), over.device()), (vec![40, 103], kind, Device::Cpu));
        assert!(over.is_contiguous() && !over.requires_grad());
        assert!(over.view([-1]).equal(&values), "{kind:?}");
        // From the middle, not at a page boundary, to the end.
        let part = tensor_over(&path, 8 + 4001 * width, &[119], kind).unwrap();
        assert!(part.equal(&values.narrow(0, 4001, 119)), "{kind:?}");

        let target = Tensor::zeros([40, 103], (kind, Device::Cpu));
        read_into(&File::open(&path).unwrap(), &path, 8, &target).unwrap();
        assert!(target.equal(&over), "{kind:?}");
        read_into(&File::open(&path).unwrap(), &path, 8 + 4001 * width, &target.view([-1]).narrow(0, 0, 119))
            .unwrap();
        let expected = Tensor::cat(&[values.narrow(0, 4001, 119), values.narrow(0, 119, 4001)], 0);
        assert!(target.view([-1]).equal(&expected), "{kind:?}: and nothing beside it");
    }
}

#[test]
fn an_empty_tensor_needs_no_bytes() {
    let (_folder, path, _) = numbers(Kind::Float);
    let end = fs::metadata(&path).unwrap().len();
    let empty = tensor_over(&path, end, &[0, 3], Kind::Float).unwrap();
    assert_eq!(empty.size(), [0, 3]);
    read_into(&File::open(&path).unwrap(), &path, end, &empty).unwrap();
}

#[test]
fn writes_to_a_mapped_tensor_stay_in_the_process() {
    let (_folder, path, values) = numbers(Kind::Float);
    let before = fs::read(&path).unwrap();
    let over = tensor_over(&path, 8, &[4120], Kind::Float).unwrap();
    let other = tensor_over(&path, 8, &[4120], Kind::Float).unwrap();
    let version = over.internal_version();
    let _ = over.narrow(0, 0, 2000).fill_(-1.0);
    assert_eq!(over.internal_version(), version + 1, "a write is a change to autograd");
    assert_eq!(over.double_value(&[1999]), -1.0);
    assert!(over.narrow(0, 2000, 2120).equal(&values.narrow(0, 2000, 2120)));
    assert!(other.equal(&values), "another tensor over the file does not see it");
    assert_eq!(fs::read(&path).unwrap(), before, "nor does the file");
}

#[test]
fn forgotten_pages_are_read_again_and_written_ones_stay() {
    const COUNT: i64 = 16 << 20;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bytes");
    fs::write(&path, vec![7u8; COUNT as usize + 3]).unwrap();
    // Neither its start nor its end is a page's.
    let over = tensor_over(&path, 3, &[COUNT], Kind::Uint8).unwrap();
    let in_files = || runtime::device::resident_memory().unwrap().file;
    let sum = || over.sum(Kind::Int64).int64_value(&[]);
    let before = in_files();
    assert_eq!(sum(), 7 * COUNT);
    let _ = over.narrow(0, 5_000_000, 10).fill_(9);
    let read = in_files();
    assert!(read >= before + (14 << 20), "{before} to {read}");
    forget(&over).unwrap();
    let after = in_files();
    assert!(after <= before + (2 << 20), "{before}, {read}, {after}");
    assert_eq!(sum(), 7 * COUNT + 20, "what was written stays");
    assert_eq!(over.int64_value(&[5_000_004]), 9);
    // Of a part only its pages, and nothing of other memory.
    forget(&over.narrow(0, 0, 4096)).unwrap();
    let owned = Tensor::ones([1 << 20], (Kind::Float, Device::Cpu));
    forget(&owned).unwrap();
    assert_eq!(owned.sum(Kind::Float).double_value(&[]), f64::from(1 << 20));
}

#[test]
fn a_tensor_outlives_its_file_handle() {
    let (folder, path, values) = numbers(Kind::Float);
    let over = tensor_over(&path, 8, &[4120], Kind::Float).unwrap();
    let part = over.narrow(0, 100, 50);
    drop(over);
    drop(folder);
    assert!(!path.exists());
    assert!(part.equal(&values.narrow(0, 100, 50)));
    let written = part.shallow_clone().fill_(3.0);
    assert_eq!(written.sum(Kind::Float).double_value(&[]), 150.0);
}

#[test]
fn reading_into_a_tensor_counts_as_an_in_place_change() {
    let (_folder, path, _) = numbers(Kind::Float);
    let file = File::open(&path).unwrap();
    let target = Tensor::ones([4], (Kind::Float, Device::Cpu));
    let x = Tensor::ones([4], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let version = target.internal_version();
    let y = (&x * &target).sum(Kind::Float);
    read_into(&file, &path, 8, &target).unwrap();
    assert!(target.internal_version() > version);
    let error = runtime::autograd::backward(&[&y]).unwrap_err().to_string();
    assert!(error.contains("modified by an inplace operation"), "{error}");
}

#[test]
fn invalid_ranges_of_a_file_are_refused() {
    let (_folder, path, _) = numbers(Kind::Float);
    let refused = |path: &Path, offset, shape: &[i64], kind, expected: Expect| {
        expected.assert_eq(&words(tensor_over(path, offset, shape, kind).unwrap_err(), path));
    };
    refused(
        &path.with_file_name("none"),
        0,
        &[1],
        Kind::Float,
        expect!["DIR/none: No such file or directory (os error 2)"],
    );
    refused(
        &path,
        8,
        &[4121],
        Kind::Float,
        expect![
            "DIR/numbers: 16484 bytes from 8 on reach beyond the file's 16488; copy or download it again"
        ],
    );
    refused(
        &path,
        u64::MAX - 3,
        &[1],
        Kind::Float,
        expect![
            "DIR/numbers: 4 bytes from 18446744073709551612 on reach beyond the file's 16488; copy or download it again"
        ],
    );
    refused(
        &path,
        6,
        &[2],
        Kind::Float,
        expect!["tensor over a file: the offset 6 is not a multiple of Float's 4 bytes"],
    );
    refused(
        &path,
        0,
        &[2, -1],
        Kind::Float,
        expect!["tensor over a file: the shape [2, -1] of Float is not one of a tensor"],
    );
    refused(
        &path,
        0,
        &[i64::MAX, i64::MAX],
        Kind::Float,
        expect![
            "tensor over a file: the shape [9223372036854775807, 9223372036854775807] of Float is not one of a tensor"
        ],
    );
}

#[test]
fn invalid_reads_are_refused() {
    let (_folder, path, _) = numbers(Kind::Float);
    let file = File::open(&path).unwrap();
    let refused = |offset, target: &Tensor, expected: Expect| {
        expected.assert_eq(&words(read_into(&file, &path, offset, target).unwrap_err(), &path));
    };
    let target = Tensor::zeros([100, 2], (Kind::Float, Device::Cpu));
    refused(
        4120 * 4,
        &target,
        expect!["DIR/numbers: 800 bytes from 16480 on: failed to fill whole buffer; is the file whole?"],
    );
    refused(
        1 << 40,
        &target,
        expect![
            "DIR/numbers: 800 bytes from 1099511627776 on: failed to fill whole buffer; is the file whole?"
        ],
    );
    refused(
        8,
        &target.tr(),
        expect![
            "read_into: the target [2, 100] is on cpu or not contiguous; expected contiguous memory on the CPU"
        ],
    );

    // A file that was truncated while mapped: a read returns an error; accessing the pages would end the process.
    let cut = File::options().write(true).open(&path).unwrap();
    cut.set_len(100).unwrap();
    refused(
        8,
        &target,
        expect!["DIR/numbers: 800 bytes from 8 on: failed to fill whole buffer; is the file whole?"],
    );
    read_into(&file, &path, 8, &target.view([-1]).narrow(0, 0, 23)).unwrap();
}

#[test]
fn the_bytes_of_contiguous_tensors_are_written() {
    let (_folder, path, values) = numbers(Kind::BFloat16);
    let mut written = vec![0xffu8; 8];
    write_values(&mut written, &values.narrow(0, 0, 100)).unwrap();
    write_values(&mut written, &values.narrow(0, 100, 0)).unwrap();
    write_values(&mut written, &values.narrow(0, 100, 4020).view([20, 201])).unwrap();
    assert_eq!(written, fs::read(&path).unwrap());
    let turned = values.view([40, 103]).transpose(0, 1);
    let error = write_values(&mut written, &turned).unwrap_err().to_string();
    assert!(error.contains("[103, 40] is on cpu or not contiguous"), "{error}");
}
