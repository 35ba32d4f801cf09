//! A loader as a source of batches.

use std::sync::Arc;

use dataloading::loader::{Loader, LoaderConfig, LoaderState, LoaderStats};
use dataloading::{Batch, BatchSource};
use serde_json::Value;

use crate::batches::Batches;
use crate::error::{Error, Result};

/// Batches from a [`Loader`], which prepares them in advance.
#[derive(Debug)]
pub struct LoaderBatches {
    source: Source,
    options: LoaderConfig,
    loader: Loader,
}

struct Source(Arc<dyn BatchSource>);

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("BatchSource")
    }
}

impl LoaderBatches {
    /// Starts at the first batch.
    ///
    /// # Errors
    /// Errors of [`Loader::new`].
    pub fn new(source: Arc<dyn BatchSource>, options: &LoaderConfig) -> Result<Self> {
        let loader = Loader::new(source.clone(), options)?;
        Ok(Self { source: Source(source), options: *options, loader })
    }

    /// Returns the loader's statistics.
    pub fn stats(&self) -> LoaderStats {
        self.loader.stats()
    }
}

impl Batches for LoaderBatches {
    fn next(&mut self) -> Result<Option<Batch>> {
        Ok(self.loader.next().transpose()?)
    }

    fn state(&self) -> Value {
        serde_json::to_value(self.loader.state()).unwrap_or_default()
    }

    fn resume(&mut self, state: &Value) -> Result<()> {
        let state: LoaderState = serde_json::from_value(state.clone()).map_err(|cause| {
            Error::config(
                "data position",
                format!("{state} is not a loader's position ({cause}); resume with the same data"),
            )
        })?;
        self.loader = Loader::resume(self.source.0.clone(), &self.options, &state)?;
        Ok(())
    }
}
