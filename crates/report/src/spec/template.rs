//! The sentence of a finding, with placeholders for computed quantities.

use serde::Deserialize;

/// A sentence with placeholders for computed quantities.
///
/// | written | becomes |
/// |---|---|
/// | `{per}` | the group's case: `batch 8, SaveOne` |
/// | `{groups}` | the number of groups of a finding with `over` |
/// | `{level}` | the value of that case key in the group, or in the `of` filter |
/// | `{of:peak_bytes}` | the value: `1.25 GiB` |
/// | `{against:peak_bytes}` | the baseline value |
/// | `{percent:share_of_resident}` | a ratio in percent: `78.5 %` |
/// | `{ratio:peak_bytes}` | `of / against`: `0.760` |
/// | `{less:peak_bytes}` | `24.0 % less`, or `… more`, or `neither more nor less` |
/// | `{more:peak_bytes}` | the same words, for sentences that expect more |
/// | `{slower:step_seconds}` | of a time: `3.1 % slower`, or `… faster`, `4.14 times as fast`, `just as fast`; a `than` behind it becomes `as` where it must |
/// | `{faster:tokens_per_second}` | of a rate: the same words |
/// | `{slower:step_time_vs_eager@1}` | the same for a ratio, whose baseline is the number after the `@` |
/// | `{{`, `}}` | a brace |
///
/// A change whose 95 % interval covers no change counts as none: the sentence has `neither more nor less`, and ends
/// with `(no difference by the 95 % interval: backward)`, or with `(undecided by the 95 % interval: backward)` where that is wide. One
/// of single runs, which have no interval, ends with `(single runs: backward)`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(try_from = "String")]
pub struct Template(pub(crate) Vec<Piece>);

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Piece {
    Text(String),
    Key(String),
    Quantity(Quantity, Operand),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Quantity {
    Of,
    Against,
    Percent,
    Ratio,
    /// Less or more.
    Change,
    /// Slower or faster, of a time.
    Time,
    /// Slower or faster, of a rate.
    Rate,
}

/// A metric, and the number it is compared with where that is no record's: `step_time_vs_eager@1`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(try_from = "String")]
pub struct Operand {
    /// The metric.
    pub metric: String,
    /// The number; `None` where the baseline is a record.
    pub baseline: Option<f64>,
}

impl TryFrom<String> for Operand {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let Some((metric, baseline)) = text.split_once('@') else {
            return Ok(Self { metric: text, baseline: None });
        };
        match baseline.parse::<f64>() {
            Ok(number) if number.is_finite() && number != 0.0 => {
                Ok(Self { metric: metric.into(), baseline: Some(number) })
            }
            _ => {
                Err(format!("`{text}` compares with `{baseline}`; write a number other than 0 after the `@`"))
            }
        }
    }
}

impl TryFrom<String> for Template {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let mut pieces = Vec::new();
        let mut plain = String::new();
        let mut rest = text.as_str();
        while let Some(at) = rest.find(['{', '}']) {
            let brace = &rest[at..=at];
            plain.push_str(&rest[..at]);
            rest = &rest[at + 1..];
            if let Some(after) = rest.strip_prefix(brace) {
                plain.push_str(brace);
                rest = after;
                continue;
            }
            if brace == "}" {
                return Err("the text has a `}` without its `{`; write `}}` for a brace".into());
            }
            let Some(end) = rest.find('}') else {
                return Err("the text has a `{` without its `}`; write `{{` for a brace".into());
            };
            if !plain.is_empty() {
                pieces.push(Piece::Text(std::mem::take(&mut plain)));
            }
            pieces.push(Piece::parse(&rest[..end])?);
            rest = &rest[end + 1..];
        }
        plain.push_str(rest);
        if !plain.is_empty() {
            pieces.push(Piece::Text(plain));
        }
        Ok(Self(pieces))
    }
}

impl Piece {
    fn parse(inside: &str) -> Result<Self, String> {
        let Some((quantity, metric)) = inside.split_once(':') else {
            return match inside {
                "" => Err("the text has an empty `{}`; name a case key or a quantity".into()),
                key => Ok(Self::Key(key.into())),
            };
        };
        let quantity = match quantity {
            "of" => Quantity::Of,
            "against" => Quantity::Against,
            "percent" => Quantity::Percent,
            "ratio" => Quantity::Ratio,
            "less" | "more" => Quantity::Change,
            "slower" => Quantity::Time,
            "faster" => Quantity::Rate,
            other => {
                return Err(format!(
                    "the text asks for the unknown quantity `{other}`; known: of, against, percent, ratio, less, more, \
                     slower, faster"
                ));
            }
        };
        if metric.is_empty() {
            return Err(format!(
                "the text has `{{{inside}}}` without a metric; write `{{{inside}backward_seconds}}`"
            ));
        }
        Ok(Self::Quantity(quantity, Operand::try_from(metric.to_owned())?))
    }
}

impl Template {
    /// Returns the metrics that it shows.
    pub fn operands(&self) -> impl Iterator<Item = &Operand> {
        self.0
            .iter()
            .filter_map(|piece| if let Piece::Quantity(_, operand) = piece { Some(operand) } else { None })
    }

    /// Returns whether its words depend on which of two values is larger.
    pub fn relates(&self) -> bool {
        let relation = |quantity| matches!(quantity, Quantity::Change | Quantity::Time | Quantity::Rate);
        self.0.iter().any(|piece| matches!(piece, Piece::Quantity(quantity, _) if relation(*quantity)))
    }

    /// Returns the words between the quantities.
    pub fn plain_text(&self) -> String {
        let text = |piece: &Piece| if let Piece::Text(text) = piece { Some(text.clone()) } else { None };
        self.0.iter().filter_map(text).collect::<Vec<_>>().join(" … ")
    }

    /// The first quantity that is a relation of two values and has one, as it is written.
    pub(super) fn first_that_needs_against(&self) -> Option<String> {
        self.0.iter().find_map(|piece| match piece {
            Piece::Quantity(quantity, Operand { metric, baseline: None }) => {
                let word = match quantity {
                    Quantity::Of | Quantity::Percent => return None,
                    Quantity::Against => "against",
                    Quantity::Ratio => "ratio",
                    Quantity::Change => return Some(format!("`{{less:{metric}}}` or `{{more:{metric}}}`")),
                    Quantity::Time => "slower",
                    Quantity::Rate => "faster",
                };
                Some(format!("`{{{word}:{metric}}}`"))
            }
            _ => None,
        })
    }
}
