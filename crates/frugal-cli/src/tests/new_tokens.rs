//! New tokens: in the tokenizer, in the rows that are trained, and in whatever is made of a run.

use dataloading::Tokenizer;
use gguf::Reader;
use lora::{LoraConfig, TokenIndices};
use models::hugging_face::{self, Folder};
use models::state_dict::state_dict;
use models::{DecoderConfig, Llama, tensors_file};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use super::session::Session;

const CALL: &str = "<|call|>";
const END: &str = "<|end_call|>";
/// Rows of the tiny model; its tokenizer uses them all.
const STORED: i64 = 4096;
const ROWS: &str = "token_adapter.trainable_tokens_delta";
const TRAIN: &str = "finetune --data calls.jsonl --new-tokens tokens.txt --r 4 --batch-size 4 --accumulation 1 --lr 0.03 --seed 3 --held-out 0 --samples 0";

/// A folder with rows that use two new tokens, and their list.
fn session() -> Session {
    let session = Session::new();
    let row = |n: i32| json!({ "prompt": format!("What is {n} + 1? "), "completion": format!("{CALL} add {n} 1 {END} {}", n + 1) });
    let rows: Vec<String> = (0..12).map(|n| row(n).to_string()).collect();
    std::fs::write(session.path("calls.jsonl"), rows.join("\n")).unwrap();
    std::fs::write(session.path("tokens.txt"), format!("{CALL}\n{END}\n")).unwrap();
    session
}

fn json_of(session: &Session, path: &str) -> Value {
    serde_json::from_slice(&session.bytes(path)).unwrap()
}

fn loss(session: &Session, arguments: &str) -> f64 {
    let out = session.succeed(&format!("eval {arguments} --data calls.jsonl --json --quiet")).0;
    serde_json::from_str::<Value>(&out).unwrap()["loss"].as_f64().unwrap()
}

/// The same model with a head of its own.
fn untie(session: &Session) {
    let tied = session.load("model");
    let config = DecoderConfig { tie_word_embeddings: false, ..tied.decoder_config().clone() };
    let model = Llama::new(&config, (Kind::Float, Device::Cpu)).unwrap();
    let mut state = state_dict(&tied);
    let head = state.iter().find(|(name, _)| name == "embed_tokens.weight").unwrap().1.shallow_clone();
    state.push(("lm_head.weight".to_owned(), head * 0.5));
    models::state_dict::load_state_dict(&model, &state, "the tied model").unwrap();
    hugging_face::save(&model, &session.path("untied"), hugging_face::SHARD_BYTES).unwrap();
    for file in ["tokenizer.json", "generation_config.json"] {
        std::fs::copy(session.path("model").join(file), session.path("untied").join(file)).unwrap();
    }
}

#[test]
fn rows_of_new_tokens_are_trained_and_every_command_finds_them() {
    let session = session();
    untie(&session);
    for (model, pad, rows) in [("model", "", STORED + 2), ("untied", " --pad-vocabulary-to 64", 4160)] {
        let is_tied = model == "model";
        let run = format!("run-{model}");
        let (_, notes) = session.succeed(&format!("{TRAIN} --model {model} --steps 6 --out {run}{pad}"));
        assert!(
            notes.contains(&format!("2 tokens added: the vocabulary grows from 4096 to {rows} rows")),
            "{notes}"
        );

        // The tokenizer of the run, and what its adapter trains.
        let tokenizer = Tokenizer::from_file(&session.path(&format!("{run}/tokenizer.json"))).unwrap();
        assert_eq!(tokenizer.encode(&format!("{CALL}{END}")).unwrap(), [4096, 4097]);
        let config = LoraConfig::read(&session.path(&format!("{run}/adapter_config.json"))).unwrap();
        let expected = match is_tied {
            true => TokenIndices::Embedding(vec![4096, 4097]),
            false => TokenIndices::ByModule(
                ["embed_tokens", "lm_head"].map(|name| (name.to_owned(), vec![4096, 4097])).into(),
            ),
        };
        assert_eq!(config.trainable_token_indices, Some(expected));
        let file = session.path(&format!("{run}/adapter_model.safetensors"));
        let tensors = tensors_file::read(&file, Device::Cpu).unwrap();
        let shapes: Vec<_> = tensors
            .iter()
            .filter(|(name, _)| name.ends_with(ROWS))
            .map(|(name, tensor)| (name.trim_end_matches(ROWS), tensor.size()))
            .collect();
        let parts = [
            ("base_model.model.lm_head.", vec![2, 16]),
            ("base_model.model.model.embed_tokens.", vec![2, 16]),
        ];
        assert_eq!(shapes, if is_tied { &parts[1..] } else { &parts[..] });

        // A run, its merged model and its GGUF file compute the same.
        let of_run = loss(&session, &format!("--model {run}"));
        assert!(of_run < loss(&session, &format!("--model {model}")), "{model}: {of_run}");
        let merged = format!("merged-{model}");
        session.succeed(&format!("merge --model {run} --out {merged}"));
        assert!((loss(&session, &format!("--model {merged}")) - of_run).abs() < 1e-5);
        let folder = Folder::open(&session.path(&merged)).unwrap();
        assert_eq!((folder.config().vocab_size, folder.config().tie_word_embeddings), (rows, is_tied));
        let text =
            session.succeed(&format!("generate --model {run} --prompt Ann --max-new-tokens 8 --quiet")).0;
        assert_eq!(
            text,
            session.succeed(&format!("generate --model {merged} --prompt Ann --max-new-tokens 8 --quiet")).0
        );
        let gguf = format!("{model}.gguf");
        session.succeed(&format!("export --model {run} --format gguf --type f32 --out {gguf} --no-verify"));
        let reader = Reader::open(&session.path(&gguf)).unwrap();
        let Some(gguf::Value::Array(gguf::Array::String(tokens))) =
            reader.header().get("tokenizer.ggml.tokens")
        else {
            panic!("the file has no tokens");
        };
        assert_eq!(tokens.len() as i64, rows, "as many rows as tokens");
        assert!((loss(&session, &format!("--model {gguf}")) - of_run).abs() < 1e-5);
        let error = session.fail(&format!("export --model {run} --format gguf-lora --out lora.gguf"));
        assert!(error.contains("`trainable_token_indices` of an adapter in GGUF"), "{error}");
    }
}

#[test]
fn a_run_that_was_stopped_and_resumed_has_the_same_rows() {
    let session = session();
    session.succeed(&format!("{TRAIN} --model model --steps 6 --out whole --quiet"));
    session.succeed(&format!("{TRAIN} --model model --steps 6 --out halves --checkpoint-every 3 --quiet"));
    let newest = session.path("halves/checkpoints/step-00000006");
    let newest = match newest.is_dir() {
        true => newest,
        false => {
            let folders = std::fs::read_dir(session.path("halves/checkpoints")).unwrap();
            folders.map(|entry| entry.unwrap().path()).filter(|path| path.is_dir()).max().unwrap()
        }
    };
    std::fs::remove_dir_all(newest).unwrap();
    // The tokens are in the run's configuration, not in the file.
    std::fs::remove_file(session.path("tokens.txt")).unwrap();
    session.succeed("resume halves --quiet");
    let adapter = |out: &str| session.bytes(&format!("{out}/adapter_model.safetensors"));
    assert!(adapter("whole") == adapter("halves"));
}

#[test]
fn first_values_are_a_mean_of_all_rows_or_of_the_rows_of_pieces() {
    let session = session();
    let list = json!([CALL, { "token": END, "special": true, "from": "stop" }, "river"]);
    std::fs::write(session.path("tokens.json"), list.to_string()).unwrap();
    let base = Tokenizer::from_file(&session.path("model/tokenizer.json")).unwrap();
    let table = state_dict(&session.load("model")).swap_remove(0).1;
    let mean = |tokens: &[u32]| {
        let index: Vec<i64> = tokens.iter().map(|token| i64::from(*token)).collect();
        table.index_select(0, &Tensor::from_slice(&index)).mean_dim([0].as_slice(), false, Kind::Float)
    };
    for (init, of_call) in [
        ("mean", table.mean_dim([0].as_slice(), false, Kind::Float)),
        ("pieces", mean(&base.encode(CALL).unwrap())),
    ] {
        let out = format!("run-{init}");
        let train = TRAIN.replace("tokens.txt", "tokens.json").replace("0.03", "0");
        let (_, notes) =
            session.succeed(&format!("{train} --model model --steps 1 --new-token-init {init} --out {out}"));
        let tensors =
            tensors_file::read(&session.path(&format!("{out}/adapter_model.safetensors")), Device::Cpu)
                .unwrap();
        let rows = tensors.into_iter().find(|(name, _)| name.ends_with(ROWS)).unwrap().1;
        let close = |row: i64, expected: &Tensor| {
            let error = (rows.get(row) - expected).abs().max().double_value(&[]);
            assert!(error < 1e-6, "{init}: row {row}: {error}");
        };
        close(0, &of_call);
        close(1, &mean(&base.encode("stop").unwrap()));
        // A token that the tokenizer has keeps its row.
        if let Some(known) = base.id("river") {
            assert!(notes.contains(&format!("`river` is token {known} already")), "{notes}");
            close(2, &mean(&[known]));
        }
        let added = json_of(&session, &format!("{out}/tokenizer.json"))["added_tokens"].clone();
        let special = |text: &str| {
            let token = added.as_array().unwrap().iter().find(|token| token["content"] == text);
            token.unwrap_or_else(|| panic!("{text} is not in {added}"))["special"].clone()
        };
        assert_eq!([special(CALL), special(END)], [json!(false), json!(true)]);
    }
}

#[test]
fn a_base_in_a_files_blocks_trains_rows_beside_it() {
    let session = session();
    session.succeed("export --model model --format gguf --type q8_0 --out model.gguf --no-verify");
    let (_, notes) = session.succeed(&format!(
        "{TRAIN} --model model.gguf --dtype gguf --steps 6 --new-token-init pieces --out run"
    ));
    assert!(notes.contains("the vocabulary grows from 4096 to 4098 rows"), "{notes}");
    let of_run = loss(&session, "--model run --dtype gguf");
    assert!(of_run < loss(&session, "--model model.gguf --dtype gguf"), "{of_run}");
    let error =
        session.fail(&format!("{TRAIN} --model model.gguf --dtype gguf --pad-vocabulary-to 64 --out other"));
    assert!(
        error.contains("rows of padding have no values; leave it out, or give --dtype bfloat16"),
        "{error}"
    );
}

#[test]
fn all_weights_are_trained_with_new_rows() {
    let session = session();
    session.succeed(&format!(
        "{} --model model --method full --steps 2 --out run --quiet",
        TRAIN.replace(" --r 4", "")
    ));
    let folder = Folder::open(&session.path("run/model")).unwrap();
    assert_eq!(folder.config().vocab_size, STORED + 2);
    let tokenizer = Tokenizer::from_file(&session.path("run/model/tokenizer.json")).unwrap();
    assert_eq!(tokenizer.id(END), Some(4097));
    assert!(loss(&session, "--model run").is_finite());
}

#[test]
fn tokens_that_cannot_be_added_are_refused() {
    let session = session();
    let error = |text: &str, more: &str| {
        std::fs::write(session.path("tokens.txt"), text).unwrap();
        session.fail(&format!("{TRAIN} --model model --out run{more}"))
    };
    assert!(error("<a>\n<a>\n", "").contains("the new token `<a>` is there twice; give it once"));
    assert!(error("\n", "").contains("there is no token; give one in each line"));
    let adapted = error("<a>\n", " --targets q_proj,embed_tokens");
    assert!(
        adapted.contains("`trainable_token_indices` is set for `model.embed_tokens`, which is adapted too"),
        "{adapted}"
    );
    let other = error("<a>\n", " --set adapter.trainable_token_indices=[5]");
    assert!(other.contains("names other tokens than `model.new_tokens`, which are 4096"), "{other}");
}

#[test]
fn an_adapter_on_the_embedding_is_trained_merged_and_exported() {
    let session = session();
    let train = TRAIN.replace(" --new-tokens tokens.txt", " --targets q_proj,v_proj,embed_tokens");
    session.succeed(&format!("{train} --model model --steps 6 --out run --quiet"));
    let tensors = tensors_file::read(&session.path("run/adapter_model.safetensors"), Device::Cpu).unwrap();
    let shapes: Vec<_> = tensors
        .iter()
        .filter(|(name, _)| name.contains("embedding"))
        .map(|(name, x)| (name.as_str(), x.size()))
        .collect();
    let module = "base_model.model.model.embed_tokens.lora_embedding_";
    assert_eq!(shapes, [(&*format!("{module}A"), vec![4, STORED]), (&*format!("{module}B"), vec![16, 4])]);
    let of_run = loss(&session, "--model run");
    session.succeed("merge --model run --out merged");
    assert!((loss(&session, "--model merged") - of_run).abs() < 1e-5);
    assert!(
        !Folder::open(&session.path("merged")).unwrap().config().tie_word_embeddings,
        "the head keeps its rows"
    );
    session.succeed("export --model run --format gguf --type f32 --out run.gguf --no-verify");
    assert!((loss(&session, "--model run.gguf") - of_run).abs() < 1e-5);
    let error = session.fail("export --model run --format gguf-lora --out lora.gguf");
    assert!(error.contains("of `embed_tokens`, to which the head is tied"), "{error}");

    // Beside a head of its own llama.cpp looks up rows of A.
    untie(&session);
    session.succeed(&format!("{train} --model untied --steps 2 --out untied-run --quiet"));
    // With llama.cpp, its log-probabilities of the model with the adapter are compared.
    let verify = match python("xllamacpp") {
        Some(python) => format!("--verify --python {}", std::path::Path::new(&python).display()),
        None => "--no-verify".to_owned(),
    };
    session.succeed(&format!("export --model untied-run --format gguf-lora --out lora.gguf {verify}"));
    let file = Reader::open(&session.path("lora.gguf")).unwrap();
    let shape = |half: &str| {
        let name = format!("token_embd.weight.lora_{half}");
        file.header().tensors.iter().find(|tensor| tensor.name == name).unwrap().shape.clone()
    };
    assert_eq!((shape("a"), shape("b")), (vec![STORED as u64, 4], vec![16, 4]));
}

/// The plan before a training and that of the command of its own count the rows.
#[test]
fn a_plan_counts_the_rows_of_new_tokens() {
    let session = session();
    untie(&session);
    let plan = |flags: &str| -> Value {
        let out =
            session.succeed(&format!("plan {flags} --length 64 --hardware h100 --dtype bfloat16 --json"));
        serde_json::from_str(&out.0).unwrap()
    };
    let parameters = |flags: &str| plan(flags)["parameters"].as_u64().unwrap();
    for (model, rows) in [("model", 2), ("untied", 4)] {
        let without = parameters(&format!("--model {model}"));
        assert_eq!(parameters(&format!("--model {model} --new-tokens tokens.txt")), without + 16 * rows);
        let padded = parameters(&format!("--model {model} --new-tokens tokens.txt --pad-vocabulary-to 64"));
        assert_eq!(padded, without + 16 * 32 * rows);
    }
    // Without a tokenizer, every row is taken to be in use.
    let preset = "--model qwen2.5-0.5b";
    assert_eq!(parameters(&format!("{preset} --new-tokens tokens.txt")), parameters(preset) + 896 * 2);
    let text = session
        .succeed("plan --model model --length 64 --hardware h100 --dtype bfloat16 --new-tokens tokens.txt")
        .0;
    assert!(text.contains("and 2 rows of tokens"), "{text}");
    assert!(text.contains("--new-tokens FILE"), "{text}");
}

/// The interpreter in `FRUGAL_PYTHON`, if it has these packages.
fn python(packages: &str) -> Option<std::ffi::OsString> {
    let python = std::env::var_os("FRUGAL_PYTHON")?;
    let imports = format!("import {packages}");
    let output = std::process::Command::new(&python).args(["-c", &imports]).output().ok()?;
    output.status.success().then_some(python)
}

/// A run and what is made of it, read by transformers and PEFT (`xtask/peers/new_tokens.py`), and by llama.cpp.
#[test]
#[allow(clippy::print_stderr, reason = "output of a test")]
fn other_programs_read_a_run_with_new_tokens() {
    let Some(python) = python("transformers, peft") else {
        eprintln!("skipped: FRUGAL_PYTHON names no interpreter with transformers and peft");
        return;
    };
    let session = session();
    untie(&session);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../xtask/peers/new_tokens.py");
    for (model, pad, rows) in [("model", "", STORED + 2), ("untied", " --pad-vocabulary-to 64", 4160)] {
        session.succeed(&format!("{TRAIN} --model {model} --steps 6 --out run-{model}{pad} --quiet"));
        session.succeed(&format!("merge --model run-{model} --out merged-{model}"));
        let ours = loss(&session, &format!("--model run-{model}"));
        let output = std::process::Command::new(&python)
            .arg(script)
            .args(["--base", model, "--run", &format!("run-{model}"), "--merged", &format!("merged-{model}")])
            .args(["--rows", "calls.jsonl", "--end", "0", "--text", &format!("a {CALL} b{END}")])
            .args(["--rows-of-table", &rows.to_string()])
            .current_dir(session.path(""))
            .env("HF_HUB_OFFLINE", "1")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let theirs: Value = serde_json::from_str(said.lines().next_back().unwrap()).unwrap();
        for figure in ["peft", "merged_by_peft", "merged"] {
            let theirs = theirs[figure].as_f64().unwrap();
            eprintln!("{model}, {figure}: {theirs}, here {ours}");
            assert!((theirs - ours).abs() <= 1e-5, "{model}, {figure}: {theirs}, here {ours}");
        }
        let tokenizer = Tokenizer::from_file(&session.path(&format!("run-{model}/tokenizer.json"))).unwrap();
        let ids = tokenizer.encode(&format!("a {CALL} b{END}")).unwrap();
        assert!(ids.contains(&4096) && ids.ends_with(&[4097]));
        assert_eq!(theirs["tokens"], json!(ids));
        if self::python("xllamacpp").is_some() {
            // Fails where a log-probability or a token is another.
            let python = std::path::Path::new(&python).display();
            session.succeed(&format!(
                "export --model run-{model} --format gguf --type f32 --out {model}.gguf --verify --python {python}"
            ));
        }
    }
}
