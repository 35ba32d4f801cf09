//! Where a layer's values are while no one computes with them.
//!
//! The model's own handles decide: a load reads the memory that they show. [`Layer::new`] gives them memory of the home's; who exchanges
//! it afterwards (`set_data`) is seen by [`Layer::look`], which each use begins with.

mod in_file;
mod watch;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use models::module::Role;
use runtime::device::{self, Event};
use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::layout::{Layout, Place, piece, view};
pub(crate) use in_file::{InFile, Left, Source, own_folder};
pub(crate) use watch::{Stamp, unchanged};

/// Where layers live between their uses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Tier {
    /// In the host's memory.
    #[default]
    Host,
    /// Frozen tensors in files, trained ones in the host's memory. Files are made in this folder, and have no name there once they are
    /// written: the system takes them back when the process ends, however it ends. The space on the disk is theirs until then.
    File(PathBuf),
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
            (Self::File(source), None) => source.read_into(target),
            (Self::File(source), Some(staging)) => {
                source.read_into(staging)?;
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
    /// By tensor: its memory at the last look. Held, so that other memory has another address.
    seen: Vec<Tensor>,
    /// By region: its bytes in the host's memory.
    flats: Vec<Option<Tensor>>,
    /// By tensor: where it was left in a file.
    files: Vec<Option<InFile>>,
    /// Host memory for the gradients of the trained tensors, from the first on.
    gradients: Vec<Option<Tensor>>,
    /// By tensor: the sum of the gradients of backwards that have not ended. Autograd does not see it: it may put a gradient of its own
    /// into `.grad` at any time.
    pub(crate) pending: Vec<Option<Tensor>>,
    /// How often the layer's values became others without a new version: a step of the engine's own optimizer, as soon as it is queued,
    /// or memory that was exchanged.
    pub(crate) generation: u64,
    /// Steps of the engine's own optimizer.
    pub(crate) steps: u64,
    /// The tensors that the engine's own optimizer has stepped, and not the rest of the model.
    pub(crate) ahead: Vec<usize>,
    /// Whether the change of this step is queued, so that the layer may be read ahead for the next one.
    pub(crate) settled: bool,
    /// When the last of those changes is done.
    pub(crate) updated: Option<Arc<Event>>,
    /// When the gradients that were delivered are in the host's memory.
    pub(crate) arrived: Vec<Arc<Event>>,
    /// Forwards whose backward is still to come.
    pub(crate) outstanding: Arc<AtomicUsize>,
    /// Why it cannot be used any more.
    pub(crate) lost: Option<String>,
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
    /// Takes tensors home: the handles stay the model's, and their memory becomes the home's. `left` says of a tensor whose values lie
    /// in a file already where that is.
    pub(crate) fn new(
        (name, number): (&str, usize),
        named: &[(String, Tensor, Role)],
        homing: &Homing,
        left: &dyn Fn(&str, &Tensor) -> Option<Left>,
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
            files: named.iter().map(|_| None).collect(),
            gradients: named.iter().map(|_| None).collect(),
            pending: named.iter().map(|_| None).collect(),
            layout,
            generation: 0,
            steps: 0,
            ahead: Vec::new(),
            settled: false,
            updated: None,
            arrived: Vec::new(),
            outstanding: Arc::default(),
            lost: None,
        };
        for region in 0..layer.layout.regions.len() {
            let trained = layer.layout.regions[region].trained;
            let (mut in_files, mut others) = (Vec::new(), Vec::new());
            for index in layer.members(region) {
                let (name, tensor, _) = named[index];
                match if trained { None } else { left(name, tensor) } {
                    Some(left) => in_files.push((index, left)),
                    None => others.push(index),
                }
            }
            let has_files = !in_files.is_empty();
            for (index, left) in in_files {
                layer.leave_in_file(index, left)?;
            }
            match &homing.folder {
                _ if others.is_empty() => {}
                Some(folder) if !trained => layer.spill(folder, region, &others)?,
                _ if has_files => {
                    others.iter().try_for_each(|&index| layer.take_alone(index, homing.pinned_for))?;
                }
                _ => layer.take_to_host(region, &others, homing.pinned_for)?,
            }
        }
        layer.seen = layer.tensors.iter().map(|tensor| Ok(tensor.f_detach()?)).collect::<Result<_>>()?;
        Ok(layer)
    }

    fn members(&self, region: usize) -> Vec<usize> {
        (0..self.tensors.len()).filter(|&index| self.layout.places[index].region == region).collect()
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

    /// Gives a tensor host memory of its own.
    fn take_alone(&mut self, index: usize, pinned_for: Device) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let Place { kind, shape, .. } = &self.layout.places[index];
        let mut home = device::pinned_empty(shape, *kind, pinned_for)?;
        home.f_copy_(&self.tensors[index])?;
        self.tensors[index].f_set_data(&home)?;
        Ok(())
    }

    /// What has to move for the layer to be in `slot`, bytes on the device: pieces with where they go. A region whose tensors are all at
    /// their places is one piece.
    pub(crate) fn pieces(&self, slot: &Tensor) -> Result<Vec<(Piece, Tensor)>> {
        let mut pieces = Vec::new();
        for (number, (region, flat)) in self.layout.regions.iter().zip(&self.flats).enumerate() {
            let members = self.members(number);
            if let Some(flat) = flat
                && members.iter().all(|&index| self.is_at_its_place(index))
            {
                pieces.push((Piece::Host(flat.shallow_clone()), piece(slot, region.range.clone())?));
                continue;
            }
            for index in members {
                let place = &self.layout.places[index];
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

    /// A tensor's name in the model.
    pub(crate) fn tensor_name(&self, index: usize) -> String {
        format!("{}.{}", self.name, self.names[index])
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

    /// Host memory for the gradient of a trained tensor: that of the last one, where nobody has kept it.
    pub(crate) fn gradient_room(&mut self, index: usize, pinned_for: Device) -> Result<Tensor> {
        if let Some(room) = &self.gradients[index]
            && runtime::memory::is_sole_owner(room)?
        {
            return Ok(room.shallow_clone());
        }
        let Place { kind, shape, .. } = &self.layout.places[index];
        let room = device::pinned_empty(shape, *kind, pinned_for)?;
        self.gradients[index] = Some(room.shallow_clone());
        Ok(room)
    }
}
