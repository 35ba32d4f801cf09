//! Host memory for copies to and from a device (`cpp/host_memory.cpp`).

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use tch::{Kind, Tensor};
use torch_sys::C_tensor;

use super::device::cuda_synchronize_used;
use super::{Status, check, take};
use crate::device::{Event, Stream, copy_async};
use crate::error::{Error, Result};

/// The functions that lock pages, as `rt_page_locker`.
#[repr(C)]
struct Locker {
    lock: unsafe extern "C" fn(*mut c_void, usize, c_uint) -> c_int,
    unlock: unsafe extern "C" fn(*mut c_void) -> c_int,
    describe: unsafe extern "C" fn(c_int) -> *const c_char,
    forget_error: unsafe extern "C" fn() -> c_int,
}

/// Bytes of host memory, as `rt_host_usage`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) live: u64,
    pub(crate) peak: u64,
    pub(crate) held: u64,
    pub(crate) powers_of_two: u64,
    pub(crate) fallback: u64,
}

unsafe extern "C" {
    fn rt_host_empty(
        shape: *const i64,
        dims: usize,
        prototype: *const C_tensor,
        device: c_int,
        out: *mut *mut C_tensor,
    ) -> Status;
    fn rt_host_locked(
        shape: *const i64,
        dims: usize,
        prototype: *const C_tensor,
        locker: *const Locker,
        out: *mut *mut C_tensor,
        reason: *mut *mut c_char,
    ) -> Status;
    fn rt_host_usage_of(pinned: c_int, out: *mut Usage) -> Status;
    fn rt_host_fallback_reason(out: *mut *mut c_char) -> Status;
    fn rt_storage_users(tensor: *const C_tensor, out: *mut u64) -> Status;
    fn rt_free_message(message: Status);
}

/// Returns an uninitialised CPU tensor on its own pages, page-locked for copies of a CUDA device if one is given.
pub(crate) fn host_empty(shape: &[i64], kind: Kind, cuda: Option<i32>) -> Result<Tensor> {
    let prototype = Tensor::f_empty([0], (kind, tch::Device::Cpu))?;
    let mut out: *mut C_tensor = std::ptr::null_mut();
    // SAFETY: shape and prototype are borrowed during the call; on success the tensor that comes out is ours.
    let tensor = unsafe {
        let device = cuda.unwrap_or(-1);
        check(rt_host_empty(shape.as_ptr(), shape.len(), prototype.as_ptr(), device, &mut out))?;
        take(out)
    };
    tensor.ok_or_else(|| Error::Torch("no tensor came back".into()))
}

/// Returns a tensor on pages that `locker` has locked, or its error.
///
/// # Safety
/// The locker's functions have the contracts of the CUDA runtime's functions, for as long as the tensor lives.
#[cfg_attr(not(test), expect(dead_code, reason = "only tests have their own locker"))]
unsafe fn host_locked(
    shape: &[i64],
    kind: Kind,
    locker: &Locker,
) -> Result<std::result::Result<Tensor, String>> {
    let prototype = Tensor::f_empty([0], (kind, tch::Device::Cpu))?;
    let (mut out, mut reason) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: shape, prototype and locker are borrowed during the call, the locker's functions are sound by this
    // function's contract; on success the tensor or the message that comes out is ours.
    let tensor = unsafe {
        let (sizes, dims) = (shape.as_ptr(), shape.len());
        check(rt_host_locked(sizes, dims, prototype.as_ptr(), locker, &mut out, &mut reason))?;
        take(out)
    };
    Ok(tensor.ok_or_else(|| message(reason).unwrap_or_default()))
}

/// Bytes of page-locked memory, or of unlocked memory of [`host_empty`].
pub(crate) fn host_usage(pinned: bool) -> Result<Usage> {
    let mut usage = Usage::default();
    // SAFETY: the out-parameter is valid during the call and has the layout of the header.
    unsafe { check(rt_host_usage_of(c_int::from(pinned), &mut usage)) }?;
    Ok(usage)
}

/// Why libtorch's pinned allocator was used instead of own pages the last time, if it was.
pub(crate) fn host_fallback_reason() -> Result<Option<String>> {
    let mut reason = std::ptr::null_mut();
    // SAFETY: the out-parameter is valid during the call.
    unsafe { check(rt_host_fallback_reason(&mut reason)) }?;
    Ok(message(reason))
}

/// Takes a message of the shim; `None` for null.
fn message(text: *mut c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the shim wrote a NUL-terminated message.
    let message = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
    // SAFETY: the message is ours and not used after this.
    unsafe { rt_free_message(text) };
    Some(message)
}

/// Returns how many tensors share the storage of `tensor`, itself included.
fn storage_users(tensor: &Tensor) -> Result<u64> {
    let mut users = 0;
    // SAFETY: the tensor is borrowed and the out-parameter is valid during the call.
    unsafe { check(rt_storage_users(tensor.as_ptr(), &mut users)) }?;
    Ok(users)
}

/// A type in which every bit pattern is a valid value.
///
/// # Safety
/// The type has no padding and no invalid bit pattern, and [`Plain::KIND`] has its size.
pub(crate) unsafe trait Plain: Copy {
    /// libtorch's name of the type.
    const KIND: Kind;
}

macro_rules! plain {
    ($($element:ty => $kind:ident),* $(,)?) => { $(
        // SAFETY: a plain number: no padding, every bit pattern is a value, same size as the kind.
        unsafe impl Plain for $element {
            const KIND: Kind = Kind::$kind;
        }
    )* };
}
plain! {
    u8 => Uint8, i8 => Int8, i16 => Int16, i32 => Int, i64 => Int64,
    half::f16 => Half, half::bf16 => BFloat16, f32 => Float, f64 => Double,
}

/// A block of initialised host memory that tensors may view.
#[derive(Debug)]
pub(crate) struct HostBlock {
    /// Contiguous `Uint8` on the CPU, every byte initialised; never handed out, so nobody can resize it.
    bytes: Tensor,
    /// Its length.
    len: usize,
    /// Whether tensors have viewed it since the last wait for the devices: a copy of a dropped view may still run.
    viewed: Cell<bool>,
    /// Copies by [`HostBlock::copy_to`] that may still run, whose views no other code has.
    copies: RefCell<Vec<Event>>,
}

impl HostBlock {
    pub(crate) fn zeroed(len: usize, cuda: Option<i32>) -> Result<Self> {
        let size = i64::try_from(len).map_err(|_| {
            Error::invalid("pinned buffer", format!("{len} bytes is more than a tensor can hold"))
        })?;
        let mut bytes = host_empty(&[size], Kind::Uint8, cuda)?;
        let _ = bytes.f_zero_()?;
        Ok(Self { bytes, len, viewed: Cell::new(false), copies: RefCell::default() })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns a tensor over `[offset, offset + size)`; takes `&mut`, so that no slice of the block is alive.
    pub(crate) fn view(&mut self, offset: usize, size: usize) -> Result<Tensor> {
        self.viewed.set(true);
        // Both were checked against `len`, which fits an i64.
        Ok(self.bytes.f_narrow(0, offset as i64, size as i64)?)
    }

    /// Queues a copy of its first bytes to `target`, which has that many, on `stream`. The next borrow of the block waits only for
    /// this copy.
    pub(crate) fn copy_to(&mut self, target: &Tensor, stream: &Stream) -> Result<()> {
        let copied = Event::untimed(stream.device())?;
        let bytes = target.numel() * target.kind().elt_size_in_bytes();
        let source = self.bytes.f_narrow(0, 0, bytes as i64)?.f_view_dtype(target.kind())?;
        let source = source.f_view(target.size().as_slice())?;
        let mut target = target.shallow_clone();
        let submitted =
            stream.submit(move || copy_async(&mut target, &source)).and_then(|()| stream.record(&copied));
        if submitted.is_err() {
            // It is unknown whether a copy was queued, so the next borrow waits for the devices.
            self.viewed.set(true);
        }
        submitted?;
        let mut copies = self.copies.borrow_mut();
        copies.retain(|copied| !copied.query().unwrap_or(false));
        copies.push(copied);
        Ok(())
    }

    /// Whether a copy of [`HostBlock::copy_to`] still runs.
    pub(crate) fn is_being_copied(&self) -> Result<bool> {
        for copied in self.copies.borrow().iter() {
            if !copied.query()? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Waits for the copies of [`HostBlock::copy_to`].
    fn finish_copies(&self) -> Result<()> {
        let mut copies = self.copies.borrow_mut();
        while let Some(copied) = copies.last() {
            // The stream reports failures of earlier work; here it only matters that nothing reads the block any more.
            match copied.synchronize() {
                Err(error) if !copied.query().unwrap_or(false) => return Err(error),
                _ => drop(copies.pop()),
            }
        }
        Ok(())
    }

    /// Returns how many tensors view the block.
    pub(crate) fn views(&self) -> Result<u64> {
        Ok(storage_users(&self.bytes)?.saturating_sub(1))
    }

    /// Whether the block may be borrowed as a slice: no tensor views it, and no device still copies for an earlier view. A copy is
    /// submitted while its tensor exists, so a wait after the last view is dropped covers all copies.
    fn lendable<T: Plain>(&self) -> Result<bool> {
        self.finish_copies()?;
        if self.views()? != 0 || !self.len.is_multiple_of(size_of::<T>()) {
            return Ok(false);
        }
        // All devices, because a view can be copied to any.
        if self.viewed.get() {
            cuda_synchronize_used()?;
            self.viewed.set(false);
        }
        Ok(true)
    }

    /// Returns the block as a slice; `None` if tensors view it, or if its size is not a multiple of `T`'s. Waits for the CUDA
    /// devices in use if tensors viewed it before.
    pub(crate) fn numbers<T: Plain>(&self) -> Result<Option<&[T]>> {
        if !self.lendable::<T>()? {
            return Ok(None);
        }
        // SAFETY: the block is initialised, starts at a page or in page-locked memory and is so aligned for any `T`, and lives
        // as long as `self`. Nothing writes to it while the slice is alive: no tensor views it, no device copies to it, and
        // `view`, the only way to get a tensor, takes `&mut self`.
        Ok(Some(unsafe { self.slice() }))
    }

    /// As [`HostBlock::numbers`], mutable.
    pub(crate) fn numbers_mut<T: Plain>(&mut self) -> Result<Option<&mut [T]>> {
        if !self.lendable::<T>()? {
            return Ok(None);
        }
        // SAFETY: as in `numbers`, and no device reads it either; `&mut self` makes the slice the only one.
        Ok(Some(unsafe {
            let pointer = self.address().cast::<T>();
            std::slice::from_raw_parts_mut(pointer, self.len / size_of::<T>())
        }))
    }

    fn address(&self) -> *mut u8 {
        match self.len {
            // An empty pinned tensor of libtorch has a null address; this one is aligned for any `T`.
            0 => std::ptr::without_provenance_mut(64),
            _ => self.bytes.data_ptr().cast(),
        }
    }

    /// # Safety
    /// The block's size is a multiple of `T`'s, and nothing writes to it while the slice is alive.
    unsafe fn slice<T: Plain>(&self) -> &[T] {
        // SAFETY: by this function's contract, and the block's own: initialised, aligned, alive as long as `self`.
        unsafe { std::slice::from_raw_parts(self.address().cast::<T>(), self.len / size_of::<T>()) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use expect_test::expect;

    use super::*;

    /// The calls to the test's locker, and whether its next call fails.
    static CALLS: Mutex<Vec<(&str, usize, usize)>> = Mutex::new(Vec::new());
    static REFUSES: Mutex<bool> = Mutex::new(false);

    fn answer() -> c_int {
        if *REFUSES.lock().unwrap() { 2 } else { 0 }
    }

    extern "C" fn lock(memory: *mut c_void, bytes: usize, _: c_uint) -> c_int {
        CALLS.lock().unwrap().push(("lock", memory as usize, bytes));
        answer()
    }

    extern "C" fn unlock(memory: *mut c_void) -> c_int {
        CALLS.lock().unwrap().push(("unlock", memory as usize, 0));
        answer()
    }

    extern "C" fn describe(_: c_int) -> *const c_char {
        c"the limit of locked memory".as_ptr()
    }

    extern "C" fn forget_error() -> c_int {
        CALLS.lock().unwrap().push(("forget", 0, 0));
        0
    }

    const LOCKER: Locker = Locker { lock, unlock, describe, forget_error };

    fn locked(shape: &[i64]) -> std::result::Result<Tensor, String> {
        // SAFETY: the functions only record their calls; the memory is ordinary.
        unsafe { host_locked(shape, Kind::Float, &LOCKER) }.unwrap()
    }

    fn calls() -> Vec<(&'static str, usize, usize)> {
        std::mem::take(&mut CALLS.lock().unwrap())
    }

    #[test]
    fn pages_are_locked_while_their_tensor_lives() {
        let mut tensor = locked(&[3, 1000]).unwrap();
        let address = tensor.data_ptr() as usize;
        assert_eq!(calls(), [("lock", address, 12_288)]);
        let usage = host_usage(true).unwrap();
        let exact = Usage { live: 12_000, peak: 12_000, held: 12_288, powers_of_two: 16_384, fallback: 0 };
        assert_eq!(usage, exact);

        // A view keeps them locked.
        let _ = tensor.fill_(2.0);
        let row = tensor.get(1);
        drop(tensor);
        assert_eq!(calls(), []);
        assert_eq!(f64::try_from(row.sum(Kind::Double)).unwrap(), 2000.0);
        drop(row);
        assert_eq!(calls(), [("unlock", address, 0)]);
        assert_eq!(host_usage(true).unwrap(), Usage { peak: 12_000, ..Usage::default() });

        // A failure returns a message, clears the runtime's error and keeps no memory.
        *REFUSES.lock().unwrap() = true;
        let reason = locked(&[5]).unwrap_err();
        expect!["cudaHostRegister of 4096 bytes: the limit of locked memory"].assert_eq(&reason);
        assert_eq!(calls().iter().map(|call| call.0).collect::<Vec<_>>(), ["lock", "forget"]);
        assert_eq!(host_usage(true).unwrap(), Usage { peak: 12_000, ..Usage::default() });

        // Pages that cannot be unlocked stay mapped, because the device may access them.
        *REFUSES.lock().unwrap() = false;
        let tensor = locked(&[4]).unwrap();
        let address = tensor.data_ptr() as usize;
        *REFUSES.lock().unwrap() = true;
        drop(tensor);
        assert_eq!(calls()[1..], [("unlock", address, 0), ("forget", 0, 0)]);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let holds = |line: &str| {
            let (begin, rest) = line.split_once('-').unwrap();
            let end = rest.split_once(' ').unwrap().0;
            let number = |text| usize::from_str_radix(text, 16).unwrap();
            (number(begin)..number(end)).contains(&address)
        };
        assert!(maps.lines().any(holds));
        assert_eq!(host_usage(true).unwrap().held, 0);
    }
}
