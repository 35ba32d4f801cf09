//! Pretrained models in GGUF files, where `FRUGAL_MODELS` names a folder of them (`cargo xtask setup --models`): texts and logits of
//! transformers, and log-probabilities of llama.cpp, where `FRUGAL_PYTHON` has it.
//!
//! `data/real_models` has what transformers computes in fp32 (`xtask/peers/gguf_models.py`), so a test needs the model's file alone.

use std::path::{Path, PathBuf};

use frugal::llama_cpp::{LlamaCpp, Request};
use frugal::models::generation::{GenerationConfig, generate};
use frugal::models::hugging_face::Folder;
use frugal::models::module::{Input, LanguageModel};
use gguf::ReadOptions;
use serde::Deserialize;
use tch::{Device, Kind, Tensor};

/// What transformers computes from a file.
#[derive(Deserialize)]
struct Expected {
    file: String,
    /// With the embedding as the head; of a file that has both, with the values of the finer one.
    tied: Computed,
    /// Of a file that holds the embedding twice, as it is.
    untied: Option<Computed>,
}

#[derive(Deserialize)]
struct Computed {
    prompts: Vec<Prompt>,
}

#[derive(Deserialize)]
struct Prompt {
    ids: Vec<i64>,
    /// Tokens that are added greedily.
    added: Vec<i64>,
    /// Tokens whose logits are compared.
    sample: Vec<i64>,
    /// Their logits after the prompt.
    first: Vec<f64>,
    /// Their logits after the prompt and all added tokens but the last.
    last: Vec<f64>,
}

#[allow(clippy::print_stderr, reason = "output of a test")]
fn models() -> Vec<(Expected, PathBuf)> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/real_models");
    let read = |name: &str| {
        let expected: Expected =
            serde_json::from_str(&std::fs::read_to_string(data.join(name)).unwrap()).unwrap();
        let path = std::env::var_os("FRUGAL_MODELS").map(|folder| PathBuf::from(folder).join(&expected.file));
        let path = path.filter(|path| path.is_file());
        if path.is_none() {
            eprintln!("skipped: no {} in FRUGAL_MODELS; `cargo xtask setup --models` gets it", expected.file);
        }
        Some((expected, path?))
    };
    ["smollm2.json", "gemma3.json", "qwen2.5.json"].into_iter().filter_map(read).collect()
}

/// The folder of a file, in a cache of the test's own.
fn folder(file: &Path, untied: bool, cache: &Path) -> Folder {
    Folder::open(&gguf::folder::make(file, ReadOptions { untied }, cache).unwrap()).unwrap()
}

/// The logits after each token, `[tokens, vocabulary]`, in f64.
fn logits(model: &dyn LanguageModel, tokens: &[i64]) -> Tensor {
    let _no_grad = tch::no_grad_guard();
    let tokens = Tensor::from_slice(tokens).unsqueeze(0);
    model.logits(&Input::new(&tokens)).unwrap().squeeze_dim(0).to_kind(Kind::Double)
}

/// fp32 products add in another order (measured: 4e-5, of logits between −30 and 40).
const LOGITS: f64 = 2e-4;

/// One forward pass over a prompt and its text: each token is the most probable one after those before it.
#[test]
#[allow(clippy::print_stderr, reason = "measured differences")]
fn greedy_texts_and_logits_are_those_of_transformers() {
    for (expected, file) in models() {
        let cache = tempfile::tempdir().unwrap();
        for (untied, computed) in [(false, Some(&expected.tied)), (true, expected.untied.as_ref())] {
            let Some(computed) = computed else { continue };
            let model = folder(&file, untied, cache.path()).load(Some(Kind::Float), Device::Cpu).unwrap();
            for prompt in &computed.prompts {
                let text = [&prompt.ids[..], &prompt.added[..prompt.added.len() - 1]].concat();
                let logits = logits(&model, &text).slice(0, prompt.ids.len() as i64 - 1, None, 1);
                let greedy = Vec::<i64>::try_from(logits.argmax(-1, false)).unwrap();
                assert_eq!(greedy, prompt.added, "{}", expected.file);
                for (row, expected_logits) in [(0, &prompt.first), (-1, &prompt.last)] {
                    let ours = logits.select(0, row).index_select(0, &Tensor::from_slice(&prompt.sample));
                    let largest = (ours - Tensor::from_slice(expected_logits)).abs().max().double_value(&[]);
                    eprintln!("{}, untied {untied}: logits differ by at most {largest:.1e}", expected.file);
                    assert!(largest <= LOGITS, "{}: {largest}", expected.file);
                }
            }
        }
    }
}

/// The smallest model and few tokens, since a build for tests takes seconds for each.
#[test]
fn a_text_generated_with_the_cache_is_that_of_transformers() {
    let Some((expected, file)) =
        models().into_iter().find(|(expected, _)| expected.file.starts_with("SmolLM2"))
    else {
        return;
    };
    let cache = tempfile::tempdir().unwrap();
    let model = folder(&file, false, cache.path()).load(Some(Kind::Float), Device::Cpu).unwrap();
    let prompt = &expected.tied.prompts[0];
    let options = GenerationConfig { max_new_tokens: 16, ..GenerationConfig::default() };
    let texts = generate(&model, std::slice::from_ref(&prompt.ids), &options, &mut ()).unwrap();
    assert_eq!(texts[0].tokens, prompt.added[..16]);
}

/// How far llama.cpp's distributions may be from this program's, which computes in fp32 with the decoded weights: Σ p·ln(p/q), and the
/// largest difference of a logarithm among tokens of at least 1e-3.
struct Tolerance {
    file: &'static str,
    divergence: f64,
    logarithm: f64,
}

/// llama.cpp rounds what it multiplies with blocks to 8 bits, in groups of 32 or 256 by the type of the matrix.
const LLAMA_CPP: [Tolerance; 3] = [
    Tolerance { file: "SmolLM2-135M-Instruct.Q4_1.gguf", divergence: 0.02, logarithm: 0.6 },
    Tolerance { file: "gemma-3-270m-q4_k_m.gguf", divergence: 0.01, logarithm: 0.8 },
    Tolerance { file: "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", divergence: 0.005, logarithm: 0.4 },
];

#[test]
#[allow(clippy::print_stderr, reason = "measured differences")]
fn log_probabilities_are_those_of_llama_cpp_within_its_rounding() {
    let models = models();
    if models.is_empty() {
        return;
    }
    let llama_cpp = match LlamaCpp::find(None) {
        Ok(llama_cpp) => llama_cpp,
        Err(error) => {
            eprintln!("skipped: {error}");
            return;
        }
    };
    for (expected, file) in models {
        let cache = tempfile::tempdir().unwrap();
        // llama.cpp has the two copies of a matrix as they are.
        let (untied, computed) = match &expected.untied {
            Some(computed) => (true, computed),
            None => (false, &expected.tied),
        };
        let model = folder(&file, untied, cache.path()).load(Some(Kind::Float), Device::Cpu).unwrap();
        let texts = computed.prompts.iter().map(|prompt| [&prompt.ids[..], &prompt.added[..]].concat());
        let texts: Vec<Vec<i64>> =
            texts.flat_map(|text| [text[..5].to_vec(), text[..20].to_vec(), text]).collect();
        let as_u32 =
            |text: &Vec<i64>| text.iter().map(|id| u32::try_from(*id).unwrap()).collect::<Vec<u32>>();
        let prompts: Vec<Vec<u32>> = texts.iter().map(as_u32).collect();
        let theirs = llama_cpp
            .compute(&Request {
                model: &file,
                lora: None,
                prompts: &prompts,
                texts: &[],
                forced: prompts[0][4],
                vocabulary: usize::try_from(model.decoder_config().vocab_size).unwrap(),
                threads: 1,
            })
            .unwrap();
        let (mut divergence, mut logarithm) = (0f64, 0f64);
        for (text, theirs) in texts.iter().zip(&theirs.log_probabilities) {
            let ours = logits(&model, text).select(0, -1).log_softmax(-1, Kind::Double);
            let (theirs, weight) = (Tensor::from_slice(theirs).log_softmax(-1, Kind::Double), ours.exp());
            let difference = &ours - theirs;
            divergence = divergence.max((&weight * &difference).sum(Kind::Double).double_value(&[]));
            let likely = difference.abs() * weight.ge(1e-3);
            logarithm = logarithm.max(likely.max().double_value(&[]));
        }
        let name = &expected.file;
        eprintln!(
            "{name}: llama.cpp diverges by {divergence:.1e} nats, logarithms differ by {logarithm:.1e}"
        );
        let limit = LLAMA_CPP.iter().find(|limit| limit.file == name).unwrap();
        assert!(divergence <= limit.divergence && logarithm <= limit.logarithm, "{name}");
    }
}
