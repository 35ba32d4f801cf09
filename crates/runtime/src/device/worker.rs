//! A CPU stream: a thread with a queue.

use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle, ThreadId};

use tch::Tensor;

use super::event::{Cause, Failure, Mark, Recorded, wait_for};
use crate::error::{Error, Result};
use crate::sys::stream::ThreadState;
use crate::sys::{error_chain, panic_message};

/// Work for a stream.
pub(super) type Work = Box<dyn FnOnce() -> Result<()> + Send>;

/// The thread and its queue. Dropped by the last handle of the stream.
#[derive(Debug)]
pub(super) struct Worker {
    queue: Arc<Queue>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    commands: VecDeque<Command>,
    /// Whether the thread executes a command that it took from the queue.
    busy: bool,
    /// Whether the stream is gone: the thread ends once the queue is empty.
    closed: bool,
    /// The thread that executes the queue, to refuse a wait for itself.
    thread: Option<ThreadId>,
}

enum Command {
    /// Runs unless earlier work failed.
    Run { work: Work, thread_state: ThreadState },
    /// Completes the mark, with the failure of earlier work.
    Complete(Arc<Mark>),
    /// Completes the mark with the failure of earlier work, and forgets the failure.
    Report(Arc<Mark>),
    /// Waits for a mark, and inherits its failure.
    Await(Recorded),
    /// Drops a tensor.
    Release(Tensor),
}

impl std::fmt::Debug for Command {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::Run { .. } => "Run",
            Self::Complete(_) => "Complete",
            Self::Report(_) => "Report",
            Self::Await(_) => "Await",
            Self::Release(_) => "Release",
        })
    }
}

thread_local! {
    /// Whether this thread executes a stream's queue.
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread executes a stream's queue.
pub(super) fn is_worker() -> bool {
    IS_WORKER.get()
}

/// The queues of live threads.
static QUEUES: Mutex<Vec<Weak<Queue>>> = Mutex::new(Vec::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Worker {
    pub(super) fn spawn() -> Result<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let name = format!("stream-{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let queue = Arc::new(Queue::default());
        let of_thread = queue.clone();
        let thread = thread::Builder::new().name(name.clone()).spawn(move || of_thread.execute());
        let thread = thread.map_err(|error| Error::Unavailable {
            what: format!("the CPU stream {name}"),
            reason: format!("its thread could not be started: {error}; use fewer streams"),
        })?;
        lock(&queue.state).thread = Some(thread.thread().id());
        let mut queues = lock(&QUEUES);
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(&queue));
        Ok(Self { queue, thread: Some(thread) })
    }

    pub(super) fn submit(&self, work: Work) -> Result<()> {
        let thread_state = ThreadState::capture()?;
        self.queue.push(Command::Run { work, thread_state });
        Ok(())
    }

    pub(super) fn complete(&self, mark: Arc<Mark>) {
        self.queue.push(Command::Complete(mark));
    }

    pub(super) fn wait(&self, recorded: Recorded) {
        self.queue.push(Command::Await(recorded));
    }

    pub(super) fn keep(&self, tensor: Tensor) {
        self.queue.push(Command::Release(tensor));
    }

    pub(super) fn idle(&self) -> bool {
        let state = lock(&self.queue.state);
        state.commands.is_empty() && !state.busy
    }

    /// Waits for the work queued so far and returns its failure, after which the stream is usable again.
    pub(super) fn synchronize(&self) -> Result<()> {
        if self.queue.is_executed_here() {
            let reason =
                "called from work of the same stream, which would wait for itself; call it from outside";
            return Err(Error::invalid("stream synchronize", reason));
        }
        let mark = Arc::new(Mark::default());
        self.queue.push(Command::Report(mark.clone()));
        Recorded::Host(mark).wait()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        lock(&self.queue.state).closed = true;
        self.queue.changed.notify_all();
        // Within the work of a stream the thread is not joined: it might be this thread, or wait for a mark that comes
        // after this work.
        if let Some(thread) = self.thread.take()
            && !IS_WORKER.get()
        {
            // The thread catches every panic of the work, so joining never fails.
            let _ = thread.join();
        }
    }
}

/// Waits for what every CPU stream has queued so far. Returns one of the failures; all stay with their streams.
pub(super) fn synchronize_all() -> Result<()> {
    if is_worker() {
        let reason =
            "called from work of a CPU stream, for which other streams may wait; call it from outside";
        return Err(Error::invalid("device synchronize", reason));
    }
    let queues: Vec<Arc<Queue>> = lock(&QUEUES).iter().filter_map(Weak::upgrade).collect();
    let mut marks = Vec::new();
    for queue in &queues {
        let mark = Arc::new(Mark::default());
        if queue.push_if_open(Command::Complete(mark.clone())) {
            marks.push(Recorded::Host(mark));
        }
    }
    drop(queues);
    marks.iter().map(Recorded::wait).fold(Ok(()), Result::and)
}

impl Queue {
    fn push(&self, command: Command) {
        lock(&self.state).commands.push_back(command);
        self.changed.notify_all();
    }

    /// A closed queue may have no thread any more; nothing waits for its remaining work.
    fn push_if_open(&self, command: Command) -> bool {
        let mut state = lock(&self.state);
        if state.closed {
            return false;
        }
        state.commands.push_back(command);
        drop(state);
        self.changed.notify_all();
        true
    }

    fn is_executed_here(&self) -> bool {
        lock(&self.state).thread == Some(thread::current().id())
    }

    /// The thread's loop: executes commands in order until the stream is dropped and the queue empty.
    fn execute(&self) {
        IS_WORKER.set(true);
        let mut failure: Option<Arc<Failure>> = None;
        while let Some(command) = self.next() {
            match command {
                Command::Run { work, thread_state } if failure.is_none() => {
                    failure = run(work, &thread_state).err().map(Failure::of_work);
                }
                Command::Run { work, .. } => discard(work),
                Command::Complete(mark) => self.complete(&mark, failure.clone()),
                Command::Report(mark) => self.complete(&mark, failure.take()),
                Command::Await(recorded) => {
                    // It waits after a failure too, so that a mark of this stream never completes before one that it
                    // waited for.
                    let inherited = match &recorded {
                        Recorded::Host(mark) => mark.wait().failure.map(|failure| failure.inherit()),
                        Recorded::Cuda(event) => wait_for(event).err().map(|error| {
                            let message = format!("a CUDA event that it waited for failed: {error}");
                            Failure::of_work(Cause::Message(message))
                        }),
                    };
                    failure = failure.or(inherited);
                }
                Command::Release(tensor) => drop(tensor),
            }
        }
    }

    /// Under the queue's lock, so that a thread that sees the last mark complete finds the stream idle.
    fn complete(&self, mark: &Mark, failure: Option<Arc<Failure>>) {
        let mut state = lock(&self.state);
        state.busy = false;
        mark.complete(failure);
    }

    fn next(&self) -> Option<Command> {
        let mut state = lock(&self.state);
        state.busy = false;
        loop {
            if let Some(command) = state.commands.pop_front() {
                state.busy = true;
                return Some(command);
            }
            if state.closed {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Runs work under the thread state of its submitter.
fn run(work: Work, thread_state: &ThreadState) -> std::result::Result<(), Cause> {
    let _state = thread_state.enter().map_err(|error| Cause::Message(error.to_string()))?;
    caught(work)
}

/// Runs work; a panic becomes an error.
pub(super) fn caught(work: impl FnOnce() -> Result<()>) -> std::result::Result<(), Cause> {
    Err(match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(Error::Stream(message))) => Cause::Message(message),
        Ok(Err(Error::Collective(failure))) => Cause::Collective(failure),
        Ok(Err(error)) => Cause::Message(error_chain(&error)),
        Err(payload) => Cause::Message(format!("panicked: {}", panic_message(&*payload))),
    })
}

/// Drops work that will not run; what it captured may panic when dropped.
fn discard(work: Work) {
    let _ = catch_unwind(AssertUnwindSafe(|| drop(work)));
}
