//! Streamed experts: the bits of experts in memory for any number of slots, loads that are counted, and failures.

use std::path::Path;

use crate::support::{FLOAT, alone, assert_same, batch, gradients_of};
use kernels::nf4::Scales;
use models::generation::{GenerationConfig, generate};
use models::hugging_face::{self, Folder, SHARD_BYTES};
use models::llama::{Family, Mixture};
use models::module::{Input, LanguageModel, freeze, tensors};
use models::{DecoderConfig, Llama};
use offload::{ExpertConfig, StreamedExperts};
use runtime::memory;
use tch::{Device, Kind, Tensor};
use training::activations::{Activations, LayerPlan};

const LAYERS: u64 = 3;
const EXPERTS: u64 = 8;
const PER_TOKEN: u64 = 2;
/// Elements of an expert, each of whose matrices is a multiple of 256 bytes in every dtype of the tests.
const EXPERT: u64 = 3 * 64 * 32;

fn config() -> DecoderConfig {
    let mixture = Mixture {
        experts: EXPERTS as i64,
        per_token: PER_TOKEN as i64,
        intermediate_size: 32,
        shared: None,
        normalizes: true,
        step: 1,
        dense_layers: Vec::new(),
        clamped: None,
    };
    DecoderConfig {
        family: Family::Qwen3Moe,
        mixture: Some(mixture),
        tie_word_embeddings: false,
        num_key_value_heads: 2,
        // So that the router's choices differ from token to token.
        initializer_range: 0.5,
        ..DecoderConfig::qwen2(60, 64, 48, LAYERS as i64, 4)
    }
}

/// The same model for each kind; everything but its experts learns.
fn model(kind: Kind) -> Llama {
    runtime::random::seed(3).unwrap();
    let model = Llama::new(&config(), (kind, Device::Cpu)).unwrap();
    freeze(&model, r".*mlp\.experts\..*", true).unwrap();
    model
}

fn saved() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    hugging_face::save(&model(Kind::Float), folder.path(), SHARD_BYTES).unwrap();
    folder
}

/// So many slots in fp32.
fn slots(count: u64, folder: &Path) -> ExpertConfig {
    ExpertConfig { cache: count * 4 * EXPERT, folder: folder.to_owned() }
}

fn logits(model: &impl LanguageModel, tokens: &Tensor) -> Tensor {
    let _no_grad = tch::no_grad_guard();
    model.logits(&Input::new(tokens)).unwrap()
}

/// What changes between two looks at the counters.
fn since(experts: &StreamedExperts, body: impl FnOnce()) -> [u64; 2] {
    let before = experts.counters();
    body();
    let after = experts.counters();
    assert_eq!(after.loaded - before.loaded, (after.loads - before.loads) * experts.expert_bytes());
    [after.requested - before.requested, after.loads - before.loads]
}

#[test]
fn losses_and_gradients_have_the_bits_of_experts_in_memory() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let tokens = batch(60, 1);
    for kind in [Kind::Float, Kind::BFloat16] {
        let expected = gradients_of(&model(kind), &tokens);
        for plan in [
            LayerPlan::KeepAll,
            LayerPlan::RecomputeMlp,
            LayerPlan::RecomputeAll,
            LayerPlan::RecomputeElementwise,
        ] {
            for count in [2, 3, 9, LAYERS * EXPERTS] {
                let mut model = model(kind);
                let options = slots(count, folder.path());
                let experts = options.install(&mut model).unwrap();
                let _plan = Activations::install(&mut model, &[plan; LAYERS as usize]).unwrap();
                for run in 0..2 {
                    let case = format!("{kind:?}, {plan}, {count} slots, run {run}");
                    assert_same(&expected, &gradients_of(&model, &tokens), &case);
                }
                assert!(experts.counters().loads > 0);
            }
        }
    }
}

#[test]
fn quantized_experts_are_streamed_as_they_are() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let kind = Scales::Nested.kind();
    let tokens = batch(60, 1);
    let expected = logits(&model(kind), &tokens);
    let mut model = model(kind);
    let experts =
        ExpertConfig { cache: 20 << 10, folder: folder.path().to_owned() }.install(&mut model).unwrap();
    // An eighth of fp32, and scales.
    assert!(experts.expert_bytes() < EXPERT && experts.slots() < experts.experts());
    assert_eq!(logits(&model, &tokens), expected);
}

#[test]
fn a_token_loads_the_experts_that_it_is_given_to() {
    let _alone = alone();
    let folder = saved();
    let opened = Folder::open(folder.path()).unwrap();
    let (model, experts) = slots(LAYERS * EXPERTS, folder.path()).open(&opened, None).unwrap();
    let one = Tensor::from_slice(&[7i64]).view([1, 1]);
    let used = LAYERS * PER_TOKEN;
    assert_eq!(since(&experts, || drop(logits(&model, &one))), [used, used]);
    assert_eq!(since(&experts, || drop(logits(&model, &one))), [used, 0]);
    // Many tokens reach more, each once, and those that are there are not read again.
    let [requested, loads] = since(&experts, || drop(logits(&model, &batch(60, 1))));
    assert!(requested > used && loads < requested && loads > 0, "{requested} {loads}");
}

/// With room for one layer's experts: forward reads those of each layer, backward those of all layers but the last. A layer that runs again has
/// them for its backward.
#[test]
fn a_recomputed_layer_shares_one_load_with_its_backward() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let tokens = batch(60, 1);
    let step = |plan| {
        let mut model = model(Kind::Float);
        let experts = slots(EXPERTS, folder.path()).install(&mut model).unwrap();
        let _plan = Activations::install(&mut model, &[plan; LAYERS as usize]).unwrap();
        since(&experts, || drop(gradients_of(&model, &tokens)))
    };
    let [kept, kept_loads] = step(LayerPlan::KeepAll);
    let [again, again_loads] = step(LayerPlan::RecomputeAll);
    assert_eq!(2 * again, 3 * kept);
    // The last layer's are there, and whichever the slots have of others.
    assert!(again_loads < kept && kept_loads < kept, "{again_loads} {kept_loads} of {kept}");
    assert!(again_loads.abs_diff(kept_loads) <= LAYERS, "{again_loads} {kept_loads}");
}

#[test]
fn a_folder_opens_without_the_memory_of_its_experts() {
    let _alone = alone();
    let folder = saved();
    let opened = Folder::open(folder.path()).unwrap();
    memory::track_cpu().unwrap();
    let tokens = batch(60, 1);
    for kind in [None, Some(Kind::BFloat16), Some(Scales::Nested.kind())] {
        let whole = opened.load(kind, Device::Cpu).unwrap();
        let expected = logits(&whole, &tokens);
        drop(whole);
        let before = memory::live_bytes(Device::Cpu).unwrap();
        let whole = opened.load(kind, Device::Cpu).unwrap();
        let all = memory::live_bytes(Device::Cpu).unwrap() - before;
        let of_expert = tensors(&whole).into_iter().filter(|named| named.name.contains(".mlp.experts."));
        let bytes = |tensor: &Tensor| (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64;
        let of_experts: u64 = of_expert.map(|named| bytes(named.tensor)).sum();
        drop(whole);
        let (model, experts) = slots(2, folder.path()).open(&opened, kind).unwrap();
        let left = memory::live_bytes(Device::Cpu).unwrap() - before;
        let of_slots = experts.slots() as u64 * experts.expert_bytes();
        let outside = all - of_experts;
        // Beside the slots what is no expert.
        assert!(left.abs_diff(outside + of_slots) < 1024, "{kind:?}: {left} of {outside} and {of_slots}");
        assert_eq!(logits(&model, &tokens), expected, "{kind:?}");
    }
}

#[test]
fn generated_tokens_are_those_of_experts_in_memory() {
    let _alone = alone();
    let folder = saved();
    let opened = Folder::open(folder.path()).unwrap();
    let prompts: [Vec<i64>; 2] = [vec![3, 1, 4, 1, 5], vec![9, 2]];
    let options = GenerationConfig { max_new_tokens: 8, ..GenerationConfig::default() };
    let tokens = |model: &Llama| {
        let generated = generate(model, &prompts, &options, &mut ()).unwrap();
        generated.into_iter().map(|row| row.tokens).collect::<Vec<_>>()
    };
    let expected = tokens(&opened.load(None, Device::Cpu).unwrap());
    for count in [2, 7] {
        let (model, _experts) = slots(count, folder.path()).open(&opened, None).unwrap();
        assert_eq!(tokens(&model), expected, "{count} slots");
    }
}

#[test]
fn what_cannot_be_streamed_is_refused_by_name() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let refused = |options: &ExpertConfig, model: &mut Llama| options.install(model).unwrap_err().to_string();
    let tokens = batch(60, 1);

    let error = refused(&slots(1, folder.path()), &mut model(Kind::Float));
    assert!(
        error.ends_with("a cache of 24576 bytes holds 1 experts of 24576 bytes; give at least 49152"),
        "{error}"
    );
    let mut dense = Llama::new(&DecoderConfig::qwen2(60, 64, 48, 2, 4), FLOAT).unwrap();
    let error = refused(&slots(2, folder.path()), &mut dense);
    assert!(error.contains("the model has no mixture of experts"), "{error}");
    let mut trained = Llama::new(&config(), FLOAT).unwrap();
    let error = refused(&slots(2, folder.path()), &mut trained);
    assert!(
        error.contains("experts.0.gate_proj.weight` is to be trained, but streamed experts are only read"),
        "{error}"
    );

    // Changes after experts were streamed.
    let mut model = model(Kind::Float);
    let _experts = slots(2, folder.path()).install(&mut model).unwrap();
    let error = refused(&slots(2, folder.path()), &mut model);
    assert!(error.contains("is streamed already"), "{error}");
    freeze(&model, r".*mlp\.experts\..*", false).unwrap();
    let error = model.logits(&Input::new(&tokens)).unwrap_err().to_string();
    assert!(error.contains("an expert is to be trained"), "{error}");
    freeze(&model, r".*mlp\.experts\..*", true).unwrap();
    let expert = tensors(&model).into_iter().find(|named| named.name.contains("experts.0.gate")).unwrap();
    let _ = tch::no_grad(|| expert.tensor.shallow_clone().fill_(0.0));
    let error = (0..60).find_map(|token| {
        let token = Tensor::from_slice(&[token as i64]).view([1, 1]);
        model.logits(&Input::new(&token)).err()
    });
    let error = error.unwrap().to_string();
    assert!(error.contains("was changed in memory, but it is streamed from"), "{error}");
}

#[test]
fn a_truncated_file_is_an_error_and_no_wait() {
    let _alone = alone();
    let folder = saved();
    let opened = Folder::open(folder.path()).unwrap();
    let (model, _experts) = slots(3, folder.path()).open(&opened, None).unwrap();
    let tokens = batch(60, 1);
    let expected = logits(&model, &tokens);
    let path = folder.path().join("model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(whole.len() as u64 / 4).unwrap();
    let error = model.logits(&Input::new(&tokens)).unwrap_err().to_string();
    assert!(error.contains("is the file whole?"), "{error}");
    std::fs::write(&path, &whole).unwrap();
    assert_eq!(logits(&model, &tokens), expected);
}
