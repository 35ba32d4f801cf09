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
    /// The tensor of an earlier argument of this name.
    Again(&'static str),
    /// A structure by value: these members of 8 bytes, then zeros up to a size in bytes.
    Structure(Vec<Given<'a>>, usize),
    /// No tensor.
    Null,
    I64(i64),
    I32(i64),
    F32(f64),
    F64(f64),
}

impl<'a> Given<'a> {
    /// An optional tensor that is read.
    pub(super) fn optional(name: &'static str, tensor: Option<&'a Tensor>) -> Self {
        tensor.map_or(Self::Null, |tensor| Self::In(name, tensor))
    }
}

/// The results of a launch: the outputs in the order of the arguments, and again with approximate instructions that err as much as
/// the hardware's may.
pub(super) struct Outcome {
    pub(super) outputs: Vec<Tensor>,
    pub(super) perturbed: Vec<Tensor>,
    pub(super) counts: Counts,
}

/// The offset of every tensor from an address that is a multiple of 256, in bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Shift(pub(super) usize);

/// Blocks, threads of a block, bytes of shared memory beyond the kernel's own.
pub(super) type Size = (i64, u32, usize);

/// Runs a kernel in four orders of its warps and blocks, which must give the same bits, and without a fault.
pub(super) fn launch(kernel: &Kernel, grid: (i64, u32), given: &[Given<'_>], shift: Shift) -> Outcome {
    launch_with(kernel, (grid.0, grid.1, 0), given, shift)
}

/// As above, with dynamic shared memory.
pub(super) fn launch_with(kernel: &Kernel, size: Size, given: &[Given<'_>], shift: Shift) -> Outcome {
    let (blocks, threads, dynamic_shared) = size;
    let launch = Launch { dynamic_shared, ..Launch::new(u32::try_from(blocks).unwrap(), threads) };
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
    let mut placed = Placed { shift, ..Placed::default() };
    let arguments: Vec<Argument> = given.iter().map(|given| placed.argument(given)).collect();
    let Placed { mut memory, outputs, .. } = placed;
    let counts = kernel.launch(launch, &arguments, &mut memory)?;
    let read = |(buffer, kind, size): (Buffer, Kind, Vec<i64>)| -> Result<Tensor, Error> {
        Ok(Tensor::from_data_size(&memory.read::<u8>(buffer)?, &size, kind))
    };
    Ok((outputs.into_iter().map(read).collect::<Result<_, _>>()?, counts))
}

/// The tensors of a launch in the device's memory.
#[derive(Default)]
struct Placed {
    memory: Memory,
    names: Vec<(&'static str, Buffer)>,
    outputs: Vec<(Buffer, Kind, Vec<i64>)>,
    shift: Shift,
}

impl Placed {
    fn argument(&mut self, given: &Given<'_>) -> Argument {
        match given {
            Given::In(name, tensor) => self.add(name, data(tensor).read_only()).into(),
            Given::InOut(name, tensor) => {
                let buffer = self.add(name, data(tensor));
                self.outputs.push((buffer, tensor.kind(), tensor.size()));
                buffer.into()
            }
            Given::Out(name, kind, size) => {
                let count = size.iter().product::<i64>() as usize * kind.elt_size_in_bytes();
                let buffer = self.add(name, Data::unwritten::<u8>(count));
                self.outputs.push((buffer, *kind, size.clone()));
                buffer.into()
            }
            Given::Again(name) => {
                let known = self.names.iter().find(|(known, _)| known == name);
                known.unwrap_or_else(|| panic!("no argument `{name}`")).1.into()
            }
            Given::Structure(members, size) => {
                let mut bytes: Vec<u8> = members.iter().flat_map(|member| self.member(member)).collect();
                assert!(bytes.len() <= *size);
                bytes.resize(*size, 0);
                Argument::Bytes(bytes)
            }
            Given::Null => Argument::Pointer(0),
            Given::I64(value) => Argument::I64(*value),
            Given::I32(value) => Argument::I32(i32::try_from(*value).unwrap()),
            Given::F32(value) => Argument::F32(*value as f32),
            Given::F64(value) => Argument::F64(*value),
        }
    }

    fn member(&mut self, given: &Given<'_>) -> [u8; 8] {
        match self.argument(given) {
            Argument::Pointer(address) => address.to_le_bytes(),
            Argument::I64(number) => number.to_le_bytes(),
            other => panic!("{other:?} has not 8 bytes"),
        }
    }

    fn add(&mut self, name: &'static str, data: Data) -> Buffer {
        let buffer = self.memory.add(name, data.at_offset(self.shift.0));
        self.names.push((name, buffer));
        buffer
    }
}

/// Refuses outputs that depend on their address or on which others are requested.
pub(super) fn same(what: &str, outputs: &[Tensor], others: &[Tensor]) {
    assert_eq!(outputs.len(), others.len(), "{what}");
    for (index, (a, b)) in outputs.iter().zip(others).enumerate() {
        assert!(bits(a).equal(&bits(b)), "{what}: output {index} depends on where the outputs are");
    }
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
