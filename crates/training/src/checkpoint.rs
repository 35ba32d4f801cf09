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
//!
//! Tensors are brought and written one after another, in pieces of up to [`PIECE_BYTES`](models::tensors_file::PIECE_BYTES), whatever
//! holds them: memory, a device, or other ranks. All ranks know names, dtypes and shapes, so rank 0 writes the header first, and each
//! piece as soon as it has received the parts of its owners. If rank 0 cannot write, it goes on receiving, so that no rank waits for it.
//! Reading maps the tensors' files: what a rank does not copy takes no memory.

mod folder;
mod manifest;
mod overwrite;
mod snapshot;

pub(crate) use folder::save_error;
pub use folder::{Checkpoint, Checkpoints, Found, Saved, is_in_use, latest, newest_state, steps};
pub use models::tensors_file::LazyTensor;
pub(crate) use overwrite::matched;
pub use overwrite::overwrite;
pub use snapshot::Snapshot;
