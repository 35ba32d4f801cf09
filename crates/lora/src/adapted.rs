//! A model whose configuration includes its adapters'.

use models::generation::CacheShape;
use models::module::{Input, LanguageModel, LossHead, LossOutput, Module, Visitor, VisitorMut};
use serde_json::{Map, Value};
use tch::Tensor;

use crate::adapters::Adapters;
use crate::error::Result;

/// A model with adapters. Its configuration contains the fields of each adapter's configuration ([`field_prefix`]), so that a
/// resume refuses a checkpoint of another adapter. Everything else is the model's.
#[derive(Debug)]
pub struct Adapted {
    model: Box<dyn LanguageModel>,
    config: Value,
}

/// Returns the prefix of an adapter's fields in [`Adapted`]'s configuration.
pub fn field_prefix(adapter: &str) -> String {
    format!("adapter `{adapter}`: ")
}

impl Adapters {
    /// Wraps `model`, in which these adapters are installed, so that its configuration includes theirs.
    ///
    /// ```
    /// use lora::LoraConfig;
    /// use models::module::LanguageModel;
    /// use models::{Llama, DecoderConfig};
    /// use tch::{Device, Kind};
    ///
    /// let mut model = Llama::new(&DecoderConfig::llama(100, 16, 40, 2, 4), (Kind::Float, Device::Cpu))?;
    /// let adapters = LoraConfig { r: 4, seed: 42, ..LoraConfig::default() }.install(&mut model)?;
    /// let model = adapters.wrap(Box::new(model))?;
    ///
    /// assert_eq!(model.config()["adapter `default`: r"], 4);
    /// # Ok::<(), lora::Error>(())
    /// ```
    ///
    /// # Errors
    /// Errors of [`Adapters::config`].
    pub fn wrap(&self, model: Box<dyn LanguageModel>) -> Result<Adapted> {
        let mut fields = match model.config() {
            Value::Object(fields) => fields,
            _ => Map::new(),
        };
        for name in self.names() {
            let mut config = self.config(&name)?.clone();
            // The path of the base does not affect the computation.
            config.base_model_name_or_path = None;
            let Ok(Value::Object(config)) = serde_json::from_str(&config.to_json()) else { continue };
            fields.extend(
                config.into_iter().map(|(field, value)| (format!("{}{field}", field_prefix(&name)), value)),
            );
        }
        let config = Value::Object(fields);
        Ok(Adapted { model, config })
    }
}

impl Adapted {
    /// Unwraps the model.
    pub fn into_inner(self) -> Box<dyn LanguageModel> {
        self.model
    }
}

impl Module for Adapted {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        self.model.visit(visitor);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> models::Result<()> {
        self.model.visit_mut(visitor)
    }
}

impl LanguageModel for Adapted {
    fn hidden(&self, input: &Input<'_>) -> models::Result<Tensor> {
        self.model.hidden(input)
    }

    fn head(&self) -> &dyn LossHead {
        self.model.head()
    }

    fn vocabulary(&self) -> i64 {
        self.model.vocabulary()
    }

    fn max_sequence(&self) -> i64 {
        self.model.max_sequence()
    }

    fn cache_shape(&self) -> Option<CacheShape> {
        self.model.cache_shape()
    }

    fn has_separate_blocks(&self) -> bool {
        self.model.has_separate_blocks()
    }

    fn cache_limit(&self) -> Option<i64> {
        self.model.cache_limit()
    }

    fn config(&self) -> Value {
        self.config.clone()
    }

    fn logits(&self, input: &Input<'_>) -> models::Result<Tensor> {
        self.model.logits(input)
    }

    fn loss(&self, input: &Input<'_>, labels_bt: &Tensor) -> models::Result<LossOutput> {
        self.model.loss(input, labels_bt)
    }
}
