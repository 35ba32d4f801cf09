//! Operators with a number that return their errors.
//!
//! `tch`'s own methods with a number, such as `f_mul_scalar`, panic where they should return an error: they free the number before they
//! read the error of the operator, find it there, and take it for one of their own (tch 0.24 to 0.26, `Scalar::drop`). A program that
//! has too little memory for a product must not end by that.
//!
//! ```
//! use runtime::memory;
//! use runtime::ops::TryScalar;
//! use tch::{Device, Tensor, kind::FLOAT_CPU};
//!
//! let x = Tensor::try_full([1 << 20], 3.0, FLOAT_CPU)?;
//! let limit = memory::limit(Device::Cpu, memory::live_bytes(Device::Cpu)?)?;
//! let error = x.try_mul_scalar(2.0).unwrap_err();
//! assert!(runtime::Error::from(error).is_out_of_memory());
//! # drop(limit);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use tch::{Device, Kind, TchError, Tensor};

use super::{Value, call, single};

type Result<T> = std::result::Result<T, TchError>;

/// Methods: name, arguments as values, operator, overload, what it computes.
macro_rules! scalar_operators {
    ($($(#[$doc:meta])* $name:ident($($argument:ident),*) = $operator:literal, $overload:literal;)*) => {
        /// `tch`'s operators with a number, each by its name there with `try_` for `f_`. See the [module](self).
        pub trait TryScalar: Sized {
            $(
                $(#[$doc])*
                ///
                /// # Errors
                /// Errors of libtorch.
                fn $name(&self, $($argument: impl Into<Value>),*) -> Result<Tensor>;
            )*

            /// A tensor of `size` with `value` everywhere.
            ///
            /// # Errors
            /// Errors of libtorch.
            fn try_full(size: impl AsRef<[i64]>, value: impl Into<Value>, options: (Kind, Device)) -> Result<Tensor>;

            /// The numbers from 0 to before `end`.
            ///
            /// # Errors
            /// Errors of libtorch.
            fn try_arange(end: impl Into<Value>, options: (Kind, Device)) -> Result<Tensor> {
                Self::try_arange_start(0i64, end, options)
            }

            /// The numbers from `start` to before `end`.
            ///
            /// # Errors
            /// Errors of libtorch.
            fn try_arange_start(
                start: impl Into<Value>,
                end: impl Into<Value>,
                options: (Kind, Device),
            ) -> Result<Tensor> {
                Self::try_arange_start_step(start, end, 1i64, options)
            }

            /// Every `step`-th number from `start` to before `end`.
            ///
            /// # Errors
            /// Errors of libtorch.
            fn try_arange_start_step(
                start: impl Into<Value>,
                end: impl Into<Value>,
                step: impl Into<Value>,
                options: (Kind, Device),
            ) -> Result<Tensor>;
        }

        impl TryScalar for Tensor {
            $(
                fn $name(&self, $($argument: impl Into<Value>),*) -> Result<Tensor> {
                    of($operator, $overload, &[self.into(), $($argument.into()),*], &[])
                }
            )*

            fn try_full(size: impl AsRef<[i64]>, value: impl Into<Value>, options: (Kind, Device)) -> Result<Tensor> {
                let size = Value::IntList(size.as_ref().to_vec());
                of("aten::full", "", &[size, value.into()], &named(options))
            }

            fn try_arange_start_step(
                start: impl Into<Value>,
                end: impl Into<Value>,
                step: impl Into<Value>,
                options: (Kind, Device),
            ) -> Result<Tensor> {
                of("aten::arange", "start_step", &[start.into(), end.into(), step.into()], &named(options))
            }
        }
    };
}

scalar_operators! {
    /// `self + scalar`
    try_add_scalar(scalar) = "aten::add", "Scalar";
    /// `self += scalar`
    try_add_scalar_(scalar) = "aten::add_", "Scalar";
    /// `self − scalar`
    try_sub_scalar(scalar) = "aten::sub", "Scalar";
    /// `self · scalar`
    try_mul_scalar(scalar) = "aten::mul", "Scalar";
    /// `self *= scalar`
    try_mul_scalar_(scalar) = "aten::mul_", "Scalar";
    /// `self / scalar`
    try_div_scalar(scalar) = "aten::div", "Scalar";
    /// `⌊self / scalar⌋`
    try_floor_divide_scalar(scalar) = "aten::floor_divide", "Scalar";
    /// The remainder of `self / scalar`, with the scalar's sign.
    try_remainder(scalar) = "aten::remainder", "Scalar";
    /// `self & scalar`
    try_bitwise_and(scalar) = "aten::bitwise_and", "Scalar";
    /// `self >> scalar`
    try_bitwise_right_shift_tensor_scalar(scalar) = "aten::bitwise_right_shift", "Tensor_Scalar";
    /// `self = scalar`, elementwise
    try_eq(scalar) = "aten::eq", "Scalar";
    /// `self ≠ scalar`, elementwise
    try_ne(scalar) = "aten::ne", "Scalar";
    /// `self < scalar`, elementwise
    try_lt(scalar) = "aten::lt", "Scalar";
    /// `self ≤ scalar`, elementwise
    try_le(scalar) = "aten::le", "Scalar";
    /// `self ≥ scalar`, elementwise
    try_ge(scalar) = "aten::ge", "Scalar";
    /// `max(min, min(max, self))`
    try_clamp(min, max) = "aten::clamp", "";
    /// `max(self, min)`
    try_clamp_min(min) = "aten::clamp_min", "";
    /// `self = max(self, min)`
    try_clamp_min_(min) = "aten::clamp_min_", "";
    /// `min(self, max)`
    try_clamp_max(max) = "aten::clamp_max", "";
    /// `self` with `value` where `mask` is true.
    try_masked_fill(mask, value) = "aten::masked_fill", "Scalar";
    /// Fills `self` with `value`.
    try_fill_(value) = "aten::fill_", "Scalar";
    /// A tensor like `self` with `value` everywhere.
    try_full_like(value) = "aten::full_like", "";
    /// `self`, a gradient, where `x` is above `threshold`, else 0.
    try_threshold_backward(x, threshold) = "aten::threshold_backward", "";
    /// The `p`-norm of all elements, computed in `kind`.
    try_norm_scalaropt_dtype(p, kind) = "aten::norm", "ScalarOpt_dtype";
}

fn named((kind, device): (Kind, Device)) -> [(&'static str, Value); 2] {
    [("dtype", Value::Kind(kind)), ("device", Value::Device(device))]
}

fn of(operator: &str, overload: &str, arguments: &[Value], named: &[(&str, Value)]) -> Result<Tensor> {
    let result = call(operator, overload, arguments, named).and_then(single);
    result.map_err(|error| TchError::Torch(error.to_string()))
}
