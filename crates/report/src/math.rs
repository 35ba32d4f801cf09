//! Formulas: the part of TeX's notation that the report's texts use, as MathML, which browsers draw by themselves.
//!
//! | written | drawn |
//! |---|---|
//! | letters, digits, signs (`∂`, `σ`, `⊙`, `≤`, … as they are) | themselves |
//! | `x^2`, `W^{⊤}`, `x_{ij}` | raised, lowered |
//! | `\frac{a}{b}`, `\sqrt{a}` | a fraction, a root |
//! | `\mathrm{SiLU}`, `\text{of a step}` | upright words |
//! | `\,`, `\quad` | space |
//! | `\cdot`, `\partial`, `\sigma`, `\alpha`, `\top`, `\odot` | `·`, `∂`, `σ`, `α`, `⊤`, `⊙` |

use crate::plot::escape;

/// The formula as a `<math>` element, or what in it is not known.
pub(crate) fn mathml(tex: &str, display: bool) -> Result<String, String> {
    let mut reader = Reader { rest: tex.trim() };
    let body = reader.until(None)?;
    let display = if display { " display=\"block\"" } else { "" };
    Ok(format!("<math{display}>{body}</math>"))
}

struct Reader<'a> {
    rest: &'a str,
}

impl Reader<'_> {
    /// Every element up to `end`, which is taken, or to the end of the text.
    fn until(&mut self, end: Option<char>) -> Result<String, String> {
        let mut elements: Vec<String> = Vec::new();
        loop {
            self.rest = self.rest.trim_start();
            let Some(c) = self.rest.chars().next() else {
                return match end {
                    None => Ok(elements.concat()),
                    Some(end) => Err(format!("no `{end}` ends the group")),
                };
            };
            if Some(c) == end {
                self.take(c);
                return Ok(elements.concat());
            }
            match c {
                '^' | '_' => {
                    self.take(c);
                    let base = elements.pop().ok_or("there is nothing to raise or lower")?;
                    let script = self.element()?;
                    let (tag, swapped) = if c == '^' { ("msup", '_') } else { ("msub", '^') };
                    self.rest = self.rest.trim_start();
                    elements.push(if self.rest.starts_with(swapped) {
                        self.take(swapped);
                        let other = self.element()?;
                        let (low, high) = if c == '^' { (other, script) } else { (script, other) };
                        format!("<msubsup>{base}{low}{high}</msubsup>")
                    } else {
                        format!("<{tag}>{base}{script}</{tag}>")
                    });
                }
                '\'' => {
                    self.take(c);
                    let base = elements.pop().ok_or("there is nothing to put a prime to")?;
                    elements.push(format!("<mrow>{base}<mo lspace=\"0\" rspace=\"0\">′</mo></mrow>"));
                }
                _ => elements.push(self.element()?),
            }
        }
    }

    /// Parses an element: a group, a command, a number, a letter or a sign.
    fn element(&mut self) -> Result<String, String> {
        self.rest = self.rest.trim_start();
        let c = self.rest.chars().next().ok_or("the formula ends too early")?;
        match c {
            '{' => {
                self.take(c);
                Ok(format!("<mrow>{}</mrow>", self.until(Some('}'))?))
            }
            '}' => Err("a `}` without its `{`".into()),
            '\\' => self.command(),
            c if c.is_ascii_digit() => {
                let number = self.take_while(|c| c.is_ascii_digit() || c == '.');
                Ok(format!("<mn>{number}</mn>"))
            }
            c if c.is_alphabetic() || c == '∂' => {
                self.take(c);
                Ok(format!("<mi>{c}</mi>"))
            }
            c => {
                self.take(c);
                let sign = if c == '-' { "−".to_owned() } else { escape(&c.to_string()) };
                // Brackets that grow with what stands beside them are too tall without a face for formulas.
                let still = if "()[]|/".contains(c) { " stretchy=\"false\"" } else { "" };
                Ok(format!("<mo{still}>{sign}</mo>"))
            }
        }
    }

    fn command(&mut self) -> Result<String, String> {
        self.take('\\');
        let name = self.take_while(|c| c.is_ascii_alphabetic());
        let sign = |tag: &str, sign: &str| Ok(format!("<{tag}>{sign}</{tag}>"));
        match name.as_str() {
            "" => {
                let space = self.rest.chars().next().ok_or("the formula ends with a `\\`")?;
                self.take(space);
                match space {
                    ',' => Ok("<mspace width=\"0.17em\"/>".into()),
                    other => Err(format!("`\\{other}` is not known")),
                }
            }
            "quad" => Ok("<mspace width=\"1em\"/>".into()),
            "frac" => Ok(format!("<mfrac>{}{}</mfrac>", self.element()?, self.element()?)),
            "sqrt" => Ok(format!("<msqrt>{}</msqrt>", self.element()?)),
            "mathrm" => Ok(format!("<mi mathvariant=\"normal\">{}</mi>", escape(&self.words()?))),
            "text" => Ok(format!("<mtext>{}</mtext>", escape(&self.words()?))),
            "cdot" => sign("mo", "·"),
            "odot" => sign("mo", "⊙"),
            "partial" => sign("mi", "∂"),
            "sigma" => sign("mi", "σ"),
            "alpha" => sign("mi", "α"),
            "top" => sign("mo", "⊤"),
            other => Err(format!("`\\{other}` is not known")),
        }
    }

    /// The text of a group, as it is.
    fn words(&mut self) -> Result<String, String> {
        let inside = self.rest.strip_prefix('{').ok_or("a `{` must follow")?;
        let (words, rest) = inside.split_once('}').ok_or("no `}` ends the group")?;
        self.rest = rest;
        Ok(words.to_owned())
    }

    fn take(&mut self, c: char) {
        self.rest = self.rest.strip_prefix(c).unwrap_or(self.rest);
    }

    fn take_while(&mut self, takes: impl Fn(char) -> bool) -> String {
        let end = self.rest.find(|c| !takes(c)).unwrap_or(self.rest.len());
        let (taken, rest) = self.rest.split_at(end);
        self.rest = rest;
        taken.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::mathml;

    #[test]
    fn what_the_texts_use_is_drawn() {
        for (tex, expected) in [
            ("x^2", "<msup><mi>x</mi><mn>2</mn></msup>"),
            ("a_i^{n}", "<msubsup><mi>a</mi><mi>i</mi><mrow><mi>n</mi></mrow></msubsup>"),
            ("f'", "<mrow><mi>f</mi><mo lspace=\"0\" rspace=\"0\">′</mo></mrow>"),
            (
                r"\frac{∂L}{∂z}",
                "<mfrac><mrow><mi>∂</mi><mi>L</mi></mrow><mrow><mi>∂</mi><mi>z</mi></mrow></mfrac>",
            ),
            (
                r"\mathrm{SiLU}(g)",
                "<mi mathvariant=\"normal\">SiLU</mi><mo stretchy=\"false\">(</mo><mi>g</mi><mo stretchy=\"false\">)</mo>",
            ),
            (r"12\,H", "<mn>12</mn><mspace width=\"0.17em\"/><mi>H</mi>"),
            ("1 - a", "<mn>1</mn><mo>−</mo><mi>a</mi>"),
        ] {
            assert_eq!(mathml(tex, false), Ok(format!("<math>{expected}</math>")), "{tex}");
        }
        assert!(mathml("x", true).is_ok_and(|text| text.starts_with("<math display=\"block\">")));
    }

    #[test]
    fn what_is_not_known_is_said() {
        for (tex, why) in [
            (r"\oint", "`\\oint` is not known"),
            ("{a", "no `}` ends the group"),
            ("a}", "a `}` without its `{`"),
            ("^2", "there is nothing to raise or lower"),
            ("x^", "the formula ends too early"),
            (r"\text", "a `{` must follow"),
        ] {
            assert_eq!(mathml(tex, false), Err(why.into()), "{tex}");
        }
    }
}
