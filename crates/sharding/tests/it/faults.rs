//! Ranks that hang, are killed or stopped, or are slow.

use std::sync::Mutex;
use std::time::Duration;

use runtime::autograd::GradientHook;
use runtime::collectives::Group as Ranks;
use serde::{Deserialize, Serialize};
use test_ranks::Ranks as Processes;
use training::checkpoint;
use training::optimizer::{Group, Optimizer, Rule, StepDecision, StepSettings, ZeroGrad};
use training::scaler::GradScaler;
use training::{Error, Result};

use crate::run;
use crate::training_case::Case;
use crate::trainings::HANGS;

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
    Reduce,
    Gather,
    Save,
}

/// A fault: what befalls which rank, and when.
pub(crate) type Injected = (Fault, usize, Operation);

/// The step of a fault.
const STEP: u64 = 3;

/// An optimizer whose rank suffers a fault, or waits for a random time, before its operations.
#[derive(Debug)]
pub(crate) struct Faulty {
    inner: Box<dyn Optimizer>,
    fault: Option<(Fault, Operation)>,
    delays: Option<Mutex<fuzz::Random>>,
    step: u64,
}

impl Faulty {
    pub(crate) fn new(inner: Box<dyn Optimizer>, case: &Case, ranks: &Ranks) -> Self {
        let rank = ranks.rank();
        let fault = case.fault.filter(|(_, faulty, _)| *faulty == rank).map(|(fault, _, at)| (fault, at));
        let delays = case.delays.then(|| Mutex::new(fuzz::Random::new(rank as u64)));
        Self { inner, fault, delays, step: 0 }
    }

    fn meet(&self, operation: Operation) -> Result<()> {
        self.delays.iter().for_each(wait);
        match self.fault {
            Some((fault, at)) if at == operation && self.step == STEP => befall(fault),
            _ => Ok(()),
        }
    }
}

fn wait(delays: &Mutex<fuzz::Random>) {
    std::thread::sleep(Duration::from_micros(delays.lock().unwrap().below(3000) as u64));
}

fn befall(fault: Fault) -> Result<()> {
    let own = std::process::id();
    let signals = match fault {
        Fault::Killed => format!("kill -9 {own}"),
        Fault::Stopped => format!("kill -STOP {own}; sleep 4; kill -9 {own}"),
        Fault::Hangs => {
            return Err(Error::Config { what: HANGS, reason: "until the others have ended".to_owned() });
        }
    };
    std::process::Command::new("sh").args(["-c", &signals]).status().unwrap();
    unreachable!("the signal has come");
}

impl Optimizer for Faulty {
    fn begin(&mut self, settings: StepSettings) -> Result<()> {
        self.step += 1;
        self.inner.begin(settings)
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

    fn ranks(&self) -> Option<Ranks> {
        self.inner.ranks()
    }

    fn reduce(&mut self) -> Result<()> {
        self.meet(Operation::Reduce)?;
        self.inner.reduce()
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

    fn state(&self) -> Result<Vec<(String, tch::Tensor)>> {
        self.meet(Operation::Save)?;
        self.inner.state()
    }

    fn load_state(&mut self, tensors: &[(String, tch::Tensor)]) -> Result<()> {
        self.inner.load_state(tensors)
    }

    fn state_bytes(&self) -> u64 {
        self.inner.state_bytes()
    }
}

/// Delays the gradients of all parameters. Dropped where the process ends.
pub(crate) fn delay_backward(parameters: &[(String, &tch::Tensor)], rank: usize) {
    for (number, (_, parameter)) in parameters.iter().enumerate() {
        let delays = Mutex::new(fuzz::Random::new((1000 * rank + number) as u64));
        let hook = GradientHook::new(parameter, move || {
            wait(&delays);
            Ok(())
        });
        std::mem::forget(hook.unwrap());
    }
}

/// What the other rank of two must say, and the newest whole checkpoint of that training.
#[track_caller]
fn check(printed: &[String], (_, rank, operation): Injected, folder: &tempfile::TempDir) {
    let named = match operation {
        Operation::Reduce => "reduce_scatter of `bucket ",
        Operation::Gather => "all_gather of `bucket ",
        Operation::Save if rank == 0 => "send of `exp_avg of bucket ",
        Operation::Save => "recv of `exp_avg of bucket ",
    };
    let failed = printed.iter().find(|line| line.starts_with("failed")).expect("a failure");
    assert!(failed.contains(named) && failed.contains(&format!("with rank {rank}: ")), "{failed}");
    let found = checkpoint::latest(folder.path()).unwrap();
    assert!(found.refused.is_empty(), "{:?}", found.refused);
    assert_eq!(found.checkpoint.unwrap().step, STEP - 1);
}

fn case(fault: Injected, folder: &tempfile::TempDir) -> Case {
    let folder = Some(folder.path().to_owned());
    Case { fault: Some(fault), folder, timeout: Duration::from_millis(1500), ..Case::default() }
}

const OPERATIONS: [Operation; 3] = [Operation::Reduce, Operation::Gather, Operation::Save];

#[test]
fn a_rank_that_hangs_is_named_with_the_operation() {
    let faults: Vec<_> = OPERATIONS
        .map(|operation| ((Fault::Hangs, 1, operation), tempfile::tempdir().unwrap()))
        .into_iter()
        .collect();
    let runs: Vec<_> = faults.iter().map(|(fault, folder)| (case(*fault, folder), 2)).collect();
    for ((fault, folder), printed) in faults.iter().zip(run(&runs)) {
        check(&printed[0], *fault, folder);
    }
}

#[test]
fn a_rank_that_is_killed_or_stopped_is_named_with_the_operation() {
    let killed = OPERATIONS.map(|operation| (Fault::Killed, 1, operation));
    let first = [(Fault::Killed, 0, Operation::Reduce), (Fault::Stopped, 0, Operation::Gather)];
    for fault in killed.into_iter().chain(first) {
        let folder = tempfile::tempdir().unwrap();
        // The other one ends, too.
        let printed =
            Processes { lost: &[0, 1], ..Processes::new("a_rank", 2) }.run(&[(case(fault, &folder), 2)]);
        let of_training = |line: &String| line.strip_prefix("training 0: ").map(str::to_owned);
        let printed: Vec<String> = printed[1 - fault.1].iter().filter_map(of_training).collect();
        check(&printed, fault, &folder);
    }
}

#[test]
fn delays_change_no_bit() {
    let delayed = Case { delays: true, clip: true, ..Case::default() };
    let case = Case { delays: false, ..delayed.clone() };
    let two = Case { stage: 2, ..delayed.clone() };
    let printed = run(&[(case, 1), (delayed, 3), (two.clone(), 3), (Case { recompute: true, ..two }, 4)]);
    assert_eq!(printed[0][0], printed[1][0]);
    assert_eq!(printed[0][0], printed[2][0]);
}
