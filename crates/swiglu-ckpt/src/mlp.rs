//! The MLP as a module with its weights.

use runtime::autograd::GradMode;
use tch::{Device, Kind, Tensor};

use crate::arguments::{Weights, check};
use crate::error::{Error, Result};
use crate::function::run;
use crate::level::CheckpointLevel;

/// How W and V are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GateUpStorage {
    /// Two tensors `[hidden, intermediate]`.
    #[default]
    Separate,
    /// One tensor `[hidden, 2·intermediate]`, W before V.
    Fused,
}

/// Sizes and choices of a [`SwigluMlp`].
#[derive(Clone, Copy, Debug)]
pub struct SwigluConfig {
    /// Size of the residual stream.
    pub hidden: i64,
    /// Size between the projections; usually 8/3 of `hidden`, or 3 to 4 times it.
    pub intermediate: i64,
    /// What is kept for backward.
    pub level: CheckpointLevel,
    /// How W and V are stored.
    pub storage: GateUpStorage,
    /// Float, Double, BFloat16 or Half.
    pub kind: Kind,
    /// Where the weights are.
    pub device: Device,
}

impl SwigluConfig {
    /// fp32 on the CPU, keeping everything, weights stored apart.
    pub fn new(hidden: i64, intermediate: i64) -> Self {
        Self {
            hidden,
            intermediate,
            level: CheckpointLevel::default(),
            storage: GateUpStorage::default(),
            kind: Kind::Float,
            device: Device::Cpu,
        }
    }
}

#[derive(Debug)]
enum Stored {
    Separate { gate: Tensor, up: Tensor, down: Tensor },
    Fused { gate_up: Tensor, down: Tensor },
}

/// FFN(x) = (SiLU(x·W) ⊙ x·V)·U, without biases.
#[derive(Debug)]
pub struct SwigluMlp {
    weights: Stored,
    level: CheckpointLevel,
}

impl SwigluMlp {
    /// Weights drawn uniformly from ±1/√fan-in, as PyTorch's linear layers are, requiring gradients.
    ///
    /// # Errors
    /// A size below 1; a dtype that is not floating; a device that is not there.
    pub fn new(config: &SwigluConfig) -> Result<Self> {
        let &SwigluConfig { hidden, intermediate, level, storage, kind, device } = config;
        for (name, found) in [("hidden", hidden), ("intermediate", intermediate)] {
            if found < 1 {
                return Err(Error::Size { name, found });
            }
        }
        if ![Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half].contains(&kind) {
            let expected = "Float, Double, BFloat16 or Half".to_owned();
            return Err(Error::Dtype { name: "weights", found: kind, expected });
        }
        let draw = |rows: i64, columns: i64| -> Result<Tensor> {
            let bound = 1.0 / (rows as f64).sqrt();
            let mut weight = Tensor::f_empty([rows, columns], (kind, device))?;
            let _no_grad = GradMode::off();
            let _ = weight.f_uniform_(-bound, bound)?;
            Ok(weight.f_set_requires_grad(true)?)
        };
        let weights = match storage {
            GateUpStorage::Separate => Stored::Separate {
                gate: draw(hidden, intermediate)?,
                up: draw(hidden, intermediate)?,
                down: draw(intermediate, hidden)?,
            },
            GateUpStorage::Fused => {
                Stored::Fused { gate_up: draw(hidden, 2 * intermediate)?, down: draw(intermediate, hidden)? }
            }
        };
        Ok(Self { weights, level })
    }

    /// An MLP over given weights: W and V `[hidden, intermediate]`, U `[intermediate, hidden]`, which stay the caller's
    /// tensors. (PyTorch's `nn.Linear` stores the transpose: pass `weight.tr()`.)
    ///
    /// # Errors
    /// Shapes, dtypes or devices that do not fit together; weights that are not finite.
    pub fn from_weights(gate: Tensor, up: Tensor, down: Tensor, level: CheckpointLevel) -> Result<Self> {
        let mlp = Self { weights: Stored::Separate { gate, up, down }, level };
        mlp.check()?;
        Ok(mlp)
    }

    /// As [`from_weights`](Self::from_weights), W and V side by side in `gate_up [hidden, 2·intermediate]`.
    ///
    /// # Errors
    /// As [`from_weights`](Self::from_weights).
    pub fn from_fused_weights(gate_up: Tensor, down: Tensor, level: CheckpointLevel) -> Result<Self> {
        let mlp = Self { weights: Stored::Fused { gate_up, down }, level };
        mlp.check()?;
        Ok(mlp)
    }

    /// The same weights, kept and computed again by another level.
    #[must_use]
    pub fn with_level(self, level: CheckpointLevel) -> Self {
        Self { level, ..self }
    }

    /// What is kept for backward.
    pub fn level(&self) -> CheckpointLevel {
        self.level
    }

    /// The weights by name.
    pub fn parameters(&self) -> Vec<(&'static str, &Tensor)> {
        match &self.weights {
            Stored::Separate { gate, up, down } => vec![("gate", gate), ("up", up), ("down", down)],
            Stored::Fused { gate_up, down } => vec![("gate_up", gate_up), ("down", down)],
        }
    }

    /// Computes `[..., hidden]` from `x [..., hidden]`.
    ///
    /// # Errors
    /// As [`swiglu`](crate::swiglu).
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        run(x, self.weights(), self.level)
    }

    fn weights(&self) -> Weights<'_> {
        match &self.weights {
            Stored::Separate { gate, up, down } => Weights::Separate { gate, up, down },
            Stored::Fused { gate_up, down } => Weights::Fused { gate_up, down },
        }
    }

    /// An input without tokens shows whether the weights fit together.
    fn check(&self) -> Result<()> {
        let (_, down) = self.parameters().pop().expect("there is a down-projection");
        let hidden = down.size().get(1).copied().unwrap_or(0);
        check(&Tensor::f_empty([0, hidden], (down.kind(), down.device()))?, self.weights())?;
        for (name, weight) in self.parameters() {
            let count = weight.f_isfinite()?.f_logical_not()?.f_sum(Kind::Int64)?.f_int64_value(&[])?;
            if count > 0 {
                return Err(Error::NotFinite { name, count });
            }
        }
        Ok(())
    }
}
