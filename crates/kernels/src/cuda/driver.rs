//! The CUDA driver: loads machine code and launches it on libtorch's streams.

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use runtime::device::CudaStream;
use runtime::shared_library::open;
use runtime::{Error, Result};

use super::library::{functions, text};

functions!(Functions {
    cuDeviceGet: fn(*mut c_int, c_int);
    cuDeviceGetAttribute: fn(*mut c_int, c_int, c_int);
    cuCtxGetCurrent: fn(*mut *mut c_void);
    cuGetErrorString: fn(c_int, *mut *const c_char);
    cuLibraryLoadData: fn(*mut *mut c_void, *const c_void, *mut c_int, *mut *mut c_void, c_uint, *mut c_int, *mut *mut c_void, c_uint);
    cuLibraryGetKernel: fn(*mut *mut c_void, *mut c_void, *const c_char);
    cuKernelSetAttribute: fn(c_int, c_int, *mut c_void, c_int);
    cuStreamIsCapturing: fn(*mut c_void, *mut c_int);
    cuStreamSynchronize: fn(*mut c_void);
    cuLaunchKernel: fn(*mut c_void, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, *mut c_void, *mut *mut c_void, *mut *mut c_void);
});

/// The functions of the loaded driver.
pub(crate) struct Driver(Functions);

/// A loaded kernel, usable on every device that its code supports; valid as long as the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Loaded(*mut c_void);

// SAFETY: a handle of the driver, which any thread may use.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

/// A kernel's argument, by its type in the kernel's signature.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Argument {
    /// A device address; 0 for a null pointer.
    Pointer(u64),
    /// `long long`.
    I64(i64),
    /// `int`.
    I32(i32),
    /// `float`.
    F32(f32),
    /// `double`.
    F64(f64),
    /// A structure of 8-byte members, by value.
    Words(Box<[u64]>),
}

/// Loads the driver's library, once for the process.
pub(crate) fn load() -> std::result::Result<&'static Driver, &'static str> {
    static LOADED: OnceLock<std::result::Result<Driver, String>> = OnceLock::new();
    let find = || {
        // SAFETY: the driver may be loaded into a running process.
        let library = unsafe { open("libcuda.so.1") }?;
        Functions::resolve(library)
            .map(Driver)
            .map_err(|error| format!("the NVIDIA driver is older than CUDA 12: {error}"))
    };
    LOADED.get_or_init(find).as_ref().map_err(String::as_str)
}

impl Driver {
    /// Returns the major and minor compute capability. libtorch has initialised the driver.
    pub(crate) fn capability(&self, device: c_int) -> Result<(c_int, c_int)> {
        const MAJOR: c_int = 75;
        const MINOR: c_int = 76;
        Ok((self.attribute(device, MAJOR)?, self.attribute(device, MINOR)?))
    }

    /// Returns the bytes of shared memory that a block may request.
    pub(crate) fn shared_memory(&self, device: c_int) -> Result<c_int> {
        const MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: c_int = 97;
        self.attribute(device, MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
    }

    fn attribute(&self, device: c_int, which: c_int) -> Result<c_int> {
        let handle = self.device(device)?;
        let mut value = 0;
        // SAFETY: the out-parameter is valid during the call; the handle is the driver's.
        self.check("an attribute", unsafe { (self.0.cuDeviceGetAttribute)(&mut value, which, handle) })?;
        Ok(value)
    }

    fn device(&self, device: c_int) -> Result<c_int> {
        let mut handle = 0;
        // SAFETY: the out-parameter is valid during the call.
        self.check("a device", unsafe { (self.0.cuDeviceGet)(&mut handle, device) })?;
        Ok(handle)
    }

    /// Raises the limit of dynamic shared memory for a kernel above the default.
    pub(crate) fn allow_shared(&self, kernel: Loaded, device: c_int, bytes: u32) -> Result<()> {
        const MAX_DYNAMIC_SHARED_SIZE_BYTES: c_int = 8;
        let handle = self.device(device)?;
        let bytes = c_int::try_from(bytes).unwrap_or(c_int::MAX);
        let set = self.0.cuKernelSetAttribute;
        // SAFETY: the kernel was loaded and is never unloaded; the handle is the driver's.
        let status = unsafe { set(MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes, kernel.0, handle) };
        self.check("shared memory for a kernel", status)
    }

    /// Loads the kernel `name` of a cubin.
    pub(crate) fn kernel(&self, cubin: &[u8], name: &str) -> Result<Loaded> {
        let name = CString::new(name).map_err(|_| Error::invalid("CUDA kernel", "a name with a NUL byte"))?;
        let (mut library, mut kernel) = (std::ptr::null_mut(), std::ptr::null_mut());
        let none = std::ptr::null_mut::<c_int>();
        let values = std::ptr::null_mut::<*mut c_void>();
        // SAFETY: the driver copies the code; the lists of options are empty.
        let status = unsafe {
            (self.0.cuLibraryLoadData)(&mut library, cubin.as_ptr().cast(), none, values, 0, none, values, 0)
        };
        self.check("loading a kernel", status)?;
        // SAFETY: the library was loaded and is never unloaded; the name is NUL-terminated.
        let status = unsafe { (self.0.cuLibraryGetKernel)(&mut kernel, library, name.as_ptr()) };
        self.check("finding a kernel", status)?;
        Ok(Loaded(kernel))
    }

    /// Makes the context of the stream's device current on this thread, if none is. The CUDA runtime does so on a thread's first call,
    /// the driver does not; the autograd engine's threads have no context when a backward begins with one of these kernels.
    pub(crate) fn make_current(&self, stream: CudaStream) -> Result<()> {
        let mut context = std::ptr::null_mut();
        // SAFETY: the out-parameter is valid during the call.
        self.check("a context", unsafe { (self.0.cuCtxGetCurrent)(&mut context) })?;
        if context.is_null() {
            let _current = stream.enter()?;
            // Any call of the runtime creates the context; this one has no other effect. (A capturing thread has a context.)
            stream.query()?;
        }
        Ok(())
    }

    /// Returns whether the stream is capturing.
    pub(crate) fn is_capturing(&self, stream: CudaStream) -> Result<bool> {
        let mut status = 0;
        let stream = stream.native()?;
        // SAFETY: the stream is libtorch's; the out-parameter is valid during the call.
        self.check("a stream", unsafe { (self.0.cuStreamIsCapturing)(stream, &mut status) })?;
        Ok(status != 0)
    }

    /// Queues a kernel on a stream, whose device is made current for the call.
    ///
    /// The arguments match the kernel's signature; the memory that they point to is on the stream's device, as large as the
    /// kernel reads and writes, and lives until the kernel is done (the allocator reuses it only in the order of the stream that it
    /// was allocated on). The modules of [`crate::cuda`], the only callers, check shapes, dtypes and devices for that.
    pub(crate) fn launch(
        &self,
        kernel: Loaded,
        (blocks, threads, shared): (u32, u32, u32),
        arguments: &[Argument],
        stream: CudaStream,
    ) -> Result<()> {
        let _current = stream.enter()?;
        let mut addresses: Vec<*mut c_void> = arguments.iter().map(Argument::address).collect();
        let native = stream.native()?;
        // SAFETY: see above; the addresses outlive the call, which copies the arguments.
        let status = unsafe {
            (self.0.cuLaunchKernel)(
                kernel.0,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                shared,
                native,
                addresses.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        self.check("launching a kernel", status)
    }

    /// Waits for the stream, and returns an error of any of its work.
    pub(crate) fn synchronize(&self, stream: CudaStream) -> Result<()> {
        let native = stream.native()?;
        // SAFETY: the stream is libtorch's.
        self.check("a kernel", unsafe { (self.0.cuStreamSynchronize)(native) })
    }

    fn check(&self, what: &str, status: c_int) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        let mut message = std::ptr::null();
        // SAFETY: the driver returns a static text, or null.
        let message = unsafe {
            (self.0.cuGetErrorString)(status, &mut message);
            text(message)
        };
        Err(Error::Torch(format!("{what}: CUDA error {status}: {message}")))
    }
}

impl Argument {
    fn address(&self) -> *mut c_void {
        match self {
            Self::Pointer(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Self::I64(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Self::I32(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Self::F32(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Self::F64(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Self::Words(words) => words.as_ptr().cast_mut().cast(),
        }
    }
}
