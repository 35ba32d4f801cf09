//! Crash-safe checkpoints.
//!
//! A [`Checkpoints`] folder holds one folder for each checkpoint, `step-000000001200`, with
//!
//! | file | contents |
//! |---|---|
//! | `model.safetensors` | every tensor of the model's state, by name; without frozen ones if the training leaves them out ([`Frozen`](crate::trainer::Frozen)) |
//! | `optimizer.safetensors` | the optimizer's state: `NAME.step`, `NAME.SLOT` |
//! | `random.bin` | the state of the random generators |
//! | `state.json` | model, settings, scaler, losses seen, position in the data |
//! | `manifest.json` | format version, step, and size and SHA-256 of each file above |
//! | `manifest.sha256` | SHA-256 of the manifest, as `sha256sum -c` reads it |
//!
//! A checkpoint is written under a temporary name: each file and then the folder is synced, and the folder is renamed at the
//! end. So a folder under its final name is complete, whenever the process or the machine stops. Opening the folder again
//! removes temporary ones. The last N checkpoints are kept; while one is written there are N + 1. One process at a time writes:
//! it holds a lock until it ends. [`latest`] and [`steps`] read a folder without writing.

mod folder;
mod manifest;
mod overwrite;

pub use folder::{Checkpoint, Checkpoints, Found, Saved, Snapshot, latest, newest_state, steps};
pub(crate) use overwrite::matched;
pub use overwrite::overwrite;
