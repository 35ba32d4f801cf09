//! `accounting dtypes`

use accounting::Dtype;
use accounting::dtype::Limits;
use accounting::quantity::{bytes_text, grouped, parse_count};
use report::Environment;
use serde_json::{Value, json};

use super::Output;
use super::table::table;
use crate::accounting::sections;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Print the bytes of a tensor of this shape too, for example 49152,12288
    #[arg(long, value_delimiter = ',', value_parser = parse_count, allow_negative_numbers = true, value_name = "N,…")]
    shape: Vec<u64>,
    /// Only this number format: fp64, fp32, tf32, fp16, bf16, fp8-e4m3, fp8-e5m2, int8 or int4
    #[arg(long, value_name = "NAME")]
    dtype: Option<Dtype>,
}

impl Args {
    pub(crate) fn run(&self, environment: &Environment) -> anyhow::Result<Output> {
        let wanted: Vec<Dtype> =
            Dtype::ALL.into_iter().filter(|dtype| self.dtype.is_none_or(|only| only == *dtype)).collect();
        let mut header = vec![
            "dtype",
            "bits",
            "sign+exp+man",
            "max",
            "min normal",
            "min subnormal",
            "epsilon",
            "digits",
            "stores 1e-8 as",
            "stores 0.1 as",
        ];
        if !self.shape.is_empty() {
            header.push("tensor");
        }
        let (mut rows, mut values) = (Vec::new(), Vec::new());
        for dtype in wanted {
            let mut row = row(&dtype.limits());
            let mut value = json(&dtype.limits());
            if !self.shape.is_empty() {
                let bytes = dtype.tensor_bytes(&self.shape)?;
                row.push(bytes_text(bytes));
                value["tensor_bytes"] = bytes.into();
            }
            rows.push(row);
            values.push(value);
        }
        let mut text = table(&header, &rows);
        text += "\ntf32 is a format of the multiplier, stored in 32 bits. Integers are shown without a scale; a \
                 quantized tensor has one.\n";
        if !self.shape.is_empty() {
            let elements: u128 = self.shape.iter().map(|n| u128::from(*n)).product();
            let shape: Vec<String> = self.shape.iter().map(u64::to_string).collect();
            text += &format!("tensor: [{}], {} elements\n", shape.join(", "), grouped(elements));
        }
        Ok(Output { text, json: Value::Array(values), records: sections::dtypes(environment)? })
    }
}

fn row(limits: &Limits) -> Vec<String> {
    let dtype = limits.dtype;
    let bits = dtype
        .float_format()
        .map_or("–".into(), |format| format!("1+{}+{}", format.exponent_bits, format.mantissa_bits));
    let optional = |value: Option<f64>| value.map_or("–".into(), number);
    vec![
        dtype.name().into(),
        dtype.storage_bits().to_string(),
        bits,
        number(limits.max),
        optional(limits.min_normal),
        number(limits.min_subnormal),
        optional(limits.epsilon),
        limits.decimal_digits.to_string(),
        if limits.tiny == 0.0 { "0 (underflow)".into() } else { number(limits.tiny) },
        if limits.tenth == 0.0 { "0".into() } else { format!("{:.8}", limits.tenth) },
    ]
}

/// Six significant digits at most.
fn number(value: f64) -> String {
    if (1e-3..1e6).contains(&value) { format!("{value}") } else { format!("{value:.4e}") }
}

fn json(limits: &Limits) -> Value {
    json!({
        "dtype": limits.dtype.name(),
        "storage_bits": limits.dtype.storage_bits(),
        "max": limits.max,
        "min_normal": limits.min_normal,
        "min_subnormal": limits.min_subnormal,
        "epsilon": limits.epsilon,
        "decimal_digits": limits.decimal_digits,
        "stored_1e-8": limits.tiny,
        "stored_0.1": limits.tenth,
    })
}
