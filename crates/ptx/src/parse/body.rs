//! A kernel's body: registers, shared memory, labels, statements.

use std::collections::HashMap;

use super::{Operand, Parameter, Parser, Statement};
use crate::error::Error;
use crate::scalar::Scalar;
use crate::token::Token;

/// The parts of a body.
#[derive(Default)]
pub(super) struct BodyParts {
    pub(super) registers: Vec<(String, Scalar)>,
    pub(super) shared: usize,
    pub(super) statements: Vec<Statement>,
    pub(super) labels: HashMap<String, usize>,
}

/// A kernel's body while it is read. Inline assembly opens scopes whose registers hide others of their name.
pub(super) struct Body<'p> {
    parameters: &'p [Parameter],
    scopes: Vec<HashMap<String, Operand>>,
    entry: BodyParts,
}

impl<'p> Body<'p> {
    pub(super) fn new(parameters: &'p [Parameter], dynamic: &[String]) -> Self {
        let shared = dynamic.iter().map(|name| (name.clone(), Operand::DynamicShared));
        let addresses = parameters
            .iter()
            .map(|parameter| (parameter.name.clone(), Operand::ParameterAddress(parameter.offset)));
        let scopes = vec![shared.chain(addresses).collect()];
        Self { parameters, scopes, entry: BodyParts::default() }
    }

    pub(super) fn parse(mut self, parser: &mut Parser<'_>) -> Result<BodyParts, Error> {
        parser.expect('{')?;
        self.scopes.push(HashMap::new());
        while let Some(token) = parser.peek() {
            match token {
                Token::Sign('{') => {
                    parser.skip(1);
                    self.scopes.push(HashMap::new());
                }
                Token::Sign('}') => {
                    parser.skip(1);
                    self.scopes.pop();
                    if self.scopes.len() == 1 {
                        return Ok(self.entry);
                    }
                }
                Token::Sign(';') => parser.skip(1),
                Token::Word(".reg") => self.registers(parser)?,
                Token::Word(".shared") => self.shared(parser)?,
                Token::Word(".pragma") => parser.skip_until(';'),
                Token::Word(".loc") => parser.skip(4),
                Token::Word(word) if self.is_label(parser) => {
                    parser.skip(2);
                    self.entry.labels.insert(word.to_owned(), self.entry.statements.len());
                }
                _ => self.statement(parser)?,
            }
        }
        Err(parser.expected("`}`"))
    }

    fn is_label(&self, parser: &Parser<'_>) -> bool {
        parser.tokens.get(parser.at + 1).is_some_and(|located| located.token == Token::Sign(':'))
    }

    fn declare(&mut self, name: &str, operand: Operand) {
        if let Some(scope) = self.scopes.last_mut() {
            scope.insert(name.to_owned(), operand);
        }
    }

    /// `.reg .f32 %f<16>;` or `.reg .b32 a, b;`.
    fn registers(&mut self, parser: &mut Parser<'_>) -> Result<(), Error> {
        parser.skip(1);
        let scalar = parser.scalar()?;
        loop {
            let name = parser.word()?;
            let names = if parser.take('<') {
                let count: u32 = parser.number()?;
                parser.expect('>')?;
                (0..count).map(|index| format!("{name}{index}")).collect()
            } else {
                vec![name.to_owned()]
            };
            for name in names {
                self.declare(&name, Operand::Register(self.entry.registers.len() as u32));
                self.entry.registers.push((name, scalar));
            }
            if !parser.take(',') {
                return parser.expect(';');
            }
        }
    }

    /// `.shared .align 4 .b8 name[384];`.
    fn shared(&mut self, parser: &mut Parser<'_>) -> Result<(), Error> {
        parser.skip(1);
        let align = parser.alignment()?;
        let scalar = parser.scalar()?;
        let name = parser.word()?.to_owned();
        let mut bytes = scalar.bytes();
        while parser.take('[') {
            bytes *= parser.number::<usize>()?;
            parser.expect(']')?;
        }
        let offset = self.entry.shared.next_multiple_of(align.max(scalar.bytes()));
        self.entry.shared = offset + bytes;
        self.declare(&name, Operand::Shared(offset as u64));
        parser.expect(';')
    }

    fn statement(&mut self, parser: &mut Parser<'_>) -> Result<(), Error> {
        let (line, start) = (parser.line(), parser.tokens[parser.at].start);
        let mut guard = None;
        if parser.take('@') {
            let negated = parser.take('!');
            let error = parser.expected("a predicate");
            let Operand::Register(register) = self.name(parser.word()?) else { return Err(error) };
            guard = Some((register, negated));
        }
        let opcode: Vec<String> = parser.word()?.split('.').map(str::to_owned).collect();
        let mut operands = Vec::new();
        if opcode[0] == "bra" {
            operands.push(Operand::Label(parser.word()?.to_owned()));
        } else if parser.peek() != Some(Token::Sign(';')) {
            operands.push(self.operand(parser)?);
            while parser.take(',') {
                operands.push(self.operand(parser)?);
            }
        }
        let end = parser.tokens.get(parser.at).map_or(parser.text.len(), |located| located.start);
        parser.expect(';')?;
        let text = parser.text[start..end].split_whitespace().collect::<Vec<_>>().join(" ");
        self.entry.statements.push(Statement { line, text, guard, opcode, operands });
        Ok(())
    }

    fn operand(&self, parser: &mut Parser<'_>) -> Result<Operand, Error> {
        if parser.take('{') {
            let mut parts = vec![self.operand(parser)?];
            while parser.take(',') {
                parts.push(self.operand(parser)?);
            }
            parser.expect('}')?;
            return Ok(Operand::Vector(parts));
        }
        if parser.take('[') {
            let word = parser.word()?;
            if let Some(parameter) = self.parameters.iter().find(|parameter| parameter.name == word) {
                let more = if parser.take('+') { parser.number::<usize>()? } else { 0 };
                parser.expect(']')?;
                return Ok(Operand::Parameter(parameter.offset + more));
            }
            let offset = match (parser.take('+'), parser.take('-')) {
                (false, false) => 0,
                (_, negative) => parser.number::<i64>()? * if negative { -1 } else { 1 },
            };
            parser.expect(']')?;
            return Ok(Operand::Address(Box::new(self.name(word)), offset));
        }
        if parser.take('-') {
            let error = parser.expected("a number");
            return match self.name(parser.word()?) {
                Operand::Constant(bits) => Ok(Operand::Constant(bits.wrapping_neg())),
                _ => Err(error),
            };
        }
        let first = self.name(parser.word()?);
        if parser.take('|') {
            let error = parser.expected("a second register");
            return match (first, self.name(parser.word()?)) {
                (Operand::Register(first), Operand::Register(second)) => Ok(Operand::Pair(first, second)),
                _ => Err(error),
            };
        }
        Ok(first)
    }

    fn name(&self, word: &str) -> Operand {
        if let Some(known) = self.scopes.iter().rev().find_map(|scope| scope.get(word)) {
            return known.clone();
        }
        match constant(word) {
            Some(bits) => Operand::Constant(bits),
            None if word.starts_with('%') => Operand::Special(word.to_owned()),
            None => Operand::Label(word.to_owned()),
        }
    }
}

/// `12`, `0xffU`, `0f3F800000`, `0d3FF0000000000000`.
fn constant(word: &str) -> Option<u64> {
    if !word.starts_with(|first: char| first.is_ascii_digit()) {
        return None;
    }
    let hexadecimal = |prefixes: [&str; 2]| prefixes.iter().find_map(|prefix| word.strip_prefix(prefix));
    if let Some(digits) = hexadecimal(["0f", "0F"]).or_else(|| hexadecimal(["0d", "0D"])) {
        return u64::from_str_radix(digits, 16).ok();
    }
    if let Some(digits) = hexadecimal(["0x", "0X"]) {
        return u64::from_str_radix(digits.trim_end_matches('U'), 16).ok();
    }
    word.trim_end_matches('U').parse().ok()
}
