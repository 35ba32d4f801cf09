//! fp32 products on a CUDA device that do not use the tensor cores.

use super::view::{View, times};
use super::{Detector, Evidence};
use crate::composition::seconds;
use crate::trace_file::DeviceWork;

pub(super) const DETECTOR: Detector = Detector {
    name: "fp32 without TF32",
    looks_at: "kernels of matrix products in full fp32 on CUDA",
    detect,
};

/// The kernels' names contain the dtype that they multiply: `ampere_sgemm_128x64_nn`, `sm80_xmma_gemm_f32f32_f32f32_f32_…`,
/// `cutlass_80_simt_sgemm_…` in fp32; `…_tf32f32_…`, `…_tensorop_s1688gemm_…` in TF32.
fn is_full_fp32(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    let fp32 = name.contains("sgemm") || name.contains("gemm_f32f32_f32f32");
    fp32 && !["tf32", "tensorop", "s1688"].iter().any(|mark| name.contains(mark))
}

fn detect(view: &View<'_>) -> Option<Evidence> {
    let mut tally = view.tally();
    for kernel in view.profile.device.iter().filter(|event| event.work == DeviceWork::Kernel) {
        let name = view.profile.device_name(kernel);
        if let (true, Some(step)) = (is_full_fp32(name), view.timeline.step_at(kernel.start)) {
            tally.add(step, seconds(kernel.end - kernel.start));
            tally.saw(name.to_owned());
        }
    }
    let count = tally.count();
    (count >= 1.0).then(|| Evidence {
        evidence: format!("products in full fp32 {}: {}", times(count), tally.shapes()),
        per_step: count,
        share: Some(tally.share()),
        remedy: "Allow TF32 for products, or train in bf16 or fp16 under autocast.".into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_classified_by_name() {
        let fp32 = [
            "ampere_sgemm_128x64_nn",
            "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n",
            "cutlass_80_simt_sgemm_256x128",
        ];
        let others = [
            "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n",
            "cutlass_80_tensorop_s1688gemm_128x128",
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n",
            "vectorized_elementwise_kernel",
        ];
        assert!(fp32.iter().all(|name| is_full_fp32(name)));
        assert!(!others.iter().any(|name| is_full_fp32(name)));
    }
}
