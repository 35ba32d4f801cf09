//! Why one rank could not save, told to the others.

use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::Trainer;
use crate::checkpoint::{Saved, save_error};
use crate::error::{Error, Result};

/// An error that was not this rank's.
#[derive(Debug, Serialize, Deserialize)]
struct FailedSave {
    /// The error in words, or its cause if a file is known.
    text: String,
    /// The step and the file of [`Error::Save`], and whether there is an earlier checkpoint.
    save: Option<(u64, PathBuf, bool)>,
    /// The operating system's number of the cause.
    number: Option<i32>,
}

impl FailedSave {
    fn of(error: &Error) -> Self {
        match error {
            Error::Save { step, path, cause, has_earlier, .. } => Self {
                text: cause.to_string(),
                save: Some((*step, path.clone(), *has_earlier)),
                number: cause.raw_os_error(),
            },
            other => Self { text: other.to_string(), save: None, number: None },
        }
    }

    fn into_error(self, rank: usize) -> Error {
        let Self { text, save, number } = self;
        match save {
            Some((step, path, has_earlier)) => {
                let cause = number.map_or_else(|| io::Error::other(text), io::Error::from_raw_os_error);
                save_error(step, path, cause, has_earlier)
            }
            None => runtime::Error::Other(format!("rank {rank}: {text}").into()).into(),
        }
    }
}

impl Trainer {
    /// Returns the error of a rank that could not save, on every rank; otherwise this rank's own result.
    pub(super) fn outcome_of_all(&self, own: Result<Option<Saved>>) -> Result<Option<Saved>> {
        let ranks = match (self.optimizer.ranks(), &own) {
            // Its group is dead, as the others find out.
            (_, Err(Error::Runtime(runtime::Error::Collective(_)))) | (None, _) => return own,
            (Some(ranks), _) => ranks,
        };
        let text = own.as_ref().err().map(|error| serde_json::to_string(&FailedSave::of(error)));
        let text = text.transpose().map_err(|cause| Error::config("checkpoint", cause.to_string()))?;
        match (own, ranks.all().first_failure(text.as_deref(), "checkpoint")?) {
            (Ok(_), Some((rank, text))) => {
                let other = FailedSave { text: text.clone(), save: None, number: None };
                Err(serde_json::from_str(&text).unwrap_or(other).into_error(rank))
            }
            (own, _) => own,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_reads_alike_on_every_rank() {
        let check = |error: Error, expected: &str| {
            let text = serde_json::to_string(&FailedSave::of(&error)).unwrap();
            let received: FailedSave = serde_json::from_str(&text).unwrap();
            let received = received.into_error(3);
            assert_eq!(received.to_string(), expected);
            assert_eq!(matches!(received, Error::Save { .. }), matches!(error, Error::Save { .. }));
        };
        let full = save_error(7, "/checkpoints/new".into(), io::Error::from_raw_os_error(28), true);
        let text = full.to_string();
        assert!(text.contains("No space left on device") && text.contains("free space"), "{text}");
        check(full, &text);
        let refused = save_error(7, "/checkpoints/new".into(), io::Error::other("a dtype"), false);
        let text = refused.to_string();
        assert!(text.ends_with("; there is no earlier one"), "{text}");
        check(refused, &text);
        check(Error::config("checkpoints", "no folder"), "rank 3: checkpoints: no folder");
    }
}
