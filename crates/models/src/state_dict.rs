//! Reading and writing a module's state.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use tch::Tensor;

use crate::error::{Error, Result, listed};
use crate::module::{Module, tensors};
use crate::tensors_file;

/// Returns every tensor of the state with its name, in order, sharing memory with the module. A shared tensor is listed once.
pub fn state_dict(module: &(impl Module + ?Sized)) -> Vec<(String, Tensor)> {
    tensors(module).into_iter().map(|named| (named.name, named.tensor.detach())).collect()
}

/// Copies values into the module's tensors, converting dtype and device. If anything does not match, nothing is copied.
///
/// `from` names the values in errors, for example a path.
///
/// # Errors
/// All names that are missing, unexpected, or of another shape.
pub fn load_state_dict(
    module: &(impl Module + ?Sized),
    state: &[(String, Tensor)],
    from: &str,
) -> Result<()> {
    let given: BTreeMap<&str, &Tensor> = state.iter().map(|(name, tensor)| (&**name, tensor)).collect();
    let targets = tensors(module);
    let shapes: Vec<_> = targets.iter().map(|named| (named.name.clone(), named.tensor.size())).collect();
    check_fit(&shapes, &given.iter().map(|(name, tensor)| (*name, tensor.size())).collect(), from)?;
    let _no_grad = tch::no_grad_guard();
    for named in targets {
        named.tensor.shallow_clone().f_copy_(given[&*named.name])?;
    }
    Ok(())
}

/// Compares the names and shapes of a state with a model's.
pub(crate) fn check_fit(
    targets: &[(String, Vec<i64>)],
    given: &BTreeMap<&str, Vec<i64>>,
    from: &str,
) -> Result<()> {
    let names: BTreeSet<&str> = targets.iter().map(|(name, _)| &**name).collect();
    let (mut missing, mut mismatched) = (Vec::new(), Vec::new());
    for (name, shape) in targets {
        match given.get(&**name) {
            None => missing.push(name.clone()),
            Some(other) if other != shape => {
                mismatched.push(format!("{name} {other:?} (expected {shape:?})"));
            }
            Some(_) => {}
        }
    }
    let unexpected: Vec<String> =
        given.keys().filter(|name| !names.contains(*name)).map(|name| (*name).to_owned()).collect();
    if missing.is_empty() && unexpected.is_empty() && mismatched.is_empty() {
        return Ok(());
    }
    let names = listed([
        ("missing", &missing[..]),
        ("unexpected", &unexpected[..]),
        ("of another shape", &mismatched[..]),
    ]);
    Err(Error::Invalid(format!("{from} does not fit the model: {names}")))
}

/// Writes a module's state as safetensors, atomically.
///
/// # Errors
/// Errors of [`tensors_file::write`].
pub fn save(module: &(impl Module + ?Sized), path: &Path) -> Result<()> {
    tensors_file::write(path, &state_dict(module))
}

/// Reads a module's state from safetensors.
///
/// # Errors
/// Errors of [`tensors_file::read`] and of [`load_state_dict`].
pub fn load(module: &(impl Module + ?Sized), path: &Path) -> Result<()> {
    let state = tensors_file::read(path, tch::Device::Cpu)?;
    load_state_dict(module, &state, &path.display().to_string())
}
