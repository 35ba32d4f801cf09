//! A short training by a recipe, which every rank of a case runs.
#![allow(clippy::print_stdout, reason = "the results of a rank, which the test reads")]

use std::path::PathBuf;

use frugal::models::module::LanguageModel;
use frugal::models::{Gpt2, Gpt2Config, Llama, LlamaConfig};
use frugal::{Config, Recipe};
use runtime::collectives::Group as Ranks;
use runtime::memory;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind};

use super::trainings;

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
    /// Hidden size, 0 for 24. From 128 on the layers are large beside the rest.
    pub(super) hidden: i64,
    pub(super) steps: u64,
    pub(super) killed_after: u64,
    pub(super) folder: Option<PathBuf>,
}

impl Case {
    fn model(&self) -> Box<dyn LanguageModel> {
        runtime::random::seed(1).unwrap();
        let options = (if self.bf16 { Kind::BFloat16 } else { Kind::Float }, Device::Cpu);
        let hidden = if self.hidden == 0 { 24 } else { self.hidden };
        if self.dropout {
            let config = Gpt2Config {
                vocabulary: 61,
                max_sequence: 16,
                hidden,
                heads: 2,
                layers: 4,
                dropout: 0.2,
                ..Gpt2Config::small()
            };
            return Box::new(Gpt2::new(&config, options).unwrap());
        }
        let config = LlamaConfig {
            tie_word_embeddings: true,
            max_position_embeddings: 16,
            ..LlamaConfig::qwen2(61, hidden, hidden * 3, 4, 2)
        };
        Box::new(Llama::new(&config, options).unwrap())
    }

    /// Trains, and prints losses, norms, weights, state and bytes as lines that begin with the training's number.
    pub(super) fn run(&self, ranks: &Ranks, number: usize) -> training::Result<()> {
        memory::track_cpu().unwrap();
        let before = memory::live_bytes(Device::Cpu).unwrap();
        let config: Config = self.recipe.parse().unwrap();
        let recipe = Recipe::new(&config).unwrap();
        let (mut trainer, handles) = if self.without_ranks {
            recipe.apply(self.model()).unwrap().trainer(self.steps).unwrap()
        } else {
            let prepared = recipe.over(ranks).unwrap().apply(self.model()).unwrap();
            prepared.trainer_over(self.steps, Some(ranks)).unwrap()
        };
        trainer.options.log_every = 1;
        trainer.options.checkpoint_every = self.folder.is_some().then_some(1);
        trainings::train(&mut trainer, ranks, number, (self.folder.as_deref(), self.killed_after))?;
        let live = memory::live_bytes(Device::Cpu).unwrap() - before;
        let sent = |group: &Ranks| group.bytes().sent;
        println!("training {number}: bytes live {live}");
        println!("training {number}: bytes sent {}", sent(ranks));
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
