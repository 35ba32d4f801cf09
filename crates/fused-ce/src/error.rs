//! Messages of the loss. The type is the runtime's.

use std::fmt::Display;

pub use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

/// An invalid argument, or options that exclude each other.
pub(crate) fn refused(reason: impl Display) -> Error {
    Error::invalid("linear cross-entropy", reason)
}

/// A tensor with an unexpected shape.
pub(crate) fn shape(name: &str, tensor: &Tensor, expected: impl Display) -> Error {
    refused(format!("`{name}` has shape {:?}; expected {expected}", tensor.size()))
}

/// A tensor with an unexpected dtype.
pub(crate) fn dtype(name: &str, kind: Kind, expected: impl Display) -> Error {
    refused(format!("`{name}` is {kind:?}; expected {expected}; convert it with `to_kind`"))
}

/// A tensor on another device than the hidden states.
pub(crate) fn device(name: &str, device: Device, hidden: Device) -> Error {
    refused(format!("`{name}` is on {device:?} and `hidden` on {hidden:?}; move one with `to_device`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    // Without a second device, a call does not reach it.
    #[test]
    fn another_device_is_named() {
        expect_test::expect![
            "linear cross-entropy: `weight` is on Cuda(1) and `hidden` on Cpu; move one with `to_device`"
        ]
        .assert_eq(&device("weight", Device::Cuda(1), Device::Cpu).to_string());
    }
}
