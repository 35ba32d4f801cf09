//! A short training by a recipe, which every rank of a case runs.
#![allow(clippy::print_stdout, reason = "the results of a rank, which the test reads")]

use std::path::PathBuf;
use std::time::Duration;

use frugal::models::hugging_face::{self, Folder};
use frugal::models::init::Init;
use frugal::models::module::{self, LanguageModel};
use frugal::models::{DecoderConfig, Gpt2, Gpt2Config, Llama};
use frugal::recipe::Prepared;
use frugal::{Config, Recipe};
use runtime::collectives::Group as Ranks;
use runtime::memory::{self, Region};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind};
use training::optimizer::{AdamW, DeviceOptimizer, Group};

use super::faulty::{Faulty, Injected};
use sharding::Mesh;

use super::trainings::{self, Place};

/// A training.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Case {
    /// The techniques, in TOML.
    pub(super) recipe: String,
    /// The ordinary optimizer, in one process.
    pub(super) without_ranks: bool,
    pub(super) bf16: bool,
    /// GPT-2 with dropout, instead of a Llama whose embedding is its head too.
    pub(super) dropout: bool,
    /// How the model comes to its techniques.
    pub(super) start: Start,
    /// Layers, 0 for 4.
    pub(super) layers: i64,
    /// Hidden size, 0 for 24. From 128 on the layers are large beside the rest.
    pub(super) hidden: i64,
    pub(super) steps: u64,
    pub(super) killed_after: u64,
    pub(super) folder: Option<PathBuf>,
    pub(super) fault: Option<Injected>,
    /// Of the ranks for each other, if not the usual one.
    pub(super) timeout: Option<Duration>,
    pub(super) place: Place,
}

/// How a model comes to its techniques.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) enum Start {
    /// Whole.
    #[default]
    Apply,
    /// Created by the recipe.
    Create,
    /// From this folder.
    Open(PathBuf),
}

impl Case {
    fn options(&self) -> (Kind, Device) {
        (if self.bf16 { Kind::BFloat16 } else { Kind::Float }, Device::Cpu)
    }

    fn hidden(&self) -> i64 {
        if self.hidden == 0 { 24 } else { self.hidden }
    }

    fn layers(&self) -> i64 {
        if self.layers == 0 { 4 } else { self.layers }
    }

    /// The configuration of the Llama.
    pub(super) fn llama(&self) -> DecoderConfig {
        let hidden = self.hidden();
        DecoderConfig {
            tie_word_embeddings: true,
            max_position_embeddings: 16,
            ..DecoderConfig::qwen2(61, hidden, hidden * 3, self.layers(), 2)
        }
    }

    fn prepare(&self, recipe: &Recipe) -> Prepared {
        runtime::random::seed(1).unwrap();
        let config = self.llama();
        let prepared = match &self.start {
            Start::Apply => recipe.apply(self.model()),
            Start::Create => {
                recipe.create(&config, Init::Normal { std: config.initializer_range }, self.options())
            }
            Start::Open(folder) => recipe.open(&Folder::open(folder).unwrap(), Device::Cpu),
        };
        prepared.unwrap()
    }

    /// Writes the model into a folder.
    pub(super) fn save_model(&self, folder: &std::path::Path) {
        runtime::random::seed(1).unwrap();
        let model = Llama::new(&self.llama(), self.options()).unwrap();
        hugging_face::save(&model, folder, hugging_face::SHARD_BYTES).unwrap();
    }

    fn model(&self) -> Box<dyn LanguageModel> {
        runtime::random::seed(1).unwrap();
        let options = self.options();
        if self.dropout {
            let hidden = self.hidden();
            let config = Gpt2Config {
                vocabulary: 61,
                max_sequence: 16,
                hidden,
                heads: 2,
                layers: self.layers(),
                dropout: 0.2,
                ..Gpt2Config::small()
            };
            return Box::new(Gpt2::new(&config, options).unwrap());
        }
        Box::new(Llama::new(&self.llama(), options).unwrap())
    }

    /// Trains, and prints losses, norms, weights, state and bytes as lines that begin with the training's number.
    pub(super) fn run(&self, ranks: &Ranks, number: usize) -> training::Result<()> {
        memory::track_cpu().unwrap();
        let before = memory::live_bytes(Device::Cpu).unwrap();
        let method = if self.recipe.contains("[adapter]") { "lora" } else { "full" };
        let config: Config = format!("method = \"{method}\"\n{}", self.recipe).parse().unwrap();
        let recipe = Recipe::new(&config).unwrap();
        let start = Region::start(Device::Cpu).unwrap();
        let mut mesh = None;
        let (mut trainer, handles) = if self.without_ranks {
            self.prepare(&recipe).trainer(self.steps).unwrap()
        } else {
            let replicas = trainings::mesh(ranks, config.optimizer.replicas, self.place).unwrap();
            let over = mesh.insert(replicas.with_sequence(config.training.sequence_parallel_size).unwrap());
            let prepared = self.prepare(&recipe.over(over.clone()).unwrap());
            println!("training {number}: bytes start {}", start.finish().unwrap().peak_above_start());
            prepared.trainer(self.steps).unwrap()
        };
        if self.fault.is_some() {
            let unused = Group::new(Vec::<(String, tch::Tensor)>::new(), 0.0);
            let unused = Box::new(DeviceOptimizer::new(AdamW::default(), vec![unused]).unwrap());
            let optimizer = std::mem::replace(&mut trainer.optimizer, unused);
            let parameters = module::parameters(trainer.model.as_ref());
            let (_, norm) =
                parameters.iter().rev().find(|(name, _)| name.ends_with("norm.weight")).expect("a last norm");
            let faulty = Faulty::new(optimizer, ranks, self.fault, false, Some(norm));
            trainer.optimizer = Box::new(faulty);
        }
        trainer.options.log_every = 1;
        trainer.options.checkpoint_every = self.folder.is_some().then_some(1);
        trainings::train(&mut trainer, ranks, number, (self.folder.as_deref(), self.killed_after))?;
        let live = memory::live_bytes(Device::Cpu).unwrap() - before;
        let sent = |group: &Ranks| group.bytes().sent;
        println!("training {number}: bytes live {live}");
        let of_mesh = mesh.iter().filter(|mesh| mesh.replicas() > 1).flat_map(Mesh::groups).map(sent);
        println!("training {number}: bytes sent {}", sent(ranks) + of_mesh.sum::<u64>());
        if let (Some(offload), Some(shards)) = (&handles.offload, &handles.shards) {
            println!("training {number}: bytes gathered {}", sent(shards.gathers()));
            println!("training {number}: bytes shards {}", shards.bytes());
            println!("training {number}: bytes layer {}", offload.layer_bytes());
            println!("training {number}: bytes loads {}", offload.counters().loads);
        }
        ranks.barrier("end").unwrap();
        Ok(())
    }
}
