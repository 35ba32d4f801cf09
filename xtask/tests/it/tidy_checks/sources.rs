//! Checks on the text of files: unsafe code, C++, paths of one machine.

use super::Tree;

/// The only unsafe code of the project: mappings of files, kernels, and the bindings of the shim.
const UNSAFE: [&str; 4] =
    ["crates/files/src/", "crates/kernels/src/", "crates/runtime/src/sys.rs", "crates/runtime/src/sys/"];
const CPP: &str = "crates/runtime/cpp/";
/// Loaded into other programs by an experiment; linked to nothing.
const PRELOADED: &str = "crates/experiments/src/robustness/faults.c";
/// Linked into the released program alone: symbols that an old libstdc++ lacks.
const COMPATIBILITY: &str = "xtask/src/release/compat.c";
/// The only file that depends on libtorch's version.
const VERSIONS: &str = "crates/runtime/cpp/versions.h";
const TEXTS: [&str; 9] = ["rs", "toml", "md", "cpp", "h", "hpp", "py", "sh", "yml"];
/// Folders of a person or of a machine; a remedy may name a system folder, but never these.
const MACHINE: [&str; 4] = ["/home/", "/root/", "/Users/", "/work/"];

/// Methods of `tch` with a number, which panic where the operator fails (`runtime::ops::TryScalar`).
const PANICKING: [&str; 28] = [
    "f_add_scalar",
    "f_arange",
    "f_arange_start",
    "f_arange_start_step",
    "f_bitwise_and",
    "f_bitwise_right_shift_tensor_scalar",
    "f_clamp",
    "f_clamp_max",
    "f_clamp_min",
    "f_div_scalar",
    "f_eq",
    "f_fill_",
    "f_floor_divide_scalar",
    "f_full",
    "f_full_like",
    "f_ge",
    "f_gt",
    "f_le",
    "f_lt",
    "f_masked_fill",
    "f_mul_scalar",
    "f_ne",
    "f_norm_scalaropt_dtype",
    "f_pow_tensor_scalar",
    "f_remainder",
    "f_scalar_tensor",
    "f_sub_scalar",
    "f_threshold_backward",
];

pub(crate) fn check(tree: &Tree) -> Vec<String> {
    let mut problems = Vec::new();
    for (path, text) in tree.with_extension(&["rs"]) {
        // These very checks are about such words.
        if path.starts_with("xtask/tests/it/tidy") {
            continue;
        }
        problems.extend(unsafe_code(path, text));
        // Experiments and tests may end by a panic.
        if path.contains("/src/") && !path.starts_with("crates/experiments/") && !path.contains("/tests") {
            problems.extend(panicking_methods(path, text));
        }
    }
    for (path, text) in tree.with_extension(&["cpp", "cc", "cxx", "cu", "c", "h", "hpp"]) {
        if !path.starts_with(CPP) && ![PRELOADED, COMPATIBILITY].contains(&path) {
            problems.push(format!("{path}: C++ outside of crates/runtime/cpp"));
        }
        for (number, line) in (1..).zip(text.lines()) {
            if line.contains("TORCH_VERSION_M") && path != VERSIONS {
                problems.push(format!("{path}:{number}: asks for libtorch's version outside of {VERSIONS}"));
            }
        }
    }
    for (path, text) in tree.with_extension(&TEXTS) {
        if path.starts_with("xtask/tests/it/tidy") {
            continue;
        }
        for (number, line) in (1..).zip(text.lines()) {
            if let Some(folder) = MACHINE.iter().find(|folder| names_folder(line, folder)) {
                problems.push(format!("{path}:{number}: a path of one machine ({folder})"));
            }
        }
    }
    problems
}

/// `folder` at the start of a path: `/w/home/x` does not start with `/home/`.
fn names_folder(line: &str, folder: &str) -> bool {
    line.match_indices(folder).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        before.is_none_or(|c| !c.is_alphanumeric() && !"_-./}$".contains(c))
    })
}

fn unsafe_code(path: &str, text: &str) -> Vec<String> {
    let is_allowed = UNSAFE.iter().any(|place| path.starts_with(place));
    let lines: Vec<&str> = text.lines().collect();
    let mut problems = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        let (at, code) = (format!("{path}:{}", index + 1), code_of(line));
        if code.contains("allow(unsafe_code)") {
            problems.push(format!("{at}: allows `unsafe_code`; a crate that needs it states its own lints"));
        }
        if !opens_unsafe(&code) {
            continue;
        }
        if !is_allowed {
            problems.push(format!("{at}: `unsafe` outside of {}", UNSAFE.join(", ")));
        } else if !has_reason(&lines[..index]) {
            problems.push(format!("{at}: `unsafe` without `// SAFETY:` just above"));
        }
    }
    problems
}

fn panicking_methods(path: &str, text: &str) -> Vec<String> {
    let mut problems = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let code = code_of(line);
        let calls = code.split(|c: char| !c.is_alphanumeric() && c != '_');
        let calls =
            calls.filter(|word| PANICKING.contains(&word.trim_end_matches('_')) || *word == "f_fill_");
        problems.extend(calls.map(|word| {
            let instead = word.replacen("f_", "try_", 1);
            format!("{path}:{number}: `{word}` panics where its operator fails; use `{instead}` of runtime::ops::TryScalar")
        }));
    }
    problems
}

/// A line without its strings and its comment. Good enough for lines that a formatter has laid out.
fn code_of(line: &str) -> String {
    let mut code = String::new();
    let mut rest = line;
    while let Some(at) = rest.find(['"', '/']) {
        code.push_str(&rest[..at]);
        rest = &rest[at..];
        if rest.starts_with("//") {
            return code;
        }
        if let Some(string) = rest.strip_prefix('"') {
            let end = end_of_string(string);
            code.push_str("\"\"");
            rest = &string[end..];
        } else {
            code.push('/');
            rest = &rest[1..];
        }
    }
    code + rest
}

fn end_of_string(text: &str) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices() {
        match c {
            '"' if !escaped => return at + 1,
            '\\' => escaped = !escaped,
            _ => escaped = false,
        }
    }
    text.len()
}

/// A block, function, implementation or trait that is unsafe. A pointer's type (`unsafe extern "C" fn(…)`) does nothing,
/// a block of declarations is used through unsafe blocks, and an attribute (`#[unsafe(no_mangle)]`) is judged by the
/// compiler.
fn opens_unsafe(code: &str) -> bool {
    code.match_indices("unsafe").any(|(at, word)| {
        let before = code[..at].chars().next_back();
        let after = &code[at + word.len()..];
        let stands_alone = before.is_none_or(|c| !c.is_alphanumeric() && c != '_' && c != '[')
            && (after.is_empty() || after.starts_with([' ', '{']));
        let rest = after.trim_start();
        let rest = match rest.strip_prefix("extern") {
            Some(external) => external.trim_start().trim_start_matches("\"\"").trim_start(),
            None => rest,
        };
        let declarations = after.trim_start().starts_with("extern") && rest.starts_with('{');
        stands_alone && !declarations && !rest.starts_with("fn(")
    })
}

/// Whether the lines just above end in a comment with the reason, attributes in between allowed.
fn has_reason(above: &[&str]) -> bool {
    let lines = above.iter().rev().map(|line| line.trim());
    lines
        .take_while(|line| line.starts_with("//") || line.starts_with("#[") || line.starts_with("#!["))
        .any(|line| line.starts_with("// SAFETY:") || line.trim_end() == "/// # Safety")
}
