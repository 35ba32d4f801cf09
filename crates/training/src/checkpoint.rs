//! Checkpoints that survive a crash.
//!
//! A [`Checkpoints`] folder holds one folder for each checkpoint, `step-000000001200`, with
//!
//! | file | what |
//! |---|---|
//! | `model.safetensors` | every tensor of the model's state, by name; without those that are not trained, where the training leaves them out ([`Frozen`](crate::trainer::Frozen)) |
//! | `optimizer.safetensors` | the optimizer's state: `NAME.step`, `NAME.SLOT` |
//! | `random.bin` | where the random generators stood |
//! | `state.json` | model and settings in words, scaler, losses seen, position in the data |
//! | `manifest.json` | format version, step, and size and SHA-256 of each file above |
//! | `manifest.sha256` | SHA-256 of the manifest, as `sha256sum -c` reads it |
//!
//! It is written under a temporary name, each file and then the folder synced, and renamed when all is on disk: under its own
//! name it is whole, whenever the process or the machine stops. What a crash leaves under temporary names is removed when
//! the folder is opened again. The last N are kept; while one is written there are N + 1. One process at a time writes: it
//! holds a lock, which ends with it. [`latest`] and [`steps`] read a folder without writing to it.

mod folder;
mod manifest;
mod overwrite;

pub use folder::{Checkpoint, Checkpoints, Found, Saved, Snapshot, latest, steps};
pub use overwrite::overwrite;
pub(crate) use overwrite::{matched, put};
