//! An optimizer whose state, and whose gradient sums, are divided among ranks.
//!
//! Each rank steps its part of every parameter with a [`DeviceOptimizer`] of its own, whose parameters are views of the weights in
//! the rank's shards, or fp32 master copies of them.

mod part;
mod settings;
mod state;

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use runtime::autograd::GradientHook;
use runtime::collectives::{ReduceConfig, ReduceOp};
use runtime::file_memory;
use runtime::precision::identity;
use tch::{Kind, Tensor};
use training::Ranks;
use training::checkpoint::LazyTensor;
use training::clip::{self, Findings, NonFinite};
use training::optimizer::{DeviceOptimizer, Group, Optimizer, Rule, StepDecision, StepSettings, ZeroGrad};
use training::scaler::GradScaler;

use crate::agreement;
use crate::bucket::{ALIGNMENT, Bucket};
use crate::mesh::Mesh;
use crate::norm::{self, Blocks};
use crate::round::{Round, hooks, label};
use crate::shards::{Shards, bytes};
use crate::{Result, refused};
use part::{Part, inner_groups, parts};
pub use settings::{ShardingConfig, Stage};

/// The value that a rank sends in place of its count of gradients if one is not finite.
const NON_FINITE: i64 = 2;

/// A rule over parameters whose state is divided among ranks. See the [crate's front page](crate).
#[derive(Debug)]
pub struct ShardedOptimizer {
    mesh: Mesh,
    options: ShardingConfig,
    groups: Vec<Group>,
    names: Vec<String>,
    /// This rank's parts of the parameters, in order, and which they are; parameters without a part are left out.
    parts: Vec<Part>,
    inner: DeviceOptimizer,
    round: Arc<Mutex<Round>>,
    /// Completed steps of each parameter.
    steps: Vec<u64>,
    settings: StepSettings,
    /// The loss of the step, if it is watched: the same on all ranks.
    loss: Option<Tensor>,
    _hooks: Vec<GradientHook>,
}

impl ShardedOptimizer {
    /// Divides the parameters of `groups` among `ranks`. They get new memory, with their values.
    ///
    /// # Errors
    /// Errors of [`DeviceOptimizer::new`]; a stage whose shards are missing; fp32 copies and stochastic rounding together; parameters that
    /// are not where the ranks' group has its tensors; a group with a rule of its own; a rule that updates whole tensors, and in
    /// [`Stage::Three`] one whose state is in blocks; ranks with other parameters, values or options, with the first difference.
    pub fn new(
        rule: impl Rule + 'static,
        groups: Vec<Group>,
        ranks: impl Into<Mesh>,
        options: ShardingConfig,
    ) -> Result<Self> {
        Self::boxed(Box::new(rule), groups, ranks, options)
    }

    /// [`ShardedOptimizer::new`] for a rule chosen at run time.
    ///
    /// # Errors
    /// As [`ShardedOptimizer::new`].
    pub fn boxed(
        rule: Box<dyn Rule>,
        groups: Vec<Group>,
        ranks: impl Into<Mesh>,
        options: ShardingConfig,
    ) -> Result<Self> {
        let mesh = ranks.into();
        options.check(&mesh)?;
        let granularity = settings::granularity(rule.as_ref(), options.stage)?;
        if let Some(group) = groups.iter().find(|group| group.rule.is_some()) {
            let reason =
                format!("group `{}` has a rule of its own; give all groups the optimizer's", group.name);
            return Err(refused(reason));
        }
        settings::distinct(&groups)?;
        agreement::agree(rule.as_ref(), &groups, &mesh, &options)?;
        let parameters: Vec<(usize, &str, &Tensor)> = groups
            .iter()
            .flat_map(|group| &group.parameters)
            .enumerate()
            .map(|(number, (name, tensor))| (number, name.as_str(), tensor))
            .collect();
        let thawed = options.shards.as_ref().map(|shards| shards.thawed(parameters.iter().map(|one| one.2)));
        if let Some(name) = thawed.transpose()?.flatten() {
            return Err(refused(format!(
                "`{name}` is trained, but was frozen when its layer was divided; unfreeze it before the model is divided"
            )));
        }
        let names: Vec<String> = parameters.iter().map(|(_, name, _)| (*name).to_owned()).collect();
        let mut numbers = HashMap::new();
        let mut rest = Vec::new();
        for &(number, name, tensor) in &parameters {
            numbers.insert(identity(tensor)?, number);
            let is_sharded = options.shards.as_ref().map_or(Ok(false), |shards| shards.holds(tensor))?;
            rest.extend((!is_sharded).then_some((number, name, tensor)));
        }
        settings::sort(&mut rest, &options.order)?;
        let mut buckets = Vec::new();
        for members in settings::divide(&rest, options.bucket_bytes) {
            buckets.push(Bucket::new(&members, &mesh, ALIGNMENT.max(granularity))?);
        }
        // Layers come last: they are reduced first, from the last one on, as backward computes them.
        if let Some(shards) = &options.shards {
            buckets.extend(shards.buckets(&numbers, buckets.len())?);
        }
        let parts = parts(&buckets, &mesh.shard, names.len(), options.master_weights)?;
        let whole: HashMap<&str, i64> =
            parameters.iter().map(|(_, name, tensor)| (*name, tensor.numel() as i64)).collect();
        let inner = DeviceOptimizer::boxed(rule, inner_groups(&groups, &names, &parts)?)?
            .with_parts(|name| whole.get(name).copied().unwrap_or_default());
        let inner = match options.stochastic_rounding {
            Some(seed) => {
                let first: HashMap<&str, i64> =
                    parts.iter().map(|part| (names[part.parameter].as_str(), part.first)).collect();
                let first = |name: &str| first.get(name).map_or(0, |first| first.cast_unsigned());
                inner.with_stochastic_rounding_of_parts(seed, first)
            }
            None => inner,
        };
        let round = Arc::new(Mutex::new(Round::new(buckets, names.len(), &mesh, &options)?));
        let hooks = match options.stage {
            Stage::One => Vec::new(),
            Stage::Two | Stage::Three => hooks(&round)?,
        };
        if let Some(shards) = &options.shards {
            shards.deliver_to(&round);
        }
        Ok(Self {
            mesh,
            options,
            steps: vec![0; names.len()],
            groups,
            names,
            parts,
            inner,
            round,
            settings: StepSettings::default(),
            loss: None,
            _hooks: hooks,
        })
    }

    /// Returns the options.
    pub fn options(&self) -> &ShardingConfig {
        &self.options
    }

    /// Refuses gradients that arrived after their bucket was reduced.
    fn check_late(&self, round: &Round) -> Result<()> {
        for bucket in round.reduced().filter(|bucket| !bucket.is_layer) {
            for member in &bucket.members {
                if member.tensor.f_grad()?.defined() {
                    return Err(refused(format!(
                        "the gradient of `{}` was added to after its bucket was reduced, because this step's graph uses it more \
                         often than {}; take Stage::One",
                        self.names[member.parameter],
                        if self.options.one_addition { "once" } else { "the first step's" }
                    )));
                }
            }
        }
        Ok(())
    }

    /// Returns whether each parameter had a gradient on any rank, and whether `non_finite` is true on any.
    fn seen(&self, non_finite: bool) -> Result<(Vec<bool>, bool)> {
        let mut flags: Vec<i64> = self.round.lock().seen.iter().map(|seen| i64::from(*seen)).collect();
        // In the same numbers, so that it takes no message of its own.
        flags.iter_mut().take(usize::from(non_finite)).for_each(|first| *first = NON_FINITE);
        let all = Tensor::f_from_slice(&flags)?;
        let options = ReduceConfig { op: ReduceOp::Max, ..ReduceConfig::default() };
        self.mesh.control().all_reduce(&all, options, "parameters with a gradient")?;
        let all = Vec::<i64>::try_from(all)?;
        Ok((all.iter().map(|seen| *seen != 0).collect(), all.contains(&NON_FINITE)))
    }

    /// Returns this rank's sums of gradients.
    fn sums(&self) -> Vec<Tensor> {
        self.round.lock().buckets.iter().flat_map(|bucket| bucket.sums.tensors()).collect()
    }

    /// Returns a parameter whose sum of gradients on this rank has an infinity or a NaN.
    fn first_non_finite(&self) -> Result<Option<String>> {
        let round = self.round.lock();
        for part in &self.parts {
            if let Some(sum) = part.gradient(&round.buckets)? {
                let name = self.names[part.parameter].as_str();
                if let Some(name) = clip::first_non_finite([(name, sum)])? {
                    return Ok(Some(name.to_owned()));
                }
            }
        }
        Ok(None)
    }

    fn norm(&self) -> Result<f64> {
        let mut blocks = Vec::new();
        for bucket in &self.round.lock().buckets {
            let rank = self.mesh.shard.rank();
            let (elements, pieces) = (bucket.division.len(rank), bucket.sums.pieces(&bucket.members)?);
            let squares = norm::block_squares(elements, &pieces, self.mesh.device())?;
            let first = bucket.division.range(rank).start / norm::BLOCK;
            let count = (bucket.division.elements + norm::BLOCK - 1) / norm::BLOCK;
            blocks.push(Blocks { squares, first, count });
        }
        norm::global_norm(&self.mesh, &blocks)
    }
}

impl Optimizer for ShardedOptimizer {
    fn ranks(&self) -> Option<Ranks> {
        Some(self.mesh.ranks().clone())
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
        (self.settings, self.loss) = (settings, None);
        let mut round = self.round.lock();
        self.parts.iter_mut().try_for_each(|part| part.follow(&round.buckets))?;
        round.begin();
        Ok(())
    }

    fn watch_loss(&mut self, loss: &Tensor) {
        self.loss = Some(loss.detach());
    }

    fn reduce(&mut self) -> Result<()> {
        let mut round = self.round.lock();
        self.check_late(&round)?;
        round.end()
    }

    fn has_gradient(&self, tensor: &Tensor) -> Result<bool> {
        let round = self.round.lock();
        let all = self.groups.iter().flat_map(|group| &group.parameters).zip(&round.seen);
        for ((_, parameter), seen) in all {
            if identity(parameter)? == identity(tensor)? {
                return Ok(*seen);
            }
        }
        Ok(tensor.f_grad()?.defined())
    }

    fn passes_communicate(&self) -> bool {
        self.options.stage == Stage::Three
    }

    fn set_idle(&mut self, idle: bool) {
        self.round.lock().set_idle(idle);
    }

    fn whole_weight(&self, tensor: &Tensor) -> Result<Tensor> {
        let shards = self.options.shards.as_ref();
        match shards.map_or(Ok(None), |shards| shards.whole(tensor))? {
            Some(weight) => Ok(weight),
            None => Ok(tensor.f_detach()?),
        }
    }

    fn lazy_weight<'a>(&'a self, name: String, tensor: &Tensor) -> LazyTensor<'a> {
        let divided = self.options.shards.as_ref().and_then(|shards| shards.divided(tensor));
        match divided {
            Some(divided) => divided.into_lazy(name, &tensor.size()),
            None => LazyTensor::from_tensor(name, tensor),
        }
    }

    fn set_weight(&self, tensor: &Tensor, values: &Tensor) -> Result<()> {
        let shards = self.options.shards.as_ref();
        if !shards.map_or(Ok(false), |shards| shards.set(tensor, values))? {
            let _no_grad = tch::no_grad_guard();
            tensor.f_detach()?.f_copy_(values)?;
        }
        Ok(())
    }

    fn own_weights(&self) -> Vec<Tensor> {
        let weights = self.parts.iter().map(|part| part.rounded.as_ref().unwrap_or(&part.stepped));
        weights.map(Tensor::shallow_clone).collect()
    }

    fn unscale_and_clip(&mut self, scaler: &mut dyn GradScaler) -> Result<StepDecision> {
        let StepSettings { clip, non_finite, .. } = self.settings;
        let checks = non_finite != NonFinite::Ignore;
        let loss = self.loss.take().filter(|_| checks).map(|loss| loss.f_double_value(&[0])).transpose()?;
        let sums = self.sums();
        // A norm tells it too, and so does a scaler's flag.
        let is_unknown = checks && clip.is_none() && !scaler.is_enabled();
        let has_non_finite = is_unknown && clip::found_non_finite(&sums)?.f_double_value(&[0])? != 0.0;
        let (seen, non_finite) = self.seen(has_non_finite)?;
        let found_inf = scaler.unscale_(&sums, false)?.found_inf;
        let overflow = match found_inf {
            Some(flag) => {
                let flag = flag.f_reshape([1])?.f_to_kind(Kind::Float)?.f_contiguous()?;
                let options = ReduceConfig { op: ReduceOp::Max, ..ReduceConfig::default() };
                self.mesh.world.all_reduce(&flag, options, "overflow")?;
                flag.f_double_value(&[0])? != 0.0
            }
            None => false,
        };
        let norm = clip.map(|_| self.norm()).transpose()?;
        let findings = Findings { loss, norm, non_finite, overflow };
        let skip = self.settings.skips(&findings, scaler, || self.first_non_finite())?;
        if let (Some(norm), Some(limit), false) = (norm, clip, skip) {
            clip::scale_to_known_(&sums, norm, limit)?;
        }
        let round = self.round.lock();
        for part in self.parts.iter().filter(|part| seen[part.parameter]) {
            if let Some(gradient) = part.gradient(&round.buckets)? {
                let gradient = gradient.f_to_kind(part.stepped.kind())?;
                runtime::autograd::set_grad(&part.stepped, Some(&gradient))?;
            }
        }
        drop(round);
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
        self.round_and_gather()?;
        // What is in files is not used until the next step.
        self.round.lock().buckets.iter().try_for_each(|bucket| bucket.sums.release())?;
        let masters = self.parts.iter().filter(|part| part.rounded.is_some()).map(|part| &part.stepped);
        Ok(masters.into_iter().try_for_each(file_memory::release)?)
    }

    fn zero_grad(&mut self, _how: ZeroGrad) -> Result<()> {
        let mut round = self.round.lock();
        round.buckets.iter().try_for_each(Bucket::clear_gradients)?;
        round.clear();
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

    fn lazy_state(&self) -> Result<Vec<LazyTensor<'_>>> {
        self.divided_state()
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
    fn round_and_gather(&mut self) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let rounded = self.parts.iter().filter_map(|part| Some((part.rounded.as_ref()?, &part.stepped)));
        let (targets, sources): (Vec<&Tensor>, Vec<&Tensor>) = rounded.unzip();
        runtime::ops::foreach::copy_(&targets, &sources)?;
        self.options.shards.as_ref().map_or(Ok(()), Shards::note_change)?;
        let round = self.round.lock();
        let gathers = round.buckets.iter().enumerate().filter(|(_, bucket)| !bucket.is_layer);
        let gathers: Vec<_> = gathers
            .map(|(number, bucket)| bucket.gather(&self.mesh, &label(number)))
            .collect::<Result<_>>()?;
        gathers.into_iter().try_for_each(|gather| Ok::<_, training::Error>(gather.wait()?))?;
        for bucket in &round.buckets {
            for member in &bucket.members {
                runtime::autograd::mark_written(&member.tensor)?;
            }
        }
        self.parts.iter_mut().try_for_each(|part| part.wrote(&round.buckets))
    }
}
