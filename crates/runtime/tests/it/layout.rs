//! What one call says of a tensor is what libtorch says of it property by property.

use runtime::memory::MovableMemory;
use runtime::tensor_layout::TensorLayout;
use runtime::tensor_memory::memory_range;
use tch::{Device, Kind, Tensor, kind};

fn check(tensor: &Tensor) {
    let layout = TensorLayout::of(tensor).unwrap();
    assert_eq!(layout.size(), tensor.size());
    assert_eq!(layout.numel(), tensor.numel());
    assert_eq!((layout.kind(), layout.device()), (tensor.kind(), tensor.device()));
    assert_eq!((layout.is_strided(), layout.is_neg()), (!tensor.is_sparse(), tensor.is_neg()));
    if layout.is_strided() {
        assert_eq!(layout.stride(), tensor.stride());
        assert_eq!(layout.is_contiguous(), tensor.is_contiguous());
        assert_eq!(layout.range().unwrap(), memory_range(tensor).unwrap());
    }
}

#[test]
fn it_agrees_with_each_property() {
    const KINDS: [Kind; 11] = [
        Kind::Uint8,
        Kind::Int8,
        Kind::Int16,
        Kind::Int,
        Kind::Int64,
        Kind::Half,
        Kind::Float,
        Kind::Double,
        Kind::Bool,
        Kind::BFloat16,
        Kind::Float8e4m3fn,
    ];
    for kind in KINDS {
        check(&Tensor::zeros([2, 3], (kind, Device::Cpu)));
    }
    let x = Tensor::zeros([4, 6, 5], tch::kind::FLOAT_CPU);
    for view in [
        x.transpose(0, 2),
        x.narrow(1, 2, 3),
        x.select(1, 0),
        x.slice(2, 0, 5, 2),
        x.narrow(0, 0, 0),
        x.sum(Kind::Float),
        x.unsqueeze(0).expand([7, 4, 6, 5], false),
        x.view([1, 2, 2, 3, 2, 1, 5, 1, 1].as_slice()).transpose(1, 6),
        x.view([1, 4, 1, 6, 1, 5, 1, 1].as_slice()),
        x.to_sparse_sparse_dim(3),
        Tensor::zeros([3], (Kind::ComplexFloat, Device::Cpu)).conj().imag(),
    ] {
        check(&view);
    }
}

#[test]
fn what_kernels_cannot_take_is_refused() {
    let error = |tensor: &Tensor| TensorLayout::of(tensor).unwrap_err().to_string();
    assert_eq!(error(&Tensor::new()), "the tensor is undefined");
    let detached = MovableMemory::new(16, Device::Cpu).unwrap();
    let layout = TensorLayout::of(detached.bytes()).unwrap();
    assert_eq!(layout.size(), [16]);
    assert_eq!(layout.range().unwrap_err().to_string(), "the tensor has elements, but no memory");
}

#[test]
fn layouts_of_rows_and_of_transposed_matrices_are_those_of_views() {
    let x = Tensor::zeros([2, 3, 5], kind::FLOAT_CPU);
    let describe = |layout: TensorLayout| {
        (layout.size().to_vec(), layout.stride().to_vec(), layout.is_contiguous(), layout.range().unwrap())
    };
    let of = |tensor: &Tensor| TensorLayout::of(tensor).unwrap();
    let rows = of(&x).rows().unwrap();
    assert_eq!(describe(rows.clone()), describe(of(&x.view([6, 5]))));
    assert_eq!(describe(rows.clone().transposed()), describe(of(&x.view([6, 5]).tr())));
    assert_eq!(describe(rows.clone().transposed().transposed()), describe(rows));
    for size in [[1, 4], [4, 1], [0, 3]] {
        let matrix = Tensor::zeros(size, kind::FLOAT_CPU);
        assert_eq!(describe(of(&matrix).transposed()), describe(of(&matrix.tr())), "{size:?}");
    }
    let window = x.get(0).narrow(1, 1, 3);
    assert_eq!(describe(of(&window).rows().unwrap()), describe(of(&window)));
    for other in [
        x.transpose(0, 1),
        Tensor::zeros([5], kind::FLOAT_CPU),
        Tensor::zeros([1, 1, 1, 2, 3], kind::FLOAT_CPU),
    ] {
        assert!(of(&other).rows().is_none(), "{other:?}");
    }
}
