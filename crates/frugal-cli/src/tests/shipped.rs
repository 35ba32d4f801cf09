//! What a run was trained with is what is made of it: chat template, tokens that end an answer, tokenizer.

use std::fs;

use frugal::companion_files::CompanionFiles;
use frugal::config::DataConfig;
use frugal::models::hugging_face::Folder;
use gguf::Reader;
use serde_json::{Value, json};

use super::session::Session;

/// A template that no format of Ollama has, with an end that the base does not list.
const TEMPLATE: &str = "{% for m in messages %}({{ m.role }})\n{{ m.content }}<|endoftext|>{% endfor %}\
    {% if add_generation_prompt %}(assistant)\n{% endif %}";
const TRAIN: &str = "finetune --model model --data chat.jsonl --batch-size 4 --accumulation 1 --epochs 8 --lr 0.05 --samples 0 --quiet";
const ENDS: [i64; 2] = [7, 0];

/// A model that lists another end than the template's, conversations, and the template in a file.
fn session() -> Session {
    let tiny = Session::new();
    fs::write(tiny.path("model/generation_config.json"), r#"{"eos_token_id": 7, "top_k": 5}"#).unwrap();
    let config = json!({ "eos_token": "<|endoftext|>", "chat_template": "{{ messages[0].content }}" });
    fs::write(tiny.path("model/tokenizer_config.json"), config.to_string()).unwrap();
    let line = json!({ "messages": [
        { "role": "user", "content": "Say it." }, { "role": "assistant", "content": "yes" },
    ] });
    fs::write(tiny.path("chat.jsonl"), format!("{line}\n").repeat(8)).unwrap();
    fs::write(tiny.path("own.jinja"), TEMPLATE).unwrap();
    tiny
}

fn json_of(tiny: &Session, name: &str) -> Value {
    serde_json::from_slice(&tiny.bytes(name)).unwrap()
}

fn text(tiny: &Session, name: &str) -> String {
    String::from_utf8(tiny.bytes(name)).unwrap()
}

/// Checks a folder with the run's companion files.
#[track_caller]
fn has_all(tiny: &Session, folder: &str) {
    assert_eq!(text(tiny, &format!("{folder}/chat_template.jinja")), TEMPLATE, "{folder}");
    assert_eq!(
        json_of(tiny, &format!("{folder}/tokenizer_config.json"))["chat_template"],
        TEMPLATE,
        "{folder}"
    );
    let generation = json_of(tiny, &format!("{folder}/generation_config.json"));
    assert_eq!(generation, json!({ "eos_token_id": ENDS, "top_k": 5 }), "{folder}");
    assert!(
        tiny.bytes(&format!("{folder}/tokenizer.json")) == tiny.bytes("model/tokenizer.json"),
        "{folder}"
    );
}

/// Checks a GGUF file's template and ends.
#[track_caller]
fn is_in_gguf(tiny: &Session, name: &str) {
    let file = Reader::open(&tiny.path(name)).unwrap();
    let of = |key: &str| file.header().get(key).cloned();
    assert_eq!(of("tokenizer.chat_template"), Some(TEMPLATE.into()), "{name}");
    assert_eq!(of("tokenizer.ggml.eos_token_id"), Some(0u32.into()), "{name}");
    assert_eq!(of("tokenizer.ggml.eot_token_id"), Some(7u32.into()), "{name}");
}

/// Generates after the template's prompt, and checks that the answer is what was trained, and that it stops.
#[track_caller]
fn stops(tiny: &Session, model: &str) {
    let prompt = "(user)\nSay it.<|endoftext|>(assistant)\n";
    let words =
        ["generate", "--model", model, "--prompt", prompt, "--json", "--quiet", "--max-new-tokens", "9"];
    let ended = tiny.run_words(&words);
    let answer: Value = serde_json::from_str(&ended.out).unwrap();
    assert_eq!((&answer["text"], &answer["ended"]), (&"yes".into(), &"end token".into()), "{model}");
}

#[test]
fn an_adapter_is_shipped_with_what_it_was_trained_with() {
    let tiny = session();
    let (_, said) = tiny.succeed(&format!(
        "{} --chat-template own.jinja --r 8 --targets all-linear --out run",
        TRAIN.replace(" --quiet", "")
    ));
    let note = "note: answers end with `<|endoftext|>` (0), which is not in the model's `eos_token_id` (it lists 7); this run, and what is \
                merged or exported of it, also stop there";
    assert!(said.contains(note), "{said}");
    let record = json_of(&tiny, "run/run.json");
    assert_eq!(record["chat_template"]["bytes"], TEMPLATE.len(), "{record}");
    // Neither an edited template nor an edited base changes the run.
    fs::write(tiny.path("own.jinja"), "{{ raise_exception('edited') }}").unwrap();
    has_all(&tiny, "run");
    let folder = Folder::open(&tiny.path("model")).unwrap();
    let companions = CompanionFiles::of(&folder, Some(&tiny.path("run")), &DataConfig::default()).unwrap();
    assert_eq!(companions.end_tokens(), ENDS);
    tiny.succeed("merge --model run --out merged --quiet");
    has_all(&tiny, "merged");
    tiny.succeed("merge --model model --adapter run --out again --quiet");
    has_all(&tiny, "again");
    tiny.succeed("export --format merged --model model --checkpoints run --out of_checkpoint --quiet");
    has_all(&tiny, "of_checkpoint");
    tiny.succeed("export --model run --out peft --quiet");
    has_all(&tiny, "peft");
    tiny.succeed("export --checkpoints run/checkpoints --out peft_of_checkpoint --quiet");
    has_all(&tiny, "peft_of_checkpoint");
    tiny.succeed("export --model run --format gguf --out run.gguf --quiet");
    is_in_gguf(&tiny, "run.gguf");
    tiny.succeed("export --model run --format ollama --out ollama --quiet");
    is_in_gguf(&tiny, "ollama/model-q8_0.gguf");
    let modelfile = text(&tiny, "ollama/Modelfile");
    for part in ["(user)\\n", "(assistant)\\n", "PARAMETER stop \"<|endoftext|>\"\n", "PARAMETER top_k 5\n"] {
        assert!(modelfile.contains(part), "{part}: {modelfile}");
    }
    let (_, said) = tiny.succeed("export --model run --format gguf-lora --out lora.gguf");
    assert!(
        said.contains(
            "note: the adapter was trained with another chat template and other end tokens than its base has"
        ),
        "{said}"
    );
    assert!(said.contains("llama-server -m BASE.gguf --lora lora.gguf"), "{said}");
    // The same training again, with the run's text.
    let (out, _) = tiny.succeed("data show chat.jsonl --model run -n 1 --json");
    let row: Value = serde_json::from_str(&out).unwrap();
    tiny.succeed("finetune --config run/config.toml --out twice --quiet");
    assert!(tiny.bytes("twice/adapter_model.safetensors") == tiny.bytes("run/adapter_model.safetensors"));
    assert_eq!(row["labels"].as_array().unwrap().last(), Some(&json!(0)));
}

#[test]
fn a_model_of_a_full_training_has_what_it_was_trained_with() {
    let tiny = session();
    tiny.succeed(&format!("{TRAIN} --method full --chat-template own.jinja --out run"));
    fs::remove_file(tiny.path("own.jinja")).unwrap();
    assert_eq!(text(&tiny, "run/chat_template.jinja"), TEMPLATE);
    has_all(&tiny, "run/model");
    stops(&tiny, "run");
    stops(&tiny, "run/model");
    tiny.succeed("export --model run --format gguf --out run.gguf --quiet");
    is_in_gguf(&tiny, "run.gguf");
    tiny.succeed("export --model run --format nf4 --out nf4 --quiet");
    has_all(&tiny, "nf4");
}

/// As TRL writes them beside an adapter.
#[test]
fn an_adapters_own_tokenizer_and_template_take_precedence() {
    let tiny = session();
    tiny.succeed(&format!("{TRAIN} --chat-template own.jinja --out run"));
    tiny.succeed("export --adapter run --out theirs --quiet");
    fs::remove_file(tiny.path("theirs/generation_config.json")).unwrap();
    fs::remove_file(tiny.path("theirs/chat_template.jinja")).unwrap();
    tiny.succeed("merge --model model --adapter theirs --out merged --quiet");
    assert_eq!(json_of(&tiny, "merged/tokenizer_config.json")["chat_template"], TEMPLATE);
    assert_eq!(json_of(&tiny, "merged/generation_config.json")["eos_token_id"], json!(ENDS));
    // A tokenizer that differs is the one that is used.
    let tokenizer = text(&tiny, "theirs/tokenizer.json").replace("<|endoftext|>", "<|end-of-text|>");
    fs::write(tiny.path("theirs/tokenizer.json"), &tokenizer).unwrap();
    tiny.succeed("merge --model model --adapter theirs --out again --quiet");
    assert_eq!(text(&tiny, "again/tokenizer.json"), tokenizer);
}

#[test]
fn variables_and_further_templates_are_kept() {
    let tiny = session();
    let template = format!("{{% if mood is defined %}}[{{{{ mood }}}}]{{% endif %}}{TEMPLATE}");
    fs::write(tiny.path("own.jinja"), &template).unwrap();
    let set = "--set data.template_arguments={mood=\"calm\"}";
    tiny.succeed(&format!("{TRAIN} --chat-template own.jinja --out run {set}"));
    tiny.succeed("merge --model run --out merged --quiet");
    let expected =
        format!("{{%- if mood is not defined %}}{{%- set mood = \"calm\" %}}{{%- endif %}}\n{template}");
    assert_eq!(text(&tiny, "merged/chat_template.jinja"), expected);
    assert_eq!(text(&tiny, "run/chat_template.jinja"), expected);

    fs::remove_file(tiny.path("model/tokenizer_config.json")).unwrap();
    fs::write(tiny.path("model/chat_template.json"), json!({ "chat_template": TEMPLATE }).to_string())
        .unwrap();
    fs::create_dir(tiny.path("model/additional_chat_templates")).unwrap();
    fs::write(tiny.path("model/additional_chat_templates/tool_use.jinja"), "tools").unwrap();
    tiny.succeed(&format!("{TRAIN} --out plain"));
    tiny.succeed("merge --model plain --out plain-merged --quiet");
    for folder in ["plain", "plain-merged"] {
        assert_eq!(json_of(&tiny, &format!("{folder}/chat_template.json"))["chat_template"], TEMPLATE);
        assert_eq!(text(&tiny, &format!("{folder}/additional_chat_templates/tool_use.jinja")), "tools");
    }
}

#[test]
fn a_replaced_model_keeps_no_companion_file_of_the_old_one() {
    let tiny = session();
    tiny.succeed(&format!("{TRAIN} --chat-template own.jinja --steps 1 --out run"));
    // Everything that another model may have left there.
    let left = ["chat_template.jinja", "chat_template.json", "added_tokens.json", "special_tokens_map.json"];
    let leave = |folder: &str| {
        fs::create_dir_all(tiny.path(&format!("{folder}/additional_chat_templates"))).unwrap();
        for name in left {
            fs::write(tiny.path(&format!("{folder}/{name}")), "{}").unwrap();
        }
        fs::write(tiny.path(&format!("{folder}/additional_chat_templates/rag.jinja")), "{}").unwrap();
        fs::write(tiny.path(&format!("{folder}/notes.md")), "mine").unwrap();
    };
    let commands = [
        ("merge --model run --out merged --overwrite --quiet", "merged"),
        ("export --model run --out peft --overwrite --quiet", "peft"),
        ("export --model model --format nf4 --out nf4 --overwrite --quiet", "nf4"),
    ];
    for (command, out) in commands {
        leave(out);
        tiny.succeed(command);
        for name in left.into_iter().chain(["additional_chat_templates/rag.jinja"]) {
            let path = tiny.path(&format!("{out}/{name}"));
            assert_ne!(fs::read_to_string(path).unwrap_or_default(), "{}", "{command}: {name}");
        }
        assert_eq!(text(&tiny, &format!("{out}/notes.md")), "mine");
    }
}

#[test]
fn a_base_that_is_not_quantized_is_said_to_be_another() {
    let tiny = session();
    tiny.succeed(&format!("{TRAIN} --chat-template own.jinja --dtype nf4 --steps 2 --out run"));
    let note = "note: the adapter was trained over its base in NF4, and here the base is not quantized";
    for command in [
        "eval --model run --data chat.jsonl",
        "generate --model run --prompt Ann --max-new-tokens 1",
        "merge --model run --out merged",
        "export --model run --format gguf --out run.gguf",
        // The adapter by itself, beside its base.
        "eval --model model --adapter run --data chat.jsonl",
        "merge --model model --adapter run --out merged-too",
    ] {
        let (_, said) = tiny.succeed(command);
        assert_eq!(said.matches(note).count(), 1, "{command}: {said}");
    }
    let (_, said) = tiny.succeed("eval --model run --data chat.jsonl --dtype nf4");
    assert!(!said.contains(note), "{said}");
}

#[test]
fn an_adapter_of_another_base_is_said_to_be_of_another() {
    let tiny = session();
    tiny.succeed(&format!("{TRAIN} --chat-template own.jinja --steps 2 --out run"));
    tiny.write_model("other", 16, 7);
    let base = tiny.path("model").canonicalize().unwrap();
    let note = format!("note: the adapter names {} as its base, and here it is over other; ", base.display());
    for command in
        ["eval --data chat.jsonl", "merge --out merged", "generate --prompt Ann --max-new-tokens 1"]
    {
        let (_, said) = tiny.succeed(&format!("{command} --model other --adapter run"));
        assert_eq!(said.matches(&note).count(), 1, "{command}: {said}");
        let (_, said) = tiny.succeed(
            &format!("{command}-2 --model model --adapter run")
                .replace("1-2", "1")
                .replace("jsonl-2", "jsonl"),
        );
        assert!(!said.contains("note:"), "{command}: {said}");
    }
    // A copy of a model on the hub has the model's name.
    let path = tiny.path("run/adapter_config.json");
    let config = fs::read_to_string(&path).unwrap().replace(&*base.to_string_lossy(), "owner/Other");
    fs::write(&path, config).unwrap();
    let (_, said) = tiny.succeed("eval --data chat.jsonl --model other --adapter run");
    assert!(!said.contains("note:"), "{said}");
}
