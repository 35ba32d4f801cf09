//! Ranks that are connected with each other, and their messages.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tch::Device;

use super::failure::{self, CollectiveError};
use super::operation_log::{OperationLog, Progress};
use super::{Bytes, Store, machines};
use crate::device::checked;
use crate::error::{Error, Result};
use crate::sys::collectives::{Backend, Interface};

/// How a group is connected.
#[derive(Clone, Debug)]
pub struct GroupConfig {
    /// The longest that a call waits for other ranks.
    pub timeout: Duration,
    /// Where this rank's tensors are: the CPU, connected by Gloo, or a CUDA device, connected by NCCL ([written, never run on a
    /// GPU](super#gpus)).
    pub device: Device,
    /// Connects CPUs by a stand-in for NCCL: operations are enqueued and run one after the other, messages are matched by their order
    /// alone, and targets have no meaningful value before the wait. With it, code for GPUs is tested where there is none.
    pub nccl_stand_in: bool,
}

impl Default for GroupConfig {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(300), device: Device::Cpu, nccl_stand_in: false }
    }
}

/// Ranks that are connected with each other. Clones are one group.
///
/// All ranks call the same operations of a group in the same order, and wait for reductions in the same order. So operations that run
/// beside each other, in threads, belong to groups of their own.
#[derive(Clone, Debug)]
pub struct Group(pub(super) Arc<Inner>);

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) name: String,
    pub(super) rank: usize,
    pub(super) size: usize,
    /// The run's ranks that are in the group.
    pub(super) members: Arc<[usize]>,
    pub(super) options: GroupConfig,
    pub(super) state: Mutex<State>,
    pub(super) sent: AtomicU64,
    pub(super) received: AtomicU64,
    /// Nothing where there is one rank, or the others are not there. Dropped before the store, which a connection may ask.
    pub(super) backend: Option<Backend>,
    pub(super) store: Option<Store>,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) failure: Option<CollectiveError>,
    pub(super) log: OperationLog,
    /// Messages sent to each rank.
    pub(super) sends: Vec<u64>,
    /// Messages received from each rank.
    pub(super) receives: Vec<u64>,
    pub(super) agreements: u64,
}

impl Group {
    /// Connects all ranks of the run.
    ///
    /// # Errors
    /// Ranks that do not come in time; a name that a group of this run has had; a device that does not exist here.
    pub fn new(store: &Store, name: &str, options: GroupConfig) -> Result<Self> {
        let ranks: Vec<usize> = (0..store.launch().world_size).collect();
        Self::of_ranks(store, name, &ranks, options)
    }

    /// Connects the given ranks of the run, this process's among them. Its rank in the group is the index in `ranks`.
    ///
    /// # Errors
    /// Errors of [`Group::new`]; ranks without this process's.
    pub fn of_ranks(store: &Store, name: &str, ranks: &[usize], options: GroupConfig) -> Result<Self> {
        let launch = store.launch();
        let refuse = |reason: String| Err(Error::invalid("group", format!("`{name}`: {reason}")));
        let Some(rank) = ranks.iter().position(|&rank| rank == launch.rank) else {
            return refuse(format!("the ranks {ranks:?} leave out this process's, {}", launch.rank));
        };
        Self::connect(store, name, (rank, ranks.into()), options)
    }

    /// Connects the same ranks once more, in a group whose operations may run beside this one's. All ranks call it.
    ///
    /// # Errors
    /// Errors of [`Group::new`].
    pub fn duplicate(&self, name: &str) -> Result<Self> {
        self.reconnect(name, self.0.options.clone())
    }

    /// Connects the same ranks once more, in another way, such as GPUs beside this group's CPUs. All ranks call it.
    ///
    /// # Errors
    /// Errors of [`Group::new`].
    pub fn reconnect(&self, name: &str, options: GroupConfig) -> Result<Self> {
        let place = (self.rank(), self.0.members.clone());
        match &self.0.store {
            Some(store) => Self::connect(store, name, place, options),
            None => Ok(Self::with(name, place, options, None, None)),
        }
    }

    /// Connects some of this group's ranks, this one's among them, in a group of their own. Its rank there is the index in `ranks`. All
    /// of `ranks` call it with one name, which no other ranks use.
    ///
    /// # Errors
    /// Errors of [`Group::of_ranks`].
    pub fn subgroup(&self, name: &str, ranks: &[usize]) -> Result<Self> {
        let Some(rank) = ranks.iter().position(|&rank| rank == self.rank()) else {
            let reason = format!("`{name}`: the ranks {ranks:?} leave out this process's, {}", self.rank());
            return Err(Error::invalid("group", reason));
        };
        let member = |rank: &usize| {
            let there = self.0.members.get(*rank).copied();
            there.ok_or_else(|| Error::invalid("group", format!("`{name}`: there is no rank {rank}")))
        };
        let place = (rank, ranks.iter().map(member).collect::<Result<_>>()?);
        let options = self.0.options.clone();
        match &self.0.store {
            Some(store) => Self::connect(store, name, place, options),
            None => Ok(Self::with(name, place, options, None, None)),
        }
    }

    fn connect(
        store: &Store,
        name: &str,
        (rank, members): (usize, Arc<[usize]>),
        options: GroupConfig,
    ) -> Result<Self> {
        let size = members.len();
        let refuse = |reason: String| Err(Error::invalid("group", format!("`{name}`: {reason}")));
        let cuda = checked(options.device)?;
        if cuda.is_some() && options.nccl_stand_in {
            return refuse("the stand-in for NCCL connects CPUs; give it Device::Cpu".to_owned());
        }
        if size == 1 {
            return Ok(Self::with(name, (rank, members), options, None, Some(store.clone())));
        }
        let member = format!("group/{name}/member/{rank}");
        if store.has(&member)? {
            return refuse("a group of that name was made before; give each its own name".to_owned());
        }
        store.set(&member, &[])?;
        let (prefix, launch_rank) = (format!("group/{name}"), store.launch().rank);
        let backend = match cuda {
            Some(_) => Backend::nccl(&store.connection, &prefix, (rank, size), options.timeout),
            None => Self::gloo(store, &prefix, (rank, size), &options),
        };
        let backend = backend.map_err(|cause| {
            let cause = cause.to_string();
            let cause = failure::without_source_line(&cause);
            let own = failure::named(&store.machines, launch_rank);
            let reason = format!("{own} of {size}, group `{name}`: no connection: {cause}");
            Error::invalid("group", reason)
        })?;
        store.end_when_silent(options.timeout)?;
        let group = Self::with(name, (rank, members), options, Some(backend), Some(store.clone()));
        if let Some(device) = cuda {
            group.connect_nccl(device)?;
        }
        Ok(group)
    }

    fn gloo(store: &Store, prefix: &str, place: (usize, usize), options: &GroupConfig) -> Result<Backend> {
        let interface = match std::env::var("GLOO_SOCKET_IFNAME") {
            Ok(names) => Interface::Named(names.split(',').next().unwrap_or_default().trim().to_owned()),
            Err(_) => Interface::Address(machines::own_address(store.launch())?.to_string()),
        };
        // The other ranks wait that long for rank 0 in a barrier: longer than rank 0, which can name who is late, waits for them.
        let patience = options.timeout + Duration::from_millis(500);
        Backend::gloo(&store.connection, prefix, place, &interface, patience, options.nccl_stand_in)
    }

    /// NCCL waits for all ranks without limit. So they meet first where there is one.
    fn connect_nccl(&self, device: c_int) -> Result<()> {
        self.meet("connect", "NCCL", &[])?;
        let operation = self.begin("connect", "NCCL", 0)?;
        let connected = self.backend().map_or(Ok(()), |backend| backend.connect(device));
        connected.map_err(|cause| self.fail(&operation, None, &cause))?;
        self.log(&operation, Progress::Done);
        Ok(())
    }

    /// Returns a group of this process alone on the CPU, whose operations copy.
    pub fn alone() -> Self {
        Self::with("alone", (0, [0].into()), GroupConfig::default(), None, None)
    }

    /// Returns a group with this process as one rank, while the others are not there: what is sent to them is counted and dropped,
    /// and what they would send is zeros. With it, memory and bytes of a rank among a thousand can be measured by one process
    /// (PyTorch's `FakeProcessGroup`).
    ///
    /// # Errors
    /// A rank that is not below `size`.
    ///
    /// ```
    /// use runtime::collectives::{Division, Group};
    /// use tch::{Kind, Tensor};
    ///
    /// let group = Group::fake(1023, 1024)?;
    /// let (weights, division) = (Tensor::ones([2048], (Kind::Float, tch::Device::Cpu)), Division::even(2048, 1024));
    /// group.all_gather(&weights, division, &weights.narrow(0, 2046, 2), "layer 3")?.wait()?;
    /// assert_eq!(weights.sum(Kind::Float).double_value(&[]), 2.0);
    /// assert_eq!(group.bytes().sent, 1023 * 2 * 4);
    /// # Ok::<(), runtime::Error>(())
    /// ```
    pub fn fake(rank: usize, size: usize) -> Result<Self> {
        if rank >= size {
            return Err(Error::invalid("group", format!("there is no rank {rank} in a group of {size}")));
        }
        Ok(Self::with("fake", (rank, (0..size).collect()), GroupConfig::default(), None, None))
    }

    fn with(
        name: &str,
        (rank, members): (usize, Arc<[usize]>),
        options: GroupConfig,
        backend: Option<Backend>,
        store: Option<Store>,
    ) -> Self {
        let size = members.len();
        let state = State {
            failure: None,
            log: OperationLog::new(),
            sends: vec![0; size],
            receives: vec![0; size],
            agreements: 0,
        };
        Self(Arc::new(Inner {
            name: name.to_owned(),
            rank,
            size,
            members,
            options,
            state: Mutex::new(state),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            backend,
            store,
        }))
    }

    /// Returns the group's name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Returns this process's rank.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.0.size
    }

    /// Returns the longest that a call waits for other ranks.
    pub fn timeout(&self) -> Duration {
        self.0.options.timeout
    }

    /// Returns the failure that made the group unusable, if one did.
    pub fn failure(&self) -> Option<CollectiveError> {
        self.0.state.lock().failure.clone()
    }

    /// Returns the bytes of tensors that this rank has sent to and received from other ranks. The backend's own collectives
    /// ([`Order::Native`](super::Order::Native)) are not counted.
    pub fn bytes(&self) -> Bytes {
        Bytes { sent: self.0.sent.load(Ordering::Relaxed), received: self.0.received.load(Ordering::Relaxed) }
    }

    /// Returns the other ranks, from the next one on, so that the ranks do not all turn to the same.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, size) = (self.rank(), self.size());
        (1..size).map(move |distance| (rank + distance) % size)
    }

    /// Returns where the group's tensors are.
    pub fn device(&self) -> Device {
        self.0.options.device
    }

    /// Whether the ranks are connected by NCCL, or by what stands for it: work is enqueued, and nothing waits on the host.
    pub(super) fn is_over_nccl(&self) -> bool {
        self.0.backend.is_some() && (self.device() != Device::Cpu || self.0.options.nccl_stand_in)
    }

    pub(super) fn backend(&self) -> Option<&Backend> {
        self.0.backend.as_ref()
    }

    /// The name of each rank's machine; none where all are on one.
    pub(super) fn machines(&self) -> Arc<[String]> {
        let all: &[String] = self.store().map_or(&[], |store| &store.machines);
        self.0.members.iter().filter_map(|member| all.get(*member).cloned()).collect()
    }

    pub(super) fn store(&self) -> Option<&Store> {
        self.0.store.as_ref()
    }

    /// The prefix of the group's keys in the store.
    pub(super) fn prefix(&self) -> String {
        format!("group/{}", self.name())
    }

    pub(super) fn next_agreement(&self) -> u64 {
        let mut state = self.0.state.lock();
        state.agreements += 1;
        state.agreements
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use tch::{Kind, Tensor};

    use super::super::{Division, Launch, Order, ReduceConfig, ReduceOp};
    use super::*;

    /// A group of one rank has no connection otherwise. Here it has one, so that one GPU runs what several do.
    fn alone_over_nccl() -> Group {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
        let launch = Launch::read(|name| match name {
            "MASTER_ADDR" => Some("127.0.0.1".to_owned()),
            "MASTER_PORT" => Some(port.clone()),
            "RANK" | "LOCAL_RANK" => Some("0".to_owned()),
            "WORLD_SIZE" | "LOCAL_WORLD_SIZE" => Some("1".to_owned()),
            _ => None,
        });
        let store = Store::connect(&launch.unwrap().unwrap(), Duration::from_secs(30)).unwrap();
        let options = GroupConfig { device: Device::Cuda(0), ..GroupConfig::default() };
        let backend = Backend::nccl(&store.connection, "group/alone", (0, 1), options.timeout).unwrap();
        let group = Group::with("alone", (0, [0].into()), options, Some(backend), Some(store));
        group.connect_nccl(0).unwrap();
        group
    }

    #[test]
    fn one_rank_over_nccl_computes_what_it_has() {
        if crate::device::cuda_count().unwrap() == 0 {
            eprintln!("skipped: no CUDA device");
            return;
        }
        let group = alone_over_nccl();
        let source = Tensor::arange(1_000_000, (Kind::Float, group.device()));
        let (target, division) = (source.zeros_like(), Division::even(1_000_000, 1));
        let check = |target: &Tensor| {
            assert!(target.equal(&source));
            let _ = target.shallow_clone().zero_();
        };
        group.all_gather(&target, division, &source, "gather").unwrap().wait().unwrap();
        check(&target);
        for order in [Order::Ordered, Order::Native] {
            let options = ReduceConfig { order, ..ReduceConfig::default() };
            group.reduce_scatter(&source, division, &target, options, "reduce").unwrap().wait().unwrap();
            check(&target);
            target.shallow_clone().copy_(&source);
            group.all_reduce(&target, ReduceConfig { op: ReduceOp::Max, ..options }, "maximum").unwrap();
            check(&target);
        }
        // Within one group of messages, a rank may send to itself.
        let bytes = |tensor: &Tensor| (0, tensor.to_kind(Kind::Int16));
        let (received, sent) = (bytes(&target), bytes(&source));
        let backend = group.backend().unwrap();
        let mut transfer =
            backend.exchange(std::slice::from_ref(&received), std::slice::from_ref(&sent)).unwrap();
        transfer.wait(group.timeout()).unwrap();
        assert!(received.1.equal(&sent.1));
        assert_eq!(
            group.first_failure(Some("disk full"), "save").unwrap(),
            Some((0, "disk full".to_owned()))
        );
        group.barrier("end").unwrap();
        assert_eq!(group.failure(), None);
    }
}
