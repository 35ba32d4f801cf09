//! The experts of one layer as the source of its mixture.

use std::collections::VecDeque;
use std::sync::Arc;

use models::{ExpertLoads, ExpertSource};
use runtime::Result;
use tch::Tensor;

use super::cache::{Cache, Key};

/// The experts of a layer.
#[derive(Debug)]
pub(super) struct Streamed {
    cache: Arc<Cache>,
    layer: usize,
}

impl Streamed {
    pub(super) fn new(cache: Arc<Cache>, layer: usize) -> Self {
        Self { cache, layer }
    }
}

impl ExpertSource for Streamed {
    fn load(&self, experts: &[usize]) -> Result<Box<dyn ExpertLoads>> {
        let (pass, left) = self.cache.begin(self.layer, experts)?;
        Ok(Box::new(Loads { cache: self.cache.clone(), pass, left, current: None }))
    }
}

/// The experts of a pass: those that were in slots, then the others as they are read.
struct Loads {
    cache: Arc<Cache>,
    pass: u64,
    left: VecDeque<(usize, Key)>,
    current: Option<Key>,
}

impl Loads {
    fn release(&mut self) {
        if let Some(key) = self.current.take() {
            self.cache.release(self.pass, key);
        }
    }
}

impl ExpertLoads for Loads {
    fn next(&mut self) -> Result<Option<(usize, [Tensor; 3])>> {
        self.release();
        let Some(&(number, key)) = self.left.front() else { return Ok(None) };
        let matrices = self.cache.wait(self.pass, key)?;
        self.left.pop_front();
        self.current = Some(key);
        Ok(Some((number, matrices)))
    }
}

impl Drop for Loads {
    fn drop(&mut self) {
        self.release();
        self.cache.cancel(self.pass, self.left.drain(..).map(|(_, key)| key));
    }
}
