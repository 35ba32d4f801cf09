//! Writing and reading named tensors, and invalid files.

use std::collections::BTreeMap;

use models::tensors_file::{TensorsFile, from_bytes, read, write, write_to};
use safetensors::SafeTensors;
use tch::{Device, Kind, Tensor};

const KINDS: [Kind; 10] = [
    Kind::Int8,
    Kind::Float,
    Kind::Bool,
    Kind::Double,
    Kind::Half,
    Kind::Int64,
    Kind::BFloat16,
    Kind::Int,
    Kind::Uint8,
    Kind::Int16,
];

/// One of every dtype, with an odd number of elements and not contiguous; one without elements; a scalar.
fn tensors() -> BTreeMap<String, Tensor> {
    let of = |kind: Kind| {
        Tensor::arange(15, (Kind::Int64, Device::Cpu)).view([3, 5]).to_kind(kind).transpose(0, 1)
    };
    let mut tensors: BTreeMap<String, Tensor> =
        KINDS.iter().map(|&kind| (format!("{kind:?}"), of(kind))).collect();
    tensors.insert("empty".into(), Tensor::zeros([0, 3], (Kind::Half, Device::Cpu)));
    tensors.insert("scalar".into(), Tensor::from(1.5));
    tensors
}

fn bytes() -> Vec<u8> {
    let mut bytes = Vec::new();
    write_to(&mut bytes, &tensors().into_iter().collect::<Vec<_>>()).unwrap();
    bytes
}

#[test]
fn every_dtype_round_trips() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    write(&path, &tensors().into_iter().collect::<Vec<_>>()).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), bytes());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing temporary is left");
    let back: BTreeMap<String, Tensor> = read(&path, Device::Cpu).unwrap().into_iter().collect();
    assert_eq!(back.len(), tensors().len());
    for (name, tensor) in tensors() {
        assert_eq!((back[&name].kind(), back[&name].size()), (tensor.kind(), tensor.size()), "{name}");
        assert!(back[&name].equal(&tensor), "{name}");
    }
}

#[test]
fn tensors_are_aligned_to_their_element_size() {
    let bytes = bytes();
    let (header, _) = SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(header % 8, 0);
    let views = SafeTensors::deserialize(&bytes).unwrap();
    for (name, view) in views.tensors() {
        let offset = view.data().as_ptr() as usize - bytes.as_ptr() as usize;
        assert_eq!(offset % (view.dtype().bitsize() / 8), 0, "{name} at {offset}");
    }
}

#[test]
fn a_file_truncated_anywhere_is_an_error() {
    let bytes = bytes();
    assert!(from_bytes(&bytes, Device::Cpu).is_ok());
    for length in 0..bytes.len() {
        let error = from_bytes(&bytes[..length], Device::Cpu).unwrap_err().to_string();
        assert!(error.contains("not a complete safetensors file"), "{length}: {error}");
    }
}

#[test]
fn unrepresentable_tensors_are_refused() {
    let one = |name: &str, tensor: Tensor| (name.to_owned(), tensor);
    let complex = Tensor::zeros([2], (Kind::ComplexFloat, Device::Cpu));
    for (tensors, words) in [
        (vec![one("a", Tensor::from(1.0)), one("a", Tensor::from(2.0))], "`a` is a duplicate"),
        (vec![one("__metadata__", Tensor::from(1.0))], "`__metadata__` is a duplicate or reserved"),
        (vec![one("c", complex)], "`c` is ComplexFloat, which the format does not support"),
    ] {
        let error = write_to(&mut Vec::new(), &tensors).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    let nowhere = std::path::Path::new("/nowhere/x.safetensors");
    let error = write(nowhere, &[]).unwrap_err().to_string();
    assert!(error.starts_with("/nowhere/x.safetensors: cannot be written: "), "{error}");
}

#[test]
fn values_go_from_a_file_into_tensors_of_other_dtypes_and_layouts() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    write(&path, &tensors().into_iter().collect::<Vec<_>>()).unwrap();
    // The same values behind a header of odd length: no value is aligned.
    let bytes = bytes();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    let odd = folder.path().join("odd.safetensors");
    let parts = [
        &(length + 1).to_le_bytes()[..],
        &bytes[8..8 + length as usize],
        b" ",
        &bytes[8 + length as usize..],
    ];
    std::fs::write(&odd, parts.concat()).unwrap();
    for path in [path, odd] {
        let file = TensorsFile::open(&path).unwrap();
        assert_eq!(file.entries().len(), tensors().len());
        // Twice, because freed pages are read again.
        for kind in [Kind::Double, Kind::BFloat16, Kind::Double] {
            for entry in file.entries() {
                let expected = &tensors()[&entry.name];
                let transposed: Vec<i64> = entry.shape.iter().rev().copied().collect();
                let turned = Tensor::zeros(&transposed, (kind, Device::Cpu));
                let turned = if transposed.len() == 2 { turned.transpose(0, 1) } else { turned };
                file.copy(entry, &turned).unwrap();
                assert!(turned.equal(&expected.to_kind(kind)), "{} into {kind:?}", entry.name);
            }
        }
        let entry = file.entries().iter().find(|entry| entry.name == "Float").unwrap();
        let error =
            file.copy(entry, &Tensor::zeros([3, 5], (Kind::Float, Device::Cpu))).unwrap_err().to_string();
        assert!(
            error.ends_with("`Float` is [5, 3]; expected [3, 5], the shape of the destination"),
            "{error}"
        );
    }
    let error =
        runtime::mapped::copy_values(&[0; 7], Kind::Float, &Tensor::from(0f32)).unwrap_err().to_string();
    assert!(error.contains("7 bytes of Float for a tensor of []; expected 4 for each element"), "{error}");
}
