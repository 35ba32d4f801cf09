//! Steps that a CUDA graph repeats.
//!
//! A step launches some thousand kernels, and on a fast GPU the host takes longer to launch them than the GPU to run them. A graph
//! launches all of them at once. It repeats addresses and scalars, so whatever differs from step to step is in tensors that are written
//! before: the micro-batches, the denominator of the loss, the base of the step's seeds ([`StepSeeds`]), and the learning rates; the optimizer decides on the device whether to skip
//! the step ([`StepSettings::on_device`](crate::optimizer::StepSettings::on_device)), and the figures of a step are in a tensor that is read
//! every [`log_every`](super::TrainerConfig::log_every) steps.
//!
//! **One graph for the whole step**: forward and backward of every micro-batch, clipping and update. The first backward stores
//! gradients and the update frees them, as without a graph, so that the bits are the same, and gradients share the pool's memory
//! with activations. A graph of the update alone would need gradients outside the pool and a pass that clears them.
//!
//! **A graph for each shape** of a step: rows, length, micro-batches, the number of labels rounded up to an eighth of the positions
//! ([`forward`](crate::accumulation::forward)), and of documents rounded up to [`DOCUMENTS`]. The first step of a shape runs as without
//! graphs, the second on the graph's stream, so that libraries have their workspaces, and the third is captured. The [`SHAPES`] shapes that
//! were used last keep their graphs, which share one pool.
//!
//! **Memory.** What a step allocates while it is captured is in the pool: activations, gradients, temporary tensors. They are freed
//! within it, so the next shape's graph uses the same blocks, and the pool has the bytes P that the largest captured step has at its
//! peak above what lives between steps. It keeps them between steps, and gives no block to other tensors:
//!
//! - A replay allocates nothing. If all steps have one shape, as packed rows do, the peak is that of a step without a graph.
//! - The first two steps of another shape, which run without a graph, and evaluations need their own memory beside P.
//! - Each shape has its static inputs, 16 bytes for each position (tokens and labels), packed 32 (positions and documents).
//!
//! Graphs are dropped when the activation plan changes, when a step fails, when a checkpoint is loaded, and when a weight has got other
//! memory. Where an allocation is refused while there are graphs, they are dropped before the activation plan is changed: the step is
//! repeated without their pool, and from then on only the last shape keeps its graph. So captured steps need no more memory than others,
//! but use what is left.
//! After a replay the versions of weights and state are incremented, so that nothing that was computed from them is taken for current.
//!
//! Not captured, with the reason in a note: see [`Trainer::capture_refusal`]. A step that cannot be captured, because the host reads a
//! value or memory is short, is computed without a graph, as all later ones, with a note. A loss scaler that decides on the host is exchanged
//! for the same one on the device ([`GradScaler::on_device`](crate::scaler::GradScaler::on_device)).
//!
//! [`Trainer::record_steps`] runs the same code on a CPU with a recorder in the place of the graph.

use std::collections::VecDeque;

use dataloading::{Batch, Counts, ExampleWeights, Packing};
use runtime::device::graph::{self, Graph};
use runtime::memory;
use runtime::ops::TryScalar;
use runtime::random::{RandomState, StepSeeds};
use tch::{Device, Kind, Tensor};

use super::{Capture, DoneStep, Overflow, StepOutcome, Trainer};
use crate::accumulation::{MicroBatches, labelled_bound};
use crate::embedding_noise::NOT_CAPTURED;
use crate::error::{Error, Result};
use crate::observer::Timings;

/// Shapes of steps that have a graph.
pub const SHAPES: usize = 8;
/// The number of documents of a packed batch is rounded up to a multiple of this; surplus documents are empty.
pub const DOCUMENTS: usize = 16;

/// The captured steps of a training.
#[derive(Debug, Default)]
pub(super) struct CapturedSteps {
    state: State,
    /// By their last use, the latest at the end.
    shapes: VecDeque<Shape>,
    /// Whether only the shape that was used last keeps its graph, for want of memory.
    one_shape: bool,
    replays: u64,
}

#[derive(Debug, Default, PartialEq)]
enum State {
    /// Not decided.
    #[default]
    Unknown,
    Off,
    On,
    /// With the recorder.
    Recorder,
}

/// What a graph cannot change.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Signature(Vec<MicroSignature>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct MicroSignature {
    size: Vec<i64>,
    labelled: usize,
    /// Entries of `cu_seqlens`, if rows are packed.
    starts: Option<usize>,
    has_weights: bool,
}

impl MicroSignature {
    fn of(batch: &Batch) -> Self {
        let bound = labelled_bound(batch.counts.targets, batch.tokens.numel());
        let labelled = bound.and_then(|bound| usize::try_from(bound).ok()).unwrap_or(0);
        let starts = batch.packing.as_ref().map(|packing| packing.starts.len().next_multiple_of(DOCUMENTS));
        Self { size: batch.tokens.size(), labelled, starts, has_weights: batch.weights.is_some() }
    }
}

/// The steps of one shape.
#[derive(Debug)]
struct Shape {
    signature: Signature,
    /// From the second step on.
    captured: Option<CapturedShape>,
}

#[derive(Debug)]
struct CapturedShape {
    /// Dropped first: it uses the tensors.
    graph: Option<Graph>,
    capture: graph::Capture,
    inputs: MicroBatches,
    denominator: Tensor,
    /// The base of the step's seeds, int64 `[1]`.
    seed: Tensor,
    /// The sums and figures of a step, where its last run has left them.
    figures: Option<Tensor>,
    parts: usize,
    /// Addresses of the trained weights.
    weights: Vec<usize>,
}

impl CapturedSteps {
    pub(super) fn is_on(&self) -> bool {
        matches!(self.state, State::On | State::Recorder)
    }

    /// Drops the graphs and their memory; later steps are captured anew. Returns whether there were any.
    pub(super) fn drop_graphs(&mut self) -> bool {
        let held = |shape: &Shape| shape.captured.as_ref().is_some_and(|captured| captured.graph.is_some());
        let any = self.shapes.iter().any(held);
        self.shapes.clear();
        any
    }

    /// Drops the graphs for want of memory. From now on, one shape keeps its graph. Returns false if there was none.
    pub(super) fn release_memory(&mut self) -> bool {
        let released = self.drop_graphs();
        self.one_shape |= released;
        released
    }

    /// Returns the steps of a shape, as the last ones; whether it is the first step of this shape.
    fn shape(&mut self, signature: Signature) -> (usize, bool) {
        let at = self.shapes.iter().position(|shape| shape.signature == signature);
        let known = at.and_then(|at| self.shapes.remove(at));
        let is_new = known.is_none();
        self.shapes.push_back(known.unwrap_or(Shape { signature, captured: None }));
        let most = if self.one_shape { 1 } else { SHAPES };
        while self.shapes.len() > most {
            self.shapes.pop_front();
        }
        (self.shapes.len() - 1, is_new)
    }
}

impl Trainer {
    /// Returns why steps cannot be captured on `devices`, those of the model; `None` if they can.
    pub fn capture_refusal(&self, devices: &[Device]) -> Option<String> {
        if self.options.capture == Capture::Off {
            return Some("capture is off".to_owned());
        }
        if let &[device] = devices {
            if !device.is_cuda() && self.captured.state != State::Recorder {
                return Some("on a CPU a launch is a call".to_owned());
            }
        } else {
            return Some("the model is on several devices".to_owned());
        }
        if self.options.embedding_noise > 0.0 {
            return Some(NOT_CAPTURED.to_owned());
        }
        if self.optimizer.ranks().is_some() {
            return Some("ranks communicate during a step".to_owned());
        }
        if self.scaler.is_enabled() && !self.scaler.decides_on_device() {
            if self.options.overflow != Overflow::Skip {
                return Some("the host decides whether a step that overflows is computed again".to_owned());
            }
            let device = devices.first().copied().unwrap_or(Device::Cpu);
            if !matches!(self.scaler.on_device(device), Ok(Some(_))) {
                return Some(
                    "the loss scaler decides on the host; give one that decides on the device".to_owned(),
                );
            }
        }
        self.not_captured.clone().or_else(|| self.optimizer.refuses_capture())
    }

    /// Captures steps on a CPU with the recorder of [`runtime::device::graph::Capture`], in the place of a graph, for tests: a step that a graph
    /// would not repeat is an error that names the operator. Hold a guard [`runtime::device::graph::OperatorsOnly`] during the
    /// training.
    pub fn record_steps(&mut self) {
        self.captured.state = State::Recorder;
    }

    /// Returns how many steps a graph, or the recorder, has run.
    pub fn replays(&self) -> u64 {
        self.captured.replays
    }

    /// Decides whether steps are captured.
    pub(super) fn prepare_capture(&mut self, devices: &[Device]) -> Result<()> {
        if self.captured.state == State::Off {
            return Ok(());
        }
        let refusal = self.capture_refusal(devices);
        match (&refusal, &self.captured.state) {
            (None, State::Unknown) => self.captured.state = State::On,
            (None, _) => {}
            (Some(reason), State::Recorder) => {
                return Err(Error::config("captured steps", reason));
            }
            (Some(_), _) => {
                self.captured.state = State::Off;
                self.captured.drop_graphs();
            }
        }
        if self.captured.is_on() && self.scaler.is_enabled() && !self.scaler.decides_on_device() {
            let device = devices.first().copied().unwrap_or(Device::Cpu);
            if let Some(scaler) = self.scaler.on_device(device)? {
                self.scaler = scaler;
            }
        }
        match refusal.filter(|_| devices.iter().any(|device| device.is_cuda())) {
            Some(reason) => self.note(&format!("steps are not captured: {reason}\n")),
            None => Ok(()),
        }
    }

    /// Runs a step by its graph if there is one, else as the loop does, and captures it if its shape has been seen.
    pub(super) fn captured_step(
        &mut self,
        micro: &MicroBatches,
        (device, seed): (Device, u64),
        random: &RandomState,
        timings: &mut Timings,
    ) -> Result<StepOutcome> {
        let signature = Signature(micro.batches.iter().map(MicroSignature::of).collect());
        let (at, is_new) = self.captured.shape(signature);
        if is_new {
            return self.compute_seeded(micro, (device, seed), timings);
        }
        let Some(mut shape) = self.captured.shapes.remove(at) else {
            return Err(Error::config("captured steps", "a shape is missing"));
        };
        let captured = match shape.captured.take() {
            Some(captured) if captured.weights == self.weight_addresses() => Ok(captured),
            // The first of them, or weights have got other memory.
            _ => CapturedShape::new(micro, device, self),
        };
        // What cannot be put back from the device after a failed capture. Reading it waits, which a replay does not.
        let is_replay = captured.as_ref().is_ok_and(|captured| captured.graph.is_some());
        let scaler = (!is_replay).then(|| self.scaler.state());
        // While it runs, the shape is not in the list: a failure drops its graph.
        let done = captured.and_then(|captured| self.run_captured(captured, micro, seed, timings));
        let (done, captured) = match done {
            Ok(done) => done,
            Err(error) => {
                self.abandon_capture(error, device, random)?;
                if let Some(scaler) = scaler {
                    self.scaler.load_state(&scaler)?;
                }
                return self.compute_seeded(micro, (device, seed), timings);
            }
        };
        shape.captured = Some(captured);
        self.captured.shapes.push_back(shape);
        Ok(StepOutcome::Done(done))
    }

    fn run_captured(
        &mut self,
        mut shape: CapturedShape,
        micro: &MicroBatches,
        seed: u64,
        timings: &mut Timings,
    ) -> Result<(DoneStep, CapturedShape)> {
        shape.fill(micro, seed)?;
        if let Some(graph) = &mut shape.graph {
            graph.replay()?;
            self.optimizer.note_replay()?;
            self.captured.replays += 1;
        } else {
            let graphs =
                self.captured.shapes.iter().filter_map(|shape| shape.captured.as_ref()?.graph.as_ref());
            let pool = graphs.map(Graph::pool).next().transpose()?.flatten();
            let CapturedShape { capture, inputs, denominator, seed: on_device, .. } = &mut shape;
            let _seeds = StepSeeds::enter(seed, Some(on_device));
            let (done, graph) = capture.run(pool, || -> Result<DoneStep> {
                let StepOutcome::Decided(sums, decision) = self.compute(inputs, denominator, timings)? else {
                    return Err(Error::config("captured steps", "a step within a step"));
                };
                self.update(sums, decision, timings)
            })?;
            shape.graph = graph;
            // Replays write the tensor of the captured run.
            (shape.figures, shape.parts) = (Some(done.sums), done.parts);
        }
        let Some(figures) = &shape.figures else {
            return Err(Error::config("captured steps", "a step left no figures"));
        };
        // The next step overwrites them. The weights are updated by now.
        let sums = figures.f_narrow_copy(0, 0, figures.numel() as i64);
        let sums = sums.map_err(|error| self.interrupt(self.step + 1, error.into()))?;
        let done = DoneStep { sums, parts: shape.parts, gradient_norm: None, skipped: false };
        Ok((done, shape))
    }

    /// Prepares the repetition of a step without a graph after its capture failed. Later steps have none either, but for want of memory
    /// that graphs of other shapes took. Returns the error of a recorder, and of a step that cannot be put back.
    fn abandon_capture(&mut self, error: Error, device: Device, random: &RandomState) -> Result<()> {
        if self.interrupted.is_some() {
            return Err(error);
        }
        let is_short = error.is_out_of_memory();
        let released = if is_short { self.captured.release_memory() } else { self.captured.drop_graphs() };
        if self.captured.state == State::Recorder && !is_short {
            return Err(error);
        }
        if !self.optimizer.abandon(self.options.zero_grad)? {
            return Err(self.interrupt(self.step + 1, error));
        }
        random.restore()?;
        memory::empty_cache(device)?;
        let step = self.step + 1;
        if is_short && released {
            return self.note(&memory_note(step));
        }
        self.captured.state = State::Off;
        self.note(&format!("steps are not captured from step {step} on: {error}\n"))
    }

    fn weight_addresses(&self) -> Vec<usize> {
        self.optimizer.own_weights().iter().map(|weight| weight.data_ptr() as usize).collect()
    }
}

/// The note about a step that is repeated without the memory of graphs.
pub(super) fn memory_note(step: u64) -> String {
    format!(
        "step {step}: an allocation was refused; the step is repeated without the memory of captured steps, and from now on only the last \
         shape of steps is captured (the result keeps its bits)\n"
    )
}

impl CapturedShape {
    fn new(micro: &MicroBatches, device: Device, trainer: &Trainer) -> Result<Self> {
        let capture = match trainer.captured.state {
            State::Recorder => graph::Capture::recorder(),
            _ => graph::Capture::new(device)?,
        };
        let batches = micro.batches.iter().map(static_batch).collect::<Result<_>>()?;
        let &MicroBatches { targets, tokens, padding, .. } = micro;
        Ok(Self {
            graph: None,
            capture,
            inputs: MicroBatches { batches, targets, tokens, padding, rollout: None },
            denominator: micro.denominator_on(device)?,
            seed: Tensor::f_zeros([1], (Kind::Int64, device))?,
            figures: None,
            parts: 0,
            weights: trainer.weight_addresses(),
        })
    }

    /// Copies a step's micro-batches, denominator and seed to where the graph reads them.
    fn fill(&mut self, micro: &MicroBatches, seed: u64) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let _ = self.denominator.try_fill_(micro.denominator())?;
        let _ = self.seed.try_fill_(seed.cast_signed())?;
        for (to, from) in self.inputs.batches.iter_mut().zip(&micro.batches) {
            to.tokens.f_copy_(&from.tokens)?;
            to.labels.f_copy_(&from.labels)?;
            if let (Some(to), Some(from)) = (&mut to.weights, &from.weights) {
                to.positions.f_copy_(&from.positions)?;
            }
            if let (Some(to), Some(from)) = (&mut to.packing, &from.packing) {
                to.positions.f_copy_(&from.positions)?;
                to.document_ids.f_copy_(&from.document_ids)?;
                // Documents beyond the last one are empty.
                let _ = to.cu_seqlens.try_fill_(from.starts.last().copied().map_or(0, i64::from))?;
                to.cu_seqlens.f_narrow(0, 0, from.starts.len() as i64)?.f_copy_(&from.cu_seqlens)?;
            }
        }
        Ok(())
    }
}

/// Returns a batch of the same shape with memory of its own, whose documents only the device knows.
fn static_batch(batch: &Batch) -> Result<Batch> {
    let signature = MicroSignature::of(batch);
    let like = |tensor: &Tensor| tensor.f_zeros_like();
    let packing = batch.packing.as_ref().zip(signature.starts).map(|(packing, starts)| -> Result<Packing> {
        let device = packing.cu_seqlens.device();
        Ok(Packing {
            positions: like(&packing.positions)?,
            document_ids: like(&packing.document_ids)?,
            cu_seqlens: Tensor::f_zeros([starts as i64], (Kind::Int, device))?,
            starts: Vec::new(),
            longest: batch.tokens.size().last().copied().unwrap_or(0),
            is_padding_free: packing.is_padding_free,
        })
    });
    let counts = Counts { targets: signature.labelled, ..batch.counts };
    let weights = batch.weights.as_ref().map(|from| -> Result<ExampleWeights> {
        let &ExampleWeights { total, chosen_targets, .. } = from;
        Ok(ExampleWeights { positions: like(&from.positions)?, examples: None, total, chosen_targets })
    });
    Ok(Batch {
        tokens: like(&batch.tokens)?,
        labels: like(&batch.labels)?,
        packing: packing.transpose()?,
        padding: Vec::new(),
        sequences: None,
        taught: None,
        weights: weights.transpose()?,
        counts,
    })
}
