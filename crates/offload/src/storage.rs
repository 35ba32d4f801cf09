//! The storage of layers on the host while they are not in use.
//!
//! The model's tensors are the truth: a load reads the memory that they refer to. [`Layer::new`] gives them host memory or file
//! pages; if that memory is exchanged later (`set_data`), [`Layer::look`] notices, with which each use starts.

mod change_detection;
mod gradient_sums;
mod in_file;
mod in_source;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use models::module::Role;
use runtime::device::{self, Event};
use runtime::file_memory;
use tch::{Device, Kind, Tensor};
use training::layer_source::{LayerSource, is_placeholder};

use crate::error::{Error, Result, refused};
use crate::layout::{Extent, Layout, piece, view};
pub(crate) use change_detection::{TensorVersions, unchanged};
pub(crate) use in_file::{FileLocation, InFile, Source, own_folder, write_file};
pub(crate) use in_source::InSource;

/// Where layers are stored between their uses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Tier {
    /// In host memory.
    #[default]
    Host,
    /// In files, which are created in this folder and unlinked, so the system frees them when the process ends, however it ends. Until
    /// then they occupy disk space. With [`HostAdamW`](crate::HostAdamW) the optimizer's state and sums of gradients of trained tensors
    /// are in files, too. The trained tensors of a layer whose frozen ones are larger, such as adapters, are in host memory.
    File(PathBuf),
}

/// Gradients of a layer's tensors, by index, in host memory or in transfer.
pub(crate) type Gradients = Vec<(usize, Tensor)>;

/// A piece of a layer to be loaded.
pub(crate) enum Piece {
    /// In host memory, or in the memory of a file.
    Host(Tensor),
    /// In a file of frozen tensors.
    File(Arc<Source>),
    /// In a [`LayerSource`].
    Source(InSource),
}

impl Piece {
    /// Copies the bytes to `target` on the device; from a file through `staging` on the host, if the device is not the CPU.
    pub(crate) fn bring(&self, target: &mut Tensor, staging: Option<&Tensor>) -> runtime::Result<()> {
        let _no_grad = tch::no_grad_guard();
        match (self, staging) {
            (Self::Host(source), _) if file_memory::is_in_file(source) => {
                file_memory::fetch(source)?;
                match target.device() {
                    Device::Cpu => device::copy_on_this_thread(target, source)?,
                    // From memory that is not page-locked the copy has ended when this returns.
                    _ => device::copy_async(target, source)?,
                }
                file_memory::release(source)
            }
            (Self::Host(source), _) if target.device() == Device::Cpu => {
                device::copy_on_this_thread(target, source)
            }
            (Self::Host(source), _) => device::copy_async(target, source),
            (Self::File(source), None) => source.read_into(target),
            (Self::Source(region), _) => region.load(target),
            (Self::File(source), Some(staging)) => {
                source.read_into(staging)?;
                device::copy_async(target, staging)
            }
        }
    }
}

/// A layer whose values are in host memory or files.
#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) name: String,
    /// Index among the model's blocks.
    pub(crate) number: usize,
    /// Names of its tensors.
    names: Vec<String>,
    pub(crate) layout: Layout,
    /// The model's own tensors, whose memory is the storage.
    pub(crate) tensors: Vec<Tensor>,
    /// By tensor: its memory at the last check. Kept alive, so that other memory has another address.
    seen: Vec<Tensor>,
    /// By region: its bytes in host memory.
    flats: Vec<Option<Tensor>>,
    /// By tensor: its location in a file.
    files: Vec<Option<InFile>>,
    /// By region: where a source holds it.
    sources: Vec<Option<InSource>>,
    /// The bytes of a layer that a source keeps where it is.
    in_place: Option<Tensor>,
    /// Host buffers for the gradients of trained tensors, once needed.
    gradients: Vec<Option<Tensor>>,
    /// By tensor: the gradient sum of running backwards. Autograd does not see it, because it may write its own gradient to
    /// `.grad` at any time.
    pub(crate) pending: Vec<Option<Tensor>>,
    /// Counts changes of the layer's values without a new version: steps of the engine's own optimizer, as soon as they are
    /// queued, and exchanged memory.
    pub(crate) generation: u64,
    /// Steps of the engine's own optimizer.
    pub(crate) steps: u64,
    /// By tensor: how much of its version are steps of the engine's own optimizer as this layer's.
    own_versions: Vec<i64>,
    /// Tensors that the engine's optimizer has stepped before the rest of the model.
    pub(crate) updated_early: Vec<usize>,
    /// Whether this step's update is queued, so that the layer may be prefetched for the next step.
    pub(crate) update_queued: bool,
    /// When the last update is done.
    pub(crate) updated: Option<Arc<Event>>,
    /// When the delivered gradients are in host memory.
    pub(crate) arrived: Vec<Arc<Event>>,
    /// Forwards whose backward is still to come.
    pub(crate) outstanding: Arc<AtomicUsize>,
    /// Why the layer cannot be used any more.
    pub(crate) lost: Option<String>,
}

/// How to store a layer.
#[derive(Debug, Clone)]
pub(crate) struct Placement {
    /// The device for whose transfers host memory is page-locked; the CPU for ordinary pages.
    pub(crate) pinned_for: Device,
    /// The folder for tensors in files; `None` to keep them in host memory.
    pub(crate) folder: Option<PathBuf>,
    /// The source that holds regions instead, as far as it takes them.
    pub(crate) source: Option<Arc<dyn LayerSource>>,
}

impl Placement {
    /// Returns a tensor of zeros in a file, or without a folder in host memory.
    fn zeros(&self, shape: &[i64], kind: Kind) -> Result<Tensor> {
        Ok(match &self.folder {
            Some(folder) => file_memory::zeros(folder, shape, kind)?,
            None => device::pinned_empty(shape, kind, self.pinned_for)?.f_zero_()?,
        })
    }

    /// Returns a tensor of zeros where a layer's tensor is: in a file, or in host memory.
    pub(crate) fn zeros_beside(&self, tensor: &Tensor, shape: &[i64], kind: Kind) -> Result<Tensor> {
        let folder = self.folder.clone().filter(|_| file_memory::is_in_file(tensor));
        Self { folder, ..self.clone() }.zeros(shape, kind)
    }
}

/// Where the values of a tensor are in a file already, if they are.
type Left<'a> = &'a dyn Fn(&str, &Tensor) -> Option<FileLocation>;

impl Layer {
    /// Offloads tensors: they stay the model's, with new memory, or that of a layer which this one replaces. `left` returns the location of a
    /// tensor whose values are already in a file.
    pub(crate) fn new(
        (name, number): (&str, usize),
        named: &[(String, Tensor, Role)],
        placement: &Placement,
        left: Left<'_>,
        replaced: Option<&Self>,
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
            seen: Vec::new(),
            flats: layout.regions.iter().map(|_| None).collect(),
            sources: layout.regions.iter().map(|_| None).collect(),
            in_place: None,
            files: named.iter().map(|_| None).collect(),
            gradients: named.iter().map(|_| None).collect(),
            pending: named.iter().map(|_| None).collect(),
            own_versions: vec![0; named.len()],
            layout,
            generation: 0,
            steps: 0,
            updated_early: Vec::new(),
            update_queued: false,
            updated: None,
            arrived: Vec::new(),
            outstanding: Arc::default(),
            lost: None,
        };
        let devices: Vec<Device> = named.iter().map(|(_, tensor, _)| tensor.device()).collect();
        let mut given = Vec::new();
        if let Err(error) = layer.fill(&named, placement, (left, replaced), &mut given) {
            return Err(layer.undo(&devices, &given, error));
        }
        Ok(layer)
    }

    /// Gives the tensors of every region their new memory. `given` gets the regions that a source took, with their values, which the
    /// tensors no longer have.
    fn fill(
        &mut self,
        named: &[(&str, &Tensor, bool)],
        placement: &Placement,
        (left, replaced): (Left<'_>, Option<&Self>),
        given: &mut Vec<(usize, Tensor)>,
    ) -> Result<()> {
        self.in_place = self.memory_in_source(placement)?;
        for region in 0..self.layout.regions.len() {
            let trained = self.layout.regions[region].trained;
            if let Some(source) = placement.source.as_ref().filter(|source| source.takes(trained)) {
                given.push((region, self.give_to(source, region)?));
                continue;
            }
            let members = self.members(region);
            if let Some(&index) = members.iter().find(|index| is_placeholder(&self.tensors[**index])) {
                return Err(self.without_values(index));
            }
            let (mut in_files, mut others) = (Vec::new(), Vec::new());
            for index in members {
                let (name, tensor, _) = named[index];
                match if trained { None } else { left(name, tensor) } {
                    Some(left) => in_files.push((index, left)),
                    None => others.push(index),
                }
            }
            let has_files = !in_files.is_empty();
            for (index, left) in in_files {
                self.use_file(index, left)?;
            }
            if let Some(flat) =
                replaced.filter(|_| !trained).and_then(|old| self.flat_of(old, region, &others))
            {
                self.flats[region] = Some(flat);
                continue;
            }
            match &placement.folder {
                _ if others.is_empty() => {}
                Some(folder) if !trained => self.spill(folder, region, &others)?,
                _ if has_files => {
                    others.iter().try_for_each(|&index| self.copy_to_host(index, placement.pinned_for))?;
                }
                Some(_) if self.layout.is_mostly_trained() => self.pack(region, &others, placement)?,
                _ => self.pack(region, &others, &Placement { folder: None, ..placement.clone() })?,
            }
        }
        self.seen = self.tensors.iter().map(|tensor| Ok(tensor.f_detach()?)).collect::<Result<_>>()?;
        Ok(())
    }

    /// Gives the tensors their values back on their devices after a region could not be stored: the block runs without this layer.
    /// Returns the error, with what else failed.
    fn undo(&self, devices: &[Device], given: &[(usize, Tensor)], error: Error) -> Error {
        let restore = || -> Result<()> {
            for (region, flat) in given {
                let start = self.layout.regions[*region].range.start;
                for index in self.members(*region) {
                    if is_placeholder(&self.tensors[index]) {
                        self.tensors[index].shallow_clone().f_set_data(&view(
                            flat,
                            start,
                            &self.layout.extents[index],
                        )?)?;
                    }
                }
            }
            for (tensor, device) in self.tensors.iter().zip(devices) {
                if tensor.device() != *device {
                    tensor.shallow_clone().f_set_data(&tensor.f_detach()?.f_to_device(*device)?)?;
                }
            }
            Ok(())
        };
        match restore() {
            Ok(()) => error,
            Err(second) => {
                let reason =
                    format!("`{}` was offloaded in part, and cannot be used: {error}; {second}", self.name);
                refused("layers", reason)
            }
        }
    }

    fn members(&self, region: usize) -> Vec<usize> {
        (0..self.tensors.len()).filter(|&index| self.layout.extents[index].region == region).collect()
    }

    /// Returns the memory of a layer that this one replaces, if all of a region is in it as this one has it, such as the frozen tensors to
    /// which adapters were added: it is neither copied nor held twice.
    fn flat_of(&self, old: &Self, region: usize, members: &[usize]) -> Option<Tensor> {
        let range = &self.layout.regions[region].range;
        let offset = |index: usize| self.layout.extents[index].range.start - range.start;
        let address = |index: usize| self.tensors[index].data_ptr() as usize;
        let start = address(*members.first()?).checked_sub(offset(members[0]))?;
        let is_whole = members.iter().all(|&index| {
            let Extent { kind, shape, .. } = &self.layout.extents[index];
            let tensor = &self.tensors[index];
            address(index) == start + offset(index)
                && (tensor.kind(), tensor.size()) == (*kind, shape.clone())
                && tensor.is_contiguous()
        });
        let mut flats = old.flats.iter().flatten();
        let flat = flats.find(|flat| flat.data_ptr() as usize == start && flat.numel() == range.len())?;
        is_whole.then(|| flat.shallow_clone())
    }

    fn pack(&mut self, region: usize, members: &[usize], placement: &Placement) -> Result<()> {
        let range = self.layout.regions[region].range.clone();
        // The padding between views is copied with them.
        let flat = placement.zeros(&[range.len() as i64], Kind::Uint8)?;
        for &index in members {
            let memory = view(&flat, range.start, &self.layout.extents[index])?;
            memory.shallow_clone().f_copy_(&self.tensors[index])?;
            self.tensors[index].f_set_data(&memory)?;
        }
        file_memory::release(&flat)?;
        self.flats[region] = Some(flat);
        Ok(())
    }

    /// Copies one tensor to its own host memory.
    fn copy_to_host(&mut self, index: usize, pinned_for: Device) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let Extent { kind, shape, .. } = &self.layout.extents[index];
        let mut memory = device::pinned_empty(shape, *kind, pinned_for)?;
        memory.f_copy_(&self.tensors[index])?;
        self.tensors[index].f_set_data(&memory)?;
        Ok(())
    }

    /// Returns the pieces to load into `slot`, bytes on the device, with their destinations. A region whose tensors all have
    /// their own memory is one piece.
    pub(crate) fn pieces(&self, slot: &Tensor) -> Result<Vec<(Piece, Tensor)>> {
        let mut pieces = Vec::new();
        if self.in_place.is_some() {
            return Ok(pieces);
        }
        for (number, (region, flat)) in self.layout.regions.iter().zip(&self.flats).enumerate() {
            if let Some(source) = &self.sources[number] {
                pieces.push((Piece::Source(source.clone()), piece(slot, region.range.clone())?));
                continue;
            }
            let members = self.members(number);
            if let Some(flat) = flat
                && members.iter().all(|&index| self.is_in_region(index))
            {
                pieces.push((Piece::Host(flat.shallow_clone()), piece(slot, region.range.clone())?));
                continue;
            }
            for index in members {
                let place = &self.layout.extents[index];
                if place.range.is_empty() {
                    continue;
                }
                let from = match self.in_file(index) {
                    Some(file) => Piece::File(file.source.clone()),
                    None => Piece::Host(self.seen[index].f_view([-1i64])?.f_view_dtype(Kind::Uint8)?),
                };
                pieces.push((from, piece(slot, place.range.clone())?));
            }
        }
        Ok(pieces)
    }

    /// Returns the bytes of the layer while it is used: those of a slot, or where it stays.
    pub(crate) fn memory(&self, slot: &Tensor) -> Tensor {
        self.in_place.as_ref().unwrap_or(slot).shallow_clone()
    }

    /// A tensor's name in the model.
    pub(crate) fn tensor_name(&self, index: usize) -> String {
        format!("{}.{}", self.name, self.names[index])
    }

    /// Bytes of a load.
    pub(crate) fn bytes(&self) -> u64 {
        if self.in_place.is_some() { 0 } else { self.layout.bytes as u64 }
    }

    /// Bytes of the gradients to store.
    pub(crate) fn gradient_bytes(&self) -> u64 {
        self.trained().map(|index| self.layout.extents[index].range.len() as u64).sum()
    }

    /// The indices of trained tensors.
    pub(crate) fn trained(&self) -> impl Iterator<Item = usize> + use<'_> {
        (0..self.tensors.len()).filter(|&index| self.tensors[index].requires_grad())
    }

    pub(crate) fn is_trained(&self) -> bool {
        self.trained().next().is_some()
    }

    /// Returns a host buffer for the gradient of a trained tensor; reuses the last one unless someone else keeps it.
    pub(crate) fn gradient_buffer(&mut self, index: usize, placement: &Placement) -> Result<Tensor> {
        if let Some(buffer) = &self.gradients[index]
            && runtime::memory::is_sole_owner(buffer)?
        {
            return Ok(buffer.shallow_clone());
        }
        let Extent { kind, shape, .. } = &self.layout.extents[index];
        let buffer = placement.zeros_beside(&self.tensors[index], shape, *kind)?;
        self.gradients[index] = Some(buffer.shallow_clone());
        Ok(buffer)
    }
}
