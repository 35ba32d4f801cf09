//! The assembled kernels, pinned: registers, spills, shared memory, and the loads and stores of the machine code.
//!
//! The figures are those of one NVRTC version; with another one, and without a disassembler, the test prints what it skips.

use std::path::PathBuf;
use std::process::Command;

use expect_test::{Expect, expect};
use kernels::nvrtc;

use super::program::{
    self, ADAM, CROSS_ENTROPY, DROPOUT, GRADIENTS, LOSS_SCALE, NF4, NORM, PRELUDE, ROPE, SCALE, SWIGLU,
    Source,
};

/// The NVRTC version of the figures.
const VERSION: (i32, i32) = (13, 0);

/// The kernels of a large model's step, in which every row is aligned.
const KERNELS: [(Source, &[&str]); 10] = [
    (ADAM, &["adam<bf16, bf16, 8, true, 128, 1024>", "adam<float, bf16, 4, false, 128, 1024>"]),
    (
        CROSS_ENTROPY,
        &[
            "ce_statistics<float, 4, false, false, 512>",
            "ce_statistics<float, 4, true, true, 512>",
            "ce_logits<float, 4, 256>",
            "ce_gradient<float, 4, false, 256>",
            "ce_gradient<float, 4, true, 256>",
            "ce_gradient_narrow<bf16, 8, false, 512>",
            "ce_gradient_narrow<bf16, 8, true, 512>",
            "ce_statistics<bf16, 8, false, false, 128>",
            "ce_statistics<bf16, 8, true, true, 128>",
            "ce_statistics<f16, 8, false, false, 128>",
            "ce_logits<bf16, 8, 256>",
            "ce_gradient<bf16, 8, false, 256>",
            "ce_gradient<bf16, 8, true, 256>",
            "ce_gradient<f16, 8, false, 256>",
        ],
    ),
    (DROPOUT, &["dropout<bf16, 8, 256>", "dropout<float, 4, 256>"]),
    (
        GRADIENTS,
        &[
            "gradient_squares<float, 4, true, 256, 16384>",
            "gradient_squares<bf16, 8, true, 256, 16384>",
            "gradient_squares<bf16, 8, false, 256, 16384>",
            "gradient_norm<1024>",
            "scale_many<bf16, 8, 256, 16384>",
        ],
    ),
    (LOSS_SCALE, &["update_loss_scale"]),
    (NF4, &["nf4_dequantize<bf16, 8, true, 256, 4>", "nf4_dequantize<float, 4, false, 256, 4>"]),
    (
        NORM,
        &[
            "norm_forward<bf16, bf16, bf16, 8, 256, 2, 2, false>",
            "norm_forward<bf16, bf16, bf16, 8, 1024, 2, 2, false>",
            "norm_forward<float, float, float, 4, 1024, 4, 0, true>",
            "norm_forward<bf16, bf16, bf16, 8, 512, 2, 3, true>",
            "norm_backward<bf16, bf16, bf16, 8, 256, 2, 2, false, false>",
            "norm_backward<bf16, bf16, bf16, 8, 512, 2, 3, true, true>",
            "norm_backward<bf16, bf16, bf16, 8, 640, 4, 2, false, false>",
            "norm_backward<bf16, bf16, bf16, 8, 640, 4, 2, true, true>",
            "norm_backward<bf16, bf16, bf16, 8, 512, 4, 2, false, false>",
            "norm_backward<bf16, bf16, bf16, 8, 512, 4, 2, true, true>",
            "norm_backward<float, float, float, 4, 1024, 4, 0, true, true>",
            "norm_backward<bf16, bf16, bf16, 8, 1024, 4, 0, false, false>",
            "norm_backward<bf16, bf16, bf16, 8, 1024, 4, 0, true, true>",
            "norm_backward<bf16, float, float, 8, 1024, 4, 0, true, true>",
            "column_sums<bf16>",
        ],
    ),
    (ROPE, &["rotate<bf16, 8>", "rotate<float, 4>"]),
    (SCALE, &["scale<bf16, 8, 256>"]),
    (SWIGLU, &["swiglu_forward<bf16, 8, 256>", "swiglu_backward<bf16, 8, 256>"]),
];

fn skipped() -> bool {
    if !program::is_available() {
        return true;
    }
    let found = nvrtc::version().unwrap_or_default();
    if found != VERSION {
        eprintln!("skipped: the figures are those of NVRTC {VERSION:?}, and this one is {found:?}");
    }
    found != VERSION
}

/// Returns the text of the assembler's log between two markers, for one kernel.
fn between<'a>(log: &'a str, kernel: &str, before: &str, after: &str) -> &'a str {
    let kernel_log = log.split_once(&format!("'{kernel}'")).map_or("", |(_, rest)| rest);
    let end = kernel_log.find("Compile time").unwrap_or(kernel_log.len());
    let found = kernel_log[..end].split_once(after).map_or("", |(found, _)| found);
    found.rsplit_once(before).map_or("0", |(_, found)| found).trim()
}

/// The assembler's counts for a kernel.
fn registers(name: &str, emitted: &nvrtc::Emitted) -> String {
    let of = |before, after| between(&emitted.log, name, before, after).to_owned();
    let shared = of(", ", " bytes smem");
    let spills = match [of("frame,", " bytes spill stores"), of("stores,", " bytes spill loads")] {
        [stores, loads] if stores == "0" && loads == "0" => "no spills".to_owned(),
        [stores, loads] => format!("SPILLS {stores} bytes, loads {loads}"),
    };
    format!("{} registers, {spills}, {shared} bytes shared", of("Used", " registers"))
}

fn disassembler() -> Option<PathBuf> {
    let folders = std::env::var_os("FRUGAL_CUDA_TOOLS").map(|tools| PathBuf::from(tools).join("cu13/bin"));
    let beside = std::env::var_os("FRUGAL_NVRTC").map(|nvrtc| PathBuf::from(nvrtc).join("../bin"));
    let found =
        folders.into_iter().chain(beside).map(|folder| folder.join("nvdisasm")).find(|path| path.is_file());
    if found.is_none() {
        eprintln!("skipped: nvdisasm was not found; `cargo xtask setup --cuda-tools` installs it");
    }
    found
}

/// Counts of a kernel's global loads and stores in machine code, with those of 16 bytes separate.
fn accesses(disassembly: &str, expression: &str, name: &str) -> String {
    let start =
        disassembly.find(&format!(".text.{name}:")).unwrap_or_else(|| panic!("{expression} is not there"));
    let own = disassembly[start..].split(".section").next().unwrap_or_default();
    let count = |wanted: &dyn Fn(&str) -> bool| own.split_whitespace().filter(|word| wanted(word)).count();
    let is = |word: &str, opcode: &str| word == opcode || word.starts_with(&format!("{opcode}."));
    // Generic addresses cost a lookup; registers spill to local memory.
    for opcode in ["LD", "ST"] {
        assert_eq!(count(&|word| is(word, opcode)), 0, "{expression} has {opcode}");
    }
    let local = match count(&|word| is(word, "LDL") || is(word, "STL")) {
        0 => String::new(),
        count => format!(", {count} TO LOCAL MEMORY"),
    };
    let of = |opcode: &str| {
        let wide = count(&|word| is(word, opcode) && word.contains(".128"));
        (wide, count(&|word| is(word, opcode)) - wide)
    };
    let ((loads, narrow_loads), (stores, narrow_stores)) = (of("LDG"), of("STG"));
    format!("loads {loads} wide, {narrow_loads} narrow; stores {stores} wide, {narrow_stores} narrow{local}")
}

/// Compares both tables of an architecture, a row for each kernel.
fn check(architecture: u32, expected_registers: Expect, expected_accesses: Expect) {
    if skipped() {
        return;
    }
    let disassembler = disassembler();
    let folder = tempfile::tempdir().unwrap();
    let (mut registers_listed, mut accesses_listed) = (String::new(), String::new());
    for (source, expressions) in KERNELS {
        let emitted = program::emit(source.0, PRELUDE, expressions, architecture);
        let disassembly = disassembler.as_ref().map(|disassembler| {
            let file = folder.path().join("kernels.cubin");
            std::fs::write(&file, &emitted.cubin).unwrap();
            let output = Command::new(disassembler).arg("-c").arg(&file).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8_lossy(&output.stdout).into_owned()
        });
        for (expression, name) in expressions.iter().zip(&emitted.names) {
            registers_listed += &format!("{expression}: {}\n", registers(name, &emitted));
            if let Some(text) = &disassembly {
                accesses_listed += &format!("{expression}: {}\n", accesses(text, expression, name));
            }
        }
    }
    expected_registers.assert_eq(&registers_listed);
    if disassembler.is_some() {
        expected_accesses.assert_eq(&accesses_listed);
    }
}

#[test]
fn kernels_on_sm_80() {
    check(
        80,
        expect![[r#"
            adam<bf16, bf16, 8, true, 128, 1024>: 63 registers, no spills, 0 bytes shared
            adam<float, bf16, 4, false, 128, 1024>: 43 registers, no spills, 0 bytes shared
            ce_statistics<float, 4, false, false, 512>: 40 registers, no spills, 384 bytes shared
            ce_statistics<float, 4, true, true, 512>: 40 registers, no spills, 640 bytes shared
            ce_logits<float, 4, 256>: 25 registers, no spills, 0 bytes shared
            ce_gradient<float, 4, false, 256>: 46 registers, no spills, 0 bytes shared
            ce_gradient<float, 4, true, 256>: 48 registers, no spills, 0 bytes shared
            ce_gradient_narrow<bf16, 8, false, 512>: 56 registers, no spills, 0 bytes shared
            ce_gradient_narrow<bf16, 8, true, 512>: 58 registers, no spills, 0 bytes shared
            ce_statistics<bf16, 8, false, false, 128>: 32 registers, no spills, 96 bytes shared
            ce_statistics<bf16, 8, true, true, 128>: 69 registers, no spills, 160 bytes shared
            ce_statistics<f16, 8, false, false, 128>: 32 registers, no spills, 96 bytes shared
            ce_logits<bf16, 8, 256>: 32 registers, no spills, 0 bytes shared
            ce_gradient<bf16, 8, false, 256>: 52 registers, no spills, 0 bytes shared
            ce_gradient<bf16, 8, true, 256>: 53 registers, no spills, 0 bytes shared
            ce_gradient<f16, 8, false, 256>: 52 registers, no spills, 0 bytes shared
            dropout<bf16, 8, 256>: 28 registers, no spills, 0 bytes shared
            dropout<float, 4, 256>: 22 registers, no spills, 0 bytes shared
            gradient_squares<float, 4, true, 256, 16384>: 32 registers, no spills, 64 bytes shared
            gradient_squares<bf16, 8, true, 256, 16384>: 44 registers, no spills, 64 bytes shared
            gradient_squares<bf16, 8, false, 256, 16384>: 40 registers, no spills, 64 bytes shared
            gradient_norm<1024>: 32 registers, no spills, 256 bytes shared
            scale_many<bf16, 8, 256, 16384>: 29 registers, no spills, 0 bytes shared
            update_loss_scale: 26 registers, no spills, 0 bytes shared
            nf4_dequantize<bf16, 8, true, 256, 4>: 32 registers, no spills, 64 bytes shared
            nf4_dequantize<float, 4, false, 256, 4>: 27 registers, no spills, 64 bytes shared
            norm_forward<bf16, bf16, bf16, 8, 256, 2, 2, false>: 60 registers, no spills, 192 bytes shared
            norm_forward<bf16, bf16, bf16, 8, 1024, 2, 2, false>: 60 registers, no spills, 768 bytes shared
            norm_forward<float, float, float, 4, 1024, 4, 0, true>: 49 registers, no spills, 768 bytes shared
            norm_forward<bf16, bf16, bf16, 8, 512, 2, 3, true>: 64 registers, no spills, 384 bytes shared
            norm_backward<bf16, bf16, bf16, 8, 256, 2, 2, false, false>: 79 registers, no spills, 128 bytes shared
            norm_backward<bf16, bf16, bf16, 8, 512, 2, 3, true, true>: 107 registers, no spills, 256 bytes shared
            norm_backward<bf16, bf16, bf16, 8, 640, 4, 2, false, false>: 74 registers, no spills, 320 bytes shared
            norm_backward<bf16, bf16, bf16, 8, 640, 4, 2, true, true>: 81 registers, no spills, 320 bytes shared
            norm_backward<bf16, bf16, bf16, 8, 512, 4, 2, false, false>: 128 registers, no spills, 256 bytes shared
            norm_backward<bf16, bf16, bf16, 8, 512, 4, 2, true, true>: 111 registers, no spills, 256 bytes shared
            norm_backward<float, float, float, 4, 1024, 4, 0, true, true>: 61 registers, no spills, 512 bytes shared
            norm_backward<bf16, bf16, bf16, 8, 1024, 4, 0, false, false>: 63 registers, no spills, 512 bytes shared
            norm_backward<bf16, bf16, bf16, 8, 1024, 4, 0, true, true>: 64 registers, no spills, 512 bytes shared
            norm_backward<bf16, float, float, 8, 1024, 4, 0, true, true>: 64 registers, no spills, 512 bytes shared
            column_sums<bf16>: 29 registers, no spills, 1056 bytes shared
            rotate<bf16, 8>: 32 registers, no spills, 0 bytes shared
            rotate<float, 4>: 28 registers, no spills, 0 bytes shared
            scale<bf16, 8, 256>: 24 registers, no spills, 0 bytes shared
            swiglu_forward<bf16, 8, 256>: 30 registers, no spills, 0 bytes shared
            swiglu_backward<bf16, 8, 256>: 38 registers, no spills, 0 bytes shared
        "#]],
        expect![[r#"
            adam<bf16, bf16, 8, true, 128, 1024>: loads 7 wide, 45 narrow; stores 7 wide, 35 narrow
            adam<float, bf16, 4, false, 128, 1024>: loads 4 wide, 45 narrow; stores 4 wide, 28 narrow
            ce_statistics<float, 4, false, false, 512>: loads 3 wide, 5 narrow; stores 0 wide, 3 narrow
            ce_statistics<float, 4, true, true, 512>: loads 4 wide, 23 narrow; stores 1 wide, 8 narrow
            ce_logits<float, 4, 256>: loads 2 wide, 6 narrow; stores 1 wide, 1 narrow
            ce_gradient<float, 4, false, 256>: loads 4 wide, 5 narrow; stores 4 wide, 1 narrow
            ce_gradient<float, 4, true, 256>: loads 12 wide, 40 narrow; stores 4 wide, 1 narrow
            ce_gradient_narrow<bf16, 8, false, 512>: loads 8 wide, 5 narrow; stores 2 wide, 1 narrow
            ce_gradient_narrow<bf16, 8, true, 512>: loads 8 wide, 24 narrow; stores 1 wide, 1 narrow
            ce_statistics<bf16, 8, false, false, 128>: loads 1 wide, 5 narrow; stores 0 wide, 3 narrow
            ce_statistics<bf16, 8, true, true, 128>: loads 7 wide, 35 narrow; stores 1 wide, 8 narrow
            ce_statistics<f16, 8, false, false, 128>: loads 1 wide, 5 narrow; stores 0 wide, 3 narrow
            ce_logits<bf16, 8, 256>: loads 3 wide, 10 narrow; stores 1 wide, 1 narrow
            ce_gradient<bf16, 8, false, 256>: loads 4 wide, 5 narrow; stores 4 wide, 1 narrow
            ce_gradient<bf16, 8, true, 256>: loads 20 wide, 72 narrow; stores 4 wide, 1 narrow
            ce_gradient<f16, 8, false, 256>: loads 4 wide, 5 narrow; stores 4 wide, 1 narrow
            dropout<bf16, 8, 256>: loads 1 wide, 1 narrow; stores 1 wide, 0 narrow
            dropout<float, 4, 256>: loads 1 wide, 1 narrow; stores 1 wide, 0 narrow
            gradient_squares<float, 4, true, 256, 16384>: loads 4 wide, 11 narrow; stores 4 wide, 6 narrow
            gradient_squares<bf16, 8, true, 256, 16384>: loads 4 wide, 11 narrow; stores 4 wide, 6 narrow
            gradient_squares<bf16, 8, false, 256, 16384>: loads 4 wide, 5 narrow; stores 0 wide, 1 narrow
            gradient_norm<1024>: loads 0 wide, 24 narrow; stores 0 wide, 2 narrow
            scale_many<bf16, 8, 256, 16384>: loads 4 wide, 6 narrow; stores 4 wide, 5 narrow
            update_loss_scale: loads 0 wide, 6 narrow; stores 0 wide, 7 narrow
            nf4_dequantize<bf16, 8, true, 256, 4>: loads 0 wide, 13 narrow; stores 4 wide, 0 narrow
            nf4_dequantize<float, 4, false, 256, 4>: loads 0 wide, 8 narrow; stores 4 wide, 0 narrow
            norm_forward<bf16, bf16, bf16, 8, 256, 2, 2, false>: loads 4 wide, 0 narrow; stores 4 wide, 1 narrow
            norm_forward<bf16, bf16, bf16, 8, 1024, 2, 2, false>: loads 4 wide, 0 narrow; stores 4 wide, 1 narrow
            norm_forward<float, float, float, 4, 1024, 4, 0, true>: loads 16 wide, 0 narrow; stores 8 wide, 2 narrow
            norm_forward<bf16, bf16, bf16, 8, 512, 2, 3, true>: loads 4 wide, 0 narrow; stores 4 wide, 2 narrow
            norm_backward<bf16, bf16, bf16, 8, 256, 2, 2, false, false>: loads 4 wide, 1 narrow; stores 6 wide, 0 narrow
            norm_backward<bf16, bf16, bf16, 8, 512, 2, 3, true, true>: loads 4 wide, 2 narrow; stores 10 wide, 0 narrow
            norm_backward<bf16, bf16, bf16, 8, 640, 4, 2, false, false>: loads 12 wide, 1 narrow; stores 12 wide, 0 narrow
            norm_backward<bf16, bf16, bf16, 8, 640, 4, 2, true, true>: loads 12 wide, 2 narrow; stores 20 wide, 0 narrow
            norm_backward<bf16, bf16, bf16, 8, 512, 4, 2, false, false>: loads 8 wide, 1 narrow; stores 12 wide, 0 narrow
            norm_backward<bf16, bf16, bf16, 8, 512, 4, 2, true, true>: loads 12 wide, 2 narrow; stores 20 wide, 0 narrow
            norm_backward<float, float, float, 4, 1024, 4, 0, true, true>: loads 28 wide, 2 narrow; stores 12 wide, 0 narrow
            norm_backward<bf16, bf16, bf16, 8, 1024, 4, 0, false, false>: loads 28 wide, 1 narrow; stores 12 wide, 0 narrow
            norm_backward<bf16, bf16, bf16, 8, 1024, 4, 0, true, true>: loads 28 wide, 2 narrow; stores 20 wide, 0 narrow
            norm_backward<bf16, float, float, 8, 1024, 4, 0, true, true>: loads 44 wide, 2 narrow; stores 20 wide, 0 narrow
            column_sums<bf16>: loads 0 wide, 9 narrow; stores 0 wide, 1 narrow
            rotate<bf16, 8>: loads 6 wide, 1 narrow; stores 2 wide, 0 narrow
            rotate<float, 4>: loads 4 wide, 1 narrow; stores 2 wide, 0 narrow
            scale<bf16, 8, 256>: loads 1 wide, 1 narrow; stores 1 wide, 0 narrow
            swiglu_forward<bf16, 8, 256>: loads 2 wide, 0 narrow; stores 2 wide, 0 narrow
            swiglu_backward<bf16, 8, 256>: loads 3 wide, 0 narrow; stores 3 wide, 0 narrow
        "#]],
    );
}

#[test]
fn kernels_on_sm_90() {
    check(
        90,
        expect![[r#"
            adam<bf16, bf16, 8, true, 128, 1024>: 63 registers, no spills, 0 bytes shared
            adam<float, bf16, 4, false, 128, 1024>: 43 registers, no spills, 0 bytes shared
            ce_statistics<float, 4, false, false, 512>: 40 registers, no spills, 384 bytes shared
            ce_statistics<float, 4, true, true, 512>: 40 registers, no spills, 640 bytes shared
            ce_logits<float, 4, 256>: 28 registers, no spills, 0 bytes shared
            ce_gradient<float, 4, false, 256>: 48 registers, no spills, 0 bytes shared
            ce_gradient<float, 4, true, 256>: 48 registers, no spills, 0 bytes shared
            ce_gradient_narrow<bf16, 8, false, 512>: 56 registers, no spills, 0 bytes shared
            ce_gradient_narrow<bf16, 8, true, 512>: 59 registers, no spills, 0 bytes shared
            ce_statistics<bf16, 8, false, false, 128>: 32 registers, no spills, 96 bytes shared
            ce_statistics<bf16, 8, true, true, 128>: 56 registers, no spills, 160 bytes shared
            ce_statistics<f16, 8, false, false, 128>: 32 registers, no spills, 96 bytes shared
            ce_logits<bf16, 8, 256>: 32 registers, no spills, 0 bytes shared
            ce_gradient<bf16, 8, false, 256>: 54 registers, no spills, 0 bytes shared
            ce_gradient<bf16, 8, true, 256>: 53 registers, no spills, 0 bytes shared
            ce_gradient<f16, 8, false, 256>: 54 registers, no spills, 0 bytes shared
            dropout<bf16, 8, 256>: 28 registers, no spills, 0 bytes shared
            dropout<float, 4, 256>: 22 registers, no spills, 0 bytes shared
            gradient_squares<float, 4, true, 256, 16384>: 32 registers, no spills, 64 bytes shared
            gradient_squares<bf16, 8, true, 256, 16384>: 40 registers, no spills, 64 bytes shared
            gradient_squares<bf16, 8, false, 256, 16384>: 40 registers, no spills, 64 bytes shared
            gradient_norm<1024>: 32 registers, no spills, 256 bytes shared
            scale_many<bf16, 8, 256, 16384>: 30 registers, no spills, 0 bytes shared
            update_loss_scale: 26 registers, no spills, 0 bytes shared
            nf4_dequantize<bf16, 8, true, 256, 4>: 32 registers, no spills, 64 bytes shared
            nf4_dequantize<float, 4, false, 256, 4>: 27 registers, no spills, 64 bytes shared
            norm_forward<bf16, bf16, bf16, 8, 256, 2, 2, false>: 60 registers, no spills, 192 bytes shared
            norm_forward<bf16, bf16, bf16, 8, 1024, 2, 2, false>: 58 registers, no spills, 768 bytes shared
            norm_forward<float, float, float, 4, 1024, 4, 0, true>: 46 registers, no spills, 768 bytes shared
            norm_forward<bf16, bf16, bf16, 8, 512, 2, 3, true>: 60 registers, no spills, 384 bytes shared
            norm_backward<bf16, bf16, bf16, 8, 256, 2, 2, false, false>: 80 registers, no spills, 128 bytes shared
            norm_backward<bf16, bf16, bf16, 8, 512, 2, 3, true, true>: 107 registers, no spills, 256 bytes shared
            norm_backward<bf16, bf16, bf16, 8, 640, 4, 2, false, false>: 70 registers, no spills, 320 bytes shared
            norm_backward<bf16, bf16, bf16, 8, 640, 4, 2, true, true>: 78 registers, no spills, 320 bytes shared
            norm_backward<bf16, bf16, bf16, 8, 512, 4, 2, false, false>: 118 registers, no spills, 256 bytes shared
            norm_backward<bf16, bf16, bf16, 8, 512, 4, 2, true, true>: 110 registers, no spills, 256 bytes shared
            norm_backward<float, float, float, 4, 1024, 4, 0, true, true>: 63 registers, no spills, 512 bytes shared
            norm_backward<bf16, bf16, bf16, 8, 1024, 4, 0, false, false>: 64 registers, no spills, 512 bytes shared
            norm_backward<bf16, bf16, bf16, 8, 1024, 4, 0, true, true>: 64 registers, no spills, 512 bytes shared
            norm_backward<bf16, float, float, 8, 1024, 4, 0, true, true>: 64 registers, no spills, 512 bytes shared
            column_sums<bf16>: 30 registers, no spills, 1056 bytes shared
            rotate<bf16, 8>: 32 registers, no spills, 0 bytes shared
            rotate<float, 4>: 28 registers, no spills, 0 bytes shared
            scale<bf16, 8, 256>: 24 registers, no spills, 0 bytes shared
            swiglu_forward<bf16, 8, 256>: 30 registers, no spills, 0 bytes shared
            swiglu_backward<bf16, 8, 256>: 40 registers, no spills, 0 bytes shared
        "#]],
        expect![[r#"
            adam<bf16, bf16, 8, true, 128, 1024>: loads 7 wide, 45 narrow; stores 7 wide, 35 narrow
            adam<float, bf16, 4, false, 128, 1024>: loads 4 wide, 45 narrow; stores 4 wide, 28 narrow
            ce_statistics<float, 4, false, false, 512>: loads 3 wide, 5 narrow; stores 0 wide, 3 narrow
            ce_statistics<float, 4, true, true, 512>: loads 4 wide, 23 narrow; stores 1 wide, 8 narrow
            ce_logits<float, 4, 256>: loads 2 wide, 6 narrow; stores 1 wide, 1 narrow
            ce_gradient<float, 4, false, 256>: loads 4 wide, 5 narrow; stores 4 wide, 1 narrow
            ce_gradient<float, 4, true, 256>: loads 12 wide, 40 narrow; stores 4 wide, 1 narrow
            ce_gradient_narrow<bf16, 8, false, 512>: loads 8 wide, 5 narrow; stores 2 wide, 1 narrow
            ce_gradient_narrow<bf16, 8, true, 512>: loads 8 wide, 24 narrow; stores 1 wide, 1 narrow
            ce_statistics<bf16, 8, false, false, 128>: loads 1 wide, 5 narrow; stores 0 wide, 3 narrow
            ce_statistics<bf16, 8, true, true, 128>: loads 7 wide, 35 narrow; stores 1 wide, 8 narrow
            ce_statistics<f16, 8, false, false, 128>: loads 1 wide, 5 narrow; stores 0 wide, 3 narrow
            ce_logits<bf16, 8, 256>: loads 3 wide, 10 narrow; stores 1 wide, 1 narrow
            ce_gradient<bf16, 8, false, 256>: loads 4 wide, 5 narrow; stores 4 wide, 1 narrow
            ce_gradient<bf16, 8, true, 256>: loads 20 wide, 72 narrow; stores 4 wide, 1 narrow
            ce_gradient<f16, 8, false, 256>: loads 4 wide, 5 narrow; stores 4 wide, 1 narrow
            dropout<bf16, 8, 256>: loads 1 wide, 1 narrow; stores 1 wide, 0 narrow
            dropout<float, 4, 256>: loads 1 wide, 1 narrow; stores 1 wide, 0 narrow
            gradient_squares<float, 4, true, 256, 16384>: loads 4 wide, 11 narrow; stores 4 wide, 6 narrow
            gradient_squares<bf16, 8, true, 256, 16384>: loads 4 wide, 11 narrow; stores 4 wide, 6 narrow
            gradient_squares<bf16, 8, false, 256, 16384>: loads 4 wide, 5 narrow; stores 0 wide, 1 narrow
            gradient_norm<1024>: loads 0 wide, 24 narrow; stores 0 wide, 2 narrow
            scale_many<bf16, 8, 256, 16384>: loads 4 wide, 6 narrow; stores 4 wide, 5 narrow
            update_loss_scale: loads 0 wide, 6 narrow; stores 0 wide, 7 narrow
            nf4_dequantize<bf16, 8, true, 256, 4>: loads 0 wide, 13 narrow; stores 4 wide, 0 narrow
            nf4_dequantize<float, 4, false, 256, 4>: loads 0 wide, 8 narrow; stores 4 wide, 0 narrow
            norm_forward<bf16, bf16, bf16, 8, 256, 2, 2, false>: loads 4 wide, 0 narrow; stores 4 wide, 1 narrow
            norm_forward<bf16, bf16, bf16, 8, 1024, 2, 2, false>: loads 4 wide, 0 narrow; stores 4 wide, 1 narrow
            norm_forward<float, float, float, 4, 1024, 4, 0, true>: loads 16 wide, 0 narrow; stores 8 wide, 2 narrow
            norm_forward<bf16, bf16, bf16, 8, 512, 2, 3, true>: loads 4 wide, 0 narrow; stores 4 wide, 2 narrow
            norm_backward<bf16, bf16, bf16, 8, 256, 2, 2, false, false>: loads 4 wide, 1 narrow; stores 6 wide, 0 narrow
            norm_backward<bf16, bf16, bf16, 8, 512, 2, 3, true, true>: loads 4 wide, 2 narrow; stores 10 wide, 0 narrow
            norm_backward<bf16, bf16, bf16, 8, 640, 4, 2, false, false>: loads 12 wide, 1 narrow; stores 12 wide, 0 narrow
            norm_backward<bf16, bf16, bf16, 8, 640, 4, 2, true, true>: loads 12 wide, 2 narrow; stores 20 wide, 0 narrow
            norm_backward<bf16, bf16, bf16, 8, 512, 4, 2, false, false>: loads 8 wide, 1 narrow; stores 12 wide, 0 narrow
            norm_backward<bf16, bf16, bf16, 8, 512, 4, 2, true, true>: loads 12 wide, 2 narrow; stores 20 wide, 0 narrow
            norm_backward<float, float, float, 4, 1024, 4, 0, true, true>: loads 28 wide, 2 narrow; stores 12 wide, 0 narrow
            norm_backward<bf16, bf16, bf16, 8, 1024, 4, 0, false, false>: loads 28 wide, 1 narrow; stores 12 wide, 0 narrow
            norm_backward<bf16, bf16, bf16, 8, 1024, 4, 0, true, true>: loads 28 wide, 2 narrow; stores 20 wide, 0 narrow
            norm_backward<bf16, float, float, 8, 1024, 4, 0, true, true>: loads 44 wide, 2 narrow; stores 20 wide, 0 narrow
            column_sums<bf16>: loads 0 wide, 9 narrow; stores 0 wide, 1 narrow
            rotate<bf16, 8>: loads 6 wide, 1 narrow; stores 2 wide, 0 narrow
            rotate<float, 4>: loads 4 wide, 1 narrow; stores 2 wide, 0 narrow
            scale<bf16, 8, 256>: loads 1 wide, 1 narrow; stores 1 wide, 0 narrow
            swiglu_forward<bf16, 8, 256>: loads 2 wide, 0 narrow; stores 2 wide, 0 narrow
            swiglu_backward<bf16, 8, 256>: loads 3 wide, 0 narrow; stores 3 wide, 0 narrow
        "#]],
    );
}
