//! The weight of a record in the loss.

use serde_json::Value;

use super::Record;
use crate::error::Result;
use crate::text::json_lines::kind;

/// The field that has it.
pub const WEIGHT: &str = "weight";

impl Record {
    /// Returns its [`WEIGHT`], a number from 0 on, which a CSV file has as a text; 1 if there is none or it is null. With 0 nothing of it
    /// is learned. `text_field` holds the text of [`RecordFormat::Text`](super::RecordFormat::Text), and may have any name.
    ///
    /// # Errors
    /// A weight that is no such number.
    pub fn weight(&self, text_field: &str) -> Result<f32> {
        let given = self.fields.get(WEIGHT).filter(|value| !value.is_null() && text_field != WEIGHT);
        let Some(value) = given else { return Ok(1.0) };
        let found = match value {
            Value::Number(number) => number.to_string(),
            Value::String(text) => format!("{text:?}"),
            other => kind(other).to_owned(),
        };
        let number = match value {
            Value::Number(number) => number.as_f64(),
            Value::String(text) => text.trim().parse().ok(),
            _ => None,
        };
        // In fp32, as losses are.
        let number = number.map(|number: f64| number as f32);
        number.filter(|number| number.is_finite() && *number >= 0.0).ok_or_else(|| {
            self.location.error(format!(
                "`{WEIGHT}` is {found}, expected a number of 0 or more; it is the factor of the record's loss: correct it, or rename the \
                 field if it has another meaning"
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;
    use crate::records::RecordLocation;

    fn weight(record: &Value) -> Result<f32> {
        let location =
            RecordLocation { path: Path::new("a.jsonl").into(), unit: "line", number: 3, line: None };
        Record { fields: record.as_object().unwrap().clone(), location }.weight("text")
    }

    #[test]
    fn a_weight_is_a_number_from_0_on() {
        for (record, expected) in [
            (json!({ "text": "a" }), 1.0),
            (json!({ "weight": null }), 1.0),
            (json!({ "weight": 0 }), 0.0),
            (json!({ "weight": 2.5 }), 2.5),
            (json!({ "weight": " 0.5 " }), 0.5),
        ] {
            assert_eq!(weight(&record).unwrap(), expected, "{record}");
        }
        for (record, found) in [
            (json!({ "weight": -1 }), "`weight` is -1, expected"),
            (json!({ "weight": 1e39 }), "`weight` is 1e+39, expected"),
            (json!({ "weight": "heavy" }), "`weight` is \"heavy\", expected"),
            (json!({ "weight": "NaN" }), "`weight` is \"NaN\", expected"),
            (json!({ "weight": [1] }), "expected a number of 0 or more"),
            (json!({ "weight": true }), "expected a number of 0 or more"),
        ] {
            let error = weight(&record).unwrap_err().to_string();
            assert!(error.contains(found) && error.contains("line 3"), "{error}");
        }
    }
}
