//! The experts of one layer in files: in the model's own, or in one without a name.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use models::tensors_file::{TensorLocation, TensorsFile};
use parking_lot::Mutex;
use runtime::file;
use tch::{Device, Tensor};

use super::cache::StoredExperts;
use crate::error::{self, Result, refused};
use crate::layout::{Layout, view};
use crate::storage::{own_folder, write_file};

/// The experts of a layer.
#[derive(Debug)]
pub(super) struct LayerExperts {
    name: String,
    /// The positions of an expert's matrices in a slot.
    layout: Layout,
    experts: Vec<[Matrix; 3]>,
}

/// A matrix in a file.
#[derive(Debug)]
struct Matrix {
    /// The model's own tensor, which shows the file's pages.
    tensor: Mutex<Tensor>,
    file: Arc<File>,
    path: PathBuf,
    offset: u64,
    /// Address and version when the pages equalled the file.
    address: usize,
    version: i64,
}

/// Returns the names of an expert's tensors in a layer's mixture.
pub(super) fn names(mixture: &str, expert: usize) -> [String; 3] {
    let of = |projection| format!("{mixture}.{expert}.{projection}.weight");
    ["gate_proj", "up_proj", "down_proj"].map(of)
}

impl LayerExperts {
    /// Gives the matrices the pages of the files where `stored` has them; writes the others to a file in `folder` first.
    pub(super) fn new(
        name: &str,
        matrices: &[[Tensor; 3]],
        folder: &Path,
        stored: &dyn Fn(&str) -> Option<TensorLocation>,
    ) -> Result<Self> {
        let _no_grad = tch::no_grad_guard();
        let named: Vec<(String, &Tensor)> = matrices
            .iter()
            .enumerate()
            .flat_map(|(expert, three)| names(name, expert).into_iter().zip(three))
            .collect();
        for (name, tensor) in &named {
            if tensor.device() != Device::Cpu {
                let reason =
                    format!("`{name}` is on {:?}; experts are streamed to the CPU only", tensor.device());
                return Err(refused("experts", reason));
            }
            if tensor.requires_grad() {
                let reason = format!(
                    "`{name}` is to be trained, but streamed experts are only read; freeze them, or keep them in memory"
                );
                return Err(refused("experts", reason));
            }
        }
        let first = matrices.first().ok_or_else(|| refused("experts", format!("`{name}` has none")))?;
        let layout =
            Layout::of(["gate", "up", "down"].into_iter().zip(first).map(|(name, one)| (name, one, false)))?;
        let like_first = |(index, (_, tensor)): &(usize, &(String, &Tensor))| {
            let first = &first[index % 3];
            (tensor.kind(), tensor.size()) == (first.kind(), first.size())
        };
        if let Some((_, (name, tensor))) = named.iter().enumerate().find(|one| !like_first(one)) {
            let reason = format!(
                "`{name}` is {:?} {:?}, other than the layer's first expert",
                tensor.kind(),
                tensor.size()
            );
            return Err(refused("experts", reason));
        }

        // What is in no file is written to one, which is open and mapped when it loses its name.
        let locations: Vec<Option<TensorLocation>> = named.iter().map(|(name, _)| stored(name)).collect();
        let missing: Vec<(String, Tensor)> = named
            .iter()
            .zip(&locations)
            .filter(|(_, location)| location.is_none())
            .map(|((name, tensor), _)| Ok((name.clone(), tensor.f_detach()?)))
            .collect::<Result<_>>()?;
        let mut written: HashMap<String, TensorLocation> = HashMap::new();
        let unlinked = own_folder(folder)?;
        if !missing.is_empty() {
            let path = unlinked.path().join(format!("{name}.safetensors"));
            write_file(&path, &missing)?;
            let file = TensorsFile::open(&path)?;
            written.extend(file.entries().iter().map(|entry| (entry.name.clone(), file.location(entry))));
        }
        drop(missing);

        let mut open: HashMap<PathBuf, Arc<File>> = HashMap::new();
        let mut all = Vec::new();
        for ((name, tensor), location) in named.iter().zip(locations) {
            let location = location.or_else(|| written.remove(name));
            let location = location.ok_or_else(|| refused("experts", format!("`{name}` is in no file")))?;
            all.push(Matrix::new(name, tensor, location, &mut open)?);
        }
        let mut all = all.into_iter();
        let experts = std::iter::from_fn(|| Some([all.next()?, all.next()?, all.next()?])).collect();
        Ok(Self { name: name.to_owned(), layout, experts })
    }
}

impl StoredExperts for LayerExperts {
    fn count(&self) -> usize {
        self.experts.len()
    }

    fn slot_bytes(&self) -> u64 {
        self.layout.bytes as u64
    }

    fn check(&self, expert: usize) -> Result<()> {
        let matrices = self.experts.get(expert);
        let matrices =
            matrices.ok_or_else(|| refused("experts", format!("`{}` has no {expert}", self.name)))?;
        for (matrix, name) in matrices.iter().zip(names(&self.name, expert)) {
            let tensor = matrix.tensor.lock();
            let change = if tensor.requires_grad() {
                "is to be trained"
            } else if (tensor.data_ptr() as usize, tensor.internal_version())
                != (matrix.address, matrix.version)
            {
                "was changed in memory"
            } else {
                continue;
            };
            let reason = format!(
                "`{name}` {change}, but it is streamed from {}; decide what is trained, and load weights, before experts are streamed",
                matrix.path.display()
            );
            return Err(refused("experts", reason));
        }
        Ok(())
    }

    fn read(&self, expert: usize, slot: &Tensor) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        for (matrix, target) in self.experts[expert].iter().zip(self.layout.views(slot)?) {
            file::read_into(&matrix.file, &matrix.path, matrix.offset, &target)?;
        }
        Ok(())
    }

    fn read_bytes(&self) -> u64 {
        self.layout.extents.iter().map(|extent| extent.range.len() as u64).sum()
    }

    fn matrices(&self, slot: &Tensor) -> Result<[Tensor; 3]> {
        let at = |index: usize| view(slot, 0, &self.layout.extents[index]);
        Ok([at(0)?, at(1)?, at(2)?])
    }
}

impl Matrix {
    fn new(
        name: &str,
        tensor: &Tensor,
        location: TensorLocation,
        open: &mut HashMap<PathBuf, Arc<File>>,
    ) -> Result<Self> {
        let TensorLocation { path, offset, kind, shape } = location;
        if (kind, &shape) != (tensor.kind(), &tensor.size()) {
            let (expected, size) = (tensor.kind(), tensor.size());
            return Err(error::file(
                &path,
                format!("`{name}` is {kind:?} {shape:?}; expected {expected:?} {size:?}"),
            ));
        }
        let mapped = file::tensor_over(&path, offset, &shape, kind)?;
        let mut tensor = tensor.shallow_clone();
        tensor.f_set_data(&mapped)?;
        let file = match open.get(&path) {
            Some(file) => file.clone(),
            None => {
                let opened = File::open(&path)
                    .map_err(|cause| error::file(&path, format!("cannot be read: {cause}")))?;
                open.entry(path.clone()).or_insert(Arc::new(opened)).clone()
            }
        };
        let (address, version) = (tensor.data_ptr() as usize, tensor.internal_version());
        Ok(Self { tensor: Mutex::new(tensor), file, path, offset, address, version })
    }
}
