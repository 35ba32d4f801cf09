//! Statements to instructions. What is not known here is an error of the whole kernel, before anything runs.

mod registers;
mod transfers;

use crate::arithmetic::{Compute, compare, integer};
use crate::control_flow::reconvergences;
use crate::convert::convert;
use crate::error::Error;
use crate::float::{float, is_approximate};
use crate::instruction::{Class, Instruction, Operation, Register};
use crate::parse::{Entry, Operand, Statement};
use crate::scalar::Scalar;
pub(crate) use registers::{Fixed, Registers, Special};

/// A kernel's instructions, and the registers that they use.
pub(crate) struct Code {
    pub(crate) instructions: Vec<Instruction>,
    pub(crate) registers: Registers,
}

pub(crate) fn decode(entry: &Entry) -> Result<Code, Error> {
    let mut decoder = Decoder { entry, registers: Registers::new(&entry.registers) };
    let mut instructions = Vec::with_capacity(entry.statements.len());
    for statement in &entry.statements {
        let (operation, class) = decoder.statement(statement).map_err(|reason| Error::Unsupported {
            line: statement.line,
            text: statement.text.clone(),
            reason,
        })?;
        instructions.push(Instruction {
            line: statement.line,
            text: statement.text.clone(),
            guard: statement.guard,
            operation,
            class,
            reconvergence: 0,
        });
    }
    for (at, reconvergence) in reconvergences(&instructions).into_iter().enumerate() {
        instructions[at].reconvergence = reconvergence;
    }
    Ok(Code { instructions, registers: decoder.registers })
}

/// Why a statement is not understood.
type Reason = String;
type Decoded = Result<(Operation, Class), Reason>;

struct Decoder<'e> {
    entry: &'e Entry,
    registers: Registers,
}

impl Decoder<'_> {
    fn statement(&mut self, statement: &Statement) -> Decoded {
        let words: Vec<&str> = statement.opcode.iter().map(String::as_str).collect();
        let operands = statement.operands.as_slice();
        match words[0] {
            "bra" => {
                let target = match operands {
                    [Operand::Label(label)] => self.entry.labels.get(label).copied(),
                    _ => None,
                };
                let target = target.ok_or("there is no such label")?;
                let uniform = match words[1..] {
                    [] => false,
                    ["uni"] => true,
                    _ => return Err("a modifier that is not known".into()),
                };
                Ok((Operation::Branch { target, uniform }, Class::Control))
            }
            "ret" | "exit" if words.len() == 1 && operands.is_empty() => {
                Ok((Operation::Exit, Class::Control))
            }
            "trap" if operands.is_empty() => Ok((Operation::Trap, Class::Control)),
            "bar" | "barrier" => self.barrier(&words, operands),
            "membar" | "fence" if operands.is_empty() => Ok((Operation::Fence, Class::Control)),
            "cp" => self.asynchronous(&words, operands),
            "ld" | "st" => self.transfer(&words, operands),
            "shfl" => self.shuffle(&words, operands),
            "vote" | "activemask" => self.vote(&words, operands),
            "mov" => self.copy(&words, operands),
            "cvta" => self.address(&words, operands),
            "selp" => {
                let [to, a, b, condition] = operands else { return Err(operands_expected(4)) };
                let scalar = scalar(words.get(1))?;
                let operation = Operation::Select {
                    to: self.destination(to)?,
                    a: self.input(a, scalar)?,
                    b: self.input(b, scalar)?,
                    condition: self.input(condition, Scalar::Predicate)?,
                };
                Ok((operation, Class::Integer))
            }
            "setp" => self.comparison(&words, operands),
            "cvt" => self.conversion(&words, operands),
            _ => self.computation(&words, operands),
        }
    }

    /// Everything else is a function of its operands, lane by lane.
    fn computation(&mut self, words: &[&str], operands: &[Operand]) -> Decoded {
        let (last, modifiers) = words.split_last().ok_or("no opcode")?;
        let scalar = scalar(Some(last))?;
        let compute = float(modifiers, scalar).or_else(|| integer(modifiers, scalar)).ok_or("unknown")?;
        let (to, inputs) = operands.split_first().ok_or_else(|| operands_expected(2))?;
        // The third operand of `mad.wide` is as wide as the result; the distance of a shift has 32 bits.
        let types: Vec<Scalar> = (0..inputs.len())
            .map(|index| match (modifiers[0], index) {
                ("mad", 2) if modifiers.contains(&"wide") => widened(scalar),
                ("shl" | "shr", 1) | ("bfe", 1 | 2) | ("bfi", 2 | 3) | ("shf", _) => Scalar::Unsigned(4),
                _ => scalar,
            })
            .collect();
        let expected = arity(modifiers[0]);
        if inputs.len() != expected {
            return Err(operands_expected(expected + 1));
        }
        let class = match (scalar, modifiers[0]) {
            (Scalar::F32, "div" | "rcp" | "sqrt" | "ex2" | "lg2" | "rsqrt" | "sin" | "cos" | "tanh") => {
                Class::Special
            }
            (Scalar::F32, "add" | "sub" | "mul" | "fma") => Class::Float,
            (Scalar::F64, _) => Class::Double,
            _ => Class::Integer,
        };
        self.compute(to, inputs, &types, compute, is_approximate(modifiers), class)
    }

    fn comparison(&mut self, words: &[&str], operands: &[Operand]) -> Decoded {
        let words: Vec<&str> = words.iter().copied().filter(|word| *word != "ftz").collect();
        let (operator, combination, last) = match words[..] {
            ["setp", operator, last] => (operator, None, last),
            ["setp", operator, combination, last] => (operator, Some(combination), last),
            _ => return Err("a modifier that is not known".into()),
        };
        let scalar = scalar(Some(&last))?;
        let compute = compare(operator, combination, scalar).ok_or("unknown")?;
        let (to, inputs) = operands.split_first().ok_or_else(|| operands_expected(3))?;
        if inputs.len() != 2 + usize::from(combination.is_some()) {
            return Err(operands_expected(3 + usize::from(combination.is_some())));
        }
        self.compute(to, inputs, &[scalar, scalar, Scalar::Predicate], compute, false, Class::Integer)
    }

    fn conversion(&mut self, words: &[&str], operands: &[Operand]) -> Decoded {
        let [modifiers @ .., to_type, from_type] = &words[1..] else { return Err("unknown".into()) };
        let (to_type, from_type) = (scalar(Some(to_type))?, scalar(Some(from_type))?);
        let compute = convert(modifiers, to_type, from_type).ok_or("unknown")?;
        let packs = matches!(to_type, Scalar::F16x2 | Scalar::Bf16x2);
        let (to, inputs) = operands.split_first().ok_or_else(|| operands_expected(2))?;
        if inputs.len() != 1 + usize::from(packs) {
            return Err(operands_expected(2 + usize::from(packs)));
        }
        let register = self.destination(to)?;
        // A signed result is extended to all of a wider register.
        let width = self.registers.scalar(register).bytes();
        let compute: Compute = if to_type.is_signed() && width > to_type.bytes() {
            Box::new(move |inputs| {
                compute(inputs).map(|bits| {
                    crate::scalar::truncate(crate::scalar::signed(bits, to_type.bytes()) as u64, width)
                })
            })
        } else {
            compute
        };
        self.compute(to, inputs, &[from_type; 2], compute, false, Class::Convert)
    }

    fn compute(
        &mut self,
        to: &Operand,
        inputs: &[Operand],
        types: &[Scalar],
        compute: Compute,
        approximate: bool,
        class: Class,
    ) -> Decoded {
        let to = self.destination(to)?;
        let mut registers = [0; 4];
        for (index, input) in inputs.iter().enumerate() {
            registers[index] = self.input(input, types[index])?;
        }
        let inputs_used = inputs.len();
        Ok((Operation::Compute { to, inputs: registers, count: inputs_used, compute, approximate }, class))
    }

    fn destination(&self, operand: &Operand) -> Result<Register, Reason> {
        match operand {
            Operand::Register(register) => Ok(*register),
            _ => Err("the first operand is not a register".into()),
        }
    }

    /// The register of an operand that is read as `scalar`.
    fn input(&mut self, operand: &Operand, scalar: Scalar) -> Result<Register, Reason> {
        match operand {
            Operand::Register(register) => Ok(*register),
            Operand::Constant(bits) | Operand::Shared(bits) => {
                Ok(self.registers.constant(scalar.constant(*bits)))
            }
            Operand::DynamicShared => Ok(self.registers.constant(dynamic_shared(self.entry.shared) as u64)),
            Operand::ParameterAddress(offset) => Ok(self.registers.constant(*offset as u64)),
            Operand::Special(name) => self
                .registers
                .special(name)
                .ok_or_else(|| format!("`{name}` is neither a register of the kernel nor a special one")),
            Operand::Label(name) => Err(format!("`{name}` is not known here")),
            _ => Err("an operand of a form that is not expected here".into()),
        }
    }
}

/// Where the shared memory of a launch begins, behind that of the kernel.
pub(crate) fn dynamic_shared(declared: usize) -> usize {
    declared.next_multiple_of(16)
}

fn arity(opcode: &str) -> usize {
    match opcode {
        "bfi" => 4,
        "mad" | "fma" | "prmt" | "shf" | "bfe" => 3,
        "not" | "neg" | "abs" | "popc" | "clz" | "brev" | "rcp" | "sqrt" | "ex2" | "lg2" | "rsqrt"
        | "sin" | "cos" | "tanh" => 1,
        _ => 2,
    }
}

fn scalar(word: Option<&&str>) -> Result<Scalar, Reason> {
    let word = word.ok_or("it has no type")?;
    Scalar::named(word).ok_or_else(|| format!("`{word}` is not a known type"))
}

fn widened(scalar: Scalar) -> Scalar {
    match scalar {
        Scalar::Signed(bytes) => Scalar::Signed(2 * bytes),
        Scalar::Unsigned(bytes) => Scalar::Unsigned(2 * bytes),
        other => other,
    }
}

fn operands_expected(count: usize) -> Reason {
    format!("expected {count} operands")
}
