//! A model of the engine, reduced to what orders accesses.

use std::collections::VecDeque;

use super::super::{Access, Direction, Load, Ring};

/// The streams. On the CPU the caller itself computes.
pub(super) const CALLER: usize = 0;
const COMPUTE: usize = 1;
pub(super) const PREFETCH: usize = 2;
pub(super) const HOST: usize = 3;

/// The known progress of each stream.
pub(super) type Clock = [u64; 4];

fn join(into: &mut Clock, other: &Clock) {
    into.iter_mut().zip(other).for_each(|(mine, theirs)| *mine = (*mine).max(*theirs));
}

/// An access of a stream to memory.
#[derive(Debug, Clone, Copy)]
struct Done {
    stream: usize,
    at: u64,
    writes: bool,
}

/// Where the layers are stored, and the kind of device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Machine {
    /// Compute is the calling thread; prefetch is another thread.
    Cpu,
    /// Compute and prefetch are streams that run later than they are queued.
    Gpu,
    /// The same, but a host thread reads the file into staging memory and queues the copy from there.
    GpuFromFiles,
}

/// A wait that is left out of the engine, for the checker to find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    None,
    LoadsDoNotWaitForFree,
    UsesDoNotWaitForReady,
    FreeIsNotRecorded,
    ReadyIsNotRecorded,
    StagedIsNotAwaited,
    VersionsAreNotRead,
}

/// A layer's values: the layer, its version, and whether a write intervened.
type Values = (usize, u64, bool);

#[derive(Debug, Clone, Default)]
pub(super) struct Memory {
    done: Vec<Done>,
    values: Option<Values>,
    staged_values: Option<Values>,
    staging: Vec<Done>,
    /// As in the engine: the last requested layer, with its version.
    pub(super) holds: Option<u64>,
    ready: Option<Clock>,
    free: Option<Clock>,
    pub(super) leases: usize,
}

/// A load that the host's thread has yet to queue: as issued, with what it waits for.
#[derive(Debug)]
pub(super) struct Task {
    number: u64,
    slot: usize,
    values: Values,
    issued: Clock,
    ready: Option<Clock>,
}

/// The engine, reduced to what orders things.
pub(super) struct Model {
    pub(super) machine: Machine,
    fault: Fault,
    pub(super) ring: Ring,
    pub(super) slots: Vec<Memory>,
    pub(super) clocks: [Clock; 4],
    pub(super) tasks: VecDeque<Task>,
    tasks_issued: u64,
    /// Each slot's last task, and when the host was done with it.
    last_task: Vec<u64>,
    tasks_done: u64,
    pub(super) versions: Vec<u64>,
    pub(super) trained: bool,
    /// Loads of a layer's values on the host: which slot and when, to find writes that come between.
    host_reads: Vec<Vec<(usize, Done)>>,
    pub(super) loads: Vec<(usize, bool)>,
    /// Loads that raced with a write on the host.
    pub(super) torn: usize,
}

impl Model {
    pub(super) fn new((machine, fault): (Machine, Fault), ring: usize, layers: usize, trained: bool) -> Self {
        let slots = ring.min(layers);
        Self {
            machine,
            fault,
            ring: Ring::new(slots, layers),
            slots: vec![Memory::default(); slots],
            clocks: [[0; 4]; 4],
            tasks: VecDeque::new(),
            tasks_issued: 0,
            last_task: vec![0; slots],
            tasks_done: 0,
            versions: vec![0; layers],
            trained,
            host_reads: vec![Vec::new(); layers],
            loads: Vec::new(),
            torn: 0,
        }
    }

    fn compute(&self) -> usize {
        if self.machine == Machine::Cpu { CALLER } else { COMPUTE }
    }

    /// The caller puts something into a stream.
    fn issue(&mut self, stream: usize) {
        self.clocks[CALLER][CALLER] += 1;
        let caller = self.clocks[CALLER];
        join(&mut self.clocks[stream], &caller);
    }

    pub(super) fn wait(&mut self, stream: usize, event: Option<Clock>) {
        if let Some(event) = event {
            join(&mut self.clocks[stream], &event);
        }
    }

    fn step(&mut self, stream: usize, writes: bool) -> Done {
        self.clocks[stream][stream] += 1;
        Done { stream, at: self.clocks[stream][stream], writes }
    }

    fn is_before(&self, done: &Done, stream: usize) -> bool {
        self.clocks[stream][done.stream] >= done.at
    }

    /// An access to a slot: everything it conflicts with happened before it.
    fn touch(&mut self, slot: usize, stream: usize, writes: bool) -> Result<(), String> {
        let conflicts = self.slots[slot].done.iter().filter(|done| done.writes || writes);
        if let Some(done) = conflicts.into_iter().find(|done| !self.is_before(done, stream)) {
            return Err(format!("slot {slot}: stream {stream} (writes: {writes}) races with {done:?}"));
        }
        let done = self.step(stream, writes);
        self.slots[slot].done.push(done);
        Ok(())
    }

    /// As `Engine::load`.
    fn load(&mut self, slot: usize, layer: usize) -> Result<(), String> {
        if self.slots[slot].leases > 0 {
            return Err(format!("slot {slot} is in use and was given to layer {layer}"));
        }
        self.issue(PREFETCH);
        if self.fault != Fault::LoadsDoNotWaitForFree {
            let free = self.slots[slot].free;
            self.wait(PREFETCH, free);
        }
        let values = (layer, self.versions[layer], false);
        self.slots[slot].holds = Some(values.1);
        if self.machine == Machine::GpuFromFiles {
            self.issue(HOST);
            self.tasks_issued += 1;
            self.last_task[slot] = self.tasks_issued;
            let (issued, ready) = (self.clocks[CALLER], self.slots[slot].ready);
            self.tasks.push_back(Task { number: self.tasks_issued, slot, values, issued, ready });
            return Ok(());
        }
        self.touch(slot, PREFETCH, true)?;
        let read = self.step(PREFETCH, false);
        self.host_reads[layer].push((slot, read));
        self.slots[slot].values = Some(values);
        if self.fault != Fault::ReadyIsNotRecorded {
            self.slots[slot].ready = Some(self.clocks[PREFETCH]);
        }
        Ok(())
    }

    /// The host's thread does the first thing in its queue.
    pub(super) fn run_task(&mut self) -> Result<(), String> {
        let Some(Task { number, slot, values, issued, ready }) = self.tasks.pop_front() else {
            return Ok(());
        };
        join(&mut self.clocks[HOST], &issued);
        self.wait(HOST, ready);
        // The file goes into staging. A copy that still reads it there brings something else than it was queued for.
        let read = self.step(HOST, true);
        let unfinished = self.slots[slot].staging.iter().any(|copy| !self.is_before(copy, HOST));
        if unfinished && let Some(values) = &mut self.slots[slot].values {
            values.2 = true;
        }
        self.host_reads[values.0].push((slot, read));
        self.slots[slot].staged_values = Some(values);
        let host = self.clocks[HOST];
        join(&mut self.clocks[PREFETCH], &host);
        self.touch(slot, PREFETCH, true)?;
        let copy = self.step(PREFETCH, false);
        self.slots[slot].staging.push(copy);
        self.slots[slot].values = self.slots[slot].staged_values;
        if self.fault != Fault::ReadyIsNotRecorded {
            self.slots[slot].ready = Some(self.clocks[PREFETCH]);
        }
        self.tasks_done = number;
        Ok(())
    }

    /// As `Engine::acquire`: a slot with the layer in it, read by compute; `None` where all are in use.
    pub(super) fn begin(&mut self, access: Access) -> Result<Option<usize>, String> {
        let (slots, versions, fault) = (self.slots.clone(), self.versions.clone(), self.fault);
        let is_current = |slot: usize, layer: usize| {
            slots[slot]
                .holds
                .is_some_and(|version| version == versions[layer] || fault == Fault::VersionsAreNotRead)
        };
        let Some((slot, load)) = self.ring.acquire(access, &is_current) else {
            let leased = self.slots.iter().filter(|slot| slot.leases > 0).count();
            return if leased == self.slots.len() {
                Ok(None)
            } else {
                Err(format!("refused with {leased} of {} slots in use", self.slots.len()))
            };
        };
        let trained = self.trained;
        let may_load = |now: Access, coming: Access| {
            let crosses = coming.direction == Direction::Forward
                && (now.direction == Direction::Backward || coming.layer <= now.layer);
            !crosses || !trained
        };
        let ahead = self.ring.prefetch(&is_current, &may_load);
        if load {
            self.loads.push((access.layer, true));
            self.load(slot, access.layer)?;
        }
        for Load { slot: other, layer } in ahead {
            if other == slot {
                return Err(format!("slot {slot} was given to layer {layer} by the use that it is for"));
            }
            self.loads.push((layer, false));
            self.load(other, layer)?;
        }
        self.slots[slot].leases += 1;
        while self.fault != Fault::StagedIsNotAwaited && self.tasks_done < self.last_task[slot] {
            self.run_task()?;
        }
        let compute = self.compute();
        self.issue(compute);
        if self.fault != Fault::UsesDoNotWaitForReady {
            let ready = self.slots[slot].ready;
            self.wait(compute, ready);
        }
        self.read(slot, access.layer)?;
        Ok(Some(slot))
    }

    fn read(&mut self, slot: usize, layer: usize) -> Result<(), String> {
        let compute = self.compute();
        self.touch(slot, compute, false)?;
        let expected = Some((layer, self.versions[layer], false));
        if self.slots[slot].values != expected {
            return Err(format!("slot {slot} has {:?}, not {expected:?}", self.slots[slot].values));
        }
        Ok(())
    }

    /// As the end of a lease; the layer was there until now.
    pub(super) fn end(&mut self, slot: usize, layer: usize) -> Result<(), String> {
        let compute = self.compute();
        self.issue(compute);
        self.touch(slot, compute, false)?;
        if self.slots[slot].values.is_none_or(|(there, ..)| there != layer) {
            return Err(format!("layer {layer} was taken out of slot {slot} while it ran"));
        }
        if self.fault != Fault::FreeIsNotRecorded {
            self.slots[slot].free = Some(self.clocks[compute]);
        }
        self.slots[slot].leases -= 1;
        self.ring.release(slot);
        Ok(())
    }

    pub(super) fn visit(&mut self, layer: usize, direction: Direction) -> Result<(), String> {
        let slot = self.begin(Access { layer, direction })?.ok_or("no slot, and nothing is in use")?;
        self.end(slot, layer)
    }

    /// Someone changes a layer on the host, as an optimizer does that the engine does not know.
    pub(super) fn write_on_host(&mut self, layer: usize) {
        self.clocks[CALLER][CALLER] += 1;
        self.versions[layer] += 1;
        for (slot, read) in self.host_reads[layer].clone() {
            if !self.is_before(&read, CALLER) && self.machine != Machine::GpuFromFiles {
                self.torn += 1;
                if let Some(values) = &mut self.slots[slot].values {
                    values.2 |= values.0 == layer;
                }
            }
        }
    }

    /// The caller waits for compute and for the gradients, as at the end of a backward.
    pub(super) fn wait_for_compute(&mut self) {
        let compute = self.clocks[self.compute()];
        self.wait(CALLER, Some(compute));
    }
}
