//! Advice where nothing fits.

use accounting::candidates::{Batch, Candidate, Ranks, SearchResult};
use accounting::offload::AvailableMemory;
use accounting::quantity::bytes_text;
use frugal::Config;
use frugal::config::{
    ActivationPlan, ActivationsConfig, Dtype, MasterWeights, OptimizerPlace, OptimizerRule,
};
use frugal::lora::LoraConfig;
use frugal::models::DecoderConfig;
use frugal::planning::{Budget, DataShape, KnownRates, NotPredicted, WeightFormat};
use tch::{Device, Kind};

/// Changes that are shown.
const SHOWN: usize = 3;
/// The share of the least budget that a change must save to be shown.
const WORTH: f64 = 0.02;

/// A training that does not fit.
pub(crate) struct Question<'a> {
    pub(crate) config: &'a Config,
    pub(crate) shape: &'a DecoderConfig,
    pub(crate) format: WeightFormat,
    pub(crate) device: Device,
    pub(crate) data: &'a DataShape,
    /// The budget. Of a training that is resumed, only it and the micro-batch can change.
    pub(crate) budget: Budget,
    /// The ranks that train together; `None` for one process.
    pub(crate) ranks: Option<Ranks>,
}

/// A change, what is trained after it, and the bytes of the least way to run a step of that.
struct Change {
    flags: String,
    config: Config,
    format: WeightFormat,
    data: DataShape,
    least: u64,
}

impl Question<'_> {
    /// The least budget, and the changes that cost the training the least.
    pub(crate) fn nothing_fits(&self, budget: &str, result: &SearchResult) -> String {
        let Some(least) = result.least() else { return format!("nothing fits {budget}") };
        let needed = least.device_bytes();
        let mut text =
            format!(
                "nothing fits a budget of {budget}; the least is {} ({}; {} in the {})",
                bytes_text(self.budget.for_tensors(needed)),
                least.name(),
                least.peak.parts.iter().max_by_key(|part| part.bytes).map_or_else(String::new, |part| {
                    format!("{} are {}", bytes_text(part.bytes), part.name)
                }),
                least.peak.moment,
            );
        if least.evaluation_bytes > least.peak.total {
            text = format!(
                "nothing fits a budget of {budget}: an evaluation of the longest validation row takes {} ({}), a training step {}; \
                 leave out long rows or give --held-out 0 without --validation",
                bytes_text(self.budget.for_tensors(least.evaluation_bytes)),
                least.name(),
                bytes_text(self.budget.for_tensors(least.peak.total)),
            );
        }
        let remedy = self.remedy(needed);
        let or = remedy.map_or_else(String::new, |remedy| format!("{remedy}; or "));
        format!("{text}; {or}give --budget {}MiB", self.budget.for_tensors(needed) >> 20)
    }

    /// The changes that cost the training the least: those that suffice alone, or else what they save together.
    fn remedy(&self, needed: u64) -> Option<String> {
        let shown = |flags: &str, least: u64| {
            format!("{} ({})", flags.trim_end_matches(','), bytes_text(self.budget.for_tensors(least)))
        };
        let worth = (self.budget.for_tensors(needed) as f64 * (1.0 - WORTH)) as u64;
        // In the order of what they change in the result.
        let mut all = self.changes();
        let suffices = |change: &Change| self.budget.for_tensors(change.least) <= self.budget.total;
        let some_suffice = all.iter().any(suffices);
        all.retain(|change| {
            if some_suffice { suffices(change) } else { self.budget.for_tensors(change.least) <= worth }
        });
        let listed: Vec<String> =
            all.iter().take(SHOWN).map(|change| shown(&change.flags, change.least)).collect();
        let listed = listed.join(", or ");
        match (some_suffice, all.is_empty()) {
            (true, _) => return Some(format!("less would take: {listed}")),
            (false, true) => return None,
            (false, false) => {}
        }
        let (flags, least) = self.together(needed);
        let together = match &flags[..] {
            [] | [_] => String::new(),
            _ => format!("; together: {}", shown(&flags.join(" "), least)),
        };
        let verdict = if self.budget.for_tensors(least) <= self.budget.total {
            "not little enough alone"
        } else {
            "still too much"
        };
        Some(format!("less would take, but {verdict}: {listed}{together}"))
    }

    /// The flags of changes one after another, each the one that saves the most, until they suffice or save no more; and what the least way
    /// to run a step takes after them.
    fn together(&self, needed: u64) -> (Vec<String>, u64) {
        let mut flags: Vec<String> = Vec::new();
        let Some(best) = self.changes().into_iter().min_by_key(|change| change.least) else {
            return (Vec::new(), needed);
        };
        let (mut best, mut least) = (best, needed);
        while self.budget.for_tensors(best.least) as f64
            <= self.budget.for_tensors(least) as f64 * (1.0 - WORTH)
        {
            // The later of two values of a flag counts.
            let name = best.flags.split(' ').next().unwrap_or_default().to_owned();
            flags.retain(|own| own.split(' ').next() != Some(&name));
            flags.push(best.flags.clone());
            least = best.least;
            let next = Question { config: &best.config, format: best.format, data: &best.data, ..*self };
            match next.changes().into_iter().min_by_key(|change| change.least) {
                Some(next) if self.budget.for_tensors(least) > self.budget.total => best = next,
                _ => break,
            }
        }
        // One is not a flag.
        flags.sort_by_key(|flags| flags.starts_with("--"));
        (flags, least)
    }

    /// Changes in the order in which they change the result.
    fn changes(&self) -> Vec<Change> {
        let (config, longest) = (self.config, self.longest());
        let mut all = Vec::new();
        let mut add = |flags: String, config: Config, format: WeightFormat, data: DataShape| {
            if let Ok(least) = self.least(&config, format, &data) {
                all.push(Change { flags, config, format, data, least });
            }
        };
        if self.budget.resumes && config.objective.kind.is_preference() {
            return all;
        }
        if self.budget.resumes {
            let mut rows = config.clone();
            rows.training.micro_batch_size = Some(1);
            add("--set training.micro_batch_size=1".to_owned(), rows, self.format, self.data.clone());
            return all;
        }
        let pinned = config.activations.plan != ActivationPlan::Auto || config.offload.is_some();
        if pinned || config.training.micro_batch_size.is_some() {
            let mut free = config.clone();
            (free.activations, free.offload) = (ActivationsConfig::default(), None);
            (free.training.micro_batch_size, free.optimizer.place) = (None, OptimizerPlace::Device);
            let flags = "leaving out --activations, --offload, --optimizer-on and --micro-batch-size,";
            add(flags.to_owned(), free, self.format, self.data.clone());
        }
        let mut chunks = config.clone();
        (chunks.loss.chunk_tokens, chunks.loss.chunk_bytes) = (Some(64), None);
        add("--loss-chunk 64".to_owned(), chunks, self.format, self.data.clone());
        if self.format.kind == Kind::Float {
            let mut narrow = config.clone();
            narrow.model.dtype = Some(Dtype::Bfloat16);
            add("--dtype bfloat16".to_owned(), narrow, Kind::BFloat16.into(), self.data.clone());
        }
        if config.adapter.is_some() && config.model.dtype != Some(Dtype::Nf4) {
            let mut quantized = config.clone();
            quantized.model.dtype = Some(Dtype::Nf4);
            add("--dtype nf4".to_owned(), quantized, Dtype::Nf4.kind().into(), self.data.clone());
        }
        let is_on_device = config.optimizer.place == OptimizerPlace::Device;
        if config.adapter.is_none() && is_on_device && config.optimizer.rule == OptimizerRule::AdamW {
            let mut eight = config.clone();
            eight.optimizer.rule = OptimizerRule::AdamW8bit;
            add("--optimizer adamw8bit".to_owned(), eight, self.format, self.data.clone());
        }
        if config.adapter.is_none() && is_on_device && config.offload.is_none() && self.ranks.is_none() {
            let mut fused = config.clone();
            (fused.training.accumulation, fused.training.micro_batch_size) = (1, None);
            (fused.optimizer.clip, fused.optimizer.in_backward) = (0.0, true);
            let flags = "--fused-optimizer --accumulation 1 --clip 0";
            add(flags.to_owned(), fused, self.format, self.data.clone());
        }
        let is_clipped = config.training.accumulation > 1 || config.optimizer.clip > 0.0;
        if config.adapter.is_none() && is_clipped && matches!(config.optimizer.rule, OptimizerRule::AdamW) {
            // The gradients of all layers never exist together then.
            let mut streamed = config.clone();
            (streamed.training.accumulation, streamed.optimizer.clip) = (1, 0.0);
            (streamed.activations, streamed.optimizer.place) =
                (ActivationsConfig::default(), OptimizerPlace::Host);
            streamed.offload.get_or_insert_default();
            let flags = "--offload host --optimizer-on host --accumulation 1 --clip 0";
            add(flags.to_owned(), streamed, self.format, self.data.clone());
        }
        if config.adapter.is_none() {
            let mut adapted = config.clone();
            adapted.adapter = Some(Config::default_adapter());
            adapted.model.freeze = None;
            add("--method lora".to_owned(), adapted, self.format, self.data.clone());
        }
        for part in [2, 4] {
            let length = longest / part;
            if length >= 16 {
                let flag = if config.data.packing.is_some() { "--packing" } else { "--max-length" };
                add(format!("{flag} {length}"), config.clone(), self.format, self.shortened(length));
            }
        }
        if let Some(adapter) = config.adapter.as_ref().filter(|adapter| adapter.r > 4) {
            let mut low = config.clone();
            low.adapter = Some(LoraConfig { r: 4, ..adapter.clone() });
            add("--r 4".to_owned(), low, self.format, self.data.clone());
        }
        all
    }

    fn longest(&self) -> u64 {
        let longest = |batch: &Batch| batch.longest.unwrap_or(batch.work.sequence);
        self.data.largest.iter().map(|(_, batch)| longest(batch)).max().unwrap_or(1)
    }

    /// The data with rows of at most `length` positions.
    fn shortened(&self, length: u64) -> DataShape {
        let mut data = self.data.clone();
        let evaluations = data.evaluations.iter_mut().map(|(_, batch)| batch);
        for batch in
            data.largest.iter_mut().map(|(_, batch)| batch).chain([&mut data.mean]).chain(evaluations)
        {
            batch.work.sequence = batch.work.sequence.min(length);
            batch.longest = batch.longest.map(|longest| longest.min(length));
            let most = batch.work.batch * batch.work.sequence;
            batch.labelled = batch.labelled.map(|labelled| labelled.min(most));
        }
        data
    }

    /// The bytes of tensors of the least way to run a step.
    fn least(&self, config: &Config, format: WeightFormat, data: &DataShape) -> Result<u64, NotPredicted> {
        let rates = KnownRates::nominal(self.device)?;
        let mut config = config.clone();
        // Where nothing else fits, weights of 16 bits are rounded stochastically.
        if config.optimizer.master_weights == MasterWeights::Auto {
            config.optimizer.master_weights = MasterWeights::Stochastic;
        }
        let config = &config;
        let (job, allowed) =
            super::step(config, self.shape, (format, self.device), data, &rates, self.ranks)?;
        let result = job.search(&allowed, AvailableMemory { device: self.budget.tensors(), host: None })?;
        result.least().map(Candidate::device_bytes).ok_or_else(|| NotPredicted("no candidate".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use frugal::planning::DataShape;

    use super::*;
    use frugal::config::{Method, Task};

    #[test]
    fn changes_that_suffice_together_are_shown_together() {
        let shape =
            DecoderConfig { tie_word_embeddings: true, ..DecoderConfig::qwen2(32_768, 512, 1536, 4, 8) };
        let config = Config::defaults(Task::Finetune, Method::Lora);
        let data = DataShape::uniform(4, 1024, false);
        let none = Budget { total: 0, taken: 0, live: 0, prepared: 0, resumes: false, is_default: false };
        let question = |tensors: u64, resumes: bool| {
            let budget = Budget { total: none.for_tensors(tensors), resumes, ..none };
            let (config, shape, data) = (&config, &shape, &data);
            Question {
                config,
                shape,
                format: Kind::Float.into(),
                device: Device::Cpu,
                data,
                budget,
                ranks: None,
            }
        };
        let of_one =
            |tensors| question(tensors, false).changes().iter().map(|change| change.least).min().unwrap();
        let needed = question(1 << 30, false).least(&config, Kind::Float.into(), &data).unwrap();
        let enough = of_one(needed);
        let alone = question(enough, false).remedy(needed).unwrap();
        assert!(alone.starts_with("less would take: ") && !alone.contains("together"), "{alone}");
        let (flags, least) = question(enough - (4 << 20), false).together(needed);
        assert!(flags.len() > 1 && least < enough, "{flags:?} {least}");
        let together = question(enough - (4 << 20), false).remedy(needed).unwrap();
        let end = format!("; together: {} ({})", flags.join(" "), bytes_text(none.for_tensors(least)));
        assert!(together.starts_with("less would take, but not little enough alone: "), "{together}");
        assert!(together.ends_with(&end), "{together}");
        let still = question(1, false).remedy(needed).unwrap();
        assert!(still.starts_with("less would take, but still too much: "), "{still}");
        // Of a training that is resumed only the budget and the rows at a time can be changed.
        let resumed: Vec<String> =
            question(1, true).changes().into_iter().map(|change| change.flags).collect();
        assert_eq!(resumed, ["--set training.micro_batch_size=1"]);
    }
}
