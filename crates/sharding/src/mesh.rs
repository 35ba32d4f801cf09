//! The ranks of a training, and how they sum gradients.

use runtime::collectives::{Division, Group, Order, ReduceConfig, Work};
use tch::{Device, Tensor};
use training::Ranks;

use crate::{Result, refused};

/// The ranks of a training, divided into replicas (hybrid sharding, PyTorch's HSDP): consecutive ranks divide one copy of weights,
/// gradient sums and optimizer state among them, and each replica has a whole copy. Layers are then gathered within a replica only, for
/// example within a machine; over replicas a rank exchanges the sums of its own shard. Clones are the same ranks.
///
/// With N ranks and R replicas, rank r is number r mod N/R of replica ⌊r / (N/R)⌋. `From<&Group>` is one replica.
///
/// Two groups have all ranks: `control`, over CPUs, for what the host decides, such as which parameters have a gradient; and one whose
/// tensors are where the parameters are ([`Mesh::over_devices`]). On CPUs one group is both.
#[derive(Clone, Debug)]
pub struct Mesh {
    /// All of them, for tensors of the host, and those that divide each row.
    ranks: Ranks,
    /// All of them, for tensors where the parameters are.
    pub(crate) world: Group,
    /// The ranks of this rank's replica.
    pub(crate) shard: Group,
    /// The ranks that have this rank's shard, one of each replica; `None` for one replica.
    pub(crate) replicas: Option<Group>,
}

impl From<&Group> for Mesh {
    fn from(world: &Group) -> Self {
        let [all, shard] = [world.clone(), world.clone()];
        Self { ranks: all.into(), world: world.clone(), shard, replicas: None }
    }
}

impl Mesh {
    /// Divides ranks into replicas of equal size. All ranks call it, once for a group.
    ///
    /// # Errors
    /// Ranks that are not a multiple of `replicas`, or do not come.
    pub fn new(world: &Group, replicas: usize) -> Result<Self> {
        if replicas == 0 || !world.size().is_multiple_of(replicas) {
            return Err(refused(format!(
                "{} ranks in {replicas} replicas; expected a number of replicas that divides the number of ranks",
                world.size()
            )));
        }
        if replicas == 1 {
            return Ok(world.into());
        }
        let size = world.size() / replicas;
        let (replica, number) = (world.rank() / size, world.rank() % size);
        let shard: Vec<usize> = (replica * size..(replica + 1) * size).collect();
        let same: Vec<usize> = (0..replicas).map(|replica| replica * size + number).collect();
        Ok(Self {
            ranks: world.clone().into(),
            world: world.clone(),
            shard: world.subgroup(&name(world, &shard), &shard)?,
            replicas: Some(world.subgroup(&name(world, &same), &same)?),
        })
    }

    /// Divides ranks into replicas as [`Mesh::new`] does, whose parameters are on the device of `devices`: a group over NCCL. `control`
    /// has the same ranks in the same order, over CPUs. All ranks call it, once for a group.
    ///
    /// # Errors
    /// Errors of [`Mesh::new`]; groups of other ranks; a control group that is not over CPUs.
    pub fn over_devices(control: &Group, devices: &Group, replicas: usize) -> Result<Self> {
        let place = |group: &Group| (group.rank(), group.size());
        if place(control) != place(devices) {
            let [(rank, size), (other, of)] = [place(control), place(devices)];
            return Err(refused(format!(
                "this process is rank {rank} of {size} in `{}` and rank {other} of {of} in `{}`; give groups of the same ranks",
                control.name(),
                devices.name()
            )));
        }
        if control.device() != Device::Cpu {
            let device = runtime::device::flag(control.device());
            return Err(refused(format!(
                "`{}`, the group for what the host decides, is on {device}; give one over CPUs",
                control.name()
            )));
        }
        Ok(Self { ranks: control.clone().into(), ..Self::new(devices, replicas)? })
    }

    /// Divides each row among `ranks` consecutive ranks ([sequence parallelism](training::ranks)), which take one micro-batch.
    /// What is divided of the parameters stays as it is. All ranks call it, once for a mesh.
    ///
    /// # Errors
    /// A number that does not divide the ranks; ranks that do not come.
    pub fn with_sequence(self, ranks: usize) -> Result<Self> {
        let world = &self.world;
        if ranks == 0 || !world.size().is_multiple_of(ranks) {
            return Err(refused(format!(
                "rows are divided among {ranks} of {} ranks; expected a number that divides the number of ranks",
                world.size()
            )));
        }
        if ranks == 1 {
            return Ok(self);
        }
        let first = world.rank() / ranks * ranks;
        let members: Vec<usize> = (first..first + ranks).collect();
        let sequence = world.subgroup(&format!("rows of {}", name(world, &members)), &members)?;
        let ranks = Ranks::with_sequence(self.control().clone(), sequence)?;
        Ok(Self { ranks, ..self })
    }

    /// Returns the ranks that divide each row, this one's among them; `None` if each takes whole rows.
    pub fn sequence(&self) -> Option<&Group> {
        self.ranks.sequence()
    }

    pub(crate) fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// All ranks, for what the host decides.
    pub(crate) fn control(&self) -> &Group {
        self.ranks.all()
    }

    /// Returns the group of all ranks whose tensors are where the parameters are.
    pub fn world(&self) -> &Group {
        &self.world
    }

    /// Returns where the parameters are.
    pub fn device(&self) -> Device {
        self.world.device()
    }

    /// Returns the number of replicas.
    pub fn replicas(&self) -> usize {
        self.replicas.as_ref().map_or(1, Group::size)
    }

    /// Returns the groups over which gradients are reduced: that of this rank's replica, and that of its shard over replicas.
    pub fn groups(&self) -> impl Iterator<Item = &Group> {
        std::iter::once(&self.shard).chain(&self.replicas)
    }

    /// Whether this rank is in the replica whose parts are written into checkpoints.
    pub(crate) fn is_in_first_replica(&self) -> bool {
        self.replicas.as_ref().is_none_or(|replicas| replicas.rank() == 0)
    }
}

/// The name of a group of these ranks, which errors show beside ranks within it.
fn name(world: &Group, ranks: &[usize]) -> String {
    let ranks: Vec<String> = ranks.iter().map(usize::to_string).collect();
    format!("{}, ranks {}", world.name(), ranks.join(" "))
}

/// How the gradients of a round are summed over ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// In fp32 (fp64), in the order of the global micro-batches, also over replicas: the same bits at any number of ranks and replicas.
    #[default]
    Ordered,
    /// By the backend's own reduce-scatter, over replicas by its all-reduce, in the gradients' dtype; rounds are added in fp32. The bits
    /// depend on the number of ranks; the difference from [`Reduction::Ordered`] is at most (N − 1)·2⁻²⁴·Σ|gᵢ| for fp32 gradients. It is for
    /// networks where each rank should not send to every other. Gloo's own takes more than twice the time and memory of the
    /// ordered one, and [`Group::bytes`] does not count it.
    Native,
}

/// The gradients of a bucket in one round, whose reduction any thread may run.
pub(crate) struct Terms {
    /// `[elements]`; for [`Reduction::Native`] as many as equal shards have.
    pub(crate) gradients: Tensor,
    pub(crate) division: Division,
    /// The tensor that the sums of this rank's shard are added to, `[elements of the shard]`.
    pub(crate) sums: Tensor,
    /// Whether this is the first round of the step, which replaces the sums.
    pub(crate) first: bool,
    pub(crate) label: String,
}

impl Terms {
    /// Adds the gradients of all ranks to the sums. Returns what is still on its way, to be waited for before the sums are read.
    pub(crate) fn reduce(self, mesh: &Mesh, reduction: Reduction) -> runtime::Result<Vec<Work>> {
        match reduction {
            Reduction::Ordered => self.reduce_ordered(mesh),
            Reduction::Native => self.reduce_native(mesh).map(|()| Vec::new()),
        }
    }

    /// Each replica adds its ranks' gradients to the sums of those before it; the last one sends the result to all.
    fn reduce_ordered(self, mesh: &Mesh) -> runtime::Result<Vec<Work>> {
        let Self { gradients, division, sums, first, label } = self;
        let (replica, last) = mesh.replicas.as_ref().map_or((0, 0), |ranks| (ranks.rank(), ranks.size() - 1));
        if let Some(replicas) = mesh.replicas.as_ref().filter(|_| replica > 0) {
            replicas.recv(&sums, replica - 1, &label)?.wait()?;
        }
        let options = ReduceConfig { accumulate: !first || replica > 0, ..ReduceConfig::default() };
        mesh.shard.reduce_scatter(&gradients, division, &sums, options, &label)?.wait()?;
        let Some(replicas) = &mesh.replicas else { return Ok(Vec::new()) };
        if replica == last {
            return (0..last).map(|replica| replicas.send(&sums, replica, &label)).collect();
        }
        replicas.send(&sums, replica + 1, &label)?.wait()?;
        Ok(vec![replicas.recv(&sums, last, &label)?])
    }

    fn reduce_native(self, mesh: &Mesh) -> runtime::Result<()> {
        let Self { gradients, division, mut sums, first, label } = self;
        let _no_grad = tch::no_grad_guard();
        let options = ReduceConfig { order: Order::Native, ..ReduceConfig::default() };
        let padded = Division { elements: gradients.numel() as i64, ..division };
        let shard = Tensor::f_empty([division.per_rank], (gradients.kind(), gradients.device()))?;
        mesh.shard.reduce_scatter(&gradients, padded, &shard, options, &label)?.wait()?;
        drop(gradients);
        if let Some(replicas) = &mesh.replicas {
            replicas.all_reduce(&shard, options, &label)?;
        }
        let shard = shard.f_narrow(0, 0, division.len(mesh.shard.rank()))?;
        if first {
            sums.f_copy_(&shard)?;
        } else {
            let _ = sums.f_add_(&shard)?;
        }
        Ok(())
    }
}
