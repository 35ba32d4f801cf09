//! Files with all experts of a layer in one tensor.
//!
//! | in the file, as transformers 5 has them in memory | its parts, as transformers saves them |
//! |---|---|
//! | `experts.gate_up_proj` `[experts, 2·inner, hidden]` | `experts.N.gate_proj.weight`, `experts.N.up_proj.weight` `[inner, hidden]` |
//! | `experts.down_proj` `[experts, hidden, inner]` | `experts.N.down_proj.weight` `[hidden, inner]` |
//!
//! An expert's values are contiguous, gate before up, so each part is a range of the tensor's bytes, and nothing is copied to divide it.

use crate::tensors_file::{Entry, TensorsFile};

/// The most experts that a layer has; a tensor of more is left as it is.
const MAX_EXPERTS: i64 = 1 << 11;

/// Divides the tensors that hold all experts of a layer.
pub(super) fn divide(file: &mut TensorsFile) {
    file.divide(&|entry: &Entry| parts(&entry.name, &entry.shape));
}

/// Splits the name of such a tensor into `….mlp.experts` and its projection.
fn split(name: &str) -> Option<(&str, &str)> {
    let (experts, projection) = name.rsplit_once('.')?;
    let is_joint = experts.ends_with(".mlp.experts") && ["gate_up_proj", "down_proj"].contains(&projection);
    is_joint.then_some((experts, projection))
}

/// Returns names and shapes of the parts of such a tensor, in the order of their values.
fn parts(name: &str, shape: &[i64]) -> Option<Vec<(String, Vec<i64>)>> {
    let (layer, projection) = split(name)?;
    let &[experts, rows, columns] = shape else { return None };
    if !(1..=MAX_EXPERTS).contains(&experts) || rows < 1 || columns < 1 {
        return None;
    }
    let (both, one) = (["gate_proj", "up_proj"], [projection]);
    let names = if projection == "gate_up_proj" { both.as_slice() } else { &one };
    let count = names.len() as i64;
    (rows % count == 0).then(|| {
        let of_expert = |expert| {
            names
                .iter()
                .map(move |name| (format!("{layer}.{expert}.{name}.weight"), vec![rows / count, columns]))
        };
        (0..experts).flat_map(of_expert).collect()
    })
}

#[cfg(test)]
mod tests {
    use tch::{Device, Tensor, kind};

    use super::*;
    use crate::tensors_file;

    #[test]
    fn parts_have_the_values_of_their_ranges() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("joint.safetensors");
        let gate_up = Tensor::arange(3 * 4 * 5, kind::FLOAT_CPU).view([3, 4, 5]);
        let down = Tensor::arange(3 * 5 * 2, kind::FLOAT_CPU).view([3, 5, 2]);
        let other = Tensor::ones([2], kind::FLOAT_CPU);
        let layer = "model.layers.0.mlp.experts";
        let named = [
            (format!("{layer}.gate_up_proj"), gate_up.shallow_clone()),
            (format!("{layer}.down_proj"), down.shallow_clone()),
            ("model.norm.weight".to_owned(), other),
        ];
        tensors_file::write(&path, &named).unwrap();
        let mut file = TensorsFile::open(&path).unwrap();
        divide(&mut file);
        assert_eq!(file.entries().len(), 3 * 3 + 1);
        let read = |name: &str, shape: [i64; 2]| {
            let entry =
                file.entries().iter().find(|entry| entry.name == format!("{layer}.{name}.weight")).unwrap();
            let values = Tensor::zeros(shape, (tch::Kind::Float, Device::Cpu));
            file.copy(entry, &values).unwrap();
            values
        };
        for expert in 0..3 {
            let name = |projection: &str| format!("{expert}.{projection}");
            assert_eq!(read(&name("gate_proj"), [2, 5]), gate_up.get(expert).narrow(0, 0, 2));
            assert_eq!(read(&name("up_proj"), [2, 5]), gate_up.get(expert).narrow(0, 2, 2));
            assert_eq!(read(&name("down_proj"), [5, 2]), down.get(expert));
        }
        assert_eq!(parts(&named[0].0, &[1 << 40, 2, 1]), None);
        assert_eq!(parts(&named[0].0, &[3, 3, 5]), None);
    }
}
