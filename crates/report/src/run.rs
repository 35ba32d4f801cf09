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
    /// It completed.
    Done {
        /// Wall-clock seconds.
        seconds: f64,
    },
    /// It failed. The records of the run before are shown.
    Failed {
        /// Its error message.
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

    /// Returns its duration, or why it failed or was skipped.
    pub fn detail(&self) -> String {
        match self {
            Self::Done { seconds } if *seconds < 59.95 => format!("{seconds:.1} s"),
            Self::Done { seconds } => {
                // Rounded first: 119.7 s is 2 min 00 s, not 1 min 60 s.
                let rounded = seconds.round();
                format!("{:.0} min {:02.0} s", (rounded / 60.0).floor(), rounded % 60.0)
            }
            Self::Failed { message } => message.clone(),
            Self::Skipped { why } => why.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outcome_is_one_flat_object() {
        for (text, detail) in [
            (r#"{"experiment":"e","state":"done","seconds":61.0}"#, "1 min 01 s"),
            (r#"{"experiment":"e","state":"failed","message":"killed"}"#, "killed"),
            (r#"{"experiment":"e","state":"skipped","why":"no GPU"}"#, "no GPU"),
        ] {
            let outcome: RunOutcome = serde_json::from_str(text).unwrap();
            assert_eq!(outcome.state.detail(), detail);
            assert_eq!(serde_json::to_string(&outcome).unwrap(), text);
        }
    }

    #[test]
    fn seconds_never_round_up_to_sixty() {
        let detail = |seconds| RunState::Done { seconds }.detail();
        assert_eq!(detail(59.96), "1 min 00 s");
        assert_eq!(detail(119.7), "2 min 00 s");
        assert_eq!(detail(0.04), "0.0 s");
    }
}
