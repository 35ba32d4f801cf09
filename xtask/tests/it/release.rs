//! What people install who have no Rust: the wheel and the archive, in environments where the checkout and its caches are hidden.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use expect_test::expect;

/// The launcher of a wheel for torch 2.13.0.
fn launcher() -> String {
    include_str!("../../src/release/launcher.py").replace("@TORCH@", "2.13.0")
}

/// A folder with packages of Python, among them one like the wheel's, whose program prints how it was called.
struct Site(tempfile::TempDir);

impl Site {
    fn new() -> Self {
        let site = Self(tempfile::tempdir().unwrap());
        site.write("frugal_train/__init__.py", "");
        site.write("frugal_train/__main__.py", &launcher());
        let program = "#!/bin/sh\necho \"$# words: $*; libraries: $LD_LIBRARY_PATH\"\n";
        let path = site.write("frugal_train/bin/frugal", program);
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        site
    }

    fn write(&self, place: &str, text: &str) -> PathBuf {
        let path = self.0.path().join(place);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
        path
    }

    /// A torch in the folder `below`.
    fn torch(&self, below: &str, version: &str) {
        self.write(
            &format!("{below}torch/version.py"),
            &format!("from typing import Optional\n\n__version__ = {version}\n"),
        );
        std::fs::create_dir_all(self.0.path().join(format!("{below}torch/lib"))).unwrap();
    }

    /// Starts the launcher with `others` on Python's path, and returns what is printed, with `SITE` and `PYTHON` for their paths.
    fn run(&self, others: &[&str], libraries: Option<&str>) -> String {
        let site = self.0.path();
        let folders = std::iter::once(site.to_owned()).chain(others.iter().map(|other| site.join(other)));
        let mut command = Command::new("python3");
        // Without the packages of this machine.
        command.args(["-S", "-m", "frugal_train", "train", "a b"]).current_dir("/");
        command.env("PYTHONPATH", std::env::join_paths(folders).unwrap()).env("PYTHONDONTWRITEBYTECODE", "1");
        command.env_remove("LD_LIBRARY_PATH");
        command.envs(libraries.map(|libraries| ("LD_LIBRARY_PATH", libraries)));
        let output = command.output().unwrap();
        let text =
            String::from_utf8_lossy(if output.status.success() { &output.stdout } else { &output.stderr });
        let text = text.trim().replace(&site.display().to_string(), "SITE");
        match text.find("error: ").and_then(|_| text.split(' ').find(|word| word.contains("/python"))) {
            Some(python) => text.replace(python, "PYTHON"),
            None => text,
        }
    }
}

#[test]
fn the_launcher_starts_the_program_with_the_torch_that_python_imports() {
    let site = Site::new();
    expect![
        "error: PYTHON has no torch, and frugal computes with it; run: PYTHON -m pip install torch==2.13.0"
    ]
    .assert_eq(&site.run(&[], None));

    site.torch("", "'2.13.0+cpu'");
    // The program's own search path leads to a torch beside it.
    expect!["2 words: train a b; libraries:"].assert_eq(&site.run(&[], None));
    expect!["2 words: train a b; libraries: /mine"].assert_eq(&site.run(&[], Some("/mine")));

    site.torch("", "'2.11.0+cu130'");
    expect!["error: this frugal needs torch 2.13.0, and the torch in SITE/torch is 2.11.0+cu130; run: PYTHON -m pip install torch==2.13.0"]
        .assert_eq(&site.run(&[], None));
    // A patch is another library.
    site.torch("", "'2.13.1'");
    assert!(site.run(&[], None).contains("the torch in SITE/torch is 2.13.1; "));
    site.write("torch/version.py", "# nothing\n");
    assert!(site.run(&[], None).contains("is of an unknown version; "));
    std::fs::remove_dir_all(site.0.path().join("torch")).unwrap();

    // In another environment, to which the program's search path does not lead.
    site.torch("other/", "\"2.13.0\"");
    expect!["2 words: train a b; libraries: SITE/other/torch/lib"].assert_eq(&site.run(&["other"], None));
    expect!["2 words: train a b; libraries: SITE/other/torch/lib:/mine"]
        .assert_eq(&site.run(&["other"], Some("/mine")));
}

/// The program of the profile `dev`, if it and libtorch are there.
fn program() -> Option<PathBuf> {
    let program = Path::new(env!("CARGO_BIN_EXE_xtask")).with_file_name("frugal");
    let torch = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.libtorch/lib/libtorch_cpu.so");
    (program.is_file() && torch.is_file()).then_some(program)
}

fn succeed(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    let text = || [&*output.stdout, b"\n", &*output.stderr].concat();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&text()));
    output
}

/// Packs the program as a wheel and an archive, in a folder that is removed with the guard.
fn packed(program: &Path) -> tempfile::TempDir {
    let out = tempfile::tempdir().unwrap();
    succeed(
        Command::new(env!("CARGO_BIN_EXE_xtask"))
            .args(["release", "--program"])
            .arg(program)
            .arg("--out")
            .arg(out.path()),
    );
    out
}

/// The packed file whose name ends so.
fn file_ending(folder: &Path, ending: &str) -> PathBuf {
    let mut files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    files.find(|path| path.to_str().unwrap().ends_with(ending)).unwrap()
}

/// What is tried in both installations: `$frugal` is the program, and the working folder is empty.
const TRY: &str = r#"
cat > config.json <<'END'
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 4096, "hidden_size": 32, "intermediate_size": 64,
 "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
 "rope_theta": 10000.0, "tie_word_embeddings": true, "hidden_act": "silu", "torch_dtype": "float32"}
END
for row in 1 2 3 4 5 6 7 8; do echo "{\"question\": \"$row + 1?\", \"answer\": \"one more than $row\"}"; done > rows.jsonl
$frugal doctor > doctor.txt
$frugal train --model config.json --data embedded --steps 2 --out base
$frugal finetune --model base --data rows.jsonl --steps 2 --out run
$frugal generate --model run --prompt "1 + 1?" --max-new-tokens 2
$frugal export --model run --format gguf --out tuned.gguf
$frugal launch -n 2 -- finetune --model base --data rows.jsonl --steps 2 --batch-size 2 --out two
cat doctor.txt
"#;

/// Runs `setup`, then [`TRY`], in a namespace of mounts where the checkout and the user's caches are empty folders. libtorch's environment
/// is at `$site`, the wheel and the archive at `$packed`. Returns the standard output; `None` where such a namespace cannot be made.
fn installed(setup: &str, packed: &Path, work: &Path) -> Option<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap();
    let torch = root.join(".libtorch").canonicalize().unwrap();
    let home = PathBuf::from(std::env::var_os("HOME").unwrap());
    let hidden = [root.clone(), home.join(".cargo"), home.join(".cache"), home.join(".rustup")];
    let hidden: String = hidden
        .iter()
        .filter(|folder| folder.is_dir())
        .map(|folder| format!("mount -t tmpfs none '{}'\n", folder.display()))
        .collect();
    let script = format!(
        "set -eu\nsite={work}/site; packed={packed}\nmkdir $site\nmount --bind '{torch}' $site\n{hidden}\
         cd {work}\n{setup}\nmkdir empty; cd empty\n{TRY}",
        work = work.display(),
        packed = packed.display(),
        torch = torch.parent().unwrap().display(),
    );
    // As root a namespace of mounts is enough; as another user it needs one of users.
    let namespaces: &[&str] = if rustix::process::geteuid().is_root() {
        &["--mount"]
    } else {
        &["--user", "--map-root-user", "--mount"]
    };
    if !Command::new("unshare").args(namespaces).arg("true").status().is_ok_and(|status| status.success()) {
        return None;
    }
    let mut command = Command::new("unshare");
    command.args(namespaces).args(["sh", "-c", &script]).env_clear();
    // As a newcomer's shell: no variable of this project or of cargo.
    command.env("PATH", "/usr/local/bin:/usr/bin:/bin").env("HOME", work);
    Some(String::from_utf8(succeed(&mut command).stdout).unwrap())
}

#[test]
fn both_kinds_of_installation_train_without_the_checkout() {
    let Some(program) = program() else {
        eprintln!(
            "skipped: no program and libtorch to pack; `cargo xtask setup` and `cargo build` make them"
        );
        return;
    };
    let packed = packed(&program);
    let sums = std::fs::read_to_string(packed.path().join("SHA256SUMS")).unwrap();
    assert_eq!(sums.lines().count(), 3, "{sums}");

    let wheel = "python3 -m venv venv\n\
                 venv/bin/python -m pip install --quiet --no-index --no-deps --disable-pip-version-check $packed/*.whl\n\
                 for package in torch nvidia; do ln -s $site/$package venv/lib/python3*/site-packages/; done\n\
                 test -f venv/share/man/man1/frugal-finetune.1\n\
                 frugal=$PWD/venv/bin/frugal";
    let archive = "mkdir unpacked; tar -xf $packed/archive.tar -C unpacked; umount $site\n\
                   frugal=$(echo $PWD/unpacked/*/bin/frugal); test -f unpacked/*/share/man/man1/frugal-finetune.1";
    // Where `zstd` is not installed, tar cannot unpack it.
    let compressed = std::fs::File::open(file_ending(packed.path(), ".tar.zst")).unwrap();
    let unpacked = std::fs::File::create(packed.path().join("archive.tar")).unwrap();
    zstd::stream::copy_decode(compressed, unpacked).unwrap();

    let mut adapters = Vec::new();
    for (setup, library) in [(wheel, "/site/torch/lib"), (archive, "-cpu/lib")] {
        let work = tempfile::tempdir().unwrap();
        let Some(said) = installed(setup, packed.path(), work.path()) else {
            eprintln!("skipped: this machine lets nobody make a namespace of mounts (unshare)");
            return;
        };
        assert!(
            said.lines().any(|line| line.starts_with("libtorch path") && line.contains(library)),
            "{said}"
        );
        let file = |place: &str| std::fs::read(work.path().join("empty").join(place)).unwrap();
        assert!(file("tuned.gguf").starts_with(b"GGUF"));
        assert!(!file("two/adapter_model.safetensors").is_empty());
        adapters.push(file("run/adapter_model.safetensors"));
    }
    assert!(adapters[0] == adapters[1], "one program, one libtorch: the same bits");
}

#[test]
fn a_program_finds_its_libtorch_where_cargo_installs_it() {
    let Some(program) = program() else {
        eprintln!("skipped: no program and libtorch; `cargo xtask setup` and `cargo build` make them");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("frugal");
    std::fs::copy(program, &copy).unwrap();
    let output = succeed(Command::new(copy).arg("--version").env_clear());
    assert!(output.stdout.starts_with(b"frugal "), "{output:?}");
}
