//! `cargo xtask kernels sass`: the machine code of each kernel, disassembled.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::compiler::{Compiled, registers};
use super::launches::{SAMPLES, Sample};
use super::{compile_sample, print};
use crate::setup::CudaTools;
use crate::workspace::Workspace;

/// Columns of the table: opcodes that are counted together, and whether their widths are shown.
const COLUMNS: [(&str, &[&str], bool); 11] = [
    ("LDG", &["LDG"], true),
    ("STG", &["STG"], true),
    ("LD/ST generic", &["LD", "ST"], false),
    ("LDL/STL", &["LDL", "STL"], false),
    ("LDS", &["LDS"], true),
    ("STS", &["STS"], true),
    ("LDGSTS", &["LDGSTS"], false),
    ("MUFU", &["MUFU"], false),
    ("FFMA", &["FFMA"], false),
    ("BAR", &["BAR"], false),
    ("SHFL", &["SHFL"], false),
];

/// Prints counts for every sample, or the disassembly of those whose expression contains a name.
pub(super) fn run(
    workspace: &Workspace,
    tools: &CudaTools,
    architecture: u32,
    kernel: Option<&str>,
) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mut rows = vec![header()];
    let chosen = |sample: &&Sample| kernel.is_none_or(|name| sample.expression.contains(name));
    for sample in SAMPLES.iter().filter(chosen) {
        let cubin = folder.path().join("kernel.cubin");
        let compiled = compile_sample(&workspace.root, tools, sample, architecture, Some(&cubin))
            .with_context(|| sample.expression)?;
        let name = compiled.names.first().context("the compiler named no kernel")?;
        let text = disassemble(&tools.disassembler, &cubin)?;
        let code = of_kernel(&text, name).with_context(|| format!("{} is not there", sample.expression))?;
        if kernel.is_some() {
            println!("{} on sm_{architecture}\n{}\n", sample.expression, code.trim_end());
        } else {
            rows.push(row(sample, &compiled, name, code)?);
        }
    }
    match kernel {
        None => print(&rows),
        Some(name) if !SAMPLES.iter().any(|sample| sample.expression.contains(name)) => {
            let all: Vec<&str> = SAMPLES.iter().map(|sample| sample.expression).collect();
            bail!("no kernel's name contains `{name}`; there are {}", all.join(", "));
        }
        Some(_) => {}
    }
    Ok(())
}

fn disassemble(disassembler: &Path, cubin: &Path) -> Result<String> {
    let output = Command::new(disassembler).arg("-c").arg(cubin).output().with_context(|| {
        format!("cannot run {}; `cargo xtask setup --cuda-tools` installs it", disassembler.display())
    })?;
    if !output.status.success() {
        bail!("{}: {}", disassembler.display(), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns the code of one kernel.
fn of_kernel<'a>(disassembly: &'a str, name: &str) -> Option<&'a str> {
    disassembly.split_once(&format!("\n.text.{name}:\n"))?.1.split("\n//------").next()
}

/// Returns the opcode of each instruction, with its modifiers.
fn opcodes(code: &str) -> impl Iterator<Item = &str> {
    code.lines().filter_map(|line| {
        let instruction = line.trim_start().strip_prefix("/*")?.split_once("*/")?.1;
        instruction.split_whitespace().find(|word| !word.starts_with('@'))
    })
}

fn header() -> Vec<String> {
    let fixed = ["kernel", "registers", "spilled", "shared", "instructions"];
    fixed.into_iter().chain(COLUMNS.iter().map(|column| column.0)).map(str::to_owned).collect()
}

fn row(sample: &Sample, compiled: &Compiled, name: &str, code: &str) -> Result<Vec<String>> {
    let (registers, spilled) =
        registers(&compiled.log, name).context("the assembler reported no registers")?;
    let module = ptx::Module::parse(&compiled.ptx)?;
    let mut row = vec![
        sample.expression.to_owned(),
        registers.to_string(),
        format!("{spilled} B"),
        format!("{} B", module.kernel(name)?.shared_bytes()),
        opcodes(code).count().to_string(),
    ];
    row.extend(COLUMNS.map(|(_, names, widths)| count(code, names, widths)));
    Ok(row)
}

/// Counts instructions of some opcodes; with `widths`, those of each number of bits.
fn count(code: &str, names: &[&str], widths: bool) -> String {
    let matching =
        opcodes(code).filter(|opcode| names.contains(&opcode.split('.').next().unwrap_or_default()));
    if !widths {
        return matching.count().to_string();
    }
    let mut counts: Vec<(u32, usize)> = Vec::new();
    for bits in matching.map(bits) {
        match counts.iter_mut().find(|(known, _)| *known == bits) {
            Some((_, count)) => *count += 1,
            None => counts.push((bits, 1)),
        }
    }
    counts.sort_unstable_by(|a, b| b.cmp(a));
    let text: Vec<String> = counts.iter().map(|(bits, count)| format!("{count}×{bits}")).collect();
    if text.is_empty() { "0".to_owned() } else { text.join(" ") }
}

/// Returns the bits that an access has for each thread.
fn bits(opcode: &str) -> u32 {
    let width = |modifier: &str| match modifier {
        "128" => Some(128),
        "64" => Some(64),
        "U16" | "S16" => Some(16),
        "U8" | "S8" => Some(8),
        _ => None,
    };
    opcode.split('.').skip(1).find_map(width).unwrap_or(32)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\t.section\t.text.f,\"ax\"\n.text.f:\n        .type           f,@function\nf:\n\
        \x20       /*0000*/                   LDC R1, c[0x0][0x28] ;\n\
        \x20       /*0010*/              @!P0 LDG.E.128 R4, desc[UR6][R2.64] ;\n\
        \x20       /*0020*/                   LDG.E.U8 R4, desc[UR6][R2.64] ;\n\
        .L_x_1:\n\
        \x20       /*0030*/               @P0 LDG.E R4, desc[UR6][R2.64] ;\n\
        \x20       /*0040*/                   LD.E R4, [R2.64] ;\n\
        \x20       /*0050*/                   LDGSTS.E.BYPASS.128 [R4], desc[UR6][R2.64] ;\n\
        //--------------------- .text.g ----\n.text.g:\n\
        \x20       /*0000*/                   STG.E.64 desc[UR6][R2.64], R4 ;\n";

    #[test]
    fn a_kernels_instructions_are_counted_by_width() {
        let code = of_kernel(TEXT, "f").unwrap();
        assert_eq!(opcodes(code).count(), 6);
        assert_eq!(count(code, &["LDG"], true), "1×128 1×32 1×8");
        assert_eq!(count(code, &["LDG"], false), "3");
        assert_eq!(count(code, &["LD", "ST"], false), "1");
        assert_eq!(count(code, &["STG"], true), "0");
        assert_eq!(count(of_kernel(TEXT, "g").unwrap(), &["STG"], true), "1×64");
        assert!(of_kernel(TEXT, "h").is_none());
    }

    #[test]
    fn a_missing_disassembler_is_named_with_its_remedy() {
        let error = disassemble(Path::new("/no/nvdisasm"), Path::new("a.cubin")).unwrap_err();
        assert!(error.to_string().contains("cargo xtask setup --cuda-tools"), "{error}");
    }
}
