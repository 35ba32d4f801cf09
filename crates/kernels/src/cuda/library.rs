//! NVRTC and the CUDA driver, loaded at run time: the build needs nothing of CUDA.

use std::ffi::{CStr, c_void};

/// Defines a table of a library's functions by their names, with the types of CUDA's headers.
macro_rules! functions {
    ($table:ident { $($name:ident: fn($($argument:ty),* $(,)?);)* }) => {
        #[allow(non_snake_case)]
        struct $table { $($name: unsafe extern "C" fn($($argument),*) -> std::ffi::c_int,)* }

        #[allow(non_snake_case)]
        impl $table {
            /// The error names the function that is missing.
            fn resolve(library: *mut std::ffi::c_void) -> Result<Self, String> {
                $(
                    let address = super::library::symbol(library, stringify!($name))?;
                    // SAFETY: the library's function of this name has this type in every version that has it.
                    let $name = unsafe {
                        std::mem::transmute::<*mut std::ffi::c_void, unsafe extern "C" fn($($argument),*) -> std::ffi::c_int>(address)
                    };
                )*
                Ok(Self { $($name,)* })
            }
        }
    };
}
pub(super) use functions;

/// Returns the address of a library's function.
pub(super) fn symbol(library: *mut c_void, name: &str) -> Result<*mut c_void, String> {
    let text = std::ffi::CString::new(name).map_err(|_| "a name with a NUL byte".to_owned())?;
    // SAFETY: the handle is of a library that is never closed, the name is NUL-terminated.
    let address = unsafe { libc::dlsym(library, text.as_ptr()) };
    if address.is_null() { Err(format!("it has no {name}")) } else { Ok(address) }
}

/// Copies a text that the library owns.
///
/// # Safety
/// Null, or NUL-terminated and alive during the call.
pub(super) unsafe fn text(pointer: *const std::ffi::c_char) -> String {
    if pointer.is_null() {
        return "unknown".to_owned();
    }
    // SAFETY: by this function's contract.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}
