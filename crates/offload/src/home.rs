//! Where a layer's values are while no one computes with them.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use models::module::Role;
use models::tensors_file::{self, Stored, TensorsFile};
use runtime::device::{self, Event};
use runtime::file;
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};
use crate::layout::{Layout, Place, piece, view};

/// Where layers live between their uses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Tier {
    /// In the host's memory.
    #[default]
    Host,
    /// Frozen tensors in files under this folder, which are removed with the engine; trained ones in the host's memory.
    File(PathBuf),
}

/// A file of the file tier, or of the model itself.
#[derive(Debug)]
pub(crate) struct Source {
    file: File,
    path: PathBuf,
    offset: u64,
}

/// One piece of a layer on its way to a slot.
pub(crate) enum Piece {
    /// From the host's memory.
    Host(Tensor),
    /// From a file.
    File(Arc<Source>),
}

impl Piece {
    /// Brings the values into `target`, bytes on the device; a file's through `staging`, host bytes, where the device is not the host.
    pub(crate) fn bring(&self, target: &mut Tensor, staging: Option<&Tensor>) -> runtime::Result<()> {
        let _no_grad = tch::no_grad_guard();
        match (self, staging) {
            (Self::Host(source), _) if target.device() == Device::Cpu => {
                device::copy_on_this_thread(target, source)
            }
            (Self::Host(source), _) => device::copy_async(target, source),
            (Self::File(source), None) => file::read_into(&source.file, &source.path, source.offset, target),
            (Self::File(source), Some(staging)) => {
                file::read_into(&source.file, &source.path, source.offset, staging)?;
                device::copy_async(target, staging)
            }
        }
    }
}

/// A layer whose values are at home.
#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) name: String,
    /// Which of the model's blocks it is.
    pub(crate) number: usize,
    /// Of its tensors.
    names: Vec<String>,
    pub(crate) layout: Layout,
    /// The model's own handles: their memory is the home.
    pub(crate) tensors: Vec<Tensor>,
    /// By region: its bytes in the host's memory.
    flats: Vec<Option<Tensor>>,
    /// By tensor: where it is in a file, and its version when it was left there.
    sources: Vec<Option<(Arc<Source>, i64)>>,
    /// Host memory for the gradients of the trained tensors, from the first on.
    gradients: Vec<Option<Tensor>>,
    /// How often the engine's own optimizer has changed the trained tensors, or will have when what is queued is done.
    pub(crate) generation: u64,
    /// Whether the change of this step is queued, so that the layer may be read ahead for the next one.
    pub(crate) settled: bool,
    /// When the last of those changes is done.
    pub(crate) updated: Option<Arc<Event>>,
    /// When the gradients that were delivered are in the host's memory.
    pub(crate) arrived: Vec<Arc<Event>>,
}

/// How to take a layer home.
#[derive(Debug, Clone)]
pub(crate) struct Homing {
    /// Whose transfers the host's memory is page-locked for; the CPU for ordinary pages.
    pub(crate) pinned_for: Device,
    /// Where frozen tensors are written; `None` to keep them in the host's memory.
    pub(crate) folder: Option<PathBuf>,
}

impl Layer {
    /// Takes tensors home: the handles stay the model's, and their memory becomes the home's. `stored` says of a tensor whose values lie
    /// in a file already where that is.
    pub(crate) fn new(
        (name, number): (&str, usize),
        named: &[(String, Tensor, Role)],
        homing: &Homing,
        stored: &dyn Fn(&str) -> Option<Stored>,
    ) -> Result<Self> {
        let _no_grad = tch::no_grad_guard();
        let named = named.iter().map(|(tensor_name, tensor, role)| {
            (tensor_name.as_str(), tensor, *role == Role::Parameter && tensor.requires_grad())
        });
        let named: Vec<(&str, &Tensor, bool)> = named.collect();
        let layout = Layout::of(named.iter().copied())?;
        let mut layer = Self {
            name: name.to_owned(),
            number,
            names: named.iter().map(|(name, ..)| (*name).to_owned()).collect(),
            tensors: named.iter().map(|(_, tensor, _)| tensor.shallow_clone()).collect(),
            flats: layout.regions.iter().map(|_| None).collect(),
            sources: named.iter().map(|_| None).collect(),
            gradients: named.iter().map(|_| None).collect(),
            layout,
            generation: 0,
            settled: false,
            updated: None,
            arrived: Vec::new(),
        };
        for region in 0..layer.layout.regions.len() {
            let members: Vec<usize> =
                (0..named.len()).filter(|&index| layer.layout.places[index].region == region).collect();
            let in_files = (!layer.layout.regions[region].trained)
                .then(|| members.iter().map(|&index| stored(named[index].0)).collect::<Option<Vec<_>>>())
                .flatten();
            match (in_files, &homing.folder) {
                (Some(places), _) => layer.leave_in_files(&members, &places)?,
                (None, Some(folder)) if !layer.layout.regions[region].trained => {
                    let path = folder.join(format!("{name}.{region}.safetensors"));
                    let places = spill(&path, &members, &named)?;
                    layer.leave_in_files(&members, &places)?;
                }
                _ => layer.take_to_host(region, &members, homing.pinned_for)?,
            }
        }
        Ok(layer)
    }

    fn take_to_host(&mut self, region: usize, members: &[usize], pinned_for: Device) -> Result<()> {
        let range = self.layout.regions[region].range.clone();
        let mut flat = device::pinned_empty(&[range.len() as i64], Kind::Uint8, pinned_for)?;
        // What aligns the views is moved with them.
        let _ = flat.f_zero_()?;
        for &index in members {
            let home = view(&flat, range.start, &self.layout.places[index])?;
            home.shallow_clone().f_copy_(&self.tensors[index])?;
            self.tensors[index].f_set_data(&home)?;
        }
        self.flats[region] = Some(flat);
        Ok(())
    }

    fn leave_in_files(&mut self, members: &[usize], stored: &[Stored]) -> Result<()> {
        for (&index, Stored { path, offset, kind, shape }) in members.iter().zip(stored) {
            let tensor = &mut self.tensors[index];
            if *kind != tensor.kind() || *shape != tensor.size() {
                let reason = format!(
                    "a tensor of `{}` is {kind:?} {shape:?} in it; expected {:?} {:?}. Take the model in the file's own dtype",
                    self.name,
                    tensor.kind(),
                    tensor.size()
                );
                return Err(Error::File { path: path.clone(), reason });
            }
            let over = file::tensor_over(path, *offset, shape, *kind)?;
            tensor.f_set_data(&over)?;
            let file = File::open(path).map_err(|cause| unreadable(path, &cause))?;
            let source = Source { file, path: path.clone(), offset: *offset };
            self.sources[index] = Some((Arc::new(source), tensor.internal_version()));
        }
        Ok(())
    }

    /// What has to move for the layer to be in `slot`, bytes on the device: pieces with where they go.
    pub(crate) fn pieces(&self, slot: &Tensor) -> Result<Vec<(Piece, Tensor)>> {
        let mut pieces = Vec::new();
        for (region, flat) in self.layout.regions.iter().zip(&self.flats) {
            if let Some(flat) = flat {
                pieces.push((Piece::Host(flat.shallow_clone()), piece(slot, region.range.clone())?));
            }
        }
        for (place, source) in self.layout.places.iter().zip(&self.sources) {
            if let Some((source, _)) = source {
                pieces.push((Piece::File(source.clone()), piece(slot, place.range.clone())?));
            }
        }
        Ok(pieces)
    }

    /// That what a load brings is what the model's tensors are: those in files have not been changed in memory, nor are they to be.
    pub(crate) fn check(&self) -> Result<()> {
        for ((tensor, source), name) in self.tensors.iter().zip(&self.sources).zip(&self.names) {
            let Some((source, version)) = source else { continue };
            let change = if tensor.requires_grad() {
                "is to be trained"
            } else if tensor.internal_version() != *version {
                "was changed in memory"
            } else {
                continue;
            };
            let reason = format!(
                "`{}.{name}` {change}, but it lives in {} and is read from there; choose what is trained, and load what is to be \
                 loaded, before the model is offloaded to files",
                self.name,
                source.path.display()
            );
            return Err(Error::config("file tier", reason));
        }
        Ok(())
    }

    /// Where those of its tensors lie that are in files.
    pub(crate) fn files(&self) -> HashMap<String, Stored> {
        let of = |index: usize| {
            let ((source, _), Place { kind, shape, .. }) =
                (self.sources[index].as_ref()?, &self.layout.places[index]);
            let stored = Stored {
                path: source.path.clone(),
                offset: source.offset,
                kind: *kind,
                shape: shape.clone(),
            };
            Some((self.names[index].clone(), stored))
        };
        (0..self.tensors.len()).filter_map(of).collect()
    }

    /// Whether any of it comes from a file.
    pub(crate) fn is_in_files(&self) -> bool {
        self.sources.iter().any(Option::is_some)
    }

    /// Bytes that a load moves.
    pub(crate) fn bytes(&self) -> u64 {
        self.layout.bytes as u64
    }

    /// Bytes of gradients that go back.
    pub(crate) fn gradient_bytes(&self) -> u64 {
        self.trained().map(|index| self.layout.places[index].range.len() as u64).sum()
    }

    /// The tensors that are trained.
    pub(crate) fn trained(&self) -> impl Iterator<Item = usize> + use<'_> {
        (0..self.tensors.len()).filter(|&index| self.tensors[index].requires_grad())
    }

    pub(crate) fn is_trained(&self) -> bool {
        self.trained().next().is_some()
    }

    /// How often the tensors were changed by others than the engine.
    pub(crate) fn versions(&self) -> Vec<i64> {
        self.tensors.iter().map(Tensor::internal_version).collect()
    }

    /// Host memory for the gradient of a trained tensor.
    pub(crate) fn gradient_room(&mut self, index: usize, pinned_for: Device) -> Result<Tensor> {
        let Place { kind, shape, .. } = &self.layout.places[index];
        if let Some(room) = &self.gradients[index] {
            return Ok(room.shallow_clone());
        }
        let room = device::pinned_empty(shape, *kind, pinned_for)?;
        self.gradients[index] = Some(room.shallow_clone());
        Ok(room)
    }

    /// The layer's own tensor that is not at home, if there is one: on a device, or in memory that is not the home's.
    pub(crate) fn astray(&self) -> Option<usize> {
        (0..self.tensors.len()).find(|&index| {
            let (tensor, place) = (&self.tensors[index], &self.layout.places[index]);
            let at_home = match (&self.flats[place.region], &self.sources[index]) {
                (Some(flat), _) => {
                    let origin = self.layout.regions[place.region].range.start;
                    tensor.data_ptr() as usize == flat.data_ptr() as usize + place.range.start - origin
                }
                (None, source) => source.is_some(),
            };
            tensor.device() != Device::Cpu || (tensor.numel() > 0 && !at_home)
        })
    }
}

/// Writes tensors to a file, and says where in it each lies.
fn spill(path: &Path, members: &[usize], named: &[(&str, &Tensor, bool)]) -> Result<Vec<Stored>> {
    let tensors: Vec<(String, Tensor)> = members
        .iter()
        .map(|&index| (named[index].0.to_owned(), named[index].1.f_detach()))
        .map(|(name, tensor)| Ok((name, tensor?)))
        .collect::<Result<_>>()?;
    tensors_file::write(path, &tensors).map_err(|error| match error {
        models::Error::File { path, reason } => {
            let reason = format!(
                "{reason}; the file tier needs room for the model's layers, in a folder that can be written"
            );
            Error::File { path, reason }
        }
        other => other.into(),
    })?;
    let file = TensorsFile::open(path)?;
    let place =
        |name: &str| file.entries().iter().find(|entry| entry.name == name).map(|entry| file.stored(entry));
    let places = members.iter().map(|&index| place(named[index].0)).collect::<Option<Vec<_>>>();
    places.ok_or_else(|| Error::File {
        path: path.to_owned(),
        reason: "lacks tensors that were just written".into(),
    })
}

fn unreadable(path: &Path, cause: &std::io::Error) -> Error {
    Error::File { path: path.to_owned(), reason: format!("cannot be read: {cause}") }
}
