//! A kernel's registers: those that it declares, and behind them one for each constant and each special register that it uses.

use std::collections::HashMap;

use crate::instruction::Register;
use crate::scalar::Scalar;

/// A register that the hardware fills.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Special {
    Thread,
    Threads,
    Block,
    Blocks,
    Lane,
    /// `%warpid`: not promised to be the warp's number, but it is for one that never moves.
    Warp,
    /// 0 or 1 of a dimension that a launch does not have.
    Fixed(u64),
    /// The lanes that are this one, below it, up to it, above it, from it.
    LaneMask(fn(u32) -> u32),
}

/// The numbers of registers.
#[derive(Debug)]
pub(crate) struct Registers {
    declared: Vec<(String, Scalar)>,
    fixed: Vec<Fixed>,
    constants: HashMap<u64, Register>,
    specials: HashMap<String, Register>,
}

/// The fixed value of a register.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fixed {
    Constant(u64),
    Special(Special),
}

impl Registers {
    pub(crate) fn new(declared: &[(String, Scalar)]) -> Self {
        let (constants, specials) = (HashMap::new(), HashMap::new());
        Self { declared: declared.to_vec(), fixed: Vec::new(), constants, specials }
    }

    pub(crate) fn count(&self) -> usize {
        self.declared.len() + self.fixed.len()
    }

    /// How many the kernel declares; the others never change.
    pub(crate) fn declared(&self) -> usize {
        self.declared.len()
    }

    pub(crate) fn fixed(&self) -> &[Fixed] {
        &self.fixed
    }

    pub(crate) fn name(&self, register: Register) -> &str {
        self.declared.get(register as usize).map_or("of a constant", |(name, _)| name)
    }

    pub(crate) fn scalar(&self, register: Register) -> Scalar {
        self.declared.get(register as usize).map_or(Scalar::Bits(8), |(_, scalar)| *scalar)
    }

    pub(crate) fn constant(&mut self, bits: u64) -> Register {
        let next = self.count() as Register;
        *self.constants.entry(bits).or_insert_with(|| {
            self.fixed.push(Fixed::Constant(bits));
            next
        })
    }

    pub(crate) fn special(&mut self, name: &str) -> Option<Register> {
        if let Some(known) = self.specials.get(name) {
            return Some(*known);
        }
        let special = match name {
            "%tid.x" => Special::Thread,
            "%ntid.x" => Special::Threads,
            "%ctaid.x" => Special::Block,
            "%nctaid.x" => Special::Blocks,
            "%laneid" => Special::Lane,
            "%warpid" => Special::Warp,
            "%tid.y" | "%tid.z" | "%ctaid.y" | "%ctaid.z" => Special::Fixed(0),
            "%ntid.y" | "%ntid.z" | "%nctaid.y" | "%nctaid.z" => Special::Fixed(1),
            "WARP_SZ" => Special::Fixed(32),
            "%lanemask_eq" => Special::LaneMask(|lane| 1 << lane),
            "%lanemask_lt" => Special::LaneMask(|lane| (1 << lane) - 1),
            "%lanemask_le" => Special::LaneMask(|lane| u32::MAX >> (31 - lane)),
            "%lanemask_gt" => Special::LaneMask(|lane| !(u32::MAX >> (31 - lane))),
            "%lanemask_ge" => Special::LaneMask(|lane| u32::MAX << lane),
            _ => return None,
        };
        let register = self.count() as Register;
        self.fixed.push(Fixed::Special(special));
        self.specials.insert(name.to_owned(), register);
        Some(register)
    }
}
