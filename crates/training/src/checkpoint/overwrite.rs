//! Overwriting named tensors.

use std::collections::BTreeMap;

use tch::Tensor;

use crate::error::{Error, Result};

/// Copies tensors into those with the same names, on any device.
///
/// # Errors
/// All names that are missing, unknown, or of another shape or dtype; then nothing is changed.
pub fn overwrite<'a>(
    targets: impl IntoIterator<Item = (String, &'a Tensor)>,
    tensors: &[(String, Tensor)],
    from: &str,
) -> Result<()> {
    put(&matched(targets, tensors, from)?)
}

/// Pairs each target with its new value, without changing anything: the first half of [`overwrite`].
pub(crate) fn matched<'a, 'b>(
    targets: impl IntoIterator<Item = (String, &'a Tensor)>,
    tensors: &'b [(String, Tensor)],
    from: &str,
) -> Result<Vec<(&'a Tensor, &'b Tensor)>> {
    let mut given: BTreeMap<&str, &Tensor> =
        tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let (mut missing, mut mismatched, mut pairs) = (Vec::new(), Vec::new(), Vec::new());
    for (name, target) in targets {
        match given.remove(name.as_str()) {
            None => missing.push(name),
            Some(tensor) if tensor.size() != target.size() || tensor.kind() != target.kind() => {
                let described = |tensor: &Tensor| format!("{:?} {:?}", tensor.kind(), tensor.size());
                mismatched.push(format!("{name} ({}, expected {})", described(tensor), described(target)));
            }
            Some(tensor) => pairs.push((target, tensor)),
        }
    }
    let unexpected: Vec<String> = given.into_keys().map(str::to_owned).collect();
    if !(missing.is_empty() && unexpected.is_empty() && mismatched.is_empty()) {
        return Err(Error::state(from, "the model", &missing, &unexpected, &mismatched));
    }
    Ok(pairs)
}

/// Copies the values: the second half of [`overwrite`].
fn put(pairs: &[(&Tensor, &Tensor)]) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    for (target, tensor) in pairs {
        target.f_detach()?.f_copy_(tensor)?;
    }
    Ok(())
}
