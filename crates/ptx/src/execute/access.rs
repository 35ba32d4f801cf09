//! Loads and stores.

use super::{Faulted, Step};
use crate::error::FaultKind;
use crate::instruction::{Access, Register, Space};
use crate::memory::{Region, SHARED_WINDOW};
use crate::races::Who;
use crate::scalar::{Scalar, signed, truncate};
use crate::traffic::{bank_conflicts, sectors};
use crate::warp::lanes_of;

impl Step<'_, '_> {
    pub(super) fn load(&mut self, at: usize, access: &Access, to: &[Register], mask: u32) -> Faulted {
        let (width, bytes) = (access.scalar.bytes(), access.scalar.bytes() * to.len());
        let addresses = self.addresses(access, bytes, mask)?;
        let registers = &self.block.kernel.code.registers;
        let widths: Vec<usize> = to.iter().map(|to| registers.scalar(*to).bytes()).collect();
        let mut values = [[0; 32]; 4];
        for (lane, address) in lanes_of(mask).zip(&addresses) {
            let who = self.who(at, lane);
            let region = self.region(access.space, *address, bytes);
            let instructions = &self.block.kernel.code.instructions;
            let lines = |instruction: u32| instructions[instruction as usize].line;
            let loaded = match region {
                Ok((Where::Shared, place)) => self.block.shared.load((place, bytes), access, who, &lines),
                Ok((Where::Global, _)) => self
                    .memory
                    .find(*address, bytes)
                    .and_then(|(region, place)| region.load((place, bytes), access, who, &lines)),
                Err(kind) => Err(kind),
            };
            let loaded = loaded.map_err(|kind| (lane as u32, kind))?;
            for (index, part) in loaded.chunks_exact(width).enumerate() {
                let bits = part.iter().rev().fold(0, |bits, byte| bits << 8 | u64::from(*byte));
                values[index][lane] = if access.scalar.is_signed() {
                    truncate(signed(bits, width) as u64, widths[index])
                } else {
                    bits
                };
            }
        }
        for (to, value) in to.iter().zip(&values) {
            self.warp.set(*to, mask, value);
        }
        Ok(())
    }

    pub(super) fn store(&mut self, at: usize, access: &Access, from: &[Register], mask: u32) -> Faulted {
        let (width, bytes) = (access.scalar.bytes(), access.scalar.bytes() * from.len());
        for from in from {
            self.need_defined(*from, mask)?;
        }
        let addresses = self.addresses(access, bytes, mask)?;
        for (lane, address) in lanes_of(mask).zip(&addresses) {
            let mut value = [0; 32];
            for (index, from) in from.iter().enumerate() {
                let bits = self.warp.register(*from)[lane].to_le_bytes();
                value[index * width..(index + 1) * width].copy_from_slice(&bits[..width]);
            }
            let who = self.who(at, lane);
            let region = self.region(access.space, *address, bytes);
            let instructions = &self.block.kernel.code.instructions;
            let lines = |instruction: u32| instructions[instruction as usize].line;
            let stored = match region {
                Ok((Where::Shared, place)) => self.block.shared.store(place, &value[..bytes], who, &lines),
                Ok((Where::Global, _)) => self
                    .memory
                    .find(*address, bytes)
                    .and_then(|(region, place)| region.store(place, &value[..bytes], who, &lines)),
                Err(kind) => Err(kind),
            };
            stored.map_err(|kind| (lane as u32, kind))?;
        }
        Ok(())
    }

    pub(super) fn parameter(
        &mut self,
        to: Register,
        address: Option<Register>,
        offset: i64,
        scalar: Scalar,
        mask: u32,
    ) -> Faulted {
        let bases = address.map_or([0; 32], |address| *self.warp.register(address));
        if let Some(address) = address {
            self.need_defined(address, mask)?;
        }
        let (bytes, width) = (scalar.bytes(), self.block.kernel.code.registers.scalar(to).bytes());
        let mut values = [0; 32];
        for lane in lanes_of(mask) {
            let at = bases[lane].wrapping_add_signed(offset);
            let end = at.checked_add(bytes as u64).map(|end| end as usize);
            let Some(bytes_read) = end.and_then(|end| self.block.arguments.get(at as usize..end)) else {
                let place = format!("the parameters + {at} (of {} bytes)", self.block.arguments.len());
                return Err((lane as u32, FaultKind::OutOfBounds { bytes, place }));
            };
            let bits = bytes_read.iter().rev().fold(0, |bits, byte| bits << 8 | u64::from(*byte));
            values[lane] =
                if scalar.is_signed() { truncate(signed(bits, bytes) as u64, width) } else { bits };
        }
        self.warp.set(to, mask, &values);
        Ok(())
    }

    pub(super) fn who(&self, at: usize, lane: usize) -> Who {
        Who {
            block: self.block.index,
            thread: (self.warp.index * 32 + lane) as u16,
            epoch: self.block.epoch,
            warp_epoch: self.warp.epoch,
            instruction: at as u32,
        }
    }

    /// The addresses of the lanes that run, aligned and counted.
    pub(super) fn addresses(
        &mut self,
        access: &Access,
        bytes: usize,
        mask: u32,
    ) -> Result<Vec<u64>, (u32, FaultKind)> {
        self.need_defined(access.address, mask)?;
        let bases = self.warp.register(access.address);
        let mut addresses: Vec<u64> =
            lanes_of(mask).map(|lane| bases[lane].wrapping_add_signed(access.offset)).collect();
        if let Some((lane, address)) =
            lanes_of(mask).zip(&addresses).find(|(_, address)| !address.is_multiple_of(bytes as u64))
        {
            let place = self.place(access.space, *address);
            return Err((lane as u32, FaultKind::Misaligned { bytes, place }));
        }
        let is_shared = access.space == Space::Shared
            || access.space == Space::Generic && addresses.first().is_some_and(|address| in_window(*address));
        if is_shared {
            self.counts.shared_requests += 1;
            self.counts.bank_conflicts += bank_conflicts(&addresses, bytes as u64);
        } else {
            let (touched, least) = sectors(&addresses, bytes as u64);
            self.counts.global_requests += 1;
            self.counts.sectors += touched;
            self.counts.least_sectors += least;
            self.counts.wide_requests += u64::from(bytes == 16);
        }
        addresses.shrink_to_fit();
        Ok(addresses)
    }

    /// Which memory an address is of, and, of shared memory, where in it.
    fn region(&self, space: Space, address: u64, bytes: usize) -> Result<(Where, usize), FaultKind> {
        let offset = match space {
            Space::Shared => address,
            Space::Generic if in_window(address) => address - SHARED_WINDOW,
            _ => return Ok((Where::Global, 0)),
        };
        if self.block.shared.has(offset, bytes) {
            return Ok((Where::Shared, offset as usize));
        }
        Err(FaultKind::OutOfBounds { bytes, place: self.block.shared.place(offset) })
    }

    fn place(&mut self, space: Space, address: u64) -> String {
        let shared: &Region = &self.block.shared;
        match space {
            Space::Shared => shared.place(address),
            Space::Generic if in_window(address) => shared.place(address - SHARED_WINDOW),
            _ => match self.memory.find(address, 1) {
                Ok((region, _)) => region.place(address),
                Err(_) => format!("address {address:#x}"),
            },
        }
    }
}

enum Where {
    Shared,
    Global,
}

/// Whether a generic address is one of shared memory.
fn in_window(address: u64) -> bool {
    (SHARED_WINDOW..2 * SHARED_WINDOW).contains(&address)
}
