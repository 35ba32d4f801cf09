//! The gradients of a round, on their way to the ranks that own them.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use runtime::autograd::GradientHook;
use runtime::collectives::Work;
use runtime::device::{Event, Stream, record_stream};
use tch::{Device, Tensor};

use crate::bucket::{Bucket, narrow};
use crate::mesh::{Mesh, Reduction, Terms};
use crate::optimizer::ShardingConfig;
use crate::sums::{self, Sums};
use crate::{Result, refused};

/// Buckets whose reductions are under way, each with its gradients, while the next one's are copied. Backward waits beyond that.
const MAX_IN_FLIGHT: usize = 1;

/// The gradients of a bucket that have arrived in this round.
#[derive(Debug)]
enum Arrived {
    /// Gradients of its parameters, in their `grad`. How often a backward adds to them is learned from this rank's first round: it adds once
    /// for each recomputed segment that uses a parameter. Where nothing is expected before, that round is reduced at its end.
    Parameters { additions: usize, expected: Option<usize>, learned: bool },
    /// Gradients of a layer's region, which says itself when they are complete.
    Layer { gradients: OfLayer, complete: bool },
}

/// The gradients of a layer's region, to which each backward of the layer adds.
#[derive(Debug)]
enum OfLayer {
    /// In one piece of memory, for a reduction.
    Flat(Option<Tensor>),
    /// By member, for [`Sums::Each`].
    Each(Vec<Option<Tensor>>),
}

impl OfLayer {
    fn of(bucket: &Bucket) -> Self {
        match &bucket.sums {
            Sums::Flat(_) => Self::Flat(None),
            Sums::Each(sums) => Self::Each(sums.iter().map(|_| None).collect()),
        }
    }

    fn add(&mut self, bucket: &Bucket, new: Vec<(usize, Tensor)>, over: (&Mesh, Reduction)) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        match self {
            Self::Flat(own) => {
                let (flat, fresh) = match own.take() {
                    Some(flat) => (flat, false),
                    None => (bucket.no_gradients(over)?, true),
                };
                for (index, gradient) in new {
                    let range = &bucket.members[index].range;
                    let mut view = narrow(&flat, range)?.f_view(gradient.size().as_slice())?;
                    if fresh {
                        view.f_copy_(&gradient)?;
                    } else {
                        let _ = view.f_add_(&gradient)?;
                    }
                }
                *own = Some(flat);
                Ok(())
            }
            Self::Each(own) => {
                new.into_iter().try_for_each(|(index, gradient)| sums::add(&mut own[index], gradient))
            }
        }
    }
}

impl Arrived {
    fn of(bucket: &Bucket, one_addition: bool) -> Self {
        match bucket.is_layer {
            true => Self::Layer { gradients: OfLayer::of(bucket), complete: false },
            false => {
                let expected = one_addition.then_some(bucket.members.len());
                Self::Parameters { additions: 0, expected, learned: false }
            }
        }
    }

    fn are_complete(&self) -> bool {
        match *self {
            Self::Parameters { additions, expected, .. } => {
                expected.is_some_and(|expected| additions >= expected.max(1))
            }
            Self::Layer { complete, .. } => complete,
        }
    }

    /// Ends a round; `learn` takes its additions for those of every later one.
    fn end(&mut self, learn: bool) {
        match self {
            Self::Parameters { additions, expected, learned } => {
                if learn && !*learned {
                    (*expected, *learned) = (Some(*additions), true);
                }
                *additions = 0;
            }
            Self::Layer { gradients, complete } => {
                match gradients {
                    OfLayer::Flat(flat) => *flat = None,
                    OfLayer::Each(each) => each.fill_with(|| None),
                }
                *complete = false;
            }
        }
    }
}

/// The buckets, which gradients of the current round are there, and which buckets are reduced. Hooks and layers use it too.
#[derive(Debug)]
pub(crate) struct Round {
    pub(crate) buckets: Vec<Bucket>,
    /// By bucket.
    arrived: Vec<Arrived>,
    /// Whether a backward may come that adds more.
    open: bool,
    /// Whether this rank's gradients are none in this round.
    idle: bool,
    /// Whether this is the first round of the step.
    first: bool,
    /// Parameters with a gradient in this step.
    pub(crate) seen: Vec<bool>,
    reductions: Reductions,
}

/// Reductions of buckets during backward, on a thread of their own; on a GPU on a stream of their own.
#[derive(Debug)]
struct Reductions {
    mesh: Mesh,
    reduction: Reduction,
    worker: Stream,
    /// Sums that the worker has left on their way between replicas.
    on_their_way: Arc<Mutex<Vec<Work>>>,
    /// Their ends.
    in_flight: VecDeque<Event>,
    /// How many were begun in this round, from the last bucket on.
    begun: usize,
}

impl Reductions {
    fn begin(&mut self, terms: Terms) -> Result<()> {
        let (mesh, reduction, left) = (self.mesh.clone(), self.reduction, self.on_their_way.clone());
        let own = Stream::current(mesh.device())?;
        let ready = Event::untimed(mesh.device())?;
        own.record(&ready)?;
        self.worker.wait(&ready)?;
        // On a GPU the memory is that of the stream that computes.
        if mesh.device() != Device::Cpu {
            record_stream(&terms.gradients, &self.worker)?;
        }
        let reduced = Event::untimed(mesh.device())?;
        self.worker.submit(move || {
            let work = terms.reduce(&mesh, reduction)?;
            left.lock().extend(work);
            Ok(())
        })?;
        self.begun += 1;
        self.worker.record(&reduced)?;
        self.in_flight.push_back(reduced);
        while self.in_flight.len() > MAX_IN_FLIGHT
            && let Some(oldest) = self.in_flight.pop_front()
        {
            own.wait(&oldest)?;
        }
        Ok(())
    }

    /// Waits for what a round that failed has begun, and forgets it.
    fn abandon(&mut self) {
        if self.begun == 0 && self.in_flight.is_empty() {
            return;
        }
        // Its failure was an error of that round.
        let _ = self.end();
    }

    /// Waits for all; on a GPU the current stream does.
    fn end(&mut self) -> Result<()> {
        let last = self.in_flight.drain(..).next_back();
        self.begun = 0;
        match (self.mesh.device(), last) {
            (Device::Cpu, _) => self.worker.synchronize()?,
            (device, Some(last)) => Stream::current(device)?.wait(&last)?,
            (_, None) => {}
        }
        let left = std::mem::take(&mut *self.on_their_way.lock());
        Ok(left.into_iter().try_for_each(Work::wait)?)
    }
}

impl Round {
    pub(crate) fn new(
        buckets: Vec<Bucket>,
        parameters: usize,
        mesh: &Mesh,
        options: &ShardingConfig,
    ) -> Result<Self> {
        let reductions = Reductions {
            mesh: mesh.clone(),
            reduction: options.reduction,
            worker: Stream::new(mesh.device())?,
            on_their_way: Arc::default(),
            in_flight: VecDeque::new(),
            begun: 0,
        };
        Ok(Self {
            arrived: buckets.iter().map(|bucket| Arrived::of(bucket, options.one_addition)).collect(),
            buckets,
            open: true,
            idle: false,
            first: true,
            seen: vec![false; parameters],
            reductions,
        })
    }

    /// Starts a step, whatever became of the one before: what a backward that failed has left behind is dropped.
    pub(crate) fn begin(&mut self) {
        self.reductions.abandon();
        self.arrived.iter_mut().for_each(|arrived| arrived.end(false));
        (self.open, self.first, self.idle) = (true, true, false);
        self.seen.fill(false);
        self.clear();
    }

    /// Forgets the gradients of a step.
    pub(crate) fn clear(&mut self) {
        self.buckets.iter_mut().for_each(|bucket| bucket.sums.clear());
    }

    pub(crate) fn set_idle(&mut self, idle: bool) {
        self.idle = idle;
    }

    /// Takes gradients of a region of `layer`, each with its index among the members; `last` completes them.
    pub(crate) fn deliver(
        &mut self,
        (number, layer): (usize, &str),
        new: Vec<(usize, Tensor)>,
        last: bool,
    ) -> Result<()> {
        let bucket = &self.buckets[number];
        if number + self.reductions.begun >= self.buckets.len() {
            return Err(refused(format!(
                "gradients of `{layer}` came after they were reduced; run one micro-batch in a round, and one backward for each \
                 forward"
            )));
        }
        if let Arrived::Layer { gradients, complete } = &mut self.arrived[number] {
            *complete = last;
            if !self.idle {
                new.iter().for_each(|(index, _)| self.seen[bucket.members[*index].parameter] = true);
                gradients.add(bucket, new, (&self.reductions.mesh, self.reductions.reduction))?;
            }
        }
        self.submit()
    }

    /// Counts an addition to the gradients of a bucket's parameters.
    fn count(&mut self, number: usize) -> Result<()> {
        if let Arrived::Parameters { additions, .. } = &mut self.arrived[number] {
            *additions += 1;
        }
        self.submit()
    }

    /// Ends a round: reduces what is left.
    pub(crate) fn end(&mut self) -> Result<()> {
        self.open = false;
        self.submit()?;
        // The worker does not need the lock.
        self.reductions.end()?;
        self.buckets.iter().try_for_each(|bucket| bucket.sums.release())?;
        let counted =
            |arrived: &Arrived| matches!(arrived, Arrived::Parameters { additions, .. } if *additions > 0);
        let learn = self.arrived.iter().any(counted);
        self.arrived.iter_mut().for_each(|arrived| arrived.end(learn));
        (self.open, self.first) = (true, false);
        Ok(())
    }

    /// The buckets that were reduced in this round.
    pub(crate) fn reduced(&self) -> impl Iterator<Item = &Bucket> {
        self.buckets.iter().rev().take(self.reductions.begun)
    }

    /// Gives the worker every bucket whose gradients are there, in the order that all ranks have: from the last to the first.
    fn submit(&mut self) -> Result<()> {
        while self.reductions.begun < self.buckets.len() {
            let number = self.buckets.len() - 1 - self.reductions.begun;
            if self.open && !self.arrived[number].are_complete() {
                break;
            }
            let bucket = &mut self.buckets[number];
            let over = (&self.reductions.mesh, self.reductions.reduction);
            if self.reductions.mesh.world.size() == 1 && !bucket.is_layer && !self.idle {
                bucket.add_gradients(self.first, &mut self.seen)?;
                self.reductions.begun += 1;
                continue;
            }
            let gradients = match &mut self.arrived[number] {
                Arrived::Layer { gradients: OfLayer::Each(gradients), .. } => {
                    bucket.add_each(gradients)?;
                    self.reductions.begun += 1;
                    continue;
                }
                Arrived::Layer { gradients: OfLayer::Flat(gradients), .. } => {
                    gradients.take().map_or_else(|| bucket.no_gradients(over), Ok)?
                }
                Arrived::Parameters { .. } if self.idle => {
                    bucket.clear_gradients()?;
                    bucket.no_gradients(over)?
                }
                Arrived::Parameters { .. } => bucket.take_gradients(over, &mut self.seen)?,
            };
            match bucket.terms(gradients, self.first, label(number)) {
                Some(terms) => self.reductions.begin(terms)?,
                None => self.reductions.begun += 1,
            }
        }
        Ok(())
    }
}

/// Counts the gradients of each bucket as they arrive during backward, and gives complete buckets to the worker.
pub(crate) fn hooks(round: &Arc<Mutex<Round>>) -> Result<Vec<GradientHook>> {
    let mut hooks = Vec::new();
    for (number, bucket) in round.lock().buckets.iter().enumerate().filter(|(_, bucket)| !bucket.is_layer) {
        for member in &bucket.members {
            // Weak, because the buckets own the parameters, which own the hooks.
            let shared = Arc::downgrade(round);
            hooks.push(GradientHook::new(&member.tensor, move || {
                let Some(round) = shared.upgrade() else { return Ok(()) };
                Ok(round.lock().count(number)?)
            })?);
        }
    }
    Ok(hooks)
}

pub(crate) fn label(bucket: usize) -> String {
    format!("bucket {bucket}")
}

#[cfg(test)]
mod tests {
    use runtime::collectives::Group;
    use tch::Kind;

    use super::*;
    use crate::bucket::{Member, divide};

    fn region(parameters: [usize; 2], mesh: &Mesh) -> Bucket {
        let tensor = || Tensor::zeros([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let member = |(index, parameter): (usize, usize)| {
            let start = 2 * index as i64;
            Member { parameter, tensor: tensor(), range: start..start + 2 }
        };
        let members = parameters.into_iter().enumerate().map(member).collect();
        let shard = Tensor::zeros([4], (Kind::Float, Device::Cpu));
        Bucket::of_layer(members, divide(4, &mesh.shard), &shard, mesh).unwrap()
    }

    #[test]
    fn layers_are_reduced_from_the_last_to_the_first_also_without_gradients() {
        let mesh = Mesh::from(&Group::alone());
        let mut round = Round::new(
            vec![region([0, 1], &mesh), region([2, 3], &mesh)],
            4,
            &mesh,
            &ShardingConfig::default(),
        )
        .unwrap();
        let ones = || Tensor::ones([2], (Kind::Float, Device::Cpu));
        let sums = |round: &Round| {
            let flat = Tensor::zeros([8], (Kind::Float, Device::Cpu));
            for (bucket, origin) in round.buckets.iter().zip([0, 4]) {
                for (start, piece) in bucket.sums.pieces(&bucket.members).unwrap() {
                    flat.narrow(0, origin + start, piece.numel() as i64).copy_(&piece);
                }
            }
            Vec::<f32>::try_from(flat).unwrap()
        };
        // The first layer waits for the last, which comes twice, and whose first tensor is not used.
        round.deliver((0, "layers.0"), vec![(0, ones()), (1, ones())], true).unwrap();
        assert_eq!(round.reductions.begun, 0);
        round.deliver((1, "layers.1"), vec![(1, ones())], false).unwrap();
        assert_eq!(round.reductions.begun, 0);
        round.deliver((1, "layers.1"), vec![(1, ones())], true).unwrap();
        assert_eq!(round.reductions.begun, 2);
        let late = round.deliver((1, "layers.1"), vec![(1, ones())], true).unwrap_err().to_string();
        assert!(late.contains("gradients of `layers.1` came after they were reduced"), "{late}");
        round.end().unwrap();
        assert_eq!(sums(&round), [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 2.0, 2.0]);
        assert_eq!(round.seen, [true, true, false, true]);
        // A round of one layer, and one that only keeps others company.
        round.deliver((0, "layers.0"), vec![(0, ones())], true).unwrap();
        round.end().unwrap();
        round.set_idle(true);
        round.deliver((1, "layers.1"), vec![(0, ones())], true).unwrap();
        round.end().unwrap();
        assert_eq!(sums(&round), [2.0, 2.0, 1.0, 1.0, 0.0, 0.0, 2.0, 2.0]);
        assert_eq!(round.seen, [true, true, false, true]);
    }

    #[test]
    fn a_first_backward_reduces_where_the_number_of_additions_is_known() {
        let mesh = Mesh::from(&Group::alone());
        for one_addition in [false, true] {
            let tensor = || Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
            let tensors = [tensor(), tensor()];
            let members: Vec<(usize, &str, &Tensor)> =
                tensors.iter().enumerate().map(|(number, tensor)| (number, "weight", tensor)).collect();
            let bucket = Bucket::new(&members, &mesh, 1).unwrap();
            let options = ShardingConfig { one_addition, ..ShardingConfig::default() };
            let mut round = Round::new(vec![bucket], 2, &mesh, &options).unwrap();
            for number in 0..2 {
                tensors.iter().for_each(|tensor| tensor.sum(Kind::Float).backward());
                round.count(0).unwrap();
                assert_eq!(round.reductions.begun, 0);
                round.count(0).unwrap();
                assert_eq!(round.reductions.begun, usize::from(one_addition || number > 0));
                round.end().unwrap();
            }
        }
    }
}
