//! Writing and reading named tensors, and invalid files.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::{self, Write};

use models::tensors_file::{
    Content, LazyTensor, PIECE_BYTES, TensorsFile, from_bytes, map, read, write, write_to,
};
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
        for (name, mapped) in map(&path).unwrap() {
            assert!(mapped.equal(&tensors()[&name]), "{name}");
        }
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
        runtime::file::copy_values(&[0; 7], Kind::Float, &Tensor::from(0f32)).unwrap_err().to_string();
    assert!(error.contains("7 bytes of Float for a tensor of []; expected 4 for each element"), "{error}");
}

/// Takes so many bytes.
struct Full(usize);

impl Write for Full {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let taken = buffer.len().min(self.0);
        self.0 -= taken;
        if taken == 0 { Err(io::ErrorKind::StorageFull.into()) } else { Ok(taken) }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn large_tensors_are_brought_in_pieces_in_the_files_order_and_the_rest_after_an_error() {
    let piece = (PIECE_BYTES / 4) as i64;
    let brought = RefCell::new(Vec::new());
    let brought = &brought;
    let lazy = |name: &'static str, kind: Kind, elements: i64| {
        LazyTensor::new(name, kind, &[elements], move |range| {
            brought.borrow_mut().push((name, range.clone()));
            Ok(Some(Tensor::arange_start(range.start, range.end, (kind, Device::Cpu))))
        })
    };
    let content = || {
        let half = lazy("half", Kind::Half, 3);
        let (none, wide) = (lazy("none", Kind::Float, 0), lazy("wide", Kind::Float, 2 * piece + 5));
        Content::new(vec![half, none, wide], &[])
    };
    let mut bytes = Vec::new();
    content().write_to(&mut bytes).unwrap();
    let expected =
        [("wide", 0..piece), ("wide", piece..2 * piece), ("wide", 2 * piece..2 * piece + 5), ("half", 0..3)];
    assert_eq!(*brought.borrow(), expected);
    for (name, tensor) in from_bytes(&bytes, Device::Cpu).unwrap() {
        let arange = Tensor::arange(tensor.numel() as i64, (tensor.kind(), Device::Cpu));
        assert_eq!(tensor, arange, "{name}");
    }
    // Each piece is brought once, wherever the disk is full: before the header, within the first piece, at the end.
    for taken in [0, PIECE_BYTES, bytes.len() - 1] {
        brought.borrow_mut().clear();
        let mut content = content();
        let error = content.write_to(&mut Full(taken)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        content.give().unwrap();
        assert_eq!(*brought.borrow(), expected, "after {taken} bytes");
    }
}

#[test]
fn an_error_of_the_values_is_returned_as_it_is() {
    let failing = |name: &str| {
        LazyTensor::new(name, Kind::Float, &[1], |_| Err(runtime::Error::invalid("gather", "rank 1 is gone")))
    };
    let error = Content::new(vec![failing("x")], &[]).write_to(&mut Vec::new()).unwrap_err();
    assert_eq!(error.downcast::<runtime::Error>().unwrap().to_string(), "gather: rank 1 is gone");
    let none = LazyTensor::new("x", Kind::Float, &[1], |_| Ok(None));
    let error = Content::new(vec![none], &[]).write_to(&mut Vec::new()).unwrap_err().to_string();
    assert_eq!(error, "`x`: expected 1 elements of Float on the process that writes");
}

#[test]
fn writing_takes_the_memory_of_a_piece() {
    runtime::memory::track_cpu().unwrap();
    let large = Tensor::zeros([3 << 20], (Kind::Double, Device::Cpu));
    let region = runtime::memory::Region::start(Device::Cpu).unwrap();
    write_to(&mut io::sink(), &[("x".to_owned(), large)]).unwrap();
    assert_eq!(region.finish().unwrap().peak_above_start(), 0, "what is in memory is not copied");
}
