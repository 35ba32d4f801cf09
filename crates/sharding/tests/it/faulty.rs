//! An optimizer whose rank hangs, is killed or stopped, or is slow.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use runtime::autograd::GradientHook;
use runtime::collectives;
use serde::{Deserialize, Serialize};
use tch::Tensor;
use training::checkpoint::LazyTensor;
use training::optimizer::{Group, Optimizer, Rule, StepDecision, StepSettings, ZeroGrad};
use training::scaler::GradScaler;
use training::{Error, Result};

use super::trainings::HANGS;

/// What befalls a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Fault {
    /// SIGKILL.
    Killed,
    /// SIGSTOP, and SIGKILL when the others must have given up.
    Stopped,
    /// Its process lives, and takes part in nothing.
    Hangs,
}

/// Before which operation of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Operation {
    /// The first forward, which gathers divided layers.
    Forward,
    /// The backward of the layers.
    Backward,
    Reduce,
    Gather,
    Save,
}

/// A fault: what befalls which rank, and when.
pub(crate) type Injected = (Fault, usize, Operation);

/// How long ranks wait for one with a fault: longer than anything else takes while other tests have both processors.
pub(crate) const PATIENCE: Duration = Duration::from_secs(4);
/// The step of a fault.
pub(crate) const STEP: u64 = 3;

/// An optimizer whose rank suffers a fault, or waits for a random time, before its operations.
#[derive(Debug)]
pub(crate) struct Faulty {
    inner: Box<dyn Optimizer>,
    fault: Option<(Fault, Operation)>,
    delays: Option<Mutex<testing::fuzz::Random>>,
    step: Arc<AtomicU64>,
    _hook: Option<GradientHook>,
}

impl Faulty {
    /// `first` is the tensor whose gradient comes before the backward of the layers.
    pub(crate) fn new(
        inner: Box<dyn Optimizer>,
        ranks: &collectives::Group,
        fault: Option<Injected>,
        delays: bool,
        first: Option<&Tensor>,
    ) -> Self {
        let rank = ranks.rank();
        let fault = fault.filter(|(_, faulty, _)| *faulty == rank).map(|(fault, _, at)| (fault, at));
        let delays = delays.then(|| Mutex::new(testing::fuzz::Random::new(rank as u64)));
        let step = Arc::new(AtomicU64::new(0));
        let _hook = match (fault, first) {
            (Some((fault, Operation::Backward)), Some(first)) => {
                let step = step.clone();
                let hook = GradientHook::new(first, move || {
                    if step.load(Ordering::Relaxed) != STEP {
                        return Ok(());
                    }
                    if fault == Fault::Hangs {
                        // Until the others have given up.
                        std::thread::sleep(PATIENCE + Duration::from_secs(1));
                    }
                    befall(fault).map_err(|error| runtime::Error::Other(error.to_string().into()))
                });
                Some(hook.unwrap())
            }
            _ => None,
        };
        Self { inner, fault, delays, step, _hook }
    }

    fn meet(&self, operation: Operation) -> Result<()> {
        self.delays.iter().for_each(wait);
        match self.fault {
            Some((fault, at)) if at == operation && self.step.load(Ordering::Relaxed) == STEP => {
                befall(fault)
            }
            _ => Ok(()),
        }
    }
}

pub(crate) fn wait(delays: &Mutex<testing::fuzz::Random>) {
    std::thread::sleep(Duration::from_micros(delays.lock().unwrap().below(3000) as u64));
}

fn befall(fault: Fault) -> Result<()> {
    let own = std::process::id();
    let signals = match fault {
        Fault::Killed => format!("kill -9 {own}"),
        Fault::Stopped => format!("kill -STOP {own}; sleep {}; kill -9 {own}", PATIENCE.as_secs() + 2),
        Fault::Hangs => {
            return Err(Error::config(HANGS, "until the others have ended"));
        }
    };
    std::process::Command::new("sh").args(["-c", &signals]).status().unwrap();
    unreachable!("the signal has come");
}

impl Optimizer for Faulty {
    fn begin(&mut self, settings: StepSettings) -> Result<()> {
        self.step.fetch_add(1, Ordering::Relaxed);
        self.inner.begin(settings)?;
        self.meet(Operation::Forward)
    }

    fn unscale_and_clip(&mut self, scaler: &mut dyn GradScaler) -> Result<StepDecision> {
        self.inner.unscale_and_clip(scaler)
    }

    fn take_step(&mut self, decision: &StepDecision) -> Result<()> {
        self.meet(Operation::Gather)?;
        self.inner.take_step(decision)
    }

    fn zero_grad(&mut self, how: ZeroGrad) -> Result<()> {
        self.inner.zero_grad(how)
    }

    fn ranks(&self) -> Option<training::Ranks> {
        self.inner.ranks()
    }

    fn reduce(&mut self) -> Result<()> {
        self.meet(Operation::Reduce)?;
        self.inner.reduce()
    }

    fn passes_communicate(&self) -> bool {
        self.inner.passes_communicate()
    }

    fn set_idle(&mut self, idle: bool) {
        self.inner.set_idle(idle);
    }

    fn whole_weight(&self, tensor: &Tensor) -> Result<Tensor> {
        self.inner.whole_weight(tensor)
    }

    fn set_weight(&self, tensor: &Tensor, values: &Tensor) -> Result<()> {
        self.inner.set_weight(tensor, values)
    }

    fn own_weights(&self) -> Vec<Tensor> {
        self.inner.own_weights()
    }

    fn groups(&self) -> &[Group] {
        self.inner.groups()
    }

    fn rule(&self) -> &dyn Rule {
        self.inner.rule()
    }

    fn learning_rates(&self) -> Vec<f64> {
        self.inner.learning_rates()
    }

    fn lazy_weight<'a>(&'a self, name: String, tensor: &Tensor) -> LazyTensor<'a> {
        self.inner.lazy_weight(name, tensor)
    }

    fn state(&self) -> Result<Vec<(String, Tensor)>> {
        self.inner.state()
    }

    /// The fault comes in the middle of a save.
    fn lazy_state(&self) -> Result<Vec<LazyTensor<'_>>> {
        let mut tensors = self.inner.lazy_state()?;
        let middle = tensors.len() / 2;
        if let Some(tensor) = tensors.get_mut(middle) {
            let (name, kind, shape) = (tensor.name().to_owned(), tensor.kind(), tensor.shape().to_vec());
            let inner = std::mem::replace(tensor, LazyTensor::from_tensor("", &Tensor::from(0)));
            *tensor = LazyTensor::new(name, kind, &shape, move |range| {
                self.meet(Operation::Save)?;
                inner.piece(range)
            });
        }
        Ok(tensors)
    }

    fn load_state(&mut self, tensors: &[(String, Tensor)]) -> Result<()> {
        self.inner.load_state(tensors)
    }

    fn state_bytes(&self) -> u64 {
        self.inner.state_bytes()
    }
}
