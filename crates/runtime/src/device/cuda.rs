//! Detection of CUDA, and the reason if it is unavailable.
//!
//! libtorch's CUDA part is a library of its own, `libtorch_cuda`, which a linker drops from a program that uses none of its
//! symbols. The shim opens it before `main` on a machine with an NVIDIA driver, because libtorch checks only once whether CUDA
//! exists; this module opens it again, for the loader's reason if that failed. A CPU install may contain a `libtorch_cuda` without
//! its dependencies, so it is opened only if a driver is visible or CUDA is requested by name.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use crate::error::{Error, Result};
use crate::sys::device as sys;

/// The result of looking for CUDA.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Cuda {
    /// CUDA works.
    Ready { devices: usize },
    /// libtorch has no CUDA library.
    NoLibrary { folder: PathBuf, driver: bool },
    /// libtorch's CUDA library does not load.
    CannotLoad { library: PathBuf, reason: String, driver: bool },
    /// It loads but sees no device.
    NoDevice { driver: bool },
    /// It loads and sees devices, but libtorch had already decided that there is no CUDA.
    TooLate,
}

/// Found once per process, when it is first needed.
static CUDA: Mutex<Option<Cuda>> = Mutex::new(None);

/// Returns the number of CUDA devices. Does not look for CUDA on a machine without a driver.
pub(super) fn count() -> Result<usize> {
    let mut cuda = CUDA.lock().unwrap_or_else(PoisonError::into_inner);
    if cuda.is_none() && !sys::driver_visible() {
        return Ok(0);
    }
    match found(&mut cuda)? {
        Cuda::Ready { devices } => Ok(*devices),
        _ => Ok(0),
    }
}

/// Returns why no GPU can be used, in a few words; `None` if one can. Does not look for CUDA on a machine without a driver.
pub(super) fn unusable() -> Result<Option<String>> {
    let mut cuda = CUDA.lock().unwrap_or_else(PoisonError::into_inner);
    if cuda.is_none() && !sys::driver_visible() {
        return Ok(Some(WITHOUT_DRIVER.to_owned()));
    }
    Ok(match found(&mut cuda)? {
        Cuda::Ready { .. } => None,
        Cuda::NoLibrary { driver: false, .. }
        | Cuda::CannotLoad { driver: false, .. }
        | Cuda::NoDevice { driver: false } => Some(WITHOUT_DRIVER.to_owned()),
        Cuda::NoLibrary { .. } => Some(format!("this libtorch has no CUDA; {INSTALL}")),
        Cuda::CannotLoad { reason, .. } => {
            Some(format!("libtorch's CUDA library cannot be loaded: {reason}"))
        }
        Cuda::NoDevice { .. } => Some("the NVIDIA driver shows no usable GPU".to_owned()),
        Cuda::TooLate => Some("CUDA was looked for too late".to_owned()),
    })
}

/// How a libtorch with CUDA is got, in an environment of Python and in a checkout.
const INSTALL: &str = "install one that has (`pip install torch` from the Python Package Index; in a checkout, `cargo \
                       xtask setup --cuda`)";

const WITHOUT_DRIVER: &str = "no CUDA device is usable: no NVIDIA driver is visible";

/// Fails with the remedy unless CUDA device `index` exists.
pub(super) fn require(index: usize) -> Result<()> {
    let mut cuda = CUDA.lock().unwrap_or_else(PoisonError::into_inner);
    require_in(found(&mut cuda)?, index)
}

fn found(cuda: &mut Option<Cuda>) -> Result<&Cuda> {
    if cuda.is_none() {
        *cuda = Some(look()?);
    }
    Ok(cuda.as_ref().unwrap_or(&Cuda::NoDevice { driver: false }))
}

fn look() -> Result<Cuda> {
    let driver = sys::driver_visible();
    // A program that was linked to the CUDA library has loaded it already.
    if sys::cuda_device_count()? == 0 {
        let folder = sys::libtorch_folder()?;
        let library = folder.join("libtorch_cuda.so");
        if !library.exists() {
            return Ok(Cuda::NoLibrary { folder, driver });
        }
        if let Err(reason) = sys::load_library(&library.to_string_lossy()) {
            return Ok(Cuda::CannotLoad { library, reason, driver });
        }
    }
    let devices = sys::cuda_device_count()?;
    if devices == 0 {
        return Ok(Cuda::NoDevice { driver });
    }
    Ok(if sys::cuda_initialise()? { Cuda::Ready { devices } } else { Cuda::TooLate })
}

fn require_in(cuda: &Cuda, index: usize) -> Result<()> {
    const NO_DRIVER: &str = "no NVIDIA driver is visible on this machine; run on one with an NVIDIA GPU and its driver, \
                             or use cpu";
    let reason = match cuda {
        Cuda::Ready { devices } if index < *devices => return Ok(()),
        Cuda::Ready { devices } => format!(
            "this machine has {}; choose one of them (CUDA_VISIBLE_DEVICES may hide others)",
            super::choice::list(*devices)
        ),
        // Without a driver, installing the library would not help.
        Cuda::NoLibrary { driver: false, .. } | Cuda::CannotLoad { driver: false, .. } => NO_DRIVER.into(),
        Cuda::NoDevice { driver: false } => NO_DRIVER.into(),
        Cuda::NoLibrary { folder, driver: true } => format!(
            "there is an NVIDIA driver, but this libtorch has no CUDA (no libtorch_cuda.so in {}); {INSTALL}, or use \
             cpu",
            folder.display()
        ),
        Cuda::CannotLoad { library, reason, driver: true } => format!(
            "there is an NVIDIA driver, but {} cannot be loaded: {reason}; {INSTALL}, or use cpu",
            library.display()
        ),
        Cuda::NoDevice { driver: true } => "there is an NVIDIA driver, but it shows no usable GPU; see that \
                                            CUDA_VISIBLE_DEVICES does not hide them all and that the driver is new \
                                            enough for this libtorch, or use cpu"
            .into(),
        Cuda::TooLate => "libtorch was asked for CUDA before its CUDA library was loaded, and does not ask again; call \
                          runtime::device::select before anything of tch::Cuda"
            .into(),
    };
    Err(Error::Unavailable { what: format!("cuda:{index}"), reason })
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use super::*;

    fn check(cuda: &Cuda, index: usize, expected: Expect) {
        expected.assert_eq(&require_in(cuda, index).map_or_else(|error| error.to_string(), |()| "ok".into()));
    }

    #[test]
    fn each_reason_has_its_message() {
        let folder = PathBuf::from("/torch/lib");
        let library = folder.join("libtorch_cuda.so");
        let reason = "libcusparse.so.12: cannot open shared object file".to_owned();
        check(&Cuda::Ready { devices: 2 }, 1, expect!["ok"]);
        check(
            &Cuda::Ready { devices: 2 },
            7,
            expect![
                "cuda:7 is not available here: this machine has cuda:0, cuda:1; choose one of them (CUDA_VISIBLE_DEVICES may hide others)"
            ],
        );
        check(
            &Cuda::NoLibrary { folder: folder.clone(), driver: true },
            0,
            expect![
                "cuda:0 is not available here: there is an NVIDIA driver, but this libtorch has no CUDA (no libtorch_cuda.so in /torch/lib); install one that has (`pip install torch` from the Python Package Index; in a checkout, `cargo xtask setup --cuda`), or use cpu"
            ],
        );
        let no_driver = expect![
            "cuda:0 is not available here: no NVIDIA driver is visible on this machine; run on one with an NVIDIA GPU and its driver, or use cpu"
        ];
        no_driver
            .assert_eq(&require_in(&Cuda::NoLibrary { folder, driver: false }, 0).unwrap_err().to_string());
        check(
            &Cuda::CannotLoad { library: library.clone(), reason: reason.clone(), driver: true },
            0,
            expect![
                "cuda:0 is not available here: there is an NVIDIA driver, but /torch/lib/libtorch_cuda.so cannot be loaded: libcusparse.so.12: cannot open shared object file; install one that has (`pip install torch` from the Python Package Index; in a checkout, `cargo xtask setup --cuda`), or use cpu"
            ],
        );
        let unloadable = Cuda::CannotLoad { library, reason, driver: false };
        no_driver.assert_eq(&require_in(&unloadable, 0).unwrap_err().to_string());
        no_driver.assert_eq(&require_in(&Cuda::NoDevice { driver: false }, 0).unwrap_err().to_string());
        check(
            &Cuda::NoDevice { driver: true },
            0,
            expect![
                "cuda:0 is not available here: there is an NVIDIA driver, but it shows no usable GPU; see that CUDA_VISIBLE_DEVICES does not hide them all and that the driver is new enough for this libtorch, or use cpu"
            ],
        );
        check(
            &Cuda::TooLate,
            0,
            expect![
                "cuda:0 is not available here: libtorch was asked for CUDA before its CUDA library was loaded, and does not ask again; call runtime::device::select before anything of tch::Cuda"
            ],
        );
    }
}
