//! A model that drops where it is trained, and nowhere else.

use std::sync::Arc;

use models::generation::CacheShape;
use models::module::{Editor, Input, LanguageModel, LossHead, LossOutput, Module, Visitor};
use serde_json::{Map, Value};
use tch::Tensor;

use crate::adapters::Adapters;
use crate::error::Result;
use crate::switch::{Evaluation, Switch};

/// A model with adapters in it. A projection is not told whether it is trained; a model is
/// ([`Context::training`](models::module::Context::training)), and this one keeps dropout off in every other pass.
///
/// Names of tensors and parts are the model's. Its configuration is the model's, with the fields of each adapter's beside it
/// ([`field_prefix`]), so that a checkpoint of one adapter is not taken for another's.
#[derive(Debug)]
pub struct Adapted {
    model: Box<dyn LanguageModel>,
    switch: Arc<Switch>,
    config: Value,
}

/// What stands before the fields of an adapter's configuration in [`Adapted`]'s own.
pub fn field_prefix(adapter: &str) -> String {
    format!("adapter `{adapter}`: ")
}

impl Adapters {
    /// `model`, which these adapters are in, with dropout in training alone.
    ///
    /// ```
    /// use lora::{Adapters, LoraConfig};
    /// use models::module::{Input, LanguageModel};
    /// use models::{Llama, LlamaConfig};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let mut model = Llama::new(&LlamaConfig::llama(100, 16, 40, 2, 4), (Kind::Float, Device::Cpu))?;
    /// let config = LoraConfig { lora_dropout: 0.5, init_lora_weights: false.into(), ..LoraConfig::default() };
    /// let adapters = Adapters::install(&mut model, &config, 42)?;
    /// let model = adapters.wrap(Box::new(model))?;
    ///
    /// let tokens = Tensor::from_slice(&[3i64, 1, 4]).view([1, 3]);
    /// let input = Input::new(&tokens);
    /// assert_eq!(model.logits(&input)?, model.logits(&input)?);
    /// # Ok::<(), lora::Error>(())
    /// ```
    ///
    /// # Errors
    /// None in practice; the border's type.
    pub fn wrap(&self, model: Box<dyn LanguageModel>) -> Result<Adapted> {
        let mut fields = match model.config() {
            Value::Object(fields) => fields,
            _ => Map::new(),
        };
        for name in self.names() {
            let mut own = self.config(&name)?.clone();
            // Where the base lay is no part of what is computed.
            own.base_model_name_or_path = None;
            let Ok(Value::Object(own)) = serde_json::from_str(&own.to_json()) else { continue };
            fields.extend(
                own.into_iter().map(|(field, value)| (format!("{}{field}", field_prefix(&name)), value)),
            );
        }
        let config = Value::Object(fields);
        Ok(Adapted { model, switch: self.switch(), config })
    }
}

impl Adapted {
    /// The model, whose adapters drop in every pass.
    pub fn into_inner(self) -> Box<dyn LanguageModel> {
        self.model
    }

    fn still(&self, input: &Input<'_>) -> Option<Evaluation> {
        (!input.context.training).then(|| self.switch.evaluation())
    }
}

impl Module for Adapted {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        self.model.visit(visitor);
    }

    fn visit_mut(&mut self, editor: &mut Editor<'_>) -> models::Result<()> {
        self.model.visit_mut(editor)
    }
}

impl LanguageModel for Adapted {
    fn hidden(&self, input: &Input<'_>) -> models::Result<Tensor> {
        let _still = self.still(input);
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

    fn config(&self) -> Value {
        self.config.clone()
    }

    fn logits(&self, input: &Input<'_>) -> models::Result<Tensor> {
        let _still = self.still(input);
        self.model.logits(input)
    }

    fn loss(&self, input: &Input<'_>, labels_bt: &Tensor) -> models::Result<LossOutput> {
        let _still = self.still(input);
        self.model.loss(input, labels_bt)
    }
}
