//! Ranks compare what they must have in common before the first transfer.

use std::time::Duration;

use super::Store;
use super::failure::named;
use super::group::Group;
use super::operation_log::Progress;
use super::work::{Deadline, Operation};
use crate::error::Result;

const AGREED: &[u8] = b"";

impl Group {
    /// Compares named values over all ranks: options, a hash of the model, versions. To be called before the first transfer, because
    /// ranks that disagree would wait for each other.
    ///
    /// # Errors
    /// On every rank: the first field that differs, with both ranks' values, or the ranks that did not come in time. The group is dead
    /// then.
    ///
    /// ```
    /// use runtime::collectives::Group;
    ///
    /// Group::alone().agree(&[("layers", "12"), ("torch", runtime::torch_version())])?;
    /// # Ok::<(), runtime::Error>(())
    /// ```
    pub fn agree(&self, fields: &[(&str, &str)]) -> Result<()> {
        self.meet("agree", "fields", fields)
    }

    /// Waits at the store until all ranks have come, and compares their fields.
    pub(super) fn meet(&self, name: &'static str, label: &str, fields: &[(&str, &str)]) -> Result<()> {
        let operation = self.begin(name, label, 0)?;
        // The launcher of another machine does not end this rank when one of its own has ended; the store does not tell either.
        if !self.machines().is_empty() && !self.is_over_nccl() {
            self.arrive(&operation)?;
        }
        if let Some(store) = self.store().filter(|_| self.size() > 1) {
            let prefix = format!("{}/agreement/{}", self.prefix(), self.next_agreement());
            let verdict = if self.rank() == 0 {
                let verdict = self.judge(store, &prefix, fields);
                let told = store.set(&prefix, verdict.as_bytes());
                told.map_err(|cause| self.fail(&operation, None, &cause))?;
                verdict
            } else {
                self.bring(store, &prefix, fields, &operation)?
            };
            if verdict.as_bytes() != AGREED {
                return Err(self.fail(&operation, None, &verdict));
            }
        }
        self.log(&operation, Progress::Done);
        Ok(())
    }

    /// Compares all ranks' fields with those of rank 0. Returns the first difference.
    fn judge(&self, store: &Store, prefix: &str, fields: &[(&str, &str)]) -> String {
        let deadline = Deadline::after(self.timeout());
        let mut absent = Vec::new();
        for rank in 1..self.size() {
            let Ok(theirs) = store.get(&format!("{prefix}/{rank}"), deadline.remaining()) else {
                absent.push(rank);
                continue;
            };
            if let Some(difference) = difference(fields, &decode(&theirs), rank) {
                return difference;
            }
        }
        if absent.is_empty() {
            return String::new();
        }
        let machines = self.machines();
        let ranks: Vec<String> = absent.iter().map(|rank| named(&machines, *rank)).collect();
        format!("{} did not come within {:?}", ranks.join(", "), self.timeout())
    }

    /// Brings this rank's fields to rank 0, and returns its verdict.
    fn bring(
        &self,
        store: &Store,
        prefix: &str,
        fields: &[(&str, &str)],
        operation: &Operation,
    ) -> Result<String> {
        let own = format!("{prefix}/{}", self.rank());
        // Rank 0 may come as late as the timeout allows, and then waits for others.
        let patience = self.timeout() + Duration::from_millis(500);
        let verdict = store.set(&own, &encode(fields)).and_then(|()| store.get(prefix, patience));
        let verdict = verdict.map_err(|cause| self.fail(operation, Some(0), &cause))?;
        Ok(String::from_utf8_lossy(&verdict).into_owned())
    }
}

fn difference(ours: &[(&str, &str)], theirs: &[(String, String)], rank: usize) -> Option<String> {
    for (index, (name, value)) in ours.iter().enumerate() {
        match theirs.get(index) {
            Some((other, _)) if other != name => {
                return Some(format!("field {index} is `{name}` on rank 0 and `{other}` on rank {rank}"));
            }
            Some((_, other)) if other != value => {
                return Some(format!("`{name}` is {value} on rank 0 and {other} on rank {rank}"));
            }
            Some(_) => {}
            None => return Some(format!("`{name}` is {value} on rank 0 and missing on rank {rank}")),
        }
    }
    let (name, value) = theirs.get(ours.len())?;
    Some(format!("`{name}` is missing on rank 0 and {value} on rank {rank}"))
}

/// Each text behind its length.
fn encode(fields: &[(&str, &str)]) -> Vec<u8> {
    let texts = fields.iter().flat_map(|(name, value)| [name, value]);
    texts.flat_map(|text| (text.len() as u64).to_le_bytes().into_iter().chain(text.bytes())).collect()
}

/// Decodes the output of [`encode`]; of other bytes, as much as is readable.
fn decode(mut bytes: &[u8]) -> Vec<(String, String)> {
    let mut text = || {
        let (length, rest) = bytes.split_first_chunk::<8>()?;
        let (text, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
        bytes = rest;
        Some(String::from_utf8_lossy(text).into_owned())
    };
    std::iter::from_fn(|| Some((text()?, text()?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_field_that_differs_is_named() {
        let check = |ours: &[(&str, &str)], theirs: &[(&str, &str)], expected: Option<&str>| {
            assert_eq!(difference(ours, &decode(&encode(theirs)), 2).as_deref(), expected);
        };
        let ours = [("layers", "12"), ("torch", "2.13.0")];
        check(&ours, &ours, None);
        check(&[], &[], None);
        check(&ours, &[("layers", "14"), ("torch", "")], Some("`layers` is 12 on rank 0 and 14 on rank 2"));
        check(
            &ours,
            &[("layers", "12"), ("model", "x")],
            Some("field 1 is `torch` on rank 0 and `model` on rank 2"),
        );
        check(&ours, &ours[..1], Some("`torch` is 2.13.0 on rank 0 and missing on rank 2"));
        check(&ours[..1], &ours, Some("`torch` is missing on rank 0 and 2.13.0 on rank 2"));
    }

    #[test]
    fn bytes_that_are_no_fields_give_none() {
        assert_eq!(decode(&[1, 2, 3]), []);
        assert_eq!(decode(&u64::MAX.to_le_bytes()), []);
    }
}
