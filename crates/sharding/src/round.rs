//! The gradients of a round, on their way to the ranks that own them.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use runtime::autograd::GradientHook;
use runtime::collectives::Group as Ranks;
use runtime::device::{Event, Stream};
use tch::{Device, Tensor};

use crate::bucket::{Bucket, narrow};
use crate::{Result, refused};

/// Layers whose reductions are under way, each with its gradients. Backward waits beyond that.
const MAX_IN_FLIGHT: usize = 2;

/// The buckets, which gradients of the current round are there, and which buckets have been given to the worker. Hooks and layers use
/// it too.
///
/// A backward adds to a parameter's gradient once for each recomputed segment that uses it. How often is learned from this rank's
/// first round, which is reduced at its end. A layer says itself when its gradients are complete.
#[derive(Debug)]
pub(crate) struct Round {
    pub(crate) buckets: Vec<Bucket>,
    /// By bucket: how often a backward adds to its gradients, once it is known.
    additions: Option<Vec<usize>>,
    /// By bucket: how often this round's backward has.
    added: Vec<usize>,
    /// By bucket: the gradients of a layer's region, and whether they are complete.
    delivered: Vec<(Option<Tensor>, bool)>,
    /// Whether a backward may come that adds more.
    open: bool,
    /// Whether this rank's gradients are none in this round.
    idle: bool,
    /// Buckets given to the worker, from the last one on.
    submitted: usize,
    /// Whether this is the first round of the step.
    first: bool,
    /// Parameters with a gradient in this step.
    pub(crate) seen: Vec<bool>,
    in_flight: VecDeque<Event>,
    ranks: Ranks,
    /// Reduces buckets during backward.
    worker: Stream,
}

impl Round {
    pub(crate) fn new(buckets: Vec<Bucket>, parameters: usize, ranks: &Ranks) -> Result<Self> {
        Ok(Self {
            additions: None,
            added: vec![0; buckets.len()],
            delivered: buckets.iter().map(|_| (None, false)).collect(),
            buckets,
            open: true,
            idle: false,
            submitted: 0,
            first: true,
            seen: vec![false; parameters],
            in_flight: VecDeque::new(),
            ranks: ranks.clone(),
            worker: Stream::new(Device::Cpu)?,
        })
    }

    /// Starts a step.
    pub(crate) fn begin(&mut self) {
        (self.first, self.idle) = (true, false);
        self.seen.fill(false);
    }

    pub(crate) fn set_idle(&mut self, idle: bool) {
        self.idle = idle;
    }

    /// Takes gradients of a region of `layer`, each with its index among the members; `last` completes them.
    pub(crate) fn deliver(
        &mut self,
        (number, layer): (usize, &str),
        gradients: Vec<(usize, Tensor)>,
        last: bool,
    ) -> Result<()> {
        let bucket = &self.buckets[number];
        if number + self.submitted >= self.buckets.len() {
            return Err(refused(format!(
                "gradients of `{layer}` came after they were reduced; run one micro-batch in a round, and one backward for each \
                 forward"
            )));
        }
        self.delivered[number].1 = last;
        if !self.idle {
            let _no_grad = tch::no_grad_guard();
            let (flat, fresh) = match self.delivered[number].0.take() {
                Some(flat) => (flat, false),
                None => (bucket.no_gradients()?, true),
            };
            for (index, gradient) in gradients {
                let member = &bucket.members[index];
                let mut view = narrow(&flat, &member.range)?.f_view(gradient.size().as_slice())?;
                if fresh {
                    view.f_copy_(&gradient)?;
                } else {
                    let _ = view.f_add_(&gradient)?;
                }
                self.seen[member.parameter] = true;
            }
            self.delivered[number].0 = Some(flat);
        }
        self.submit()
    }

    /// Ends a round: reduces what is left.
    pub(crate) fn end(&mut self) -> Result<()> {
        self.open = false;
        self.submit()?;
        // The worker does not need the lock.
        self.worker.synchronize()?;
        self.in_flight.clear();
        if self.additions.is_none() && self.added.iter().any(|added| *added > 0) {
            self.additions = Some(self.added.clone());
        }
        self.added.fill(0);
        self.delivered.fill_with(|| (None, false));
        (self.open, self.first, self.submitted) = (true, false, 0);
        Ok(())
    }

    /// The buckets that were reduced in this round.
    pub(crate) fn reduced(&self) -> impl Iterator<Item = &Bucket> {
        self.buckets.iter().rev().take(self.submitted)
    }

    /// Whether all gradients of a bucket are there.
    fn is_complete(&self, number: usize) -> bool {
        if self.buckets[number].is_layer {
            return self.delivered[number].1;
        }
        self.additions.as_ref().is_some_and(|additions| self.added[number] >= additions[number].max(1))
    }

    /// Gives the worker every bucket whose gradients are there, in the order that all ranks have: from the last to the first.
    fn submit(&mut self) -> Result<()> {
        while self.submitted < self.buckets.len() {
            let number = self.buckets.len() - 1 - self.submitted;
            if self.open && !self.is_complete(number) {
                break;
            }
            let bucket = &self.buckets[number];
            let gradients = match (bucket.is_layer, self.delivered[number].0.take()) {
                (true, Some(gradients)) => gradients,
                (true, None) => bucket.no_gradients()?,
                (false, _) if self.idle => {
                    bucket.clear_gradients()?;
                    bucket.no_gradients()?
                }
                (false, _) => bucket.take_gradients(&mut self.seen)?,
            };
            let (reduce, ranks) =
                (bucket.reduction(gradients, self.first, label(number)), self.ranks.clone());
            self.worker.submit(move || reduce(&ranks))?;
            self.submitted += 1;
            if bucket.is_layer {
                let reduced = Event::untimed(Device::Cpu)?;
                self.worker.record(&reduced)?;
                self.in_flight.push_back(reduced);
            }
            while self.in_flight.len() > MAX_IN_FLIGHT
                && let Some(oldest) = self.in_flight.pop_front()
            {
                oldest.synchronize()?;
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
                let mut round = round.lock();
                round.added[number] += 1;
                round.submit().map_err(|error| match error {
                    training::Error::Runtime(error) => error,
                    other => runtime::Error::Other(other.to_string().into()),
                })
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
    use tch::Kind;

    use super::*;
    use crate::bucket::{Member, divide};

    fn region(parameters: [usize; 2], ranks: &Ranks) -> Bucket {
        let tensor = || Tensor::zeros([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let member = |(index, parameter): (usize, usize)| {
            let start = 2 * index as i64;
            Member { parameter, tensor: tensor(), range: start..start + 2 }
        };
        let members = parameters.into_iter().enumerate().map(member).collect();
        let shard = Tensor::zeros([4], (Kind::Float, Device::Cpu));
        Bucket::of_layer(members, divide(4, ranks), &shard, ranks).unwrap()
    }

    #[test]
    fn layers_are_reduced_from_the_last_to_the_first_also_without_gradients() {
        let ranks = Ranks::alone();
        let mut round = Round::new(vec![region([0, 1], &ranks), region([2, 3], &ranks)], 4, &ranks).unwrap();
        let ones = || Tensor::ones([2], (Kind::Float, Device::Cpu));
        let sums = |round: &Round| {
            let all: Vec<Tensor> = round.buckets.iter().map(|bucket| bucket.sums.shallow_clone()).collect();
            Vec::<f32>::try_from(Tensor::cat(&all, 0)).unwrap()
        };
        // The first layer waits for the last, which comes twice, and whose first tensor is not used.
        round.deliver((0, "layers.0"), vec![(0, ones()), (1, ones())], true).unwrap();
        assert_eq!(round.submitted, 0);
        round.deliver((1, "layers.1"), vec![(1, ones())], false).unwrap();
        assert_eq!(round.submitted, 0);
        round.deliver((1, "layers.1"), vec![(1, ones())], true).unwrap();
        assert_eq!(round.submitted, 2);
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
}
