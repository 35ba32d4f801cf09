//! The plan of a training: predicted before its weights are read, printed, enforced, and changed when memory is short.

mod calibration;
mod changes;
mod over_ranks;
mod table;

use accounting::candidates::{Allowed, Candidate, Job, Placement, Ranks, SearchResult};
use accounting::offload::{self as on_paper, Footprint};
use accounting::quantity::bytes_text;
use frugal::Config;
use frugal::config::{ActivationPlan, MasterWeights, TeacherPlace};
use frugal::models::DecoderConfig;
use frugal::planning::{self, Budget, DataShape, KnownRates, NotPredicted, Searched, WeightFormat};
use frugal::recipe::Handles;
use frugal::training::trainer::{CheaperPlan, CheaperPlans};
use report::cli::Failure;
use runtime::memory::Limit;
use serde_json::json;
use tch::{Device, Kind};

use crate::common_flags::Common;
use crate::output::print_line;
pub(crate) use calibration::Expected;
pub(crate) use changes::Question;
pub(crate) use table::{Columns, candidates_json, candidates_table};

/// Exit status where nothing fits the budget.
pub(crate) const NOTHING_FITS: u8 = 3;

/// Seconds that a training must take, at nominal rates, to be worth some seconds of measuring this machine.
const WORTH_MEASURING: f64 = 60.0;

/// Bytes that measuring a CPU's memory and products takes.
pub(crate) const MEASURING: u64 = 768 << 20;

/// Per cent of the peak by which freed blocks that are kept for reuse may exceed it, where the budget has room: a step of all weights of 135
/// million parameters takes three quarters of the time with it.
const CACHE_SLACK: u8 = 25;

/// Bytes of a trained number: its gradient and AdamW's moments.
const TRAINED_BYTES: u64 = 12;

/// The properties of a training that decide its plan.
pub(crate) struct PlannedTraining<'a> {
    /// The model's shape; `None` for one whose activations are not predicted.
    pub(crate) shape: Option<&'a DecoderConfig>,
    /// The format of its weights.
    pub(crate) format: WeightFormat,
    pub(crate) device: Device,
    pub(crate) data: DataShape,
    pub(crate) steps: u64,
    /// Whether it continues an earlier training, whose sums it must not reorder.
    pub(crate) resumes: bool,
}

/// The value; a budget below what the process takes already is a [`Failure`].
pub(crate) fn fitting<T>(result: frugal::Result<T>) -> anyhow::Result<T> {
    result.map_err(|error| match error {
        frugal::Error::Budget { .. } => Failure { status: NOTHING_FITS, message: error.to_string() }.into(),
        error => error.into(),
    })
}

/// `3.00 GiB (80 % of the free memory)`.
pub(crate) fn budget_text(budget: &Budget) -> String {
    let source = format!(" ({} % of the free memory)", (planning::FREE_SHARE * 100.0).round());
    bytes_text(budget.total) + if budget.is_default { &source } else { "" }
}

/// The prediction of a training.
pub(crate) struct Prediction {
    pub(crate) job: Job,
    pub(crate) result: SearchResult,
    data: DataShape,
    /// Whether the rates are this machine's.
    is_timed: bool,
    /// Rows at a time of an evaluation, and its peak under the chosen way.
    evaluation: Option<(usize, Footprint)>,
}

/// The plan of a training.
pub(crate) struct RunPlan {
    device: Device,
    budget: Budget,
    /// Reason for a missing prediction.
    prediction: Result<Prediction, NotPredicted>,
    plan: ActivationPlan,
    /// Of a training of all weights in 16 bits: how they take small updates, and their dtype.
    half: Option<(MasterWeights, Kind)>,
    /// Where a teacher's layers are, if that was open.
    teacher_place: Option<TeacherPlace>,
}

impl RunPlan {
    /// Predicts a training.
    ///
    /// # Errors
    /// A budget below what the process takes already; a [`Failure`] where nothing fits.
    pub(crate) fn of(common: &Common, config: &Config, planned: PlannedTraining<'_>) -> anyhow::Result<Self> {
        let device = planned.device;
        let plan = config.activations.plan;
        let given = config.training.budget.map(|given| given.0);
        let sharing = common.ranks.as_ref().map_or(1, |ranks| ranks.sharing(device));
        let own = Budget::given_or_default(given, device, sharing)?;
        let own = Budget { resumes: planned.resumes, ..own };
        let budget = common.ranks.as_ref().map_or(Ok(own), |ranks| ranks.least(own))?;
        let mut teacher_place = None;
        let predicted = match planned.shape {
            None => Err(NotPredicted("this architecture".to_owned())),
            Some(shape) => {
                let mut predicted = predict(common, config, shape, &planned, budget)?;
                let nothing_fits =
                    matches!(&predicted, Ok((prediction, _)) if prediction.result.chosen().is_none());
                let is_open = config.objective.teacher_place == TeacherPlace::Auto;
                if planned.data.teacher.is_some() && is_open && nothing_fits {
                    let mut offloaded = config.clone();
                    offloaded.objective.teacher_place = TeacherPlace::Offloaded;
                    predicted = predict(common, &offloaded, shape, &planned, budget)?;
                    teacher_place = Some(TeacherPlace::Offloaded);
                }
                predicted
            }
        };
        let (predicted, half) = match predicted {
            Ok((prediction, half)) => (Ok(prediction), half),
            Err(why) => (Err(why), unpredicted(config, &planned, common, Some(budget.tensors()))),
        };
        let run_plan = Self { device, budget: own, prediction: predicted, plan, half, teacher_place };
        if let (Ok(prediction), Some(shape)) = (&run_plan.prediction, planned.shape)
            && prediction.result.chosen().is_none()
        {
            let question = Question {
                config: &run_plan.decided(config),
                shape,
                format: planned.format,
                device,
                data: &prediction.data,
                budget,
                ranks: prediction.job.ranks,
            };
            let message = match common.is_first() {
                true => question.nothing_fits(&budget_text(&own), &prediction.result),
                false => "nothing fits the budget, as rank 0 says".to_owned(),
            };
            return Err(Failure { status: NOTHING_FITS, message }.into());
        }
        fitting(own.free())?;
        let chosen = run_plan.chosen().map_or_else(String::new, Candidate::name);
        common.agree(&[("plan".to_owned(), chosen)])?;
        Ok(run_plan)
    }

    /// Whether the step's memory was predicted.
    pub(crate) fn is_predicted(&self) -> bool {
        self.prediction.is_ok()
    }

    fn is_over_ranks(&self) -> bool {
        self.prediction.as_ref().is_ok_and(|prediction| prediction.job.ranks.is_some())
    }

    fn chosen(&self) -> Option<&Candidate> {
        self.prediction.as_ref().ok()?.result.chosen()
    }

    /// The plan for programs; null where it is not predicted.
    pub(crate) fn json(&self) -> serde_json::Value {
        let Ok(prediction) = &self.prediction else { return serde_json::Value::Null };
        let mut json = prediction.json(self.budget);
        json["master_weights"] = json!(self.half.map(|(way, _)| way));
        json
    }

    /// Prints the plan, on standard error, or with `--json` on standard output.
    pub(crate) fn print(&self, common: &Common) {
        match &self.prediction {
            Ok(_) if common.json => print_line(&json!({ "plan": self.json() })),
            Ok(prediction) => common.note(prediction.text(self.budget).trim_end()),
            Err(_) if common.json => {}
            Err(NotPredicted(why)) => {
                // Ranks do not repeat a step.
                let remedy = match &common.ranks {
                    None => ": layers are recomputed if it does not suffice",
                    Some(_) => "; give --activations recompute if it does not suffice",
                };
                common.note(&format!(
                    "budget {}; the memory of a step is not predicted for {why}{remedy}",
                    budget_text(&self.budget)
                ));
            }
        }
        if let Some((way, kind)) = self.half.filter(|_| !common.json) {
            common.note(&half_text(way, kind));
        }
    }

    /// Says whether steps are captured, and what that takes.
    pub(crate) fn note_capture(&self, common: &Common, config: &Config) {
        let applied = self.applied(config);
        if let Some(reason) = planning::capture_refusal(&applied, common.ranks.is_some(), self.device) {
            return common.note(&format!("steps are not captured: {reason}"));
        }
        let prediction = self.prediction.as_ref().ok().zip(self.chosen());
        let memory = prediction.and_then(|(prediction, chosen)| {
            planning::captured_memory(&prediction.job, chosen).ok().flatten()
        });
        let text =
            memory.map_or_else(String::new, |memory| format!(": {}", planning::captured_text(&memory)));
        common.note(&format!("steps are captured{text}"));
    }

    /// The configuration with the decision on master weights.
    fn decided(&self, config: &Config) -> Config {
        let mut config = config.clone();
        if let Some((way, _)) = self.half {
            config.optimizer.master_weights = way;
        }
        if let Some(place) = self.teacher_place {
            config.objective.teacher_place = place;
        }
        config
    }

    /// The rows at a time with which an evaluation fits the budget; `None` where it is not predicted.
    pub(crate) fn evaluation_rows(&self) -> Option<usize> {
        self.prediction.as_ref().ok()?.evaluation.as_ref().map(|(rows, _)| *rows)
    }

    /// The bytes that the budget leaves beside the tensors there are, when `trained` numbers have gradients and optimizer states, too.
    ///
    /// # Errors
    /// A system that does not count.
    pub(crate) fn left_of(&self, trained: u64) -> anyhow::Result<u64> {
        let live = runtime::memory::live_bytes(self.device)?;
        Ok(self.budget.tensors().saturating_sub(live + TRAINED_BYTES * trained))
    }

    /// The configuration that runs in the chosen way.
    pub(crate) fn applied(&self, config: &Config) -> Config {
        let config = self.decided(config);
        match self.chosen() {
            Some(chosen) => planning::with_choice(&config, chosen),
            None => config,
        }
    }

    /// The configuration as it is written for a resume: with what decides bits.
    pub(crate) fn written(&self, config: &Config) -> Config {
        let mut config = self.decided(config);
        if let Some(chosen) = self.chosen().filter(|_| config.training.micro_batch_size.is_none()) {
            // Also where a batch is not divided: the file's next training must not divide it at other rates or under another budget.
            config.training.micro_batch_size =
                Some(chosen.rows.map_or(config.training.batch, |rows| rows as usize));
        }
        config
    }

    /// The common flags, with the origin of what [`RunPlan::written`] has decided.
    pub(crate) fn with_origins(common: &Common, config: &Config, written: &Config) -> Common {
        let mut common = common.clone();
        for (key, is_decided) in [
            ("optimizer.master_weights", config.optimizer.master_weights != written.optimizer.master_weights),
            (
                "training.micro_batch_size",
                config.training.micro_batch_size != written.training.micro_batch_size,
            ),
            ("objective.teacher_place", config.objective.teacher_place != written.objective.teacher_place),
        ] {
            if is_decided {
                common.origins.set(key, "the plan");
            }
        }
        common
    }

    /// Makes the allocator refuse what goes beyond the budget. On a CPU the program's own memory counts too.
    ///
    /// # Errors
    /// The program takes more already.
    pub(crate) fn enforce(&self) -> anyhow::Result<Option<Limit>> {
        if self.device == Device::Cpu {
            runtime::memory::set_cache_slack(CACHE_SLACK)?;
        }
        Ok(planning::enforce(self.device, self.budget.enforced())?)
    }

    /// The same when the layers are where they are offloaded to: on a CPU that memory is of the budget and not of the allocator's. `None`
    /// where there is none.
    ///
    /// # Errors
    /// A system that does not count.
    pub(crate) fn enforce_beside_offloaded(&self) -> anyhow::Result<Option<Limit>> {
        let offloaded = runtime::device::pinned_bytes(Device::Cpu)?.live;
        if self.device != Device::Cpu || offloaded == 0 {
            return Ok(None);
        }
        let left = self.budget.enforced().saturating_sub(offloaded);
        Ok(planning::enforce(self.device, left.max(runtime::memory::live_bytes(self.device)?))?)
    }

    /// Sets what layers on the device keep.
    ///
    /// # Errors
    /// A plan for other layers.
    pub(crate) fn apply(&self, handles: &Handles) -> anyhow::Result<()> {
        if let (Some(Placement::Resident(plan)), Some(activations)) =
            (self.chosen().map(|chosen| &chosen.placement), &handles.activations)
        {
            activations.change(plan)?;
        }
        Ok(())
    }

    /// The plans that a training changes to when memory is short.
    ///
    /// # Errors
    /// Any error of a prediction.
    pub(crate) fn cheaper_plans(&self, handles: &Handles) -> anyhow::Result<Option<CheaperPlans>> {
        let Some(activations) = &handles.activations else { return Ok(None) };
        // A plan that was named is kept; ranks keep theirs.
        if self.is_over_ranks() || !matches!(self.plan, ActivationPlan::Auto | ActivationPlan::Plan) {
            return Ok(None);
        }
        let (peak, plans) = match (&self.prediction, self.chosen()) {
            (Ok(prediction), Some(chosen)) => {
                let cheaper = prediction.job.cheaper_plans(chosen)?;
                let plans = cheaper.into_iter().filter_map(|plan| {
                    let Placement::Resident(layers) = &plan.placement else { return None };
                    let (name, layers) = (plan.name(), layers.clone());
                    Some(CheaperPlan { name, layers, peak_bytes: Some(plan.peak.total) })
                });
                (Some(chosen.peak.total), plans.collect())
            }
            _ => (None, CheaperPlans::by_quarters(activations.plan().len())),
        };
        Ok(Some(CheaperPlans::new(activations.clone(), peak, plans)))
    }

    /// The predicted time of a step, which the first steps correct; at nominal rates there is none, but the first steps show it.
    pub(crate) fn expected(&self) -> Option<Expected> {
        let prediction = self.prediction.as_ref().ok()?;
        let work = prediction.job.mean.work;
        Some(Expected {
            seconds: prediction.is_timed.then_some(self.chosen()?.seconds),
            positions: (work.batch * work.sequence * prediction.job.accumulation) as f64,
            epoch: prediction.steps_of_an_epoch(),
        })
    }
}

/// A step, and the ways to run it that are allowed.
fn step(
    config: &Config,
    shape: &DecoderConfig,
    (format, device): (WeightFormat, Device),
    data: &DataShape,
    rates: &KnownRates,
    ranks: Option<Ranks>,
) -> Result<(Job, Allowed), NotPredicted> {
    let job = planning::job(config, shape, (format, device), data, rates)?;
    let allowed = planning::allowed(config, shape.num_hidden_layers.unsigned_abs() as usize, device)?;
    match ranks {
        Some(ranks) => planning::over_ranks((job, allowed), config, ranks, (format.kind, device)),
        None => Ok((job, allowed)),
    }
}

/// A prediction, and the master weights that it has decided on.
type Predicted = Result<(Prediction, Option<(MasterWeights, Kind)>), NotPredicted>;

/// Predicts a step. Ranks do it at the same rates.
fn predict(
    common: &Common,
    config: &Config,
    shape: &DecoderConfig,
    planned: &PlannedTraining<'_>,
    budget: Budget,
) -> anyhow::Result<Predicted> {
    let PlannedTraining { format, device, ref data, resumes, .. } = *planned;
    let ranks = common.ranks.as_ref().map(|ranks| ranks.planned(config)).transpose()?;
    let bytes = on_paper::AvailableMemory { device: budget.tensors(), host: None };
    let with = |rates: &KnownRates| -> Result<Searched, NotPredicted> {
        planning::choose_master_weights(config, format.kind, |master_weights| {
            let mut config = config.clone();
            config.optimizer.master_weights = master_weights;
            let (job, mut allowed) = step(&config, shape, (format, device), data, rates, ranks)?;
            allowed.splits &= !resumes;
            let result = job.search(&allowed, bytes)?;
            let job = result.chosen().map_or_else(|| job.clone(), |chosen| job.at(chosen));
            Ok((job, result))
        })
    };
    let (searched, is_timed) = match at_known_rates(common, planned, budget, &with)? {
        Ok(found) => found,
        Err(why) => return Ok(Err(why)),
    };
    let Searched { master_weights, job, result } = searched;
    let half = planning::trains_half(config, format.kind).then_some((master_weights, format.kind));
    let mut evaluation = None;
    if let Some(chosen) = result.chosen() {
        for &(rows, batch) in &data.evaluations {
            let peak = job.evaluation(&chosen.placement, batch)?;
            let fits = peak.total <= budget.tensors();
            evaluation = Some((rows, peak));
            if fits {
                break;
            }
        }
    }
    Ok(Ok((Prediction { job, result, data: data.clone(), is_timed, evaluation }, half)))
}

/// Searches at the rates of this machine, which are measured where that is worth its time, or else at nominal ones; returns whether they are
/// this machine's. Ranks take those of the first.
fn at_known_rates(
    common: &Common,
    planned: &PlannedTraining<'_>,
    budget: Budget,
    with: &dyn Fn(&KnownRates) -> Result<Searched, NotPredicted>,
) -> anyhow::Result<Result<(Searched, bool), NotPredicted>> {
    let PlannedTraining { format, device, steps, .. } = *planned;
    let sharing = common.ranks.as_ref().map_or(1, |ranks| ranks.sharing(device));
    let agreed = |own: Option<KnownRates>| match &common.ranks {
        Some(ranks) => ranks.rates_of_first(own),
        None => Ok(own),
    };
    let kept = agreed(KnownRates::kept(device, format.kind, sharing))?;
    let rates = match kept {
        Some(rates) => rates,
        None => KnownRates::nominal(device)?.divided(sharing),
    };
    let searched = match with(&rates) {
        Ok(searched) => searched,
        Err(why) => return Ok(Err(why)),
    };
    let seconds = searched.result.chosen().map_or(0.0, |chosen| chosen.seconds * steps as f64);
    // On a CPU measuring takes memory of the budget.
    let has_room = device != Device::Cpu || budget.tensors() >= MEASURING;
    if kept.is_some() || seconds <= WORTH_MEASURING || !has_room {
        return Ok(Ok((searched, kept.is_some())));
    }
    let measured = agreed(Some(KnownRates::measure(device, format.kind, sharing)?))?.unwrap_or(rates);
    Ok(with(&measured).map(|searched| (searched, true)))
}

/// The same decision for a step that is not predicted, by what weights, gradients, state and master weights take of `bytes`.
fn unpredicted(
    config: &Config,
    planned: &PlannedTraining<'_>,
    common: &Common,
    bytes: Option<u64>,
) -> Option<(MasterWeights, Kind)> {
    let ranks = common.ranks.as_ref().map_or(1, |ranks| ranks.mesh.world().size() / ranks.mesh.replicas());
    let fits = || match (planned.shape, bytes) {
        (Some(shape), Some(bytes)) => planning::states_fit(config, shape, ranks, bytes),
        _ => true,
    };
    let way = match config.optimizer.master_weights {
        MasterWeights::Auto if fits() => MasterWeights::Always,
        MasterWeights::Auto => MasterWeights::Stochastic,
        way => way,
    };
    let kind = planned.format.kind;
    planning::trains_half(config, kind).then_some((way, kind))
}

/// How trained weights of 16 bits take small updates.
fn half_text(way: MasterWeights, kind: Kind) -> String {
    let name = if kind == Kind::Half { "float16" } else { "bfloat16" };
    match way {
        MasterWeights::Auto | MasterWeights::Always => {
            format!("the {name} weights are trained with fp32 master weights, 4 bytes for each weight")
        }
        MasterWeights::Stochastic => format!(
            "the {name} weights are rounded stochastically, without fp32 master weights, which would take 4 bytes more for each weight"
        ),
        MasterWeights::Never => format!(
            "optimizer.master_weights = false: the {name} weights lose updates smaller than their last digit, which are most of a \
             fine-tuning's; \"auto\" loses none"
        ),
    }
}
