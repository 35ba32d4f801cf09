//! The MLP as a module with weights.

use runtime::autograd::GradMode;
use tch::{Device, Kind, Tensor};

use crate::arguments::{Sizes, Weights, check};
use crate::error::{Result, dtype, refused, too_small};
use crate::function::{check_tile, run};
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

/// Options of a [`SwigluMlp`].
#[derive(Clone, Copy, Debug)]
pub struct SwigluConfig {
    /// Width of the residual stream.
    pub hidden: i64,
    /// Inner width; usually 8/3 of `hidden`, or 3 to 4 times it.
    pub intermediate: i64,
    /// The activations that are kept for backward.
    pub level: CheckpointLevel,
    /// How W and V are stored.
    pub storage: GateUpStorage,
    /// Float, Double, BFloat16 or Half.
    pub kind: Kind,
    /// The device of the weights.
    pub device: Device,
}

impl SwigluConfig {
    /// Returns options for fp32 on the CPU, keeping everything, with separate weights.
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
    /// Creates an MLP with weights uniform in ±1/√fan-in, as in PyTorch's linear layers, requiring gradients.
    ///
    /// # Errors
    /// A size below 1; a dtype that is not floating; a device that does not exist; a tile in which no token fits.
    pub fn new(config: &SwigluConfig) -> Result<Self> {
        let &SwigluConfig { hidden, intermediate, level, storage, kind, device } = config;
        for (name, count) in [("hidden", hidden), ("intermediate", intermediate)] {
            if count < 1 {
                return Err(too_small(name, count));
            }
        }
        if ![Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half].contains(&kind) {
            return Err(dtype("weights", kind, "Float, Double, BFloat16 or Half"));
        }
        check_tile(level, Sizes { tokens: 0, hidden, features: intermediate }, (kind, device))?;
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

    /// Creates an MLP with given weights, which stay the caller's tensors: W and V `[hidden, intermediate]`, U `[intermediate,
    /// hidden]`. (PyTorch's `nn.Linear` stores the transpose: pass `weight.tr()`.)
    ///
    /// # Errors
    /// Shapes, dtypes or devices that do not match; weights that are not finite; a tile in which no token fits.
    pub fn from_weights(gate: Tensor, up: Tensor, down: Tensor, level: CheckpointLevel) -> Result<Self> {
        let mlp = Self { weights: Stored::Separate { gate, up, down }, level };
        mlp.check()?;
        Ok(mlp)
    }

    /// As [`from_weights`](Self::from_weights), with W and V side by side in `gate_up [hidden, 2·intermediate]`.
    ///
    /// # Errors
    /// As [`from_weights`](Self::from_weights).
    pub fn from_fused_weights(gate_up: Tensor, down: Tensor, level: CheckpointLevel) -> Result<Self> {
        let mlp = Self { weights: Stored::Fused { gate_up, down }, level };
        mlp.check()?;
        Ok(mlp)
    }

    /// Returns the level.
    pub fn level(&self) -> CheckpointLevel {
        self.level
    }

    /// Returns the weights by name.
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

    /// Checks with an empty input that the weights match.
    fn check(&self) -> Result<()> {
        let (_, down) = self.parameters().pop().expect("there is a down-projection");
        let hidden = down.size().get(1).copied().unwrap_or(0);
        let options = (down.kind(), down.device());
        let sizes = check(&Tensor::f_empty([0, hidden], options)?, self.weights())?;
        check_tile(self.level, sizes, options)?;
        for (name, weight) in self.parameters() {
            let count = weight.f_isfinite()?.f_logical_not()?.f_sum(Kind::Int64)?.f_int64_value(&[])?;
            if count > 0 {
                return Err(refused(format!(
                    "`{name}` has {count} values that are not finite; load or initialise it again"
                )));
            }
        }
        Ok(())
    }
}
