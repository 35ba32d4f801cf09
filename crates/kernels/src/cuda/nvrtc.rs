//! CUDA C++ to machine code.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use runtime::shared_library::open;

use super::library::functions;

type Program = *mut c_void;

functions!(Functions {
    nvrtcVersion: fn(*mut c_int, *mut c_int);
    nvrtcCreateProgram: fn(*mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char);
    nvrtcDestroyProgram: fn(*mut Program);
    nvrtcAddNameExpression: fn(Program, *const c_char);
    nvrtcCompileProgram: fn(Program, c_int, *const *const c_char);
    nvrtcGetLoweredName: fn(Program, *const c_char, *mut *const c_char);
    nvrtcGetProgramLogSize: fn(Program, *mut usize);
    nvrtcGetProgramLog: fn(Program, *mut c_char);
    nvrtcGetPTXSize: fn(Program, *mut usize);
    nvrtcGetPTX: fn(Program, *mut c_char);
    nvrtcGetCUBINSize: fn(Program, *mut usize);
    nvrtcGetCUBIN: fn(Program, *mut c_char);
});

/// The functions of the loaded NVRTC.
pub(crate) struct Nvrtc {
    functions: Functions,
    version: (c_int, c_int),
}

/// The result of a compilation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Compiled {
    pub(crate) cubin: Vec<u8>,
    /// The kernel's mangled name.
    pub(crate) name: String,
}

/// All results of a compilation of several kernels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Emitted {
    /// The PTX of all kernels.
    pub ptx: String,
    /// The machine code.
    pub cubin: Vec<u8>,
    /// The log of NVRTC and of the assembler.
    pub log: String,
    /// The kernels' mangled names, in the order of the expressions.
    pub names: Vec<String>,
}

/// Loads NVRTC, once for the process: from the folder `FRUGAL_NVRTC`, from the packages beside torch, from the folder
/// `FRUGAL_CUDA_TOOLS` that `cargo xtask setup --cuda-tools` makes, or from the loader's search path.
pub(crate) fn load() -> Result<&'static Nvrtc, &'static str> {
    static LOADED: OnceLock<Result<Nvrtc, String>> = OnceLock::new();
    LOADED.get_or_init(Nvrtc::find).as_ref().map_err(String::as_str)
}

impl Nvrtc {
    fn find() -> Result<Self, String> {
        let mut tried = Vec::new();
        for folder in folders() {
            if let Some(library) = named(&folder, "libnvrtc.so.") {
                // NVRTC loads its builtins by file name only, which the loader resolves once they are open.
                if let Some(builtins) = named(&folder, "libnvrtc-builtins.so.") {
                    // SAFETY: NVRTC may be loaded into a running process, and its builtins with it.
                    unsafe { open(&builtins.to_string_lossy()) }?;
                }
                return Self::open(&library.to_string_lossy());
            }
            tried.push(folder.display().to_string());
        }
        for name in ["libnvrtc.so.13", "libnvrtc.so.12"] {
            if let Ok(nvrtc) = Self::open(name) {
                return Ok(nvrtc);
            }
        }
        Err(format!(
            "NVRTC was not found in {} or by the loader; install nvidia-cuda-nvrtc, or set FRUGAL_NVRTC to the folder of libnvrtc.so",
            tried.join(", ")
        ))
    }

    fn open(path: &str) -> Result<Self, String> {
        // SAFETY: NVRTC may be loaded into a running process.
        let library = unsafe { open(path) }?;
        let functions = Functions::resolve(library).map_err(|error| format!("{path}: {error}"))?;
        let mut version = (0, 0);
        // SAFETY: the out-parameters are valid during the call.
        let status = unsafe { (functions.nvrtcVersion)(&mut version.0, &mut version.1) };
        if status == 0 { Ok(Self { functions, version }) } else { Err(format!("{path}: error {status}")) }
    }

    /// Returns the version; (13, 0) for CUDA 13.0.
    pub(crate) fn version(&self) -> (c_int, c_int) {
        self.version
    }

    /// Compiles `text`, which may include `headers` by name, and instantiates `expression`, such as `f<float, 4>`. The error is
    /// NVRTC's log.
    pub(crate) fn compile(
        &self,
        text: &str,
        headers: &[(&str, &str)],
        expression: &str,
        options: &[String],
    ) -> Result<Compiled, String> {
        let Emitted { cubin, mut names, .. } = self.emit(text, headers, &[expression], options)?;
        Ok(Compiled { cubin, name: names.pop().unwrap_or_default() })
    }

    /// The same for several expressions at once, with all results of NVRTC.
    pub(crate) fn emit(
        &self,
        text: &str,
        headers: &[(&str, &str)],
        expressions: &[&str],
        options: &[String],
    ) -> Result<Emitted, String> {
        let c = |text: &str| CString::new(text).map_err(|_| "a text with a NUL byte".to_owned());
        let all = |texts: &mut dyn Iterator<Item = &str>| texts.map(c).collect::<Result<Vec<_>, _>>();
        let pointers = |texts: &[CString]| texts.iter().map(|text| text.as_ptr()).collect::<Vec<_>>();
        let names = all(&mut headers.iter().map(|(name, _)| *name))?;
        let texts = all(&mut headers.iter().map(|(_, text)| *text))?;
        let options = all(&mut options.iter().map(String::as_str))?;
        let (text, expressions) = (c(text)?, all(&mut expressions.iter().copied())?);
        let functions = &self.functions;
        let mut program = OwnedProgram { program: std::ptr::null_mut(), functions };
        let count = |list: &[CString]| c_int::try_from(list.len()).unwrap_or(c_int::MAX);
        // SAFETY: all texts are NUL-terminated and outlive the calls; the lists have the given numbers of pointers.
        let status = unsafe {
            (functions.nvrtcCreateProgram)(
                &mut program.program,
                text.as_ptr(),
                c"kernel.cu".as_ptr(),
                count(&texts),
                pointers(&texts).as_ptr(),
                pointers(&names).as_ptr(),
            )
        };
        succeeded(status, "nvrtcCreateProgram")?;
        for expression in &expressions {
            // SAFETY: as above; the program was made.
            let status = unsafe { (functions.nvrtcAddNameExpression)(program.program, expression.as_ptr()) };
            succeeded(status, "nvrtcAddNameExpression")?;
        }
        // SAFETY: as above.
        let status = unsafe {
            (functions.nvrtcCompileProgram)(program.program, count(&options), pointers(&options).as_ptr())
        };
        let log = program.text(functions.nvrtcGetProgramLogSize, functions.nvrtcGetProgramLog)?;
        if status != 0 {
            return Err(format!("NVRTC error {status}: {log}"));
        }
        let mut names = Vec::new();
        for expression in &expressions {
            let mut name = std::ptr::null();
            // SAFETY: the program was compiled with this expression; the name is the program's and copied before that is freed.
            names.push(unsafe {
                let status = (functions.nvrtcGetLoweredName)(program.program, expression.as_ptr(), &mut name);
                succeeded(status, "nvrtcGetLoweredName")?;
                CStr::from_ptr(name).to_string_lossy().into_owned()
            });
        }
        let cubin = program.bytes(functions.nvrtcGetCUBINSize, functions.nvrtcGetCUBIN)?;
        let ptx = program.text(functions.nvrtcGetPTXSize, functions.nvrtcGetPTX)?;
        Ok(Emitted { ptx, cubin, log, names })
    }
}

struct OwnedProgram<'a> {
    program: Program,
    functions: &'a Functions,
}

impl OwnedProgram<'_> {
    fn text(
        &self,
        size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
        get: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ) -> Result<String, String> {
        let bytes = self.bytes(size, get)?;
        Ok(String::from_utf8_lossy(&bytes).trim_end_matches('\0').trim().to_owned())
    }

    /// Returns a result, after asking NVRTC for its size.
    fn bytes(
        &self,
        size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
        get: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>, String> {
        let mut count = 0;
        // SAFETY: the program is ours; the out-parameter is valid during the call.
        succeeded(unsafe { size(self.program, &mut count) }, "a size")?;
        let mut bytes = vec![0u8; count];
        if count > 0 {
            // SAFETY: the memory has the size that NVRTC returned.
            succeeded(unsafe { get(self.program, bytes.as_mut_ptr().cast()) }, "a result")?;
        }
        Ok(bytes)
    }
}

impl Drop for OwnedProgram<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: the program is ours and not used after this.
            unsafe { (self.functions.nvrtcDestroyProgram)(&mut self.program) };
        }
    }
}

fn succeeded(status: c_int, what: &str) -> Result<(), String> {
    if status == 0 { Ok(()) } else { Err(format!("{what}: NVRTC error {status}")) }
}

/// Returns the folders of NVIDIA's Python packages, relative to torch's `lib`.
fn folders() -> Vec<PathBuf> {
    if let Some(given) = std::env::var_os("FRUGAL_NVRTC").filter(|given| !given.is_empty()) {
        return vec![PathBuf::from(given)];
    }
    let tools = std::env::var_os("FRUGAL_CUDA_TOOLS").map(|tools| PathBuf::from(tools).join("cu13/lib"));
    let Ok(libtorch) = runtime::shared_library::libtorch_folder() else { return tools.into_iter().collect() };
    // `torch/lib`, or a link to it.
    let libtorch = libtorch.canonicalize().unwrap_or(libtorch);
    let packages = libtorch.parent().and_then(Path::parent).map(Path::to_owned).unwrap_or_default();
    let mut folders: Vec<_> =
        ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"].iter().map(|place| packages.join(place)).collect();
    folders.push(libtorch);
    folders.extend(tools);
    folders
}

/// Returns the file of a folder whose name begins with the prefix, except for NVIDIA's `alt` variant.
fn named(folder: &Path, beginning: &str) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?;
    let paths = entries.flatten().map(|entry| entry.path());
    paths
        .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(beginning)))
        .min()
}
