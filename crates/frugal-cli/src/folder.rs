//! The folders and files that commands read and write: a run's output, an exported model; and their removal when a signal ends a command.

pub(crate) mod best_weights;
pub(crate) mod model_folder;
pub(crate) mod offload_folder;
pub(crate) mod open;
pub(crate) mod output_file;
pub(crate) mod output_folder;
pub(crate) mod run_model;
pub(crate) mod run_record;
pub(crate) mod signals;
pub(crate) mod vocabulary;
