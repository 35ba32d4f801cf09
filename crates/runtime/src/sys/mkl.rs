//! MKL's products that libtorch links and does not call. libtorch has them on x86-64 only, so they are looked up at run time.

use std::ffi::{CStr, c_int, c_void};

use tch::{Device, Kind, Tensor};

use super::tensor::bump_version;
use crate::error::{Error, Result};

const NAME: &str = "MKL product";
/// Values of MKL's `cblas.h`.
const ROW_MAJOR: c_int = 101;
const NO_TRANSPOSE: c_int = 111;
const TRANSPOSE: c_int = 112;
const PACKED: c_int = 151;
const RIGHT_OPERAND: c_int = 162;

/// `(identifier, m, n, k)`.
type PackSize = unsafe extern "C" fn(c_int, c_int, c_int, c_int) -> usize;
/// `(layout, identifier, transposition, m, n, k, alpha, source, stride, packed)`.
#[rustfmt::skip]
type Pack = unsafe extern "C" fn(
    c_int, c_int, c_int, c_int, c_int, c_int, f32, *const c_void, c_int, *mut c_void,
);
/// `(layout, transposition of a, of b, m, n, k, a, stride, b, stride, beta, c, stride)`.
#[rustfmt::skip]
type Compute = unsafe extern "C" fn(
    c_int, c_int, c_int, c_int, c_int, c_int, *const c_void, c_int, *const c_void, c_int, f32, *mut c_void, c_int,
);
/// `(layout, transposition of a, of b, m, n, k, alpha, a, stride, b, stride, beta, c, stride)`.
#[rustfmt::skip]
type MultiplyBf16 = unsafe extern "C" fn(
    c_int, c_int, c_int, c_int, c_int, c_int, f32, *const c_void, c_int, *const c_void, c_int, f32, *mut c_void, c_int,
);

/// A weight `[out, in]` in the layout of MKL's packed product.
pub(crate) struct PackedWeight {
    compute: Compute,
    memory: Tensor,
    sizes: Sizes,
}

#[derive(Clone, Copy, PartialEq)]
struct Sizes {
    rows: c_int,
    out: c_int,
    width: c_int,
}

impl PackedWeight {
    /// `None` if libtorch has no such function.
    pub(crate) fn new(weight: &Tensor, rows: i64) -> Result<Option<Self>> {
        let (Some(size), Some(pack), Some(compute)) = (
            symbol(c"cblas_sgemm_pack_get_size"),
            symbol(c"cblas_sgemm_pack"),
            symbol(c"cblas_sgemm_compute"),
        ) else {
            return Ok(None);
        };
        let &[out, width] = &weight.size()[..] else { return Err(shapes(&[weight])) };
        let sizes = sizes(rows, out, width)?;
        dense(weight, Kind::Float, [out, width])?;
        // SAFETY: these are MKL's functions with the signatures of its `cblas.h`, unchanged since MKL 2017.
        let (size, pack, compute) = unsafe {
            (
                std::mem::transmute::<*mut c_void, PackSize>(size),
                std::mem::transmute::<*mut c_void, Pack>(pack),
                std::mem::transmute::<*mut c_void, Compute>(compute),
            )
        };
        let Sizes { rows, out, width } = sizes;
        // SAFETY: plain data in and out.
        let bytes = unsafe { size(RIGHT_OPERAND, rows, out, width) };
        let memory = Tensor::f_empty([bytes as i64], (Kind::Uint8, Device::Cpu))?;
        // SAFETY: the weight is dense and has these sizes (`dense`); the memory is as large as MKL asks.
        unsafe {
            let (source, target) = (weight.data_ptr().cast_const(), memory.data_ptr());
            pack(ROW_MAJOR, RIGHT_OPERAND, TRANSPOSE, rows, out, width, 1.0, source, width, target);
        }
        Ok(Some(Self { compute, memory, sizes }))
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.memory.numel() as u64
    }

    pub(crate) fn multiply_into(&self, result: &mut Tensor, x: &Tensor) -> Result<()> {
        let Sizes { rows, out, width } = self.sizes;
        dense(x, Kind::Float, [i64::from(rows), i64::from(width)])?;
        dense(result, Kind::Float, [i64::from(rows), i64::from(out)])?;
        bump_version(result)?;
        let (x, packed, result) = (x.data_ptr(), self.memory.data_ptr(), result.data_ptr());
        // SAFETY: x and the result are dense and have these sizes, and `packed` was made for them. The result is borrowed mutably;
        // a tensor that shares its memory is not written here.
        unsafe {
            (self.compute)(
                ROW_MAJOR,
                NO_TRANSPOSE,
                PACKED,
                rows,
                out,
                width,
                x,
                width,
                packed,
                width,
                0.0,
                result,
                out,
            );
        }
        Ok(())
    }
}

/// `result [rows, out]` in fp32 `= x [rows, in]·weightᵀ`, both in bf16; false if libtorch has no such function.
pub(crate) fn multiply_bf16_into(result: &mut Tensor, x: &Tensor, weight: &Tensor) -> Result<bool> {
    let Some(multiply) = symbol(c"cblas_gemm_bf16bf16f32") else { return Ok(false) };
    let (&[rows, width], &[out, _]) = (&x.size()[..], &weight.size()[..]) else {
        return Err(shapes(&[x, weight]));
    };
    let sizes = sizes(rows, out, width)?;
    dense(x, Kind::BFloat16, [rows, width])?;
    dense(weight, Kind::BFloat16, [out, width])?;
    dense(result, Kind::Float, [rows, out])?;
    bump_version(result)?;
    let Sizes { rows, out, width } = sizes;
    let (x, weight, result) = (x.data_ptr(), weight.data_ptr(), result.data_ptr());
    // SAFETY: MKL's function with the signature of its `cblas.h`; the operands are dense and have these sizes.
    unsafe {
        let multiply = std::mem::transmute::<*mut c_void, MultiplyBf16>(multiply);
        multiply(
            ROW_MAJOR,
            NO_TRANSPOSE,
            TRANSPOSE,
            rows,
            out,
            width,
            1.0,
            x,
            width,
            weight,
            width,
            0.0,
            result,
            out,
        );
    }
    Ok(true)
}

fn symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the name is NUL-terminated.
    let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!address.is_null()).then_some(address)
}

/// MKL's own integers have 32 bits here.
fn sizes(rows: i64, out: i64, width: i64) -> Result<Sizes> {
    let size = |value: i64| match c_int::try_from(value) {
        Ok(size) if size > 0 => Ok(size),
        _ => Err(Error::invalid(NAME, format!("a size of {value}; expected 1 to 2³¹ − 1"))),
    };
    Ok(Sizes { rows: size(rows)?, out: size(out)?, width: size(width)? })
}

fn dense(tensor: &Tensor, kind: Kind, size: [i64; 2]) -> Result<()> {
    if tensor.device() == Device::Cpu
        && tensor.kind() == kind
        && tensor.size() == size
        && tensor.is_contiguous()
    {
        return Ok(());
    }
    let found = (tensor.kind(), tensor.size(), tensor.device());
    Err(Error::invalid(
        NAME,
        format!("an operand is {found:?}; expected a dense {kind:?} {size:?} on the CPU"),
    ))
}

fn shapes(found: &[&Tensor]) -> Error {
    let sizes: Vec<_> = found.iter().map(|tensor| tensor.size()).collect();
    Error::invalid(NAME, format!("operands {sizes:?}; expected matrices"))
}
