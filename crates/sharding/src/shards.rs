//! Layers whose weights are divided among ranks.
//!
//! Each region of a layer (its tensors of one dtype, trained or frozen) lies in one flat piece of memory; rank r keeps the r-th
//! part. A layer is gathered by receiving the other parts straight into the slot where it computes, next to its own, so nothing is
//! copied twice.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use runtime::collectives::{Division, Group as Ranks};
use runtime::device::{Event, Stream};
use runtime::file_memory;
use runtime::precision::identity;
use tch::{Device, Tensor};
use training::layer_source::{LayerRegion, LayerSource};

use crate::agreement::describe;
use crate::bucket::{Bucket, Member, divide, narrow, owned};
use crate::divided::Divided;
use crate::mesh::Mesh;
use crate::round::Round;
use crate::{Result, refused};

/// Where frozen weights of layers are, such as the base of adapters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum FrozenWeights {
    /// On every rank: they are never sent.
    Whole,
    /// Divided among ranks, and gathered for each use as the trained ones are.
    #[default]
    Sharded,
}

/// This rank's shards of a model's layers, for [`Stage::Three`](crate::Stage::Three). Clones are the same shards. They are in memory of the
/// mesh's device, or in files ([`Shards::in_files`]), whose pages are in memory only while a layer is gathered or stepped.
#[derive(Clone)]
pub struct Shards(Arc<Inner>);

struct Inner {
    mesh: Mesh,
    /// Loads run beside reductions, so they have a group of their own.
    gathers: Ranks,
    frozen: FrozenWeights,
    /// The folder of the files that the shards are in; `None` for memory of the mesh's device.
    files: Option<PathBuf>,
    /// On a GPU, when the shards' last change is done: layers are loaded on another stream than that which changes them.
    changed: Mutex<Option<Event>>,
    values: Mutex<Option<Values>>,
    state: Mutex<State>,
}

/// Copies the values of a tensor, by its name in the model, into the given one. Returns whether it has them.
type Values = Box<dyn Fn(&str, &Tensor) -> Result<bool> + Send>;

#[derive(Default)]
struct State {
    regions: Vec<Region>,
    /// By a tensor's identity: its region, and its index there.
    indices: HashMap<usize, (usize, usize)>,
    /// Takes the gradients, once there is an optimizer.
    round: Option<Weak<Mutex<Round>>>,
}

struct Region {
    layer: String,
    trained: bool,
    division: Division,
    /// This rank's weights.
    shard: Tensor,
    members: Vec<LayerTensor>,
    /// Its number among the optimizer's buckets.
    bucket: Option<usize>,
}

/// A tensor of a region.
struct LayerTensor {
    name: String,
    tensor: Tensor,
    range: std::ops::Range<i64>,
    /// Its shape and the sum of its values, which all ranks must have.
    description: String,
}

impl Shards {
    /// Creates shards without a layer. `offload::OffloadConfig::install` with these as its `source` divides a model's layers.
    ///
    /// # Errors
    /// Ranks that do not come; a second call for the same ranks.
    pub fn new(ranks: impl Into<Mesh>, frozen: FrozenWeights) -> Result<Self> {
        Self::within(ranks, frozen, None)
    }

    /// [`Shards::new`] in unnamed files in `folder`, where the optimizer's sums, copies and state of these shards are then, too (as in
    /// ZeRO-Infinity). Each rank may give another folder.
    ///
    /// # Errors
    /// As [`Shards::new`]; ranks on a GPU.
    pub fn in_files(ranks: impl Into<Mesh>, frozen: FrozenWeights, folder: &Path) -> Result<Self> {
        Self::within(ranks, frozen, Some(folder.to_owned()))
    }

    fn within(ranks: impl Into<Mesh>, frozen: FrozenWeights, files: Option<PathBuf>) -> Result<Self> {
        let mesh = ranks.into();
        if files.is_some() && mesh.device() != Device::Cpu {
            return Err(refused(
                "shards in files of ranks on a GPU, which is not implemented; keep them on the GPU",
            ));
        }
        let gathers = mesh.shard.duplicate(&format!("{}, gathers", mesh.shard.name()))?;
        let (changed, values, state) = (Mutex::default(), Mutex::default(), Mutex::default());
        Ok(Self(Arc::new(Inner { mesh, gathers, frozen, files, changed, values, state })))
    }

    /// Reads the values of layers that have none in memory, such as those of a model's files, while they are divided: a layer is whole
    /// only for that time. [`layer_source::set_placeholder`](training::layer_source::set_placeholder) takes the memory of a tensor.
    /// `values` copies a tensor's values, by its name in the model, and returns whether it has them. It is kept until
    /// [`Shards::forget_values`].
    pub fn read_values(&self, values: impl Fn(&str, &Tensor) -> Result<bool> + Send + 'static) {
        *self.0.values.lock() = Some(Box::new(values));
    }

    /// Drops what [`Shards::read_values`] has given.
    pub fn forget_values(&self) {
        *self.0.values.lock() = None;
    }

    /// Returns the group that gathers layers.
    pub fn gathers(&self) -> &Ranks {
        &self.0.gathers
    }

    /// Returns the bytes of this rank's shards.
    pub fn bytes(&self) -> u64 {
        self.0.state.lock().regions.iter().map(|region| bytes(&region.shard)).sum()
    }

    /// Notes that the current stream has changed shards, which are not used until their layers are.
    pub(crate) fn note_change(&self) -> Result<()> {
        if self.0.files.is_some() {
            self.0.state.lock().regions.iter().try_for_each(|region| file_memory::release(&region.shard))?;
        }
        let device = self.0.mesh.device();
        if device != Device::Cpu {
            let event = Event::untimed(device)?;
            Stream::current(device)?.record(&event)?;
            *self.0.changed.lock() = Some(event);
        }
        Ok(())
    }

    pub(crate) fn is_of(&self, mesh: &Mesh) -> bool {
        let mesh_of_shards = &self.0.mesh;
        (mesh_of_shards.world.name(), mesh_of_shards.replicas()) == (mesh.world.name(), mesh.replicas())
    }

    pub(crate) fn holds(&self, tensor: &Tensor) -> Result<bool> {
        Ok(self.0.state.lock().indices.contains_key(&identity(tensor)?))
    }

    /// Returns the name of a tensor that is to be trained, but was frozen when its layer was divided: it is in no bucket.
    pub(crate) fn thawed<'a>(&self, parameters: impl Iterator<Item = &'a Tensor>) -> Result<Option<String>> {
        let state = self.0.state.lock();
        for parameter in parameters.filter(|parameter| parameter.requires_grad()) {
            if let Some(&(region, index)) = state.indices.get(&identity(parameter)?)
                && !state.regions[region].trained
            {
                return Ok(Some(state.regions[region].members[index].name.clone()));
            }
        }
        Ok(None)
    }

    /// The description that all ranks must agree on: each tensor's name, shape and sum.
    pub(crate) fn descriptions(&self) -> Vec<(String, String)> {
        let state = self.0.state.lock();
        let all = state.regions.iter().flat_map(|region| &region.members);
        all.map(|held| (format!("parameter {}", held.name), held.description.clone())).collect()
    }

    /// Returns a bucket for each trained region, as bucket `first` and following ones. `parameters` has the parameters' numbers by
    /// identity.
    pub(crate) fn buckets(&self, parameters: &HashMap<usize, usize>, first: usize) -> Result<Vec<Bucket>> {
        let mut buckets = Vec::new();
        for region in self.0.state.lock().regions.iter_mut().filter(|region| region.trained) {
            let mut members = Vec::new();
            for LayerTensor { name, tensor, range, .. } in &region.members {
                let Some(&parameter) = parameters.get(&identity(tensor)?) else {
                    return Err(refused(format!(
                        "`{name}` is trained, but in no group; give all trained parameters"
                    )));
                };
                members.push(Member { parameter, tensor: tensor.shallow_clone(), range: range.clone() });
            }
            region.bucket = Some(first + buckets.len());
            buckets.push(Bucket::of_layer(members, region.division, &region.shard, &self.0.mesh)?);
        }
        Ok(buckets)
    }

    /// Gives the layers' gradients to the buckets of `round`.
    pub(crate) fn deliver_to(&self, round: &Arc<Mutex<Round>>) {
        self.0.state.lock().round = Some(Arc::downgrade(round));
    }

    /// Returns a tensor's values, whole; `None` if no layer has it. Each owner sends its part to all.
    pub(crate) fn whole(&self, tensor: &Tensor) -> Result<Option<Tensor>> {
        let _no_grad = tch::no_grad_guard();
        let Some(located) = self.find(tensor)? else { return Ok(None) };
        let gathered = Tensor::f_empty([tensor.numel() as i64], (tensor.kind(), self.0.mesh.device()))?;
        for rank in 0..self.0.mesh.shard.size() {
            let Some((part, in_shard)) = located.part(rank) else { continue };
            let mut part = narrow(&gathered, &part)?;
            if rank == self.0.mesh.shard.rank() {
                part.f_copy_(&narrow(&located.shard, &in_shard)?)?;
            }
            self.0.mesh.shard.broadcast(&part, rank, &located.name)?;
        }
        Ok(Some(gathered.f_view(tensor.size().as_slice())?))
    }

    /// Returns a tensor as rank 0 writes it; `None` if no layer has it.
    pub(crate) fn divided(&self, tensor: &Tensor) -> Option<Divided> {
        let TensorShard { name, range, division, shard } = self.find(tensor).ok()??;
        let rank = self.0.mesh.shard.rank();
        let first = division.range(rank).start;
        let (start, end) = (range.start.max(first), range.end.min(division.range(rank).end));
        let own = (start < end).then(|| shard.narrow(0, start - first, end - start));
        Some(Divided { mesh: self.0.mesh.clone(), label: name, kind: shard.kind(), division, range, own })
    }

    /// Writes this rank's part of a tensor's values; returns whether a layer has it.
    pub(crate) fn set(&self, tensor: &Tensor, values: &Tensor) -> Result<bool> {
        let _no_grad = tch::no_grad_guard();
        let Some(located) = self.find(tensor)? else { return Ok(false) };
        if let Some((part, in_shard)) = located.part(self.0.mesh.shard.rank()) {
            let mut target = narrow(&located.shard, &in_shard)?;
            target.f_copy_(&narrow(&values.f_reshape([-1])?, &part)?)?;
        }
        self.note_change()?;
        runtime::autograd::mark_written(tensor)?;
        Ok(true)
    }

    fn find(&self, tensor: &Tensor) -> Result<Option<TensorShard>> {
        let state = self.0.state.lock();
        let Some(&(region, index)) = state.indices.get(&identity(tensor)?) else { return Ok(None) };
        let Region { division, shard, members, .. } = &state.regions[region];
        let LayerTensor { name, range, .. } = &members[index];
        Ok(Some(TensorShard {
            name: name.clone(),
            range: range.clone(),
            division: *division,
            shard: shard.shallow_clone(),
        }))
    }
}

/// Where a tensor is.
struct TensorShard {
    name: String,
    range: std::ops::Range<i64>,
    division: Division,
    shard: Tensor,
}

impl TensorShard {
    /// Returns a rank's part of the tensor: its elements in the tensor, and in the rank's shard.
    fn part(&self, rank: usize) -> Option<(std::ops::Range<i64>, std::ops::Range<i64>)> {
        let owned = owned(&self.range, self.division, rank);
        let from = |origin: i64| owned.start - origin..owned.end - origin;
        (!owned.is_empty()).then(|| (from(self.range.start), from(self.division.range(rank).start)))
    }
}

impl LayerSource for Shards {
    fn takes(&self, trained: bool) -> bool {
        trained || self.0.frozen == FrozenWeights::Sharded
    }

    /// Nothing is gathered where there is one rank. On a GPU a layer is computed in a slot all the same.
    fn keeps_memory(&self) -> bool {
        self.0.mesh.shard.size() == 1 && self.0.mesh.device() == Device::Cpu && self.0.files.is_none()
    }

    fn read(&self, name: &str, target: &Tensor) -> Result<bool> {
        self.0.values.lock().as_ref().map_or(Ok(false), |values| values(name, target))
    }

    fn take(&self, region: &LayerRegion<'_>) -> Result<usize> {
        let _no_grad = tch::no_grad_guard();
        let division = divide(region.values.numel() as i64, &self.0.mesh.shard);
        let values = narrow(region.values, &division.range(self.0.mesh.shard.rank()))?;
        // Of one rank the shard is the region itself.
        let shard = match (self.0.mesh.device(), &self.0.files) {
            (_, Some(folder)) => {
                let mut shard = file_memory::zeros(folder, &values.size(), values.kind())?;
                shard.f_copy_(&values)?;
                file_memory::release(&shard)?;
                shard
            }
            (Device::Cpu, None) if self.keeps_memory() => values,
            (Device::Cpu, None) => values.f_detach_copy()?,
            (device, None) => values.f_to_device(device)?,
        };
        self.note_change()?;
        let mut members = Vec::new();
        for (name, tensor, range) in &region.tensors {
            members.push(LayerTensor {
                name: name.clone(),
                tensor: tensor.shallow_clone(),
                range: range.clone(),
                description: describe(tensor, &narrow(region.values, range)?)?,
            });
        }
        let mut state = self.0.state.lock();
        let number = state.regions.len();
        for (index, held) in members.iter().enumerate() {
            state.indices.insert(identity(&held.tensor)?, (number, index));
        }
        let (layer, trained) = (region.layer.to_owned(), region.trained);
        state.regions.push(Region { layer, trained, division, shard, members, bucket: None });
        Ok(number)
    }

    fn load(&self, region: usize, target: &Tensor) -> runtime::Result<()> {
        let (division, shard, layer) = {
            let state = self.0.state.lock();
            let Region { division, shard, layer, .. } = &state.regions[region];
            (*division, shard.shallow_clone(), layer.clone())
        };
        let _no_grad = tch::no_grad_guard();
        if let Some(changed) = &*self.0.changed.lock() {
            Stream::current(self.0.mesh.device())?.wait(changed)?;
        }
        let target = target.f_view_dtype(shard.kind())?;
        file_memory::fetch(&shard)?;
        self.0.gathers.all_gather(&target, division, &shard, &layer)?.wait()?;
        file_memory::release(&shard)
    }

    fn deliver(&self, region: usize, gradients: Vec<(usize, Tensor)>, last: bool) -> Result<()> {
        let (round, bucket, layer) = {
            let state = self.0.state.lock();
            let Region { bucket, layer, .. } = &state.regions[region];
            (state.round.as_ref().and_then(Weak::upgrade), *bucket, layer.clone())
        };
        let (Some(round), Some(bucket)) = (round, bucket) else {
            let reason =
                format!("no optimizer takes the gradients of `{layer}`; make it before the first backward");
            return Err(refused(reason));
        };
        round.lock().deliver((bucket, &layer), gradients, last)
    }
}

impl fmt::Debug for Shards {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shards").field("frozen", &self.0.frozen).finish_non_exhaustive()
    }
}

pub(crate) fn bytes(tensor: &Tensor) -> u64 {
    tensor.numel() as u64 * tensor.kind().elt_size_in_bytes() as u64
}
