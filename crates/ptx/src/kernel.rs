//! Modules, kernels, launches.

use crate::block::{Block, Found, Random};
use crate::counts::Counts;
use crate::decode::{Code, decode, dynamic_shared};
use crate::error::{Error, Fault};
use crate::memory::{Buffer, Memory, Region};
use crate::parse::{Parameter, parse};
use crate::warp::Warp;

/// The kernels of a PTX text.
pub struct Module {
    target: String,
    kernels: Vec<Kernel>,
}

/// A kernel, ready to run.
pub struct Kernel {
    pub(crate) name: String,
    pub(crate) code: Code,
    parameters: Vec<Parameter>,
    most_threads: Option<u32>,
    shared: usize,
}

/// How a kernel is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Blocks of the grid, which has one dimension.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
    /// The order of warps and blocks; of 0 everything runs in order.
    pub seed: u64,
    /// By how many units in the last place the approximate instructions (`ex2.approx`, …) are moved from the correctly rounded
    /// value, at most, up or down by their result; the hardware's are up to 2 away.
    pub approximation_error: u32,
    /// Bytes of shared memory of a block beyond the kernel's own: `extern __shared__`.
    pub dynamic_shared: usize,
    /// Instructions of warps after which a kernel is taken to be endless.
    pub limit: u64,
}

impl Launch {
    /// Returns a grid, in order, without errors of the approximations.
    pub fn new(blocks: u32, threads: u32) -> Self {
        Self { blocks, threads, seed: 0, approximation_error: 0, dynamic_shared: 0, limit: 1 << 32 }
    }

    /// Returns the same in another order.
    #[must_use]
    pub fn seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }
}

/// A kernel's argument.
#[derive(Debug, Clone, PartialEq)]
pub enum Argument {
    /// An address of the device; 0 for none.
    Pointer(u64),
    /// `int`.
    I32(i32),
    /// `unsigned`.
    U32(u32),
    /// `long long`.
    I64(i64),
    /// `float`.
    F32(f32),
    /// `double`.
    F64(f64),
    /// A structure by value.
    Bytes(Vec<u8>),
}

impl Argument {
    fn bytes(&self) -> Vec<u8> {
        match self {
            Self::Pointer(value) => value.to_le_bytes().to_vec(),
            Self::I32(value) => value.to_le_bytes().to_vec(),
            Self::U32(value) => value.to_le_bytes().to_vec(),
            Self::I64(value) => value.to_le_bytes().to_vec(),
            Self::F32(value) => value.to_le_bytes().to_vec(),
            Self::F64(value) => value.to_le_bytes().to_vec(),
            Self::Bytes(bytes) => bytes.clone(),
        }
    }
}

impl From<Buffer> for Argument {
    fn from(buffer: Buffer) -> Self {
        Self::Pointer(buffer.address())
    }
}

impl Module {
    /// Reads PTX. Every kernel of it must consist of instructions that are known.
    ///
    /// # Errors
    /// The line of what is not PTX, or not supported.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let source = parse(text)?;
        let kernels = source.entries.into_iter().map(|entry| {
            let code = decode(&entry)?;
            let (name, shared) = (entry.name, entry.shared);
            Ok(Kernel { name, code, parameters: entry.parameters, most_threads: entry.most_threads, shared })
        });
        Ok(Self { target: source.target, kernels: kernels.collect::<Result<_, Error>>()? })
    }

    /// Returns the architecture that the text is for: `sm_80`.
    pub fn target(&self) -> &str {
        &self.target
    }

    /// Returns all kernels.
    pub fn kernels(&self) -> &[Kernel] {
        &self.kernels
    }

    /// Returns the kernel of this name, which is mangled where it is C++.
    ///
    /// # Errors
    /// There is no kernel of this name.
    pub fn kernel(&self, name: &str) -> Result<&Kernel, Error> {
        self.kernels.iter().find(|kernel| kernel.name == name).ok_or_else(|| Error::NoKernel {
            name: name.to_owned(),
            known: self.kernels.iter().map(|kernel| kernel.name.clone()).collect(),
        })
    }
}

impl Kernel {
    /// Returns its name in the PTX.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the bytes of shared memory of a block, without what the launch adds.
    pub fn shared_bytes(&self) -> usize {
        self.shared
    }

    /// Runs every thread of the grid and counts what they did.
    ///
    /// # Errors
    /// Arguments that are not those of the signature, or the first fault of the kernel, after which the buffers hold what had been
    /// written until then.
    pub fn launch(
        &self,
        launch: Launch,
        arguments: &[Argument],
        memory: &mut Memory,
    ) -> Result<Counts, Error> {
        let arguments = self.arguments(arguments)?;
        let Launch { blocks, threads, seed, .. } = launch;
        let most = self.most_threads.unwrap_or(1024).min(1024);
        if threads == 0 || threads > most || blocks == 0 {
            return Err(self.refused(format!(
                "{blocks} blocks of {threads} threads; expected one block or more, of 1 to {most} threads"
            )));
        }
        memory.forget_accesses();
        let (mut counts, mut random) = (Counts::default(), Random::new(seed));
        let mut warps: Vec<Warp> =
            (0..threads.div_ceil(32)).map(|index| Warp::new(index as usize, &self.code.registers)).collect();
        let shared_bytes = match launch.dynamic_shared {
            0 => self.shared,
            more => dynamic_shared(self.shared) + more,
        };
        for index in random.order(blocks) {
            let shared = Region::shared(shared_bytes);
            let mut block = Block { kernel: self, launch, arguments: &arguments, index, shared, epoch: 0 };
            block
                .run(&mut warps, memory, &mut counts, &mut random)
                .map_err(|fault| self.fault(index, fault))?;
        }
        (counts.bytes_read, counts.bytes_written) = memory.touched();
        Ok(counts)
    }

    fn fault(&self, block: u32, Found { instruction, thread, kind }: Found) -> Error {
        let at = &self.code.instructions[instruction];
        Error::Fault(Box::new(Fault {
            kernel: self.name.clone(),
            line: at.line,
            instruction: at.text.clone(),
            block,
            thread,
            kind,
        }))
    }

    fn refused(&self, message: String) -> Error {
        Error::Launch { kernel: self.name.clone(), message }
    }

    /// The arguments as they lie in the memory of parameters.
    fn arguments(&self, given: &[Argument]) -> Result<Vec<u8>, Error> {
        if given.len() != self.parameters.len() {
            let (given, expected) = (given.len(), self.parameters.len());
            return Err(self.refused(format!("{given} arguments; the kernel has {expected} parameters")));
        }
        let mut bytes = Vec::new();
        for (index, (argument, Parameter { bytes: expected, offset, .. })) in
            given.iter().zip(&self.parameters).enumerate()
        {
            let value = argument.bytes();
            if value.len() != *expected {
                return Err(self.refused(format!(
                    "argument {index} is {argument:?}; the kernel's parameter has {expected} bytes"
                )));
            }
            bytes.resize(*offset, 0);
            bytes.extend(value);
        }
        Ok(bytes)
    }
}
