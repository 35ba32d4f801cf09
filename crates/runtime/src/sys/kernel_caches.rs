//! The caches of kernels that libtorch's CPU libraries compile.

use std::env;

/// Kernels that each cache holds. A step's products have fewer shapes than this.
const CAPACITY: &str = "64";
/// oneDNN's primitives, and those of ideep, through which libtorch calls oneDNN. Both hold 1024 where nothing is set.
const VARIABLES: [&str; 2] = ["ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"];

/// Limits how many kernels oneDNN and ideep keep, unless the environment says it already. They compile one for each shape of a product in
/// bf16 or fp16 and keep it: batches of ever other lengths take hundreds of megabytes that no allocator of tensors counts. Call it
/// first in a program: it returns false, and does nothing, if the process has other threads already.
pub fn limit_kernel_caches() -> bool {
    let alone = std::fs::read_dir("/proc/self/task").is_ok_and(|tasks| tasks.count() == 1);
    if alone {
        for name in VARIABLES.into_iter().filter(|name| env::var_os(name).is_none()) {
            // SAFETY: no other thread exists that could read the environment meanwhile.
            unsafe { env::set_var(name, CAPACITY) };
        }
    }
    alone
}
