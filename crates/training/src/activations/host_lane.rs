//! The way of layers' inputs to the host's memory and back.
//!
//! One stream carries both directions. In forward a layer's input goes out while the layer computes; the input is let go when
//! both are done, so that never more than one is under way, whatever the stream's speed. In backward a layer waits for its
//! input and, before it computes, sends for that of the layer before it.
//!
//! ```text
//! compute   forward 0 │ forward 1 │ …    … │ backward 1 │ backward 0
//! lane         out 0  │    out 1  │ …    … │    in 0    │
//! ```
//!
//! Host memory is page-locked for CUDA, and counted by [`runtime::device::pinned_bytes`] and not by [`runtime::memory`] on
//! every device. Buffers are kept for the next step; when a batch of another shape comes, the idle ones are given back.

use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;
use runtime::autograd::{GradMode, SavedTensorStorage, StoredTensor};
use runtime::device::{Event, Stream, copy_async, pinned_empty};
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

/// The lane of a model.
#[derive(Debug, Default)]
pub(super) struct HostLane(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    /// Made when something is to be carried.
    stream: OnceLock<Stream>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Buffers that nobody uses. Work on them that is still in the stream is done before what comes behind it.
    idle: Vec<Tensor>,
    /// What went out last.
    last: Weak<Trip>,
    /// Bytes that are out.
    bytes: u64,
}

impl HostLane {
    /// Where layer `place` loads and unloads.
    pub(super) fn stop(&self, place: usize) -> Stop {
        Stop { lane: self.0.clone(), place }
    }

    pub(super) fn bytes(&self) -> u64 {
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
            "a layer's input is on {device:?} and those before it were on {:?}; offload the layers of one device",
            stream.device()
        );
        Err(Error::invalid("activation offload", reason))
    }
}

/// One layer's place at the lane.
#[derive(Debug, Clone)]
pub(super) struct Stop {
    lane: Arc<Shared>,
    place: usize,
}

/// One input that is out.
#[derive(Debug)]
struct Trip {
    lane: Arc<Shared>,
    stream: Stream,
    place: usize,
    shape: Vec<i64>,
    kind: Kind,
    /// A lock, because threads of the engine share the trip.
    host: Mutex<Tensor>,
    /// The input on the device until it is copied, and when that is.
    leaving: Mutex<Option<Tensor>>,
    copied: Event,
    /// On its way back, and when it is there.
    returning: Mutex<Option<(Tensor, Event)>>,
    /// What went out before, of the same forward.
    previous: Weak<Trip>,
}

/// A [`Trip`] as its segment holds it.
struct Ticket(Arc<Trip>);

impl SavedTensorStorage for Stop {
    fn pack(&self, input: &Tensor) -> Result<Box<dyn StoredTensor>> {
        let (shape, kind, device) = (input.size(), input.kind(), input.device());
        let stream = self.lane.stream(device)?;
        let host = {
            let mut state = self.lane.state.lock();
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
                "a layer's input was changed in place while it was copied to the host; change a copy";
            Err(Error::invalid("activation offload", reason))
        })?;
        let copied = Event::untimed(device)?;
        stream.record(&copied)?;

        // Never let go of under the lock: a trip's end takes it too.
        let last = self.lane.state.lock().last.upgrade();
        // The same place again is a block that runs twice in a forward; an earlier one begins another forward.
        let previous = last.as_ref().filter(|last| last.place <= self.place);
        let trip = Arc::new(Trip {
            lane: self.lane.clone(),
            stream,
            place: self.place,
            shape,
            kind,
            host: Mutex::new(host),
            leaving: Mutex::new(Some(input)),
            copied,
            returning: Mutex::default(),
            previous: previous.map_or_else(Weak::new, Arc::downgrade),
        });
        let mut state = self.lane.state.lock();
        state.bytes += bytes(&trip.host.lock());
        state.last = Arc::downgrade(&trip);
        Ok(Box::new(Ticket(trip)))
    }
}

impl StoredTensor for Ticket {
    fn wait(&self) -> Result<()> {
        let trip = &*self.0;
        Stream::current(trip.stream.device())?.wait(&trip.copied)?;
        // Its memory may be used again by whatever this thread computes next.
        trip.leaving.lock().take();
        Ok(())
    }

    fn unpack(&self) -> Result<Tensor> {
        let trip = &*self.0;
        trip.send_for()?;
        let returning = trip.returning.lock().take();
        let (input, arrived) = returning.ok_or_else(|| {
            Error::invalid("activation offload", "two backwards at once took one layer's input")
        })?;
        Stream::current(trip.stream.device())?.wait(&arrived)?;
        if let Some(previous) = trip.previous.upgrade() {
            previous.send_for()?;
        }
        Ok(input)
    }
}

impl Trip {
    /// Begins the way back, if it has not begun.
    fn send_for(&self) -> Result<()> {
        let mut returning = self.returning.lock();
        if returning.is_some() {
            return Ok(());
        }
        let device = self.stream.device();
        let input = Tensor::f_empty(&self.shape, (self.kind, device))?;
        // The memory may have been another tensor's until now.
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

impl Drop for Trip {
    fn drop(&mut self) {
        // Device memory that the stream still reads or writes is not given to anything before that is done. A failure of the
        // stream was, or will be, an error of whoever needs what it did not carry.
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
        let mut state = self.lane.state.lock();
        state.bytes -= bytes(&host);
        state.idle.push(host);
    }
}

fn bytes(tensor: &Tensor) -> u64 {
    (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64
}
