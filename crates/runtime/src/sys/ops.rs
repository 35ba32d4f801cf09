//! Boxed calls through the dispatcher, and the settings of the operators.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::{null_mut, slice_from_raw_parts};

use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

use super::{Status, check, take};
use crate::error::{Error, Result};
use crate::ops::Value;

#[repr(C)]
struct RawValue {
    tag: i32,
    integer: i64,
    real: f64,
    items: *mut c_void,
    size: usize,
}

const NONE: i32 = 0;
const TENSOR: i32 = 1;
const TENSORS: i32 = 2;
const INT: i32 = 3;
const DOUBLE: i32 = 4;
const BOOL: i32 = 5;
const INTS: i32 = 6;
const DOUBLES: i32 = 7;
const BOOLS: i32 = 8;
const STRING: i32 = 9;
const KIND: i32 = 10;
const DEVICE: i32 = 11;

const LOOK_UP: c_int = 0;
const ARGUMENTS: c_int = 1;
const NO_KERNEL: c_int = 2;

unsafe extern "C" {
    fn rt_value_free(block: *mut c_void);
    fn rt_op_call(
        name: *const c_char,
        overload: *const c_char,
        positional: *const RawValue,
        positional_count: usize,
        keys: *const *const c_char,
        named: *const RawValue,
        named_count: usize,
        results: *mut *mut RawValue,
        result_count: *mut usize,
        stage: *mut c_int,
    ) -> Status;
    fn rt_op_flops(
        name: *const c_char,
        overload: *const c_char,
        positional: *const RawValue,
        positional_count: usize,
        keys: *const *const c_char,
        named: *const RawValue,
        named_count: usize,
        dense: *mut u64,
        causal: *mut u64,
        known: *mut c_int,
    ) -> Status;
    fn rt_set_num_threads(count: c_int) -> Status;
    fn rt_num_threads(count: *mut c_int) -> Status;
    fn rt_set_deterministic(on: c_int, warn_only: c_int) -> Status;
    fn rt_deterministic(on: *mut c_int) -> Status;
    fn rt_attention_order(order: *mut i64, count: usize) -> Status;
    fn rt_set_attention_order(order: *const i64, count: usize) -> Status;
}

/// Values that C++ reads: the blocks they point to live as long as this.
#[derive(Default)]
struct Borrowed {
    values: Vec<RawValue>,
    lists: Vec<Vec<*mut C_tensor>>,
}

impl Borrowed {
    fn push(&mut self, value: &Value) -> Result<()> {
        let mut raw = RawValue { tag: NONE, integer: 0, real: 0.0, items: null_mut(), size: 0 };
        match value {
            Value::None => {}
            Value::Tensor(tensor) => (raw.tag, raw.items) = (TENSOR, tensor.as_ptr().cast_mut().cast()),
            Value::TensorList(tensors) => {
                self.list(&mut raw, tensors.iter().map(|tensor| tensor.as_ptr().cast_mut()).collect());
            }
            Value::OptionalTensorList(tensors) => {
                let pointer =
                    |tensor: &Option<Tensor>| tensor.as_ref().map_or(null_mut(), |t| t.as_ptr().cast_mut());
                self.list(&mut raw, tensors.iter().map(pointer).collect());
            }
            Value::Int(integer) => (raw.tag, raw.integer) = (INT, *integer),
            Value::Double(real) => (raw.tag, raw.real) = (DOUBLE, *real),
            Value::Bool(on) => (raw.tag, raw.integer) = (BOOL, i64::from(*on)),
            Value::IntList(items) => {
                (raw.tag, raw.items, raw.size) = (INTS, items.as_ptr().cast_mut().cast(), items.len());
            }
            Value::DoubleList(items) => {
                (raw.tag, raw.items, raw.size) = (DOUBLES, items.as_ptr().cast_mut().cast(), items.len());
            }
            Value::BoolList(items) => {
                (raw.tag, raw.items, raw.size) = (BOOLS, items.as_ptr().cast_mut().cast(), items.len());
            }
            Value::String(text) => {
                (raw.tag, raw.items, raw.size) = (STRING, text.as_ptr().cast_mut().cast(), text.len());
            }
            Value::Kind(kind) => (raw.tag, raw.integer) = (KIND, scalar_type(*kind)),
            Value::Device(device) => {
                let number = match device {
                    Device::Cpu => Some(-1),
                    Device::Cuda(index) => i8::try_from(*index).ok().map(i64::from),
                    _ => None,
                };
                let reason = || {
                    Error::invalid("ops::call", format!("{device:?} is neither the CPU nor a CUDA device"))
                };
                (raw.tag, raw.integer) = (DEVICE, number.ok_or_else(reason)?);
            }
        }
        self.values.push(raw);
        Ok(())
    }

    fn list(&mut self, raw: &mut RawValue, pointers: Vec<*mut C_tensor>) {
        (raw.tag, raw.items, raw.size) = (TENSORS, pointers.as_ptr().cast_mut().cast(), pointers.len());
        // Moving the vector leaves its block where it is.
        self.lists.push(pointers);
    }
}

/// `c10::ScalarType`'s numbers (torch/headeronly/core/ScalarType.h).
fn scalar_type(kind: Kind) -> i64 {
    match kind {
        Kind::Uint8 => 0,
        Kind::Int8 => 1,
        Kind::Int16 => 2,
        Kind::Int => 3,
        Kind::Int64 => 4,
        Kind::Half => 5,
        Kind::Float => 6,
        Kind::Double => 7,
        Kind::ComplexHalf => 8,
        Kind::ComplexFloat => 9,
        Kind::ComplexDouble => 10,
        Kind::Bool => 11,
        Kind::QInt8 => 12,
        Kind::QUInt8 => 13,
        Kind::QInt32 => 14,
        Kind::BFloat16 => 15,
        Kind::Float8e5m2 => 23,
        Kind::Float8e4m3fn => 24,
        Kind::Float8e5m2fnuz => 25,
        Kind::Float8e4m3fnuz => 26,
    }
}

/// Copies a list out of a block that C++ allocated, and frees the block.
///
/// # Safety
/// `raw` is a list result with items of type `T`, not taken over before.
unsafe fn take_list<T: Copy>(raw: &RawValue) -> Vec<T> {
    // SAFETY: by the contract the block holds `size` items of this type.
    let items = unsafe { &*slice_from_raw_parts(raw.items.cast::<T>(), raw.size) }.to_vec();
    // SAFETY: the block is ours and not used after this.
    unsafe { rt_value_free(raw.items) };
    items
}

/// Takes over one result.
///
/// # Safety
/// `raw` came from `rt_op_call` and was not taken over before.
unsafe fn take_value(raw: &RawValue) -> Value {
    // SAFETY: each tag says what `items` holds (ops.cpp), and it is ours by this function's contract.
    unsafe {
        match raw.tag {
            TENSOR => take(raw.items.cast()).map_or(Value::None, Value::Tensor),
            TENSORS => {
                let tensors: Vec<_> = take_list(raw).into_iter().map(|pointer| take(pointer)).collect();
                if tensors.iter().all(Option::is_some) {
                    Value::TensorList(tensors.into_iter().flatten().collect())
                } else {
                    Value::OptionalTensorList(tensors)
                }
            }
            INT => Value::Int(raw.integer),
            DOUBLE => Value::Double(raw.real),
            BOOL => Value::Bool(raw.integer != 0),
            INTS => Value::IntList(take_list(raw)),
            DOUBLES => Value::DoubleList(take_list(raw)),
            BOOLS => Value::BoolList(take_list::<u8>(raw).into_iter().map(|byte| byte != 0).collect()),
            STRING => Value::String(String::from_utf8_lossy(&take_list::<u8>(raw)).into_owned()),
            _ => Value::None,
        }
    }
}

/// A call in the shim's layout.
struct Call {
    name: CString,
    overload: CString,
    _keys: Vec<CString>,
    keys: Vec<*const c_char>,
    positional: Borrowed,
    named: Borrowed,
}

impl Call {
    /// Borrows the values, which outlive the call.
    fn new(name: &str, overload: &str, positional: &[Value], named: &[(&str, Value)]) -> Result<Self> {
        let text = |text: &str| {
            CString::new(text)
                .map_err(|_| Error::invalid("ops::call", format!("{text:?} has a NUL character in it")))
        };
        let owned_keys = named.iter().map(|(key, _)| text(key)).collect::<Result<Vec<_>>>()?;
        let mut call = Self {
            name: text(name)?,
            overload: text(overload)?,
            keys: owned_keys.iter().map(|key| CStr::as_ptr(key)).collect(),
            _keys: owned_keys,
            positional: Borrowed::default(),
            named: Borrowed::default(),
        };
        positional.iter().try_for_each(|value| call.positional.push(value))?;
        named.iter().try_for_each(|(_, value)| call.named.push(value))?;
        Ok(call)
    }
}

/// Returns the FLOPs (dense, causal) of a call without executing it.
pub(crate) fn flops(
    name: &str,
    overload: &str,
    positional: &[Value],
    named: &[(&str, Value)],
) -> Result<Option<(u64, u64)>> {
    let call = Call::new(name, overload, positional, named)?;
    let (mut dense, mut causal, mut known) = (0, 0, 0);
    // SAFETY: every pointer is to a live value or list with the size given, and C++ only reads them.
    let status = unsafe {
        check(rt_op_flops(
            call.name.as_ptr(),
            call.overload.as_ptr(),
            call.positional.values.as_ptr(),
            call.positional.values.len(),
            call.keys.as_ptr(),
            call.named.values.as_ptr(),
            call.named.values.len(),
            &raw mut dense,
            &raw mut causal,
            &raw mut known,
        ))
    };
    status.map_err(|error| Error::invalid("profile::flops_of", error.to_string()))?;
    Ok((known != 0).then_some((dense, causal)))
}

pub(crate) fn call(
    name: &str,
    overload: &str,
    positional: &[Value],
    named: &[(&str, Value)],
) -> Result<Vec<Value>> {
    let call = Call::new(name, overload, positional, named)?;
    let (mut results, mut count, mut stage) = (null_mut(), 0, LOOK_UP);
    // SAFETY: every pointer is to a live value or list with the size given, and C++ only reads them; in-place operators
    // change what the tensors refer to, as libtorch's own bindings do through shared handles.
    let status = unsafe {
        check(rt_op_call(
            call.name.as_ptr(),
            call.overload.as_ptr(),
            call.positional.values.as_ptr(),
            call.positional.values.len(),
            call.keys.as_ptr(),
            call.named.values.as_ptr(),
            call.named.values.len(),
            &raw mut results,
            &raw mut count,
            &raw mut stage,
        ))
    };
    status.map_err(|error| match stage {
        LOOK_UP | ARGUMENTS => Error::invalid("ops::call", error.to_string()),
        NO_KERNEL => Error::Unavailable { what: format!("the operator {name}"), reason: error.to_string() },
        _ => error,
    })?;
    // SAFETY: on success `results` holds `count` values.
    let raw = unsafe { &*slice_from_raw_parts(results, count) };
    // SAFETY: each result is taken over once.
    let values = raw.iter().map(|value| unsafe { take_value(value) }).collect();
    // SAFETY: the block is ours and not used after this.
    unsafe { rt_value_free(results.cast()) };
    Ok(values)
}

pub(crate) fn set_num_threads(count: c_int) -> Result<()> {
    // SAFETY: a plain call; the status is fresh.
    unsafe { check(rt_set_num_threads(count)) }
}

pub(crate) fn num_threads() -> Result<c_int> {
    let mut count = 0;
    // SAFETY: `count` is written on success; the status is fresh.
    unsafe { check(rt_num_threads(&raw mut count))? };
    Ok(count)
}

pub(crate) fn set_deterministic(on: bool, warn_only: bool) -> Result<()> {
    // SAFETY: a plain call; the status is fresh.
    unsafe { check(rt_set_deterministic(c_int::from(on), c_int::from(warn_only))) }
}

pub(crate) fn deterministic() -> Result<bool> {
    let mut on = 0;
    // SAFETY: `on` is written on success; the status is fresh.
    unsafe { check(rt_deterministic(&raw mut on))? };
    Ok(on != 0)
}

pub(crate) fn attention_order<const BACKENDS: usize>() -> Result<[i64; BACKENDS]> {
    let mut order = [0; BACKENDS];
    // SAFETY: `order` has room for the given number; the status is fresh.
    unsafe { check(rt_attention_order(order.as_mut_ptr(), BACKENDS))? };
    Ok(order)
}

pub(crate) fn set_attention_order(order: &[i64]) -> Result<()> {
    // SAFETY: `order` is read during the call; the status is fresh.
    unsafe { check(rt_set_attention_order(order.as_ptr(), order.len())) }
}
