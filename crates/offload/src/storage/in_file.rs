//! Tensors whose values are in files.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use models::tensors_file::{self, TensorLocation, TensorsFile};
use runtime::{device, file};
use tch::{Device, Kind, Tensor};

use super::Layer;
use crate::error::{self, Error, Result, refused};

/// A part of a file of the file tier, or of the model's own file.
#[derive(Debug)]
pub(crate) struct Source {
    file: Arc<File>,
    pub(super) path: PathBuf,
    offset: u64,
}

/// A tensor in a file: the model's tensor refers to its pages.
#[derive(Debug)]
pub(crate) struct InFile {
    pub(crate) source: Arc<Source>,
    /// The pages, whatever memory the tensor refers to now.
    mapped: Tensor,
    /// The tensor's version when its pages equalled the file.
    version: i64,
}

/// A location where a tensor's values already are.
pub(crate) enum FileLocation {
    /// In a file of the model.
    InModel(TensorLocation),
    /// In the file where the layer had stored it before.
    Stored(InFile),
}

impl Source {
    pub(super) fn read_into(&self, target: &Tensor) -> runtime::Result<()> {
        file::read_into(&self.file, &self.path, self.offset, target)
    }
}

impl InFile {
    fn clone(&self) -> Self {
        let Self { source, mapped, version } = self;
        Self { source: source.clone(), mapped: mapped.shallow_clone(), version: *version }
    }
}

impl Layer {
    pub(super) fn use_file(&mut self, index: usize, left: FileLocation) -> Result<()> {
        let TensorLocation { path, offset, kind, shape } = match left {
            FileLocation::InModel(stored) => stored,
            FileLocation::Stored(in_file) => {
                self.files[index] = Some(in_file);
                return Ok(());
            }
        };
        let file = |path: &Path| {
            let file = File::open(path).map_err(|cause| unreadable(path, &cause));
            Ok(Arc::new(file?))
        };
        self.map(index, &file, TensorLocation { path, offset, kind, shape })
    }

    fn map(
        &mut self,
        index: usize,
        file: &dyn Fn(&Path) -> Result<Arc<File>>,
        stored: TensorLocation,
    ) -> Result<()> {
        let TensorLocation { path, offset, kind, shape } = stored;
        let tensor = &mut self.tensors[index];
        if kind != tensor.kind() || shape != tensor.size() {
            let reason = format!(
                "a tensor of `{}` is {kind:?} {shape:?} in it; expected {:?} {:?}. Load the model in the file's dtype",
                self.name,
                tensor.kind(),
                tensor.size()
            );
            return Err(error::file(&path, reason));
        }
        let mapped = file::tensor_over(&path, offset, &shape, kind)?;
        tensor.f_set_data(&mapped)?;
        let version = tensor.internal_version();
        let source = Arc::new(Source { file: file(&path)?, path, offset });
        self.files[index] = Some(InFile { source, mapped, version });
        Ok(())
    }

    /// Writes tensors to a file in its own folder and unlinks it: the open file stays for this process only. So it is not synced; the
    /// system writes its pages when it needs their memory.
    pub(super) fn spill(&mut self, folder: &Path, region: usize, members: &[usize]) -> Result<()> {
        let unlinked = own_folder(folder)?;
        let path = unlinked.path().join(format!("{}.{region}.safetensors", self.name));
        let tensors: Vec<(String, Tensor)> = members
            .iter()
            .map(|&index| Ok((self.names[index].clone(), self.tensors[index].f_detach()?)))
            .collect::<Result<_>>()?;
        write_file(&path, &tensors)?;
        let written = TensorsFile::open(&path)?;
        let file = Arc::new(File::open(&path).map_err(|cause| unreadable(&path, &cause))?);
        for &index in members {
            let entry = written.entries().iter().find(|entry| entry.name == self.names[index]);
            let stored = entry
                .map(|entry| written.location(entry))
                .ok_or_else(|| error::file(&path, "lacks tensors that were just written"))?;
            self.map(index, &|_| Ok(file.clone()), stored)?;
        }
        Ok(())
    }

    /// Returns a tensor's location in a file, unless the tensor refers to other memory.
    pub(super) fn in_file(&self, index: usize) -> Option<&InFile> {
        self.files[index].as_ref().filter(|file| file.mapped.data_ptr() == self.tensors[index].data_ptr())
    }

    /// Returns that location, for a layer that replaces this one, if `tensor` refers to its pages.
    pub(crate) fn left(&self, name: &str, tensor: &Tensor) -> Option<FileLocation> {
        let index = self.names.iter().position(|known| known == name)?;
        let file = self.files[index].as_ref()?;
        (file.mapped.data_ptr() == tensor.data_ptr()).then(|| FileLocation::Stored(file.clone()))
    }

    /// Whether any tensor is in a file.
    pub(crate) fn is_in_files(&self) -> bool {
        (0..self.files.len()).any(|index| self.in_file(index).is_some())
    }

    /// Checks that the files contain what the tensors show: they were not written in memory, and are not to be trained.
    pub(super) fn check_files(&mut self) -> Result<()> {
        for index in 0..self.files.len() {
            let Some(InFile { source, mapped, version }) = self.in_file(index) else { continue };
            let now = self.tensors[index].internal_version();
            let change = if self.tensors[index].requires_grad() {
                "is to be trained"
            } else if now == *version {
                continue;
            } else if same_bytes(source, mapped)? {
                // The memory was exchanged and restored.
                self.files[index].iter_mut().for_each(|file| file.version = now);
                continue;
            } else {
                "was changed in memory"
            };
            let reason = format!(
                "`{}.{}` {change}, but it is stored in {} and is read from there; decide what is trained, and load weights, \
                 before the model is offloaded to files",
                self.name,
                self.names[index],
                source.path.display()
            );
            return Err(refused("file tier", reason));
        }
        Ok(())
    }
}

/// Writes a new file in the safetensors format, without syncing it.
pub(crate) fn write_file(path: &Path, tensors: &[(String, Tensor)]) -> Result<()> {
    let written = File::create_new(path).and_then(|file| {
        let mut out = BufWriter::new(file);
        tensors_file::write_to(&mut out, tensors)?;
        out.flush()
    });
    written.map_err(|cause| match cause.downcast::<runtime::Error>() {
        Ok(error) => error,
        Err(cause) => error::file(path, format!(
                "cannot be written: {cause}; the file tier needs space for the model's layers in a writable folder"
            )),
    })
}

/// Creates a folder in which a file can be written, and which is removed with the value.
pub(crate) fn own_folder(folder: &Path) -> Result<tempfile::TempDir> {
    let made = tempfile::Builder::new().prefix("offload-").tempdir_in(folder);
    made.map_err(|cause| {
        error::file(folder, format!("a folder for the layers cannot be created in it: {cause}"))
    })
}

fn same_bytes(source: &Source, mapped: &Tensor) -> Result<bool> {
    let bytes = mapped.f_view([-1i64])?.f_view_dtype(Kind::Uint8)?;
    let read = device::pinned_empty(&bytes.size(), Kind::Uint8, Device::Cpu)?;
    source.read_into(&read)?;
    Ok(read.f_equal(&bytes)?)
}

fn unreadable(path: &Path, cause: &std::io::Error) -> Error {
    error::file(path, format!("cannot be read: {cause}"))
}
