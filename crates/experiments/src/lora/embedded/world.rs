//! The model's training data: rows of running text, and problems with their answers masked in.

use std::path::Path;

use anyhow::Context;
use dataloading::Tokenizer;
use dataloading::embedded::{
    self, CORPUS_TRAIN, CORPUS_VALID, SMALL_PROBLEMS_TEST, SMALL_PROBLEMS_TRAIN, SMALL_STORIES, TOKENIZER,
};
use frugal::tasks::gsm8k::{
    Annotations, EncodeConfig, Encoder, FewShot, Problem, PromptFormat, TooLong, TrainingRow, records, split,
};
use models::module::IGNORE_INDEX;
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

/// A line of the corpus that is not a heading.
const SHORTEST_LINE: usize = 40;

/// The embedded small world, in tokens.
pub(crate) struct World {
    /// Makes prompts and rows.
    pub(crate) encoder: Encoder,
    /// Questions without examples.
    pub(crate) prompts: FewShot,
    /// Questions after the assignment's three examples.
    pub(crate) three_shot: FewShot,
    /// Held-out problems.
    pub(crate) test: Vec<Problem>,
    /// Rows of the problems to learn from.
    pub(crate) train_rows: Vec<TrainingRow>,
    /// Rows of the held-out problems.
    pub(crate) test_rows: Vec<TrainingRow>,
    /// Stories, lists of calculations, lines of the encyclopedia: documents, each with its end.
    texts: [Vec<Vec<i64>>; 3],
    /// Held-out lines of the encyclopedia.
    valid: Vec<Vec<i64>>,
    pad: i64,
}

/// Shares of stories, lists of calculations, and lines of the encyclopedia among the rows of pretraining.
const SHARES: [f64; 3] = [0.72, 0.20, 0.08];

impl World {
    /// Reads the data; `held_out` problems at most.
    pub(crate) fn read(context: usize, held_out: usize) -> anyhow::Result<Self> {
        let folder = embedded::folder()?;
        let path = folder.join(TOKENIZER);
        let tokenizer = Tokenizer::from_file(&path)?;
        let end = tokenizer.end_of_text()?;
        let lines = |name: &str| -> anyhow::Result<Vec<Vec<i64>>> {
            let text = read(&folder.join(name))?;
            let lines: Vec<&str> = text.lines().filter(|line| line.len() > SHORTEST_LINE).collect();
            documents(&tokenizer, &lines, end)
        };
        let text = read(&folder.join(SMALL_STORIES))?;
        let paragraphs = text.split("\n\n").map(str::trim).filter(|paragraph| !paragraph.is_empty());
        let (lists, stories): (Vec<&str>, Vec<&str>) =
            paragraphs.partition(|paragraph| paragraph.starts_with(|first: char| first.is_ascii_digit()));
        let texts = [
            documents(&tokenizer, &stories, end)?,
            documents(&tokenizer, &lists, end)?,
            lines(CORPUS_TRAIN)?,
        ];
        let options = EncodeConfig {
            vocabulary: tokenizer.vocabulary(),
            context,
            begin: None,
            end,
            too_long: TooLong::Refuse,
        };
        let encoder = Encoder::new(tokenizer.clone(), options)?;
        let prompts = FewShot::zero(PromptFormat::default());
        let train = records::read(&folder.join(SMALL_PROBLEMS_TRAIN), Annotations::Strip)?;
        let three_shot = FewShot::new(&train, FewShot::SHOTS, PromptFormat::default(), split::SEED)?;
        let mut test = records::read(&folder.join(SMALL_PROBLEMS_TEST), Annotations::Strip)?;
        test.truncate(held_out);
        Ok(Self {
            train_rows: encoder.tokenize_all(&train, &prompts)?.rows,
            test_rows: encoder.tokenize_all(&test, &prompts)?.rows,
            encoder,
            prompts,
            three_shot,
            test,
            texts,
            valid: lines(CORPUS_VALID)?,
            pad: i64::from(end),
        })
    }

    /// Tokens of the texts to pretrain on: of stories, lists and encyclopedia.
    pub(crate) fn text_tokens(&self) -> [usize; 3] {
        self.texts.each_ref().map(|documents| documents.iter().map(Vec::len).sum())
    }

    /// Rows of the problems `numbers` of `rows`, padded on the right to the longest: tokens, and the token to predict at each
    /// position, both `[rows, longest - 1]`.
    pub(crate) fn batch(
        &self,
        rows: &[TrainingRow],
        numbers: &[usize],
        device: Device,
    ) -> anyhow::Result<(Tensor, Tensor)> {
        let longest = numbers.iter().map(|&number| rows[number].input_ids.len()).max().context("no rows")?;
        let fill = |values: &[i64], filler: i64| {
            let missing = longest - 1 - values.len();
            values.iter().copied().chain(std::iter::repeat_n(filler, missing)).collect::<Vec<i64>>()
        };
        let (mut tokens, mut labels) = (Vec::new(), Vec::new());
        for &number in numbers {
            let TrainingRow { input_ids, labels: own, .. } = &rows[number];
            tokens.extend(fill(&input_ids[..input_ids.len() - 1], self.pad));
            labels.extend(fill(&own[1..], IGNORE_INDEX));
        }
        let size = [numbers.len() as i64, longest as i64 - 1];
        let tensor = |values: &[i64]| Tensor::f_from_slice(values)?.f_view(size)?.f_to_device(device);
        Ok((tensor(&tokens)?, tensor(&labels)?))
    }

    /// The first `rows` rows of `length` tokens of the encyclopedia's validation part, with what follows each.
    pub(crate) fn validation(
        &self,
        rows: i64,
        length: i64,
        device: Device,
    ) -> anyhow::Result<(Tensor, Tensor)> {
        let stream = self.valid.iter().flatten().copied().take((rows * (length + 1)) as usize);
        shifted(&stream.collect::<Vec<i64>>(), rows, device)
    }
}

/// Rows to pretrain on: each continues where the last of its kind stopped, its kind drawn by [`SHARES`], documents in an order drawn
/// anew each time they have all been read.
pub(crate) struct Reading<'w> {
    world: &'w World,
    generator: Generator,
    streams: [Stream; 3],
}

#[derive(Default)]
struct Stream {
    order: Vec<usize>,
    /// Tokens of the last document that was begun, which are not read yet.
    left: Vec<i64>,
}

impl<'w> Reading<'w> {
    /// Starts from the first row.
    pub(crate) fn new(world: &'w World, seed: u64) -> anyhow::Result<Self> {
        Ok(Self { world, generator: Generator::new(seed)?, streams: Default::default() })
    }

    /// `rows` rows of `length` tokens, and what follows each token.
    pub(crate) fn next(
        &mut self,
        rows: i64,
        length: i64,
        device: Device,
    ) -> anyhow::Result<(Tensor, Tensor)> {
        let drawn = self.generator.uniform(&[rows], (0.0, 1.0), (Kind::Double, Device::Cpu))?;
        let mut tokens = Vec::new();
        for drawn in Vec::<f64>::try_from(drawn)? {
            let kind = if drawn < SHARES[0] { 0 } else { 1 + usize::from(drawn >= SHARES[0] + SHARES[1]) };
            let documents = &self.world.texts[kind];
            self.streams[kind].take(documents, length as usize + 1, &mut self.generator, &mut tokens)?;
        }
        shifted(&tokens, rows, device)
    }
}

impl Stream {
    fn take(
        &mut self,
        documents: &[Vec<i64>],
        count: usize,
        generator: &mut Generator,
        into: &mut Vec<i64>,
    ) -> anyhow::Result<()> {
        while self.left.len() < count {
            if self.order.is_empty() {
                self.order = permutation(documents.len(), generator)?;
            }
            let next = self.order.pop().context("no documents")?;
            self.left.extend(&documents[next]);
        }
        into.extend(self.left.drain(..count));
        Ok(())
    }
}

/// The numbers below `count` in an order that the generator draws.
pub(crate) fn permutation(count: usize, generator: &mut Generator) -> anyhow::Result<Vec<usize>> {
    let keys = generator.uniform(&[count as i64], (0.0, 1.0), (Kind::Double, Device::Cpu))?;
    let order = Vec::<i64>::try_from(keys.f_argsort(0, false)?)?;
    Ok(order.into_iter().map(|number| number as usize).collect())
}

/// Rows of tokens without their last, and without their first.
fn shifted(tokens: &[i64], rows: i64, device: Device) -> anyhow::Result<(Tensor, Tensor)> {
    let rows = Tensor::f_from_slice(tokens)?.f_view([rows, -1])?.f_to_device(device)?;
    let length = rows.size()[1] - 1;
    Ok((rows.f_narrow(1, 0, length)?.f_contiguous()?, rows.f_narrow(1, 1, length)?.f_contiguous()?))
}

fn documents(tokenizer: &Tokenizer, texts: &[&str], end: u32) -> anyhow::Result<Vec<Vec<i64>>> {
    let encoded = tokenizer.encode_batch(texts)?.into_iter();
    Ok(encoded.map(|ids| ids.into_iter().chain([end]).map(i64::from).collect()).collect())
}

fn read(path: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(path).with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(tensor: &Tensor) -> Vec<Vec<i64>> {
        Vec::try_from(tensor).unwrap()
    }

    #[test]
    fn a_batch_predicts_each_answer_and_nothing_else() {
        let world = World::read(256, 3).unwrap();
        let (tokens, labels) = world.batch(&world.test_rows, &[2, 0], Device::Cpu).unwrap();
        assert_eq!(tokens.size(), labels.size());
        for ((tokens, labels), problem) in numbers(&tokens).iter().zip(numbers(&labels)).zip([2, 0]) {
            let prompt =
                world.encoder.prompt(&world.prompts.prompt(&world.test[problem].question).unwrap()).unwrap();
            assert_eq!(tokens[..prompt.len()], prompt);
            let learnt: Vec<i64> = labels.iter().copied().filter(|label| *label != IGNORE_INDEX).collect();
            let ids: Vec<u32> = learnt.iter().map(|id| *id as u32).collect();
            let (end, answer) = ids.split_last().unwrap();
            assert_eq!(*end, world.encoder.options().end);
            let text = world.encoder.tokenizer().decode(answer).unwrap();
            assert_eq!(text, format!(" {}", world.test[problem].answer));
            // The first token of the answer is predicted at the prompt's last position.
            assert_eq!(labels[..prompt.len()].iter().filter(|label| **label != IGNORE_INDEX).count(), 1);
        }
    }

    #[test]
    fn rows_follow_one_another_and_come_again_from_their_seed() {
        let world = World::read(256, 1).unwrap();
        let read = |seed| {
            let mut reading = Reading::new(&world, seed).unwrap();
            let batches: Vec<_> = (0..3).map(|_| reading.next(2, 16, Device::Cpu).unwrap()).collect();
            for (tokens, labels) in &batches {
                let (tokens, labels) = (numbers(tokens), numbers(labels));
                assert!(tokens.iter().zip(&labels).all(|(tokens, labels)| tokens[1..] == labels[..15]));
            }
            batches.iter().map(|(tokens, _)| numbers(tokens)).collect::<Vec<_>>()
        };
        assert_eq!(read(1), read(1));
        assert_ne!(read(1), read(2));
    }
}
