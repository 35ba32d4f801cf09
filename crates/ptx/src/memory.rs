//! Device memory: buffers far apart, so that an address outside of one is in none.

use crate::error::{Error, FaultKind};
use crate::instruction::Access;
use crate::races::{Conflict, Marks, Who};

/// Bytes of addresses that each buffer has for itself.
const APART: u64 = 1 << 36;
/// Where a block's shared memory lies among generic addresses, below every buffer.
pub(crate) const SHARED_WINDOW: u64 = 1 << 32;

/// A number that lies in memory: `u8`, `u16` (the bits of a half), `u32`, `u64`, `i32`, `i64`, `f32`, `f64`.
pub trait Number: Copy + private::Sealed {
    /// Appends its bytes, the low ones first.
    fn write(self, out: &mut Vec<u8>);
    /// Its value from as many bytes as it has.
    fn read(bytes: &[u8]) -> Self;
}

mod private {
    pub trait Sealed {}
}

macro_rules! numbers {
    ($($number:ty),*) => {
        $(
            impl private::Sealed for $number {}
            impl Number for $number {
                fn write(self, out: &mut Vec<u8>) {
                    out.extend_from_slice(&self.to_le_bytes());
                }
                fn read(bytes: &[u8]) -> Self {
                    let mut array = [0; size_of::<$number>()];
                    array.copy_from_slice(bytes);
                    Self::from_le_bytes(array)
                }
            }
        )*
    };
}
numbers!(u8, u16, u32, u64, i32, i64, f32, f64);

/// The initial content of a buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Data {
    bytes: Vec<u8>,
    written: bool,
    read_only: bool,
    offset: u64,
}

impl Data {
    /// Creates a buffer with these numbers.
    pub fn of<T: Number>(numbers: &[T]) -> Self {
        let mut bytes = Vec::with_capacity(size_of_val(numbers));
        numbers.iter().for_each(|number| number.write(&mut bytes));
        Self { bytes, written: true, read_only: false, offset: 0 }
    }

    /// Creates a buffer of uninitialised numbers: reading one before the kernel has written it is an error.
    pub fn unwritten<T: Number>(count: usize) -> Self {
        let bytes = vec![0xa5; count * size_of::<T>()];
        Self { bytes, written: false, read_only: false, offset: 0 }
    }

    /// Returns the same; a kernel that writes to it is at fault.
    #[must_use]
    pub fn read_only(mut self) -> Self {
        self.read_only = true;
        self
    }

    /// Returns the same, this many bytes behind an address that 256 divides.
    #[must_use]
    pub fn at_offset(mut self, bytes: usize) -> Self {
        self.offset = bytes as u64;
        self
    }
}

/// A buffer of a [`Memory`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffer {
    index: usize,
    address: u64,
}

impl Buffer {
    /// Returns its address on the device.
    pub fn address(self) -> u64 {
        self.address
    }
}

/// The buffers of a device.
#[derive(Debug, Default)]
pub struct Memory {
    regions: Vec<Region>,
}

#[derive(Debug)]
pub(crate) struct Region {
    name: String,
    base: u64,
    bytes: Vec<u8>,
    /// For each byte, whether it has a value.
    written: Vec<bool>,
    read_only: bool,
    pub(crate) marks: Marks,
}

/// A run of bytes of a region.
pub(crate) type ByteRange = (usize, usize);

impl Memory {
    /// Creates a memory without buffers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a buffer; faults call it by this name.
    pub fn add(&mut self, name: &str, data: Data) -> Buffer {
        let index = self.regions.len();
        let address = (index as u64 + 1) * APART + data.offset;
        self.regions.push(Region::new(name, address, data));
        Buffer { index, address }
    }

    /// Returns the numbers of a buffer.
    ///
    /// # Errors
    /// If some of it has no value.
    pub fn read<T: Number>(&self, buffer: Buffer) -> Result<Vec<T>, Error> {
        let Region { name, bytes, written, .. } = &self.regions[buffer.index];
        if let Some(first) = written.iter().position(|written| !written) {
            let missing = written.iter().filter(|written| !**written).count();
            return Err(Error::Unwritten { buffer: name.clone(), missing, bytes: bytes.len(), first });
        }
        Ok(self.read_lossy(buffer))
    }

    /// Returns the numbers of a buffer; those without a value have the bytes `0xa5`.
    pub fn read_lossy<T: Number>(&self, buffer: Buffer) -> Vec<T> {
        self.regions[buffer.index].bytes.chunks_exact(size_of::<T>()).map(T::read).collect()
    }

    pub(crate) fn forget_accesses(&mut self) {
        for region in &mut self.regions {
            region.marks = Marks::new(region.bytes.len());
        }
    }

    /// Bytes of all buffers that were read, and bytes that were written.
    pub(crate) fn touched(&self) -> (u64, u64) {
        let all = self.regions.iter().map(|region| region.marks.touched());
        all.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
    }

    /// The buffer of an address, and where in it.
    pub(crate) fn find(&mut self, address: u64, bytes: usize) -> Result<(&mut Region, usize), FaultKind> {
        let index = (address / APART).checked_sub(1).map(|index| index as usize);
        let place = |regions: &[Region]| match index.and_then(|index| regions.get(index)) {
            Some(region) => region.place(address),
            None => format!("address {address:#x}, which is of no buffer,"),
        };
        let known =
            index.filter(|index| self.regions.get(*index).is_some_and(|region| region.has(address, bytes)));
        let Some(index) = known else {
            return Err(FaultKind::OutOfBounds { bytes, place: place(&self.regions) });
        };
        let region = &mut self.regions[index];
        let at = (address - region.base) as usize;
        Ok((region, at))
    }
}

impl Region {
    fn new(name: &str, base: u64, data: Data) -> Self {
        let Data { bytes, written, read_only, .. } = data;
        let (written, marks) = (vec![written; bytes.len()], Marks::new(bytes.len()));
        Self { name: name.to_owned(), base, bytes, written, read_only, marks }
    }

    /// A block's shared memory, whose addresses begin at 0.
    pub(crate) fn shared(bytes: usize) -> Self {
        Self::new("shared memory", 0, Data::unwritten::<u8>(bytes))
    }

    pub(crate) fn has(&self, address: u64, bytes: usize) -> bool {
        let end = address.checked_add(bytes as u64);
        address >= self.base && end.is_some_and(|end| end <= self.base + self.bytes.len() as u64)
    }

    pub(crate) fn place(&self, address: u64) -> String {
        let Self { name, base, bytes, .. } = self;
        format!("`{name}` + {} (of {} bytes)", address as i64 - *base as i64, bytes.len())
    }

    pub(crate) fn load(
        &mut self,
        (at, bytes): ByteRange,
        access: &Access,
        who: Who,
        lines: &dyn Fn(u32) -> usize,
    ) -> Result<&[u8], FaultKind> {
        if !self.written[at..at + bytes].iter().all(|written| *written) {
            return Err(FaultKind::Uninitialised { place: self.place(self.base + at as u64) });
        }
        self.marks
            .read((at, bytes), who, access.non_coherent, lines)
            .map_err(|conflict| self.race(at, conflict))?;
        Ok(&self.bytes[at..at + bytes])
    }

    pub(crate) fn store(
        &mut self,
        at: usize,
        value: &[u8],
        who: Who,
        lines: &dyn Fn(u32) -> usize,
    ) -> Result<(), FaultKind> {
        if self.read_only {
            return Err(FaultKind::ReadOnly { place: self.place(self.base + at as u64) });
        }
        let place = (at, value.len());
        self.marks.write(place, who, lines).map_err(|conflict| self.race(at, conflict))?;
        self.bytes[at..at + value.len()].copy_from_slice(value);
        self.written[at..at + value.len()].fill(true);
        Ok(())
    }

    /// Takes the value from some bytes.
    pub(crate) fn forget(&mut self, at: usize, bytes: usize) {
        self.written[at..at + bytes].fill(false);
    }

    fn race(&self, at: usize, Conflict { what, earlier }: Conflict) -> FaultKind {
        FaultKind::Race { what, place: self.place(self.base + at as u64), earlier }
    }
}
