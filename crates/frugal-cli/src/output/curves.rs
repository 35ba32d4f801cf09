//! The curves of a training while it runs: TensorBoard's event file and the page.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use training::evaluation::Evaluation;
use training::observer::{Observer, StepRecord};

use frugal::run_folder::State;
use frugal::run_folder::event_file::EventFile;

use super::run_page;

/// The least time between two pages.
const PAUSE: Duration = Duration::from_secs(10);
/// The least ratio of that time to the time that a page takes.
const RATIO: u32 = 50;

/// Appends to an event file, and rewrites the page at most every ten seconds. The loss log has to be before it among the observers,
/// because the page is made of it.
#[derive(Debug)]
pub(crate) struct Curves {
    folder: PathBuf,
    events: Option<EventFile>,
    /// Completed steps at the start.
    start: u64,
    /// When the next page is due.
    due: Instant,
}

impl Curves {
    /// Creates an observer of the training in an output folder. The event file is created by the first step.
    pub(crate) fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), events: None, start: 0, due: Instant::now() }
    }

    fn scalars(&mut self, step: u64, values: &[(&str, f64)]) -> training::Result<()> {
        let io = |cause| training::Error::io(&self.folder, cause);
        let events = match &mut self.events {
            Some(events) => events,
            None => self.events.insert(EventFile::create(&self.folder, self.start).map_err(io)?),
        };
        events.scalars(step, values).map_err(|cause| training::Error::io(events.path(), cause))
    }

    /// Writes the page if it is due. A page that cannot be written does not end the training.
    fn refresh(&mut self) {
        let now = Instant::now();
        if now >= self.due {
            let _ = run_page::write(&self.folder, Some(State::Running));
            self.due = now + PAUSE.max(now.elapsed() * RATIO);
        }
    }
}

impl Observer for Curves {
    fn on_step(&mut self, record: &StepRecord) -> training::Result<()> {
        let seconds = record.timings.total.max(1e-9);
        let mut values = vec![
            ("train/loss", record.loss),
            ("train/learning_rate", record.learning_rate),
            ("train/tokens_per_second", record.tokens as f64 / seconds),
        ];
        values.extend(record.gradient_norm.map(|norm| ("train/gradient_norm", norm)));
        values.extend(record.router_aux_loss.map(|aux| ("train/router_aux_loss", aux)));
        if let Some([chosen, rejected]) = record.rewards {
            let margin = ("rewards/margin", chosen - rejected);
            let rewards = [("rewards/chosen", chosen), ("rewards/rejected", rejected), margin];
            // A step may have answers of one kind alone.
            values.extend(rewards.into_iter().filter(|(_, reward)| reward.is_finite()));
            values.extend(record.reference_point.map(|point| ("rewards/reference_point", point)));
            values.extend(record.accuracy.map(|accuracy| ("rewards/accuracy", accuracy)));
        }
        if let Some(own) = record.distilled {
            values.extend([
                ("distillation/teacher_divergence", own.divergence),
                ("distillation/cross_entropy", own.cross_entropy),
            ]);
        }
        if let Some(policy) = record.policy {
            let rollout = policy.rollout;
            values.extend([
                ("rewards/mean", rollout.reward),
                ("rewards/deviation", rollout.reward_deviation),
                ("rewards/equal_groups", rollout.equal_groups),
                ("rollout/answer_tokens", rollout.length),
                ("rollout/cut_answers", rollout.cut),
                ("rollout/divergence", policy.divergence),
                ("rollout/clipped", policy.clipped),
            ]);
        }
        self.scalars(record.step, &values)?;
        self.refresh();
        Ok(())
    }

    fn on_evaluation(&mut self, evaluation: &Evaluation) -> training::Result<()> {
        let mut values = match evaluation.reward {
            Some(reward) => vec![("validation/reward", reward)],
            None => vec![("validation/loss", evaluation.loss), ("validation/accuracy", evaluation.accuracy)],
        };
        if let Some(own) = evaluation.distilled {
            values.extend([
                ("validation/teacher_divergence", own.divergence),
                ("validation/cross_entropy", own.cross_entropy),
            ]);
        }
        self.scalars(evaluation.step, &values)
    }

    fn on_resume(&mut self, step: u64) -> training::Result<()> {
        self.start = step;
        Ok(())
    }
}
