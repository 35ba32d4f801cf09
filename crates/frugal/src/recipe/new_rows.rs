//! First values of the rows of new tokens.
//!
//! The rows of a dense table are written before anything is trained, so that all weights begin with them too, and an adapter's rows are
//! copies of them. A table in the blocks of a GGUF file is not written: the rows of its adapter are.

use kernels::quantized::is_quantized;
use lora::Adapters;
use lora::peft::PREFIX;
use models::hugging_face::tensor_name;
use models::module::{Module, ModuleMapper, Role, map_modules};
use models::token_rows::{TOKEN_ROWS, mean_row, rows_of};
use tch::{Kind, Tensor};

use models::Result;

/// Names of the tables.
const TABLES: [&str; 2] = ["embed_tokens.weight", "lm_head.weight"];

/// A new token and the tokens whose rows it begins with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewRow {
    /// Its id.
    pub token: i64,
    /// The tokens whose rows have its first values as their mean; empty for all tokens that were there before.
    pub from: Vec<i64>,
}

/// The rows of new tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewRows {
    /// New tokens.
    pub rows: Vec<NewRow>,
    /// The number of tokens that were there before: a table may have more rows.
    pub before: i64,
}

impl NewRows {
    /// The first values of the rows of a table, `[rows, width]`, in fp32 (f64 for f64).
    fn values(&self, table: &Tensor) -> Result<Tensor> {
        let kind = if table.kind() == Kind::Double { Kind::Double } else { Kind::Float };
        let of_all = mean_row(table, self.before.min(table.size()[0]))?;
        let row = |row: &NewRow| -> Result<Tensor> {
            if row.from.is_empty() {
                return Ok(of_all.shallow_clone());
            }
            Ok(rows_of(table, &row.from, kind)?.f_mean_dim([0].as_slice(), false, kind)?)
        };
        let rows: Vec<Tensor> = self.rows.iter().map(row).collect::<Result<_>>()?;
        Ok(Tensor::f_stack(&rows, 0)?)
    }

    /// Writes them into the tables of a model that are dense, and returns the first values of each quantized table's rows by the name of
    /// the table.
    pub(super) fn write(&self, model: &mut dyn Module) -> Result<Vec<(String, Tensor)>> {
        struct Tables(Vec<(String, Tensor)>);
        impl ModuleMapper for Tables {
            fn tensor(&mut self, name: &str, tensor: &mut Tensor, _: Role) -> models::Result<()> {
                if TABLES.contains(&name)
                    && !self.0.iter().any(|(_, known)| known.data_ptr() == tensor.data_ptr())
                {
                    self.0.push((name.to_owned(), tensor.shallow_clone()));
                }
                Ok(())
            }
        }
        if self.rows.is_empty() {
            return Ok(Vec::new());
        }
        let _no_grad = tch::no_grad_guard();
        let mut tables = Tables(Vec::new());
        map_modules(model, &mut tables)?;
        let mut quantized = Vec::new();
        for (name, table) in tables.0 {
            let values = self.values(&table)?;
            if is_quantized(&table) {
                quantized.push((name, values));
                continue;
            }
            let tokens: Vec<i64> = self.rows.iter().map(|row| row.token).collect();
            let index = Tensor::f_from_slice(&tokens)?.f_to_device(table.device())?;
            let _ = table.f_detach()?.f_index_copy_(0, &index, &values.f_to_kind(table.kind())?)?;
        }
        Ok(quantized)
    }

    /// Writes the first values of quantized tables' rows into the rows of adapters, whose tokens are `tokens`.
    pub(super) fn fill(
        &self,
        quantized: &[(String, Tensor)],
        adapters: &Adapters,
        tokens: &[i64],
    ) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        for name in adapters.names() {
            for (key, rows) in adapters.tensors(&name)? {
                let key = key.strip_prefix(PREFIX).unwrap_or(&key);
                let Some(module) = key.strip_suffix(TOKEN_ROWS) else { continue };
                let table =
                    quantized.iter().find(|(table, _)| tensor_name(table) == format!("{module}weight"));
                let Some((_, values)) = table else { continue };
                for (row, value) in self.rows.iter().zip(0..) {
                    let Some(place) = tokens.iter().position(|token| *token == row.token) else { continue };
                    rows.f_select(0, place as i64)?.f_copy_(&values.f_select(0, value)?)?;
                }
            }
        }
        Ok(())
    }
}
