//! Launches with tensors as arguments.

use ptx::{Argument, Buffer, Counts, Data, Error, Kernel, Launch, Memory};
use tch::{Kind, Tensor};

/// A kernel's argument.
#[derive(Debug)]
pub(super) enum Given<'a> {
    /// A tensor that the kernel reads.
    In(&'static str, &'a Tensor),
    /// A tensor that it changes.
    InOut(&'static str, &'a Tensor),
    /// A tensor that it writes, all of it.
    Out(&'static str, Kind, Vec<i64>),
    /// No tensor.
    Null,
    I64(i64),
    I32(i64),
    F32(f64),
}

impl<'a> Given<'a> {
    /// A tensor that is read, if there is one.
    pub(super) fn optional(name: &'static str, tensor: Option<&'a Tensor>) -> Self {
        tensor.map_or(Self::Null, |tensor| Self::In(name, tensor))
    }
}

/// What a launch gave: the outputs in the order of the arguments, and again with approximate instructions that err as the hardware's
/// may.
pub(super) struct Outcome {
    pub(super) outputs: Vec<Tensor>,
    pub(super) perturbed: Vec<Tensor>,
    pub(super) counts: Counts,
}

/// Every tensor lies this many bytes behind an address that 256 divides.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Shift(pub(super) usize);

/// Runs a kernel in four orders of its warps and blocks, which must give the same bits, and without a fault.
pub(super) fn launch(kernel: &Kernel, grid: (i64, u32), given: &[Given<'_>], shift: Shift) -> Outcome {
    let launch = Launch::new(u32::try_from(grid.0).unwrap(), grid.1);
    let run =
        |launch: Launch| try_launch(kernel, launch, given, shift).unwrap_or_else(|error| panic!("{error}"));
    let (outputs, counts) = run(launch);
    for seed in 1..4 {
        let (again, _) = run(launch.seed(seed));
        for (index, (a, b)) in outputs.iter().zip(&again).enumerate() {
            assert!(bits(a).equal(&bits(b)), "{}: seed {seed} changes output {index}", kernel.name());
        }
    }
    let (perturbed, _) = run(Launch { approximation_error: 2, ..launch });
    Outcome { outputs, perturbed, counts }
}

pub(super) fn try_launch(
    kernel: &Kernel,
    launch: Launch,
    given: &[Given<'_>],
    shift: Shift,
) -> Result<(Vec<Tensor>, Counts), Error> {
    let mut memory = Memory::new();
    let mut outputs: Vec<(Buffer, Kind, Vec<i64>)> = Vec::new();
    let mut arguments = Vec::new();
    for given in given {
        arguments.push(match given {
            Given::In(name, tensor) => memory.add(name, data(tensor).read_only().at_offset(shift.0)).into(),
            Given::InOut(name, tensor) => {
                let buffer = memory.add(name, data(tensor).at_offset(shift.0));
                outputs.push((buffer, tensor.kind(), tensor.size()));
                buffer.into()
            }
            Given::Out(name, kind, size) => {
                let count = size.iter().product::<i64>() as usize * kind.elt_size_in_bytes();
                let buffer = memory.add(name, Data::unwritten::<u8>(count).at_offset(shift.0));
                outputs.push((buffer, *kind, size.clone()));
                buffer.into()
            }
            Given::Null => Argument::Pointer(0),
            Given::I64(value) => Argument::I64(*value),
            Given::I32(value) => Argument::I32(i32::try_from(*value).unwrap()),
            Given::F32(value) => Argument::F32(*value as f32),
        });
    }
    let counts = kernel.launch(launch, &arguments, &mut memory)?;
    let read = |(buffer, kind, size): (Buffer, Kind, Vec<i64>)| -> Result<Tensor, Error> {
        Ok(Tensor::from_data_size(&memory.read::<u8>(buffer)?, &size, kind))
    };
    Ok((outputs.into_iter().map(read).collect::<Result<_, _>>()?, counts))
}

/// A tensor's bytes.
fn data(tensor: &Tensor) -> Data {
    let mut bytes = vec![0u8; tensor.numel() * tensor.kind().elt_size_in_bytes()];
    bits(tensor).copy_data_u8(&mut bytes, tensor.numel() * tensor.kind().elt_size_in_bytes());
    Data::of(&bytes)
}

/// Bits instead of numbers, so that NaN equals itself.
fn bits(tensor: &Tensor) -> Tensor {
    let flat = tensor.contiguous().reshape([-1]);
    flat.view_dtype(Kind::Uint8)
}
