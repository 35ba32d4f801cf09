//! The share of time in which a training advances although GPUs fail.

/// Failures of a run and their costs, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Failures {
    /// Mean time between failures of a GPU, with the devices that belong to it.
    pub gpu_mtbf: f64,
    /// Writing a checkpoint, during which the training waits.
    pub save: f64,
    /// From a failure to the first step after it.
    pub restart: f64,
}

impl Failures {
    /// Returns the mean time between failures of a run.
    pub fn mtbf(&self, gpus: u64) -> f64 {
        self.gpu_mtbf / gpus.max(1) as f64
    }

    /// Returns the time between checkpoints that loses the least (Young's).
    pub fn checkpoint_interval(&self, gpus: u64) -> f64 {
        (2.0 * self.save * self.mtbf(gpus)).sqrt()
    }

    /// Returns the share of time in which the training advances: 1 without writing checkpoints, computing again what was lost, and
    /// restarts. 0 if they take all of it.
    pub fn effective(&self, gpus: u64) -> f64 {
        let (mtbf, interval) = (self.mtbf(gpus), self.checkpoint_interval(gpus));
        (1.0 - self.save / interval - (interval / 2.0 + self.restart) / mtbf).max(0.0)
    }
}
