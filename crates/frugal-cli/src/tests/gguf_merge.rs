//! An adapter merged into a model whose file has blocks of seven types, against PEFT on the dequantised model
//! (`xtask/peers/gguf_merge.py`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use gguf::{ModelFile, ReadOptions};
use models::hugging_face::Folder;
use models::tensors_file;
use tch::{Device, Kind, Tensor};

use super::session::Session;

/// Every 16th row of each merged matrix, in fp32, by Hugging Face's names.
fn expected(fixture: &Path) -> BTreeMap<String, Tensor> {
    let all = tensors_file::read(&fixture.join("expected.safetensors"), Device::Cpu).unwrap();
    let rows = |(name, tensor): (String, Tensor)| Some((name.strip_suffix(".rows")?.to_owned(), tensor));
    let rows: BTreeMap<String, Tensor> = all.into_iter().filter_map(rows).collect();
    assert_eq!(rows.len(), 7);
    rows
}

fn every_16th(tensor: &Tensor) -> Tensor {
    tensor.slice(0, None, None, 16).to_kind(Kind::Float)
}

/// ‖x − y‖ / ‖y‖.
fn distance(ours: &Tensor, theirs: &Tensor) -> f64 {
    let norm = |tensor: &Tensor| tensor.to_kind(Kind::Double).norm().double_value(&[]);
    norm(&(ours.to_kind(Kind::Double) - theirs.to_kind(Kind::Double))) / norm(theirs)
}

/// A folder with the model, the adapter, and a run over the model's blocks that has learned the adapter.
fn with_run() -> (Session, PathBuf) {
    let tiny = Session::new();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/fixtures/gguf_merge");
    std::fs::copy(fixture.join("base.gguf"), tiny.path("base.gguf")).unwrap();
    tiny.succeed("finetune --model base.gguf --dtype gguf --data problems --r 4 --steps 1 --quiet --out run");
    std::fs::create_dir(tiny.path("adapter")).unwrap();
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        for folder in ["run", "adapter"] {
            std::fs::copy(fixture.join("adapter").join(file), tiny.path(folder).join(file)).unwrap();
        }
    }
    (tiny, fixture)
}

/// In fp32 the sum is exact but for its own rounding; in bf16 the base and the sum are rounded, each by up to 2⁻⁹ of a value (measured:
/// 2.5e-3).
#[test]
fn merged_weights_are_those_of_peft_on_the_dequantised_model() {
    let (tiny, fixture) = with_run();
    for (flags, limit) in [
        ("--model run --dtype float32", 1e-6),
        ("--model base.gguf --adapter adapter --dtype float32", 1e-6),
        ("--model run", 1.0 / 256.0),
        ("--model base.gguf --adapter adapter", 1.0 / 256.0),
    ] {
        tiny.succeed(&format!("merge {flags} --out merged --overwrite"));
        let merged = Folder::open(&tiny.path("merged")).unwrap().load(None, Device::Cpu).unwrap();
        let merged: BTreeMap<String, Tensor> = models::state_dict::state_dict(&merged).into_iter().collect();
        for (name, theirs) in expected(&fixture) {
            let ours = every_16th(&merged[name.strip_prefix("model.").unwrap()]);
            let figure = distance(&ours, &theirs);
            assert!(figure <= limit, "{flags}: {name}: {figure:.1e}");
        }
    }
}

/// A merged model that is quantised again is as near to PEFT's as blocks of 32 with 8 bits can be: a step is 1/127 of a block's largest
/// value, so an error is at most half of it, beside that of a merge in bf16.
#[test]
fn a_merged_export_is_as_near_to_peft_as_its_blocks_can_be() {
    let (tiny, fixture) = with_run();
    for model in ["--model run", "--model base.gguf --adapter adapter"] {
        for (kind, step) in [("f32", 0.0), ("q8_0", 1.0 / 254.0)] {
            tiny.succeed(&format!(
                "export {model} --format gguf --type {kind} --out merged.gguf --no-verify --overwrite"
            ));
            let file = ModelFile::open(&tiny.path("merged.gguf"), ReadOptions::default()).unwrap();
            for (name, theirs) in expected(&fixture) {
                let tensor = file.tensor(&name).unwrap();
                let mut values = Vec::new();
                file.rows(tensor, 0..tensor.shape[0], &mut values).unwrap();
                let ours = Tensor::from_slice(&values).view([-1, tensor.shape[1] as i64]);
                let difference = (every_16th(&ours) - &theirs).abs().view([-1, 32]);
                let largest = theirs.abs().view([-1, 32]).amax(1, true);
                let figure = (difference / largest).max().double_value(&[]);
                assert!(figure <= step + 2.0 * 2f64.powi(-8), "{model}, {kind}: {name}: {figure:.1e}");
            }
        }
    }
}

/// The adapter over the blocks computes what PEFT computes over the dequantised model.
#[test]
fn logits_of_an_adapter_over_blocks_are_those_of_peft() {
    let (tiny, fixture) = with_run();
    let all: BTreeMap<String, Tensor> =
        tensors_file::read(&fixture.join("expected.safetensors"), Device::Cpu).unwrap().into_iter().collect();
    let folder = gguf::folder::make(&tiny.path("base.gguf"), ReadOptions::default(), &tiny.path("of-file"));
    let folder = Folder::open(&folder.unwrap()).unwrap();
    let tokens = all["tokens"].unsqueeze(0);
    let _no_grad = tch::no_grad_guard();
    for kind in [Kind::Float, kernels::quantized::blocks::KIND] {
        let mut model = folder.load(Some(kind), Device::Cpu).unwrap();
        for name in ["base_logits", "adapted_logits"] {
            if name == "adapted_logits" {
                crate::flags::model::load_adapter(&mut model, &tiny.path("adapter")).unwrap();
            }
            let input = models::module::Input::new(&tokens);
            let ours = models::module::LanguageModel::logits(&model, &input).unwrap();
            let figure = distance(&ours, &all[name].unsqueeze(0));
            // Beside blocks, vectors and what is computed are in bf16.
            let limit = if kind == Kind::Float { 1e-5 } else { 1e-2 };
            assert!(figure <= limit, "{kind:?}, {name}: {figure:.1e}");
        }
    }
}
