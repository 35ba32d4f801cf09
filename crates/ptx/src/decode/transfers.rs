//! Decodes loads, stores and copies, and the instructions of several threads: barriers, shuffles and votes.
//!
//! `words` are an instruction's name and modifiers, split at the dots: `ld.global.v4.f32` is `[ld, global, v4, f32]`. An unknown form is an
//! error, so that a kernel is interpreted completely or not at all.

use super::{Decoded, Decoder, operands_expected, scalar};
use crate::instruction::{Access, Class, Operation, Register, Shuffle, Space, Vote};
use crate::memory::SHARED_WINDOW;
use crate::parse::Operand;
use crate::scalar::Scalar;

/// Modifiers of loads and stores: hints about the reuse of data, and the default order.
const HINTS: [&str; 17] = [
    "weak",
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "wb",
    "wt",
    "volatile",
    "L1::no_allocate",
    "L1::evict_first",
    "L1::evict_last",
    "L1::evict_normal",
    "L1::evict_unchanged",
    "L2::64B",
    "L2::128B",
    "L2::256B",
];

impl Decoder<'_> {
    /// Decodes `ld` and `st`, of one register or of a vector of 2 or 4.
    pub(super) fn transfer(&mut self, words: &[&str], operands: &[Operand]) -> Decoded {
        let is_load = words[0] == "ld";
        let (mut space, mut count, mut non_coherent) = (Space::Generic, 1, false);
        let [modifiers @ .., last] = &words[1..] else { return Err("it has no type".into()) };
        let scalar = scalar(Some(last))?;
        for word in modifiers {
            match *word {
                "global" => space = Space::Global,
                "shared" | "shared::cta" => space = Space::Shared,
                "param" if is_load => return self.argument(scalar, operands),
                "v2" => count = 2,
                "v4" => count = 4,
                "nc" if is_load => non_coherent = true,
                word if HINTS.contains(&word) => {}
                word => return Err(format!("the modifier `{word}` is not known")),
            }
        }
        if non_coherent && space != Space::Global {
            return Err("`nc` is for global memory".into());
        }
        // A load is `register, [address]`, a store `[address], register`.
        let [first, second] = operands else { return Err(operands_expected(2)) };
        let (data, address) = if is_load { (first, second) } else { (second, first) };
        let Operand::Address(base, offset) = address else {
            return Err("expected an address in brackets".into());
        };
        let address = self.input(base, Scalar::Unsigned(8))?;
        let access = Access { space, scalar, address, offset: *offset, non_coherent };
        let parts: &[Operand] = match data {
            Operand::Vector(parts) => parts,
            one => std::slice::from_ref(one),
        };
        if parts.len() != count {
            return Err(format!("expected {count} registers"));
        }
        let class = if space == Space::Shared { Class::Shared } else { Class::Global };
        if is_load {
            let to = parts.iter().map(|part| self.destination(part)).collect::<Result<_, _>>()?;
            return Ok((Operation::Load { access, to }, class));
        }
        let from = parts.iter().map(|part| self.input(part, scalar)).collect::<Result<_, _>>()?;
        Ok((Operation::Store { access, from }, class))
    }

    /// Decodes `ld.param`: reads an argument of the kernel, at a fixed or a computed offset.
    fn argument(&mut self, scalar: Scalar, operands: &[Operand]) -> Decoded {
        let (to, address, offset) = match operands {
            [to, Operand::Parameter(offset)] => (to, None, *offset as i64),
            [to, Operand::Address(base, offset)] => {
                (to, Some(self.input(base, Scalar::Unsigned(8))?), *offset)
            }
            _ => return Err("expected a register and a parameter".into()),
        };
        let to = self.destination(to)?;
        Ok((Operation::Parameter { to, address, offset, scalar }, Class::Control))
    }

    /// Decodes `cp.async`: asynchronous copies from global to shared memory, and the waits for them.
    pub(super) fn asynchronous(&mut self, words: &[&str], operands: &[Operand]) -> Decoded {
        match (words, operands) {
            (["cp", "async", "commit_group"], []) => Ok((Operation::CommitCopies, Class::Control)),
            (["cp", "async", "wait_all"], []) => {
                Ok((Operation::WaitForCopies { most: None }, Class::Control))
            }
            (["cp", "async", "wait_group"], [Operand::Constant(most)]) => {
                Ok((Operation::WaitForCopies { most: Some(*most as usize) }, Class::Control))
            }
            (
                ["cp", "async", "ca" | "cg", "shared" | "shared::cta", "global", ..],
                [
                    Operand::Address(to, to_offset),
                    Operand::Address(from, from_offset),
                    Operand::Constant(bytes @ (4 | 8 | 16)),
                ],
            ) if words[5..].iter().all(|word| HINTS.contains(word)) => {
                let scalar = Scalar::Bits(*bytes as u8);
                let mut access = |space, base: &Operand, offset| -> Result<Access, String> {
                    let address = self.input(base, Scalar::Unsigned(8))?;
                    Ok(Access { space, scalar, address, offset, non_coherent: false })
                };
                let to = access(Space::Shared, to, *to_offset)?;
                let from = access(Space::Global, from, *from_offset)?;
                Ok((Operation::CopyAsync { to, from }, Class::Global))
            }
            _ => Err("unknown".into()),
        }
    }

    /// Decodes `mov`: a copy of a register, or one that packs several registers into one or unpacks one into several.
    pub(super) fn copy(&mut self, words: &[&str], operands: &[Operand]) -> Decoded {
        let (&["mov", last], [to, from]) = (words, operands) else { return Err("unknown".into()) };
        let scalar = scalar(Some(&last))?;
        let operation = match (to, from) {
            (Operand::Vector(parts), from) => {
                let bytes = scalar.bytes() / parts.len();
                let parts = parts.iter().map(|part| self.destination(part)).collect::<Result<_, _>>()?;
                Operation::Unpack { parts, from: self.input(from, scalar)?, bytes }
            }
            (to, Operand::Vector(parts)) => {
                let bytes = scalar.bytes() / parts.len();
                let parts = parts.iter().map(|part| self.input(part, scalar)).collect::<Result<_, _>>()?;
                Operation::Pack { to: self.destination(to)?, parts, bytes }
            }
            (to, from) => Operation::Move { to: self.destination(to)?, from: self.input(from, scalar)? },
        };
        Ok((operation, Class::Integer))
    }

    /// Decodes `cvta`, which converts between generic addresses and those of a memory space. Here a generic address equals the global one, and
    /// shared memory begins at [`SHARED_WINDOW`].
    pub(super) fn address(&mut self, words: &[&str], operands: &[Operand]) -> Decoded {
        let [to, from] = operands else { return Err(operands_expected(2)) };
        let (to, from) = (self.destination(to)?, self.input(from, Scalar::Unsigned(8))?);
        let by = match words[1..] {
            ["to", "global", "u64"] | ["global", "u64"] => {
                return Ok((Operation::Move { to, from }, Class::Integer));
            }
            ["to", "shared", "u64"] => SHARED_WINDOW.wrapping_neg(),
            ["shared", "u64"] => SHARED_WINDOW,
            _ => return Err("unknown".into()),
        };
        let compute = crate::arithmetic::unary(move |address| address.wrapping_add(by));
        let operation =
            Operation::Compute { to, inputs: [from, 0, 0, 0], count: 1, compute, approximate: false };
        Ok((operation, Class::Integer))
    }

    /// Decodes `bar.sync`, of a block, and `bar.warp.sync`.
    pub(super) fn barrier(&mut self, words: &[&str], operands: &[Operand]) -> Decoded {
        let operation = match (words, operands) {
            (["bar", "sync"] | ["barrier", "sync", "aligned"], [Operand::Constant(0)]) => Operation::Barrier,
            (["bar", "warp", "sync"], [mask]) => {
                Operation::WarpBarrier { mask: self.input(mask, Scalar::Unsigned(4))? }
            }
            _ => return Err("only barrier 0 of the whole block, and that of a warp, are known".into()),
        };
        Ok((operation, Class::Control))
    }

    /// Decodes `shfl.sync`: reads a register of another thread of the warp.
    pub(super) fn shuffle(&mut self, words: &[&str], operands: &[Operand]) -> Decoded {
        let ["shfl", "sync", mode, "b32"] = words else { return Err("unknown".into()) };
        let mode = match *mode {
            "up" => Shuffle::Up,
            "down" => Shuffle::Down,
            "bfly" => Shuffle::Butterfly,
            "idx" => Shuffle::Index,
            _ => return Err("unknown".into()),
        };
        let [to, value, by, clamp, mask] = operands else { return Err(operands_expected(5)) };
        let (to, valid) = match to {
            Operand::Pair(to, valid) => (*to, Some(*valid)),
            to => (self.destination(to)?, None),
        };
        let mut input = |operand| self.input(operand, Scalar::Unsigned(4));
        let (value, by, clamp, mask) = (input(value)?, input(by)?, input(clamp)?, input(mask)?);
        Ok((Operation::Shuffle { mode, to, valid, value, by, clamp, mask }, Class::Shuffle))
    }

    /// Decodes `activemask` and `vote.sync`.
    pub(super) fn vote(&mut self, words: &[&str], operands: &[Operand]) -> Decoded {
        let operation = match (words, operands) {
            (["activemask", "b32"], [to]) => Operation::ActiveMask { to: self.destination(to)? },
            (["vote", "sync", mode, _], [to, predicate, mask]) => {
                let mode = match *mode {
                    "all" => Vote::All,
                    "any" => Vote::Any,
                    "uni" => Vote::Uniform,
                    "ballot" => Vote::Ballot,
                    _ => return Err("unknown".into()),
                };
                let to: Register = self.destination(to)?;
                let predicate = self.input(predicate, Scalar::Predicate)?;
                Operation::Vote { mode, to, predicate, mask: self.input(mask, Scalar::Unsigned(4))? }
            }
            _ => return Err("unknown".into()),
        };
        Ok((operation, Class::Shuffle))
    }
}
