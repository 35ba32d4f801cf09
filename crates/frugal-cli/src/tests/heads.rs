//! Heads that are tied to the embedding or not, in every combination of what `config.json` says, what the files have, and what an adapter
//! changes. The losses are those of transformers 5.23 and PEFT 0.21 on the same values; of a merged model that PEFT changes itself (it
//! merges an adapter of a tied head into the embedding, too) the loss before merging.

use gguf::Reader;
use lora::Adapters;
use models::hugging_face::Folder;
use models::module::{Input, LanguageModel};
use models::{Llama, tensors_file};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use super::session::Session;

const VOCABULARY: i64 = 4096;
const HIDDEN: i64 = 16;
const WIDE: i64 = 40;
const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";
const QUERY: &str = "model.layers.0.self_attn.q_proj";
const TOKENS: [i64; 16] = [3, 1041, 4, 1, 559, 2026, 5, 3589, 79, 3238, 4, 6, 264, 3383, 2795, 28];

/// Values from −scale/2 to scale/2 that any language computes alike.
fn values(shape: &[i64], seed: u32, scale: f64) -> Tensor {
    let of = |index: u32| {
        let mut x = index.wrapping_mul(0x9e37_79b1).wrapping_add(seed.wrapping_mul(0x85eb_ca6b));
        for _ in 0..2 {
            x = (x ^ (x >> 16)).wrapping_mul(0x045d_9f3b);
        }
        ((f64::from(x ^ (x >> 16)) / 2f64.powi(32) - 0.5) * scale) as f32
    };
    let count = shape.iter().product::<i64>() as u32;
    Tensor::from_slice(&(0..count).map(of).collect::<Vec<f32>>()).view(shape)
}

/// The values of an adapter's tensor follow from its name.
fn trained(name: &str, shape: &[i64]) -> (String, Tensor) {
    let scale = if name.contains("lora") { 0.6 } else { 0.8 };
    let seed = name.bytes().map(u32::from).sum();
    (format!("base_model.model.{name}"), values(shape, seed, scale))
}

/// Bases: whether `config.json` ties the head, and which matrices the files have.
const BASES: [(&str, bool, &str); 6] = [
    ("tied", true, "embedding"),
    ("copied", true, "both, equal"),
    ("head-only", true, "head"),
    ("own", true, "both"),
    ("untied", false, "both"),
    ("untied-copy", false, "both, equal"),
];

/// Whether the head is the embedding.
fn is_tied(base: &str) -> bool {
    ["tied", "copied", "head-only"].contains(&base)
}

/// The values of a base's head.
fn head_of(base: &str) -> Tensor {
    let seed = if ["own", "untied"].contains(&base) { 99 } else { 1 };
    values(&[VOCABULARY, HIDDEN], seed, 0.8)
}

fn write_base(session: &Session, name: &str, tied: bool, has: &str) {
    let mut tensors = Vec::new();
    if has != "head" {
        tensors.push((EMBEDDING.to_owned(), values(&[VOCABULARY, HIDDEN], 1, 0.8)));
    }
    if has != "embedding" {
        tensors.push((HEAD.to_owned(), head_of(name)));
    }
    let square = [HIDDEN, HIDDEN];
    let projections = [
        ("self_attn.q_proj", square),
        ("self_attn.k_proj", square),
        ("self_attn.v_proj", square),
        ("self_attn.o_proj", square),
        ("mlp.gate_proj", [WIDE, HIDDEN]),
        ("mlp.up_proj", [WIDE, HIDDEN]),
        ("mlp.down_proj", [HIDDEN, WIDE]),
    ];
    for (seed, (module, shape)) in (2..).zip(projections) {
        tensors.push((format!("model.layers.0.{module}.weight"), values(&shape, seed, 0.8)));
    }
    for norm in ["layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"] {
        tensors.push((format!("model.{norm}.weight"), Tensor::ones([HIDDEN], (Kind::Float, Device::Cpu))));
    }
    let folder = session.path(name);
    std::fs::create_dir(&folder).unwrap();
    tensors_file::write(&folder.join("model.safetensors"), &tensors).unwrap();
    let config = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
        "intermediate_size": WIDE, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": tied, "torch_dtype": "float32"
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    for file in ["tokenizer.json", "generation_config.json"] {
        std::fs::copy(session.path("model").join(file), folder.join(file)).unwrap();
    }
}

/// An adapter: what of the head and the embedding it changes, and how.
#[derive(Clone, Copy)]
struct Change {
    name: &'static str,
    /// Whether `lm_head` is a target.
    adapts: bool,
    saves: &'static [&'static str],
    tying: bool,
    dora: bool,
}

const PLAIN: Change = Change { name: "", adapts: false, saves: &[], tying: false, dora: false };
const CHANGES: [Change; 11] = [
    Change { name: "lora", adapts: true, ..PLAIN },
    Change { name: "head", saves: &["lm_head"], ..PLAIN },
    Change { name: "embedding", saves: &["embed_tokens"], ..PLAIN },
    Change { name: "both", saves: &["embed_tokens", "lm_head"], ..PLAIN },
    Change { name: "lora-embedding", adapts: true, saves: &["embed_tokens"], ..PLAIN },
    // PEFT saves a target that is also to be saved whole.
    Change { name: "lora-head", adapts: true, saves: &["lm_head"], ..PLAIN },
    Change { name: "dora", adapts: true, dora: true, ..PLAIN },
    Change { name: "head-tying", saves: &["lm_head"], tying: true, ..PLAIN },
    Change { name: "both-tying", saves: &["embed_tokens", "lm_head"], tying: true, ..PLAIN },
    Change { name: "lora-tying", adapts: true, tying: true, ..PLAIN },
    Change { name: "lora-embedding-tying", adapts: true, saves: &["embed_tokens"], tying: true, ..PLAIN },
];

impl Change {
    fn targets(&self) -> Vec<&'static str> {
        // DoRA is on the head alone.
        let query = if self.dora { None } else { Some("q_proj") };
        query.into_iter().chain(self.adapts.then_some("lm_head")).collect()
    }

    /// Whether the head has a low-rank term.
    fn has_term(&self) -> bool {
        self.adapts && !self.saves.contains(&"lm_head")
    }

    fn write(&self, session: &Session, base: &str) -> String {
        let mut tensors = Vec::new();
        if !self.dora {
            tensors.push(trained(&format!("{QUERY}.lora_A.weight"), &[2, HIDDEN]));
            tensors.push(trained(&format!("{QUERY}.lora_B.weight"), &[HIDDEN, 2]));
        }
        if self.has_term() {
            tensors.push(trained("lm_head.lora_A.weight", &[2, HIDDEN]));
            tensors.push(trained("lm_head.lora_B.weight", &[VOCABULARY, 2]));
        }
        if self.dora {
            let norms = head_of(base).square().sum_dim_intlist(1i64, false, Kind::Float).sqrt() * 1.1;
            tensors.push(("base_model.model.lm_head.lora_magnitude_vector".to_owned(), norms));
        }
        let whole = [VOCABULARY, HIDDEN];
        if self.tying {
            tensors.push(trained(EMBEDDING, &whole));
            tensors.push((format!("base_model.model.{HEAD}"), trained(EMBEDDING, &whole).1));
        } else {
            tensors.extend(
                self.saves
                    .iter()
                    .map(|saved| trained(if *saved == "lm_head" { HEAD } else { EMBEDDING }, &whole)),
            );
        }
        let name = format!("{base}-{}", self.name);
        let folder = session.path(&name);
        std::fs::create_dir(&folder).unwrap();
        tensors_file::write(&folder.join("adapter_model.safetensors"), &tensors).unwrap();
        let config = json!({
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "target_modules": self.targets(),
            "modules_to_save": (!self.saves.is_empty()).then_some(self.saves), "ensure_weight_tying": self.tying,
            "use_dora": self.dora, "base_model_name_or_path": base
        });
        std::fs::write(folder.join("adapter_config.json"), config.to_string()).unwrap();
        name
    }
}

/// The mean loss of the tokens after the first.
fn loss(model: &dyn LanguageModel) -> f64 {
    let tokens = Tensor::from_slice(&TOKENS).view([1, -1]);
    let logits = tch::no_grad(|| model.logits(&Input::new(&tokens)).unwrap());
    let count = TOKENS.len() as i64;
    let logits = logits.narrow(1, 0, count - 1).view([count - 1, VOCABULARY]);
    logits.cross_entropy_for_logits(&tokens.narrow(1, 1, count - 1).view([-1])).double_value(&[])
}

#[track_caller]
fn is_near(found: f64, expected: f64, what: &str) {
    assert!((found - expected).abs() < 1e-4, "{what}: {found}, and transformers {expected}");
}

fn open(session: &Session, name: &str) -> (Folder, Llama) {
    let folder = Folder::open(&session.path(name)).unwrap();
    let model = folder.load(None, Device::Cpu).unwrap();
    (folder, model)
}

/// Whether `config.json` ties the head, and whether the file has one.
fn form(session: &Session, name: &str) -> (Value, bool) {
    let config: Value = serde_json::from_slice(&session.bytes(&format!("{name}/config.json"))).unwrap();
    let tensors = tensors_file::read(&session.path(name).join("model.safetensors"), Device::Cpu).unwrap();
    (config["tie_word_embeddings"].clone(), tensors.iter().any(|(name, _)| name == HEAD))
}

/// Compares the embedding and the head in a GGUF file with a folder's; a tied head has no tensor there.
fn compare_gguf(session: &Session, file: &str, folder: &str) {
    let reader = Reader::open(&session.path(file)).unwrap();
    let (_, model) = open(session, folder);
    let state: Vec<(String, Tensor)> = models::state_dict::state_dict(&model);
    let of = |name: &str| state.iter().find(|(known, _)| known == name).map(|(_, tensor)| tensor);
    for (name, new) in [("embed_tokens.weight", "token_embd.weight"), (HEAD, "output.weight")] {
        let found = reader.position(new).map(|at| reader.rows(at, 0..VOCABULARY as u64).unwrap());
        let found = found.map(|values| Tensor::from_slice(&values).view([VOCABULARY, HIDDEN]));
        assert!(found.as_ref() == of(name), "{file}: {new}");
    }
}

#[test]
fn a_base_is_read_and_exported_as_transformers_does() {
    let session = Session::new();
    for (base, tied, has) in BASES {
        write_base(&session, base, tied, has);
        let (folder, model) = open(&session, base);
        is_near(loss(&model), if ["own", "untied"].contains(&base) { 8.76928 } else { 8.46202 }, base);
        assert_eq!(
            (folder.config().tie_word_embeddings, folder.has_own_head()),
            (is_tied(base), base == "own")
        );

        let (_, said) =
            session.succeed(&format!("export --format gguf --type f32 --model {base} --out {base}.gguf"));
        assert_eq!(said.contains("config.json ties the head"), base == "own", "{said}");
        compare_gguf(&session, &format!("{base}.gguf"), base);
        session.succeed(&format!("export --format nf4 --model {base} --out {base}-nf4"));
        let expected = (json!(is_tied(base)), !is_tied(base));
        assert_eq!(form(&session, &format!("{base}-nf4")), expected, "{base}");
        let info = session.succeed(&format!("info {base}")).0;
        assert_eq!(info.contains("tied to the embedding"), is_tied(base), "{info}");
        let plan = session.succeed(&format!("plan parameters --model {base} --json")).0;
        let parameters = folder.config().parameter_count();
        assert!(plan.contains(&parameters.to_string()), "{parameters}: {plan}");
    }
    // Without a head, what no file says is not made up.
    write_base(&session, "headless", false, "embedding");
    assert!(session.fail("info headless").contains("missing lm_head.weight"));
}

#[test]
fn an_adapter_is_applied_merged_and_exported_as_peft_does() {
    let session = Session::new();
    for (base, tied, has) in BASES.into_iter().filter(|(.., has)| *has != "both, equal") {
        write_base(&session, base, tied, has);
        for change in CHANGES {
            let what = format!("{} on {base}", change.name);
            let adapter = change.write(&session, base);
            let model = || open(&session, base).1;
            let mut adapted = model();
            let loaded = Adapters::load(&mut adapted, &session.path(&adapter));
            let own = ["own", "untied"].contains(&base);
            let expected = match change.name {
                "lora" => [8.4251, 8.78414],
                "head" | "lora-head" => [8.59621; 2],
                "embedding" => [8.95073, 8.82307],
                "both" => [8.76848; 2],
                "lora-embedding" => [8.94323, 8.81695],
                "dora" => [8.5086, 8.79192],
                // One matrix in the files of PEFT, under both names; on an own head, too.
                "both-tying" if base == "untied" => continue,
                "both-tying" => [8.74775; 2],
                "head-tying" if is_tied(base) => [8.74775; 2],
                _ => {
                    let error = loaded.map(drop).unwrap_err().to_string();
                    let words = match is_tied(base) {
                        true => "`ensure_weight_tying` is true with an adapter on `lm_head`",
                        false => "does not fit this model",
                    };
                    assert!(error.contains(words), "{what}: {error}");
                    assert!(
                        session
                            .fail(&format!("merge --model {base} --adapter {adapter} --out x"))
                            .contains(words)
                    );
                    continue;
                }
            };
            let expected = expected[usize::from(own)];
            drop(loaded.unwrap());
            is_near(loss(&adapted), expected, &what);

            let merged = format!("{adapter}-merged");
            session.succeed(&format!("merge --model {base} --adapter {adapter} --out {merged}"));
            is_near(loss(&open(&session, &merged).1), expected, &format!("{what}, merged"));
            let stays_tied = is_tied(base) && change.tying;
            assert_eq!(form(&session, &merged), (json!(stays_tied), !stays_tied), "{what}");
            let from = format!("--model {base} --adapter {adapter}");
            session.succeed(&format!("export --format gguf --type f32 {from} --out {adapter}.gguf"));
            compare_gguf(&session, &format!("{adapter}.gguf"), &merged);

            let lora = session.run(&format!("export --format gguf-lora {from} --out {adapter}-lora.gguf"));
            let is_pair = change.saves.is_empty() && !change.dora;
            let is_held = is_pair && !is_tied(base);
            assert_eq!(lora.status == 0, is_held, "{what}: {}", lora.err);
            if is_pair && !is_held {
                let words = "of `lm_head`, which is tied to the embedding; merge it into the model";
                assert!(lora.err.contains(words), "{what}: {}", lora.err);
            }
        }
    }
}

/// A folder for Ollama has the adapter merged where a file of its own cannot hold it.
#[test]
fn an_adapter_of_a_tied_head_is_merged_for_ollama() {
    let session = Session::new();
    write_base(&session, "tied", true, "embedding");
    let adapter = CHANGES[0].write(&session, "tied");
    let export = format!("export --format ollama --type f32 --model tied --adapter {adapter} --out chat");
    let (_, said) = session.succeed(&export);
    assert!(said.contains("the adapter is merged into the model"), "{said}");
    assert!(!session.path("chat/adapter.gguf").exists());
    let reader = Reader::open(&session.path("chat/model-f32.gguf")).unwrap();
    assert!(reader.position("output.weight").is_some());
}

const TRAIN: &str = "finetune --data problems --format question-answer --held-out 0 --samples 0 --batch-size 4 --accumulation 1 \
                     --steps 1 --lr 0.01 --warmup 0";

#[test]
fn what_cannot_be_merged_or_exported_is_said_before_a_step_is_trained() {
    let session = Session::new();
    for (base, tied, has) in [BASES[0], BASES[3], BASES[4]] {
        write_base(&session, base, tied, has);
    }
    let refused = |base: &str, settings: &str, words: &str| {
        let said = session.fail(&format!("{TRAIN} --model {base} --out out {settings}"));
        assert!(said.contains(words), "{base} {settings}: {said}");
        assert!(!session.path("out").exists(), "{base} {settings}");
    };
    let tying = "--set adapter.ensure_weight_tying=true";
    for base in ["own", "untied"] {
        let saved = format!("{tying} --set adapter.modules_to_save=[\"lm_head\"]");
        refused(base, &saved, "the head and the embedding of this model are not tied");
    }
    refused("tied", tying, "neither `lm_head` nor `embed_tokens` is in `modules_to_save`");
    refused("tied", &format!("{tying} --targets q_proj,lm_head"), "with an adapter on `lm_head`");

    let said = |base: &str, settings: &str| {
        session.succeed(&format!("{TRAIN} --model {base} --dry-run {settings}")).1
    };
    let lora = "the adapter alone cannot be exported as GGUF (`--format gguf-lora`)";
    assert!(said("tied", "--targets q_proj,lm_head").contains(lora));
    assert!(said("own", "--method dora").contains(lora));
    let both = "--set adapter.modules_to_save=[\"lm_head\",\"embed_tokens\"]";
    assert!(said("tied", both).contains(lora));
    for (base, settings) in [("tied", ""), ("own", "--targets q_proj,lm_head"), ("untied", "--method full")] {
        let said = said(base, settings);
        assert!(!said.contains("cannot be exported"), "{said}");
        assert_eq!(said.contains("it is used, as by transformers 5"), base == "own", "{said}");
    }
}

#[test]
fn a_trained_head_is_merged_and_a_full_fine_tuning_keeps_an_own_head() {
    let session = Session::new();
    for (base, tied, has) in [BASES[0], BASES[3]] {
        write_base(&session, base, tied, has);
        let both = "--set adapter.modules_to_save=[\"lm_head\",\"embed_tokens\"]";
        session.succeed(&format!("{TRAIN} --model {base} --out {base}-both {both}"));
        session.succeed(&format!("merge --model {base}-both --out {base}-merged"));
        assert_eq!(form(&session, &format!("{base}-merged")), (json!(false), true), "{base}");
        let mut adapted = open(&session, base).1;
        let _adapters = Adapters::load(&mut adapted, &session.path(&format!("{base}-both"))).unwrap();
        is_near(loss(&open(&session, &format!("{base}-merged")).1), loss(&adapted), base);

        session.succeed(&format!("{TRAIN} --model {base} --out {base}-full --method full"));
        let expected = (json!(is_tied(base)), !is_tied(base));
        assert_eq!(form(&session, &format!("{base}-full/model")), expected, "{base}");
    }
    // The head and the embedding are trained, each with its own gradient.
    let full = open(&session, "own-full/model").1;
    let state = models::state_dict::state_dict(&full);
    let of = |name: &str| state.iter().find(|(known, _)| known == name).unwrap().1.copy();
    assert!(of(HEAD) != head_of("own") && of("embed_tokens.weight") != values(&[VOCABULARY, HIDDEN], 1, 0.8));
    assert!(of(HEAD) != of("embed_tokens.weight"));
}
