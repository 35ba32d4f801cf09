//! An optimizer whose state, and whose gradient sums, are divided among ranks.
//!
//! Each rank steps its part of every parameter with a [`DeviceOptimizer`] of its own, whose parameters are views of the weights in
//! the rank's shards, or fp32 master copies of them.

mod settings;
mod state;

use std::sync::Arc;

use parking_lot::Mutex;
use runtime::autograd::GradientHook;
use runtime::collectives::{Group as Ranks, ReduceOp, ReduceOptions};
use runtime::device::Stream;
use tch::{Device, Kind, Tensor};
use training::clip;
use training::optimizer::{DeviceOptimizer, Group, Optimizer, Rule, StepDecision, StepSettings, ZeroGrad};
use training::scaler::GradScaler;

use crate::bucket::{Bucket, narrow};
use crate::norm;
use crate::{Result, refused};
pub use settings::{Options, Stage};

/// A rule over parameters whose state is divided among ranks. See the [crate's front page](crate).
#[derive(Debug)]
pub struct ShardedOptimizer {
    ranks: Ranks,
    options: Options,
    groups: Vec<Group>,
    names: Vec<String>,
    /// This rank's parts of the parameters, in order, and which they are; parameters without a part are left out.
    parts: Vec<Part>,
    inner: DeviceOptimizer,
    round: Arc<Mutex<Round>>,
    /// Reduces buckets during backward.
    worker: Stream,
    /// Completed steps of each parameter.
    steps: Vec<u64>,
    settings: StepSettings,
    _hooks: Vec<GradientHook>,
}

/// This rank's part of a parameter.
#[derive(Debug)]
struct Part {
    parameter: usize,
    /// Its gradient's place in the bucket's sums.
    sums: Tensor,
    /// What the inner optimizer steps: the weights themselves, or their fp32 master copy.
    stepped: Tensor,
    /// The weights that a master copy is rounded into.
    rounded: Option<Tensor>,
    /// Whether the master copy is the weights' from the next step on, and not from a checkpoint or an earlier step.
    follows: bool,
}

/// The buckets, which gradients of the current round are there, and which buckets have been given to the worker. Hooks use it too.
///
/// A backward adds to a parameter's gradient once for each recomputed segment that uses it. How often is learned from this rank's
/// first round, which is reduced at its end.
#[derive(Debug)]
struct Round {
    buckets: Vec<Bucket>,
    /// By bucket: how often a backward adds to its gradients, once it is known.
    additions: Option<Vec<usize>>,
    /// By bucket: how often this round's backward has.
    added: Vec<usize>,
    /// Whether a backward may come that adds more.
    open: bool,
    /// Buckets given to the worker, from the last one on.
    submitted: usize,
    /// Whether this is the first round of the step.
    first: bool,
    /// Parameters with a gradient in this step.
    seen: Vec<bool>,
}

impl ShardedOptimizer {
    /// Divides the parameters of `groups` among `ranks`. They get new memory, with their values.
    ///
    /// # Errors
    /// Those of [`DeviceOptimizer::new`]; parameters that are not on the CPU; a group with a rule of its own; ranks with other
    /// parameters, values or options, with the first difference.
    pub fn new(
        rule: impl Rule + 'static,
        groups: Vec<Group>,
        ranks: &Ranks,
        options: Options,
    ) -> Result<Self> {
        Self::boxed(Box::new(rule), groups, ranks, options)
    }

    /// [`ShardedOptimizer::new`] for a rule chosen at run time.
    ///
    /// # Errors
    /// As [`ShardedOptimizer::new`].
    pub fn boxed(rule: Box<dyn Rule>, groups: Vec<Group>, ranks: &Ranks, options: Options) -> Result<Self> {
        options.check()?;
        if let Some(group) = groups.iter().find(|group| group.rule.is_some()) {
            let reason =
                format!("group `{}` has a rule of its own; give all groups the optimizer's", group.name);
            return Err(refused(reason));
        }
        settings::agree(rule.as_ref(), &groups, ranks, &options)?;
        let parameters: Vec<(usize, &str, &Tensor)> = groups
            .iter()
            .flat_map(|group| &group.parameters)
            .enumerate()
            .map(|(number, (name, tensor))| (number, name.as_str(), tensor))
            .collect();
        let names: Vec<String> = parameters.iter().map(|(_, name, _)| (*name).to_owned()).collect();
        let mut buckets = Vec::new();
        for members in settings::divide(&parameters, options.bucket_bytes) {
            buckets.push(Bucket::new(&members, ranks)?);
        }
        let parts = parts(&buckets, ranks, names.len(), options.master_weights)?;
        let inner = DeviceOptimizer::boxed(rule, inner_groups(&groups, &names, &parts)?)?;
        let round = Arc::new(Mutex::new(Round {
            additions: None,
            added: vec![0; buckets.len()],
            buckets,
            open: true,
            submitted: 0,
            first: true,
            seen: vec![false; names.len()],
        }));
        let worker = Stream::new(Device::Cpu)?;
        let hooks = match options.stage {
            Stage::One => Vec::new(),
            Stage::Two => hooks(&round, &worker, ranks)?,
        };
        Ok(Self {
            ranks: ranks.clone(),
            options,
            steps: vec![0; names.len()],
            groups,
            names,
            parts,
            inner,
            round,
            worker,
            settings: StepSettings::default(),
            _hooks: hooks,
        })
    }

    /// The options.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Bytes of this rank's gradient sums.
    pub fn sum_bytes(&self) -> u64 {
        self.round.lock().buckets.iter().map(|bucket| bytes(&bucket.sums)).sum()
    }

    /// Refuses gradients that arrived after their bucket was reduced.
    fn check_late(&self, round: &Round) -> Result<()> {
        for bucket in round.buckets.iter().rev().take(round.submitted) {
            for member in &bucket.members {
                if member.tensor.f_grad()?.defined() {
                    return Err(refused(format!(
                        "the gradient of `{}` was added to after its bucket was reduced, because this step's graph uses it more \
                         often than the first step's; take Stage::One",
                        self.names[member.parameter]
                    )));
                }
            }
        }
        Ok(())
    }

    /// Whether each parameter had a gradient on any rank.
    fn seen(&self) -> Result<Vec<bool>> {
        let own: Vec<i64> = self.round.lock().seen.iter().map(|seen| i64::from(*seen)).collect();
        let all = Tensor::f_from_slice(&own)?;
        let options = ReduceOptions { op: ReduceOp::Max, ..ReduceOptions::default() };
        self.ranks.all_reduce(&all, options, "parameters with a gradient")?;
        Ok(Vec::<i64>::try_from(all)?.into_iter().map(|seen| seen != 0).collect())
    }

    fn norm(&self) -> Result<f64> {
        let mut blocks = Vec::new();
        for bucket in &self.round.lock().buckets {
            let all = bucket.division.elements.max(0) as u64;
            let first = bucket.division.range(self.ranks.rank()).start / norm::BLOCK;
            let own = norm::block_squares(&bucket.sums)?;
            blocks.push((
                usize::try_from(first).unwrap_or(0),
                own,
                all.div_ceil(norm::BLOCK as u64) as usize,
            ));
        }
        norm::global_norm(&self.ranks, &blocks)
    }
}

impl Optimizer for ShardedOptimizer {
    fn ranks(&self) -> Option<Ranks> {
        Some(self.ranks.clone())
    }

    fn check(&self, scaler: &mut dyn GradScaler) -> Result<()> {
        if scaler.device_scaler().is_some() {
            return Err(refused(
                "a scaler that decides on the device is not supported; take one that decides on the host",
            ));
        }
        Ok(())
    }

    fn begin(&mut self, settings: StepSettings) -> Result<()> {
        self.round.lock().buckets.iter().try_for_each(|bucket| bucket.check_memory(&self.names))?;
        self.inner.set_factor(settings.factor)?;
        self.settings = settings;
        for part in self.parts.iter_mut().filter(|part| part.follows) {
            let _no_grad = tch::no_grad_guard();
            if let Some(weights) = &part.rounded {
                part.stepped.f_detach()?.f_copy_(weights)?;
            }
            part.follows = false;
        }
        let mut round = self.round.lock();
        round.first = true;
        round.seen.fill(false);
        Ok(())
    }

    fn reduce(&mut self) -> Result<()> {
        let mut round = self.round.lock();
        self.check_late(&round)?;
        round.open = false;
        round.submit(&self.worker, &self.ranks)?;
        // The worker does not need the lock.
        self.worker.synchronize()?;
        if round.additions.is_none() && round.added.iter().any(|added| *added > 0) {
            round.additions = Some(round.added.clone());
        }
        round.added.fill(0);
        (round.open, round.first, round.submitted) = (true, false, 0);
        Ok(())
    }

    fn unscale_and_clip(&mut self, scaler: &mut dyn GradScaler) -> Result<StepDecision> {
        let StepSettings { clip, non_finite, .. } = self.settings;
        let seen = self.seen()?;
        let sums: Vec<Tensor> = self
            .round
            .lock()
            .buckets
            .iter()
            .map(|bucket| bucket.sums.shallow_clone())
            .filter(|sums| sums.numel() > 0)
            .collect();
        let found_inf = scaler.unscale_(&sums, false)?.found_inf;
        let overflow = match found_inf {
            Some(flag) => {
                let flag = flag.f_reshape([1])?.f_to_kind(Kind::Float)?.f_contiguous()?;
                let options = ReduceOptions { op: ReduceOp::Max, ..ReduceOptions::default() };
                self.ranks.all_reduce(&flag, options, "overflow")?;
                flag.f_double_value(&[0])? != 0.0
            }
            None => false,
        };
        let norm = clip.map(|_| self.norm()).transpose()?;
        scaler.update(overflow)?;
        let skip = match norm {
            _ if overflow => true,
            Some(norm) => non_finite.skips(norm)?,
            None => false,
        };
        if let (Some(norm), Some(limit), false) = (norm, clip, skip)
            && let Some(factor) = clip::factor(norm, limit)
        {
            let _no_grad = tch::no_grad_guard();
            runtime::ops::foreach::mul_scalar_(&sums, factor)?;
        }
        for part in self.parts.iter().filter(|part| seen[part.parameter]) {
            let gradient = part.sums.f_to_kind(part.stepped.kind())?;
            runtime::autograd::set_grad(&part.stepped, Some(&gradient))?;
        }
        if !skip {
            let frozen: Vec<bool> =
                self.groups.iter().flat_map(|group| group.parameters.iter().map(|_| group.frozen)).collect();
            for (parameter, steps) in self.steps.iter_mut().enumerate() {
                *steps += u64::from(seen[parameter] && !frozen[parameter]);
            }
        }
        Ok(StepDecision::Host { norm, skip, overflow })
    }

    fn take_step(&mut self, decision: &StepDecision) -> Result<()> {
        if matches!(decision, StepDecision::Host { skip: true, .. }) {
            return Ok(());
        }
        self.inner.step()?;
        self.round_and_gather()
    }

    fn zero_grad(&mut self, _how: ZeroGrad) -> Result<()> {
        for bucket in &self.round.lock().buckets {
            bucket.members.iter().try_for_each(|member| runtime::autograd::set_grad(&member.tensor, None))?;
        }
        self.inner.zero_grad(ZeroGrad::ToNone)
    }

    fn groups(&self) -> &[Group] {
        &self.groups
    }

    fn rule(&self) -> &dyn Rule {
        self.inner.rule()
    }

    fn learning_rates(&self) -> Vec<f64> {
        self.inner.learning_rates()
    }

    fn state(&self) -> Result<Vec<(String, Tensor)>> {
        self.gather_state()
    }

    fn load_state(&mut self, tensors: &[(String, Tensor)]) -> Result<()> {
        self.scatter_state(tensors)
    }

    fn state_bytes(&self) -> u64 {
        let masters =
            self.parts.iter().filter(|part| part.rounded.is_some()).map(|part| bytes(&part.stepped));
        self.inner.state_bytes() + masters.sum::<u64>()
    }
}

impl ShardedOptimizer {
    /// Rounds master copies into the weights, and gathers the weights from their owners.
    fn round_and_gather(&self) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let rounded = self.parts.iter().filter_map(|part| Some((part.rounded.as_ref()?, &part.stepped)));
        let (targets, sources): (Vec<&Tensor>, Vec<&Tensor>) = rounded.unzip();
        runtime::ops::foreach::copy_(&targets, &sources)?;
        let round = self.round.lock();
        let gathers = round.buckets.iter().enumerate();
        let gathers: Vec<_> = gathers
            .map(|(number, bucket)| bucket.gather(&self.ranks, &label(number)))
            .collect::<Result<_>>()?;
        gathers.into_iter().try_for_each(|gather| Ok::<_, training::Error>(gather.wait()?))?;
        for bucket in &round.buckets {
            for member in &bucket.members {
                runtime::autograd::mark_written(&member.tensor)?;
            }
        }
        Ok(())
    }
}

impl Round {
    /// Gives the worker every bucket whose gradients are there, in the order that all ranks have: from the last to the first.
    fn submit(&mut self, worker: &Stream, ranks: &Ranks) -> Result<()> {
        while self.submitted < self.buckets.len() {
            let number = self.buckets.len() - 1 - self.submitted;
            let complete = |additions: &Vec<usize>| self.added[number] >= additions[number].max(1);
            if self.open && !self.additions.as_ref().is_some_and(complete) {
                break;
            }
            let bucket = &self.buckets[number];
            let gradients = bucket.take_gradients(&mut self.seen)?;
            let (reduce, ranks) = (bucket.reduction(gradients, self.first, label(number)), ranks.clone());
            worker.submit(move || reduce(&ranks))?;
            self.submitted += 1;
        }
        Ok(())
    }
}

/// Counts the gradients of each bucket as they arrive during backward, and gives complete buckets to the worker.
fn hooks(round: &Arc<Mutex<Round>>, worker: &Stream, ranks: &Ranks) -> Result<Vec<GradientHook>> {
    let mut hooks = Vec::new();
    for (number, bucket) in round.lock().buckets.iter().enumerate() {
        for member in &bucket.members {
            // Weak, because the buckets own the parameters, which own the hooks.
            let (shared, worker, ranks) = (Arc::downgrade(round), worker.clone(), ranks.clone());
            hooks.push(GradientHook::new(&member.tensor, move || {
                let Some(round) = shared.upgrade() else { return Ok(()) };
                let mut round = round.lock();
                round.added[number] += 1;
                round.submit(&worker, &ranks).map_err(|error| match error {
                    training::Error::Runtime(error) => error,
                    other => runtime::Error::Other(other.to_string().into()),
                })
            })?);
        }
    }
    Ok(hooks)
}

/// Returns this rank's parts of all parameters, in the parameters' order.
fn parts(buckets: &[Bucket], ranks: &Ranks, parameters: usize, master_weights: bool) -> Result<Vec<Part>> {
    let _no_grad = tch::no_grad_guard();
    let mut parts: Vec<Option<Part>> = (0..parameters).map(|_| None).collect();
    for bucket in buckets {
        let shard = bucket.division.range(ranks.rank());
        for member in &bucket.members {
            let owned = bucket.owned(member, ranks.rank());
            if owned.is_empty() {
                continue;
            }
            let weights = narrow(&bucket.weights, &owned)?.f_detach()?;
            let half = matches!(bucket.kind, Kind::Half | Kind::BFloat16);
            let (stepped, rounded) = if half && master_weights {
                (weights.f_to_kind(Kind::Float)?, Some(weights))
            } else {
                (weights, None)
            };
            parts[member.parameter] = Some(Part {
                parameter: member.parameter,
                sums: narrow(&bucket.sums, &(owned.start - shard.start..owned.end - shard.start))?,
                stepped: stepped.f_set_requires_grad(true)?,
                follows: rounded.is_some(),
                rounded,
            });
        }
    }
    Ok(parts.into_iter().flatten().collect())
}

/// Returns the groups with this rank's parts instead of the parameters.
fn inner_groups(groups: &[Group], names: &[String], parts: &[Part]) -> Result<Vec<Group>> {
    let (mut start, mut inner) = (0, Vec::new());
    for group in groups {
        let numbers = start..start + group.parameters.len();
        start = numbers.end;
        let own = parts.iter().filter(|part| numbers.contains(&part.parameter));
        let own = own.map(|part| (names[part.parameter].clone(), part.stepped.shallow_clone())).collect();
        inner.push(Group {
            name: group.name.clone(),
            parameters: own,
            lr: group.lr,
            weight_decay: group.weight_decay,
            frozen: group.frozen,
            rule: None,
        });
    }
    Ok(inner)
}

fn label(bucket: usize) -> String {
    format!("bucket {bucket}")
}

fn bytes(tensor: &Tensor) -> u64 {
    tensor.numel() as u64 * tensor.kind().elt_size_in_bytes() as u64
}
