//! PTX text to statements with resolved names: registers are numbers, variables addresses, labels positions.

mod body;

use std::collections::HashMap;

use body::{Body, BodyParts};

use crate::error::Error;
use crate::scalar::Scalar;
use crate::token::{Located, Token, tokens};

/// The declarations of a module.
#[derive(Debug)]
pub(crate) struct Source {
    /// `sm_80`.
    pub(crate) target: String,
    pub(crate) entries: Vec<Entry>,
}

/// A kernel as it is written.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) parameters: Vec<Parameter>,
    /// `.maxntid`.
    pub(crate) most_threads: Option<u32>,
    /// Names and types, by number.
    pub(crate) registers: Vec<(String, Scalar)>,
    /// Bytes of shared memory.
    pub(crate) shared: usize,
    pub(crate) statements: Vec<Statement>,
    pub(crate) labels: HashMap<String, usize>,
}

#[derive(Debug, Clone)]
pub(crate) struct Parameter {
    pub(crate) name: String,
    pub(crate) bytes: usize,
    pub(crate) offset: usize,
}

/// An instruction as it is written.
#[derive(Debug)]
pub(crate) struct Statement {
    pub(crate) line: usize,
    pub(crate) text: String,
    /// The predicate, and whether it is negated.
    pub(crate) guard: Option<(u32, bool)>,
    /// `ld`, `global`, `v4`, `u32`.
    pub(crate) opcode: Vec<String>,
    pub(crate) operands: Vec<Operand>,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Operand {
    Register(u32),
    /// `a|b`; the second one.
    Pair(u32, u32),
    /// The bits of an integer, or of a number in the `0f`/`0d` form.
    Constant(u64),
    /// `%tid.x`.
    Special(String),
    /// An address in shared memory.
    Shared(u64),
    /// The beginning of the shared memory whose size the launch gives.
    DynamicShared,
    /// A parameter's offset among the parameters, as an address of their space.
    ParameterAddress(usize),
    /// `[base+offset]`.
    Address(Box<Operand>, i64),
    /// A parameter's offset.
    Parameter(usize),
    /// `{a, b}`.
    Vector(Vec<Operand>),
    /// A label.
    Label(String),
}

pub(crate) fn parse(text: &str) -> Result<Source, Error> {
    let mut parser = Parser { text, tokens: tokens(text)?, at: 0, dynamic: Vec::new() };
    let mut source = Source { target: String::new(), entries: Vec::new() };
    while let Some(token) = parser.peek() {
        match token {
            Token::Word(".version" | ".address_size") => parser.skip(2),
            Token::Word(".target") => {
                parser.skip(1);
                parser.word()?.clone_into(&mut source.target);
                while parser.take(',') {
                    parser.word()?;
                }
            }
            Token::Word(".visible" | ".weak" | ".extern") => parser.skip(1),
            Token::Word(".entry") => source.entries.push(parser.entry()?),
            Token::Word(".shared") => parser.dynamic_shared()?,
            // Variables of the module; an instruction that names one is refused where it stands.
            Token::Word(".global" | ".const") => parser.skip_until(';'),
            Token::Word(".file") => {
                parser.skip(1);
                parser.word()?;
                parser.skip(1);
                while parser.take(',') {
                    parser.word()?;
                }
            }
            _ => return Err(parser.expected("a directive of a module")),
        }
    }
    Ok(source)
}

struct Parser<'a> {
    text: &'a str,
    tokens: Vec<Located<'a>>,
    at: usize,
    /// Names of shared memory whose size the launch gives; they all begin at one place.
    dynamic: Vec<String>,
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Option<Token<'a>> {
        self.tokens.get(self.at).map(|located| located.token)
    }

    fn line(&self) -> usize {
        self.tokens.get(self.at).or(self.tokens.last()).map_or(1, |located| located.line)
    }

    fn skip(&mut self, count: usize) {
        self.at += count;
    }

    fn skip_until(&mut self, end: char) {
        while self.peek().is_some_and(|token| token != Token::Sign(end)) {
            self.at += 1;
        }
        self.at += 1;
    }

    fn take(&mut self, sign: char) -> bool {
        let matches = self.peek() == Some(Token::Sign(sign));
        self.at += usize::from(matches);
        matches
    }

    fn expect(&mut self, sign: char) -> Result<(), Error> {
        if self.take(sign) { Ok(()) } else { Err(self.expected(&format!("`{sign}`"))) }
    }

    fn word(&mut self) -> Result<&'a str, Error> {
        match self.peek() {
            Some(Token::Word(word)) => {
                self.at += 1;
                Ok(word)
            }
            _ => Err(self.expected("a word")),
        }
    }

    fn number<T: std::str::FromStr>(&mut self) -> Result<T, Error> {
        let error = self.expected("a number");
        self.word()?.parse().map_err(|_| error)
    }

    fn expected(&self, what: &str) -> Error {
        let token = match self.peek() {
            Some(Token::Word(word)) => format!("`{word}`"),
            Some(Token::Quoted(text)) => format!("\"{text}\""),
            Some(Token::Sign(sign)) => format!("`{sign}`"),
            None => "the end".to_owned(),
        };
        Error::Syntax { line: self.line(), message: format!("expected {what}, found {token}") }
    }

    fn scalar(&mut self) -> Result<Scalar, Error> {
        let error = self.expected("a type");
        self.word()?.strip_prefix('.').and_then(Scalar::named).ok_or(error)
    }

    /// `.align 8`, where it stands here; else 1.
    fn alignment(&mut self) -> Result<usize, Error> {
        if self.peek() != Some(Token::Word(".align")) {
            return Ok(1);
        }
        self.skip(1);
        self.number()
    }

    /// `.shared .align 16 .b8 name[];`, behind `.extern`.
    fn dynamic_shared(&mut self) -> Result<(), Error> {
        self.skip(1);
        self.alignment()?;
        self.scalar()?;
        let name = self.word()?.to_owned();
        for sign in ['[', ']', ';'] {
            self.expect(sign)?;
        }
        self.dynamic.push(name);
        Ok(())
    }

    fn entry(&mut self) -> Result<Entry, Error> {
        self.skip(1);
        let name = self.word()?.to_owned();
        let (mut parameters, mut end) = (Vec::new(), 0usize);
        if self.take('(') {
            while !self.take(')') {
                if self.word()? != ".param" {
                    self.at -= 1;
                    return Err(self.expected("`.param`"));
                }
                let align = self.alignment()?;
                let scalar = self.scalar()?;
                let name = self.word()?.to_owned();
                let mut bytes = scalar.bytes();
                if self.take('[') {
                    bytes *= self.number::<usize>()?;
                    self.expect(']')?;
                }
                let offset = end.next_multiple_of(align.max(scalar.bytes()));
                end = offset + bytes;
                parameters.push(Parameter { name, bytes, offset });
                if self.peek() != Some(Token::Sign(')')) {
                    self.expect(',')?;
                }
            }
        }
        let mut most_threads = None;
        while let Some(Token::Word(directive)) = self.peek() {
            self.skip(1);
            let mut numbers = vec![self.number::<u32>()?];
            while self.take(',') {
                numbers.push(self.number()?);
            }
            match directive {
                ".maxntid" => most_threads = Some(numbers.iter().product()),
                ".reqntid" | ".minnctapersm" | ".maxnreg" => {}
                _ => {
                    self.at -= 1;
                    return Err(self.expected("a directive of a kernel"));
                }
            }
        }
        let BodyParts { registers, shared, statements, labels } =
            Body::new(&parameters, &self.dynamic).parse(self)?;
        Ok(Entry { name, parameters, most_threads, registers, shared, statements, labels })
    }
}
