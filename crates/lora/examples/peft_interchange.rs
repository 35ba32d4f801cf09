//! The middle of `xtask/peers/peft_interchange.py`: reads each adapter that PEFT wrote, and writes one of its own beside.

use std::error::Error;
use std::path::{Path, PathBuf};

use lora::peft::{CONFIG_FILE, TENSORS_FILE};
use lora::{Adapters, LoraConfig};
use models::module::{Input, LanguageModel};
use models::{Llama, LlamaConfig, llama, tensors_file};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

fn base(folder: &Path) -> models::Result<Llama> {
    let config = LlamaConfig::read(&folder.join("base/config.json"))?;
    let model = Llama::new(&config, (Kind::Float, Device::Cpu))?;
    llama::load(&model, &folder.join("base/model.safetensors"))?;
    Ok(model)
}

fn case(folder: &Path) -> Result<(), Box<dyn Error>> {
    let read = tensors_file::read(&folder.join("theirs.safetensors"), Device::Cpu)?;
    let named = |wanted: &str| read.iter().find(|(name, _)| name == wanted).map(|(_, tensor)| tensor);
    let (tokens, expected) = (named("tokens").ok_or("no tokens")?, named("logits").ok_or("no logits")?);

    let mut model = base(folder)?;
    let adapters = Adapters::load(&mut model, &folder.join("theirs"))?;
    let difference = {
        let _evaluation = adapters.evaluation();
        (model.logits(&Input::new(tokens))? - expected).abs().max()
    };

    adapters.save(&folder.join("again"))?;
    for file in [CONFIG_FILE, TENSORS_FILE] {
        let bytes = |of: &str| std::fs::read(folder.join(of).join(file));
        if bytes("theirs")? != bytes("again")? {
            return Err(format!("{file} is written differently than it was read").into());
        }
    }

    let theirs = LoraConfig::read(&folder.join("theirs").join(CONFIG_FILE))?;
    let config = LoraConfig { read: serde_json::Map::new(), ..theirs };
    let mut model = base(folder)?;
    let adapters = Adapters::install(&mut model, &config, 3)?;
    let mut generator = Generator::new(4)?;
    for (_, tensor) in adapters.tensors("default")? {
        let _no_grad = tch::no_grad_guard();
        let noise = generator.normal(&tensor.size(), (tensor.kind(), Device::Cpu))? * 0.3;
        let _ = tensor.shallow_clone().f_add_(&noise)?;
    }
    adapters.save(&folder.join("ours"))?;
    let _evaluation = adapters.evaluation();
    let logits = model.logits(&Input::new(tokens))?.detach();
    let ours: [(String, Tensor); 2] =
        [("logits".to_owned(), logits), ("difference".to_owned(), difference.detach())];
    tensors_file::write(&folder.join("ours.safetensors"), &ours)?;
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let folder = PathBuf::from(std::env::args().nth(1).ok_or("usage: peft_interchange FOLDER")?);
    let mut entries: Vec<PathBuf> =
        std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<Result<_, std::io::Error>>()?;
    entries.sort();
    for folder in entries {
        case(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    }
    Ok(())
}
