//! How the run of an experiment ended.

use serde::{Deserialize, Serialize};

/// An experiment or comparison, and how its run ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunOutcome {
    /// The name that its crate registers.
    pub experiment: String,
    /// How it ended.
    #[serde(flatten)]
    pub state: RunState,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum RunState {
    /// It did all its work.
    Done {
        /// Wall-clock seconds.
        seconds: f64,
    },
    /// It broke off. The records that it left before are shown.
    Failed {
        /// Its last words.
        message: String,
    },
    /// It did not start.
    Skipped {
        /// Why.
        why: String,
    },
}

impl RunState {
    /// `done`, `failed` or `skipped`.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Done { .. } => "done",
            Self::Failed { .. } => "failed",
            Self::Skipped { .. } => "skipped",
        }
    }

    /// The time it took, or why it did not end well.
    pub fn detail(&self) -> String {
        match self {
            Self::Done { seconds } if *seconds < 60.0 => format!("{seconds:.1} s"),
            Self::Done { seconds } => {
                format!("{:.0} min {:02.0} s", (seconds / 60.0).floor(), seconds % 60.0)
            }
            Self::Failed { message } => message.clone(),
            Self::Skipped { why } => why.clone(),
        }
    }
}
