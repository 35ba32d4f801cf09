//! Copies of layer inputs to host memory and back.
//!
//! One stream carries both directions. In forward a layer's input is copied to the host while the layer computes, and freed
//! when both are done, so that at most one copy is in flight. In backward a layer waits for its input and, before it computes,
//! starts the copy of the previous layer's input.
//!
//! ```text
//! compute   forward 0 │ forward 1 │ …    … │ backward 1 │ backward 0
//! offload         out 0  │    out 1  │ …    … │    in 0    │
//! ```
//!
//! Host memory is page-locked for CUDA; [`runtime::device::pinned_bytes`] counts it on every device, [`runtime::memory`] does
//! not. Buffers are reused in the next step; when a batch of another shape comes, idle buffers are freed.

use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;
use runtime::autograd::{GradMode, SavedTensorStorage, StoredTensor};
use runtime::device::{Event, Stream, copy_async, pinned_empty};
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

/// The layer inputs of one model in host memory, and their copies. Clones share them.
#[derive(Debug, Default, Clone)]
pub struct HostOffload(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    /// Created at the first copy, or given.
    stream: OnceLock<Stream>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Idle buffers. Work in the stream that still uses them is done before later work.
    idle: Vec<Tensor>,
    /// The last copy to the host.
    last: Weak<Transfer>,
    /// Bytes in host memory.
    bytes: u64,
}

impl HostOffload {
    /// Creates a storage that copies on `stream`, which may have other work: gradients on their way to the host.
    pub fn on(stream: Stream) -> Self {
        Self(Arc::new(Shared { stream: OnceLock::from(stream), state: Mutex::default() }))
    }

    /// Returns the storage of the input of layer `layer`, in the order of forward.
    pub fn storage(&self, layer: usize) -> LayerStorage {
        LayerStorage { offload: self.0.clone(), layer }
    }

    /// Returns the bytes in host memory now, between a forward and its backward.
    pub fn bytes(&self) -> u64 {
        self.0.state.lock().bytes
    }
}

impl Shared {
    fn stream(&self, device: Device) -> Result<Stream> {
        if let Some(stream) = self.stream.get().filter(|stream| stream.device() == device) {
            return Ok(stream.clone());
        }
        let made = Stream::new(device)?;
        let stream = self.stream.get_or_init(|| made).clone();
        if stream.device() == device {
            return Ok(stream);
        }
        let reason = format!(
            "a layer's input is on {device:?}, but earlier ones were on {:?}; offload layers of one device only",
            stream.device()
        );
        Err(Error::invalid("activation offload", reason))
    }
}

/// The storage of one layer's input.
#[derive(Debug, Clone)]
pub struct LayerStorage {
    offload: Arc<Shared>,
    layer: usize,
}

/// One input in host memory, or on its way.
#[derive(Debug)]
struct Transfer {
    offload: Arc<Shared>,
    stream: Stream,
    layer: usize,
    shape: Vec<i64>,
    kind: Kind,
    /// A lock, because threads of the engine share the transfer.
    host: Mutex<Tensor>,
    /// The input on the device, until it is copied.
    leaving: Mutex<Option<Tensor>>,
    copied: Event,
    /// The prefetched input, and the event that marks its arrival.
    returning: Mutex<Option<(Tensor, Event)>>,
    /// The previous transfer of the same forward.
    previous: Weak<Transfer>,
}

/// The handle that a segment keeps.
struct StoredInput(Arc<Transfer>);

impl SavedTensorStorage for LayerStorage {
    fn pack(&self, input: &Tensor) -> Result<Box<dyn StoredTensor>> {
        let (shape, kind, device) = (input.size(), input.kind(), input.device());
        let stream = self.offload.stream(device)?;
        let host = {
            let mut state = self.offload.state.lock();
            let fits = state.idle.iter().position(|idle| idle.size() == shape && idle.kind() == kind);
            match fits {
                Some(index) => Some(state.idle.swap_remove(index)),
                None => {
                    state.idle.clear();
                    None
                }
            }
        };
        let host = host.map_or_else(|| pinned_empty(&shape, kind, device), Ok)?;
        let input = input.f_detach()?;
        let computed = Event::untimed(device)?;
        Stream::current(device)?.record(&computed)?;
        stream.wait(&computed)?;
        let (mut target, source) = (host.shallow_clone(), input.shallow_clone());
        let version = input.f_internal_version()?;
        stream.submit(move || {
            let _no_grad = GradMode::off();
            copy_async(&mut target, &source)?;
            if source.f_internal_version()? == version {
                return Ok(());
            }
            let reason =
                "a layer's input was changed in layer while it was copied to the host; change a copy";
            Err(Error::invalid("activation offload", reason))
        })?;
        let copied = Event::untimed(device)?;
        stream.record(&copied)?;

        // Not dropped under the lock: the end of a transfer takes it too.
        let last = self.offload.state.lock().last.upgrade();
        // The same layer again is a block that runs twice in a forward; an earlier layer starts another forward.
        let previous = last.as_ref().filter(|last| last.layer <= self.layer);
        let transfer = Arc::new(Transfer {
            offload: self.offload.clone(),
            stream,
            layer: self.layer,
            shape,
            kind,
            host: Mutex::new(host),
            leaving: Mutex::new(Some(input)),
            copied,
            returning: Mutex::default(),
            previous: previous.map_or_else(Weak::new, Arc::downgrade),
        });
        let mut state = self.offload.state.lock();
        state.bytes += bytes(&transfer.host.lock());
        state.last = Arc::downgrade(&transfer);
        Ok(Box::new(StoredInput(transfer)))
    }
}

impl StoredTensor for StoredInput {
    fn wait(&self) -> Result<()> {
        let transfer = &*self.0;
        Stream::current(transfer.stream.device())?.wait(&transfer.copied)?;
        // This thread's next computation may reuse the memory.
        transfer.leaving.lock().take();
        Ok(())
    }

    fn unpack(&self) -> Result<Tensor> {
        let transfer = &*self.0;
        transfer.prefetch()?;
        let returning = transfer.returning.lock().take();
        let (input, arrived) = returning.ok_or_else(|| {
            Error::invalid("activation offload", "two concurrent backwards requested one layer's input")
        })?;
        Stream::current(transfer.stream.device())?.wait(&arrived)?;
        if let Some(previous) = transfer.previous.upgrade() {
            previous.prefetch()?;
        }
        Ok(input)
    }
}

impl Transfer {
    /// Starts the copy to the device, if it has not started.
    fn prefetch(&self) -> Result<()> {
        let mut returning = self.returning.lock();
        if returning.is_some() {
            return Ok(());
        }
        let device = self.stream.device();
        let input = Tensor::f_empty(&self.shape, (self.kind, device))?;
        // The memory may have belonged to another tensor until now.
        let (free, arrived) = (Event::untimed(device)?, Event::untimed(device)?);
        Stream::current(device)?.record(&free)?;
        self.stream.wait(&free)?;
        let (mut target, source) = (input.shallow_clone(), self.host.lock().shallow_clone());
        self.stream.submit(move || {
            let _no_grad = GradMode::off();
            copy_async(&mut target, &source)
        })?;
        self.stream.record(&arrived)?;
        *returning = Some((input, arrived));
        Ok(())
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        // Device memory that the stream still reads or writes is not reused before that work is done. A failure of the stream
        // is reported to whoever needs the tensor.
        if let Ok(current) = Stream::current(self.stream.device()) {
            let returning = self.returning.get_mut().take();
            let leaving = self.leaving.get_mut().take();
            if let Some((_, arrived)) = &returning {
                let _ = current.wait(arrived);
            }
            if leaving.is_some() {
                let _ = current.wait(&self.copied);
            }
        }
        let host = self.host.get_mut().shallow_clone();
        let mut state = self.offload.state.lock();
        state.bytes -= bytes(&host);
        state.idle.push(host);
    }
}

fn bytes(tensor: &Tensor) -> u64 {
    (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64
}
