//! Gradient accumulation: several micro-batches with the gradients of one batch.
//!
//! With the summed loss Sᵢ and nᵢ targets of micro-batch i, the loss of the step is L = Σ Sᵢ / Σ nᵢ. Each micro-batch runs
//! backward from Sᵢ / Σ nᵢ, and the gradients add up to that of L. (The mean of means, Σ (Sᵢ/nᵢ) / k, would weight the tokens
//! of short micro-batches more.) Σ nᵢ must be known before the first backward, so all micro-batches of a step are fetched
//! first; the loader counts targets on the host. Where examples have weights w ([`ExampleWeights`]), Sᵢ is the sum of w·ℓ and nᵢ that of w over
//! the targets, so that the loss is the weighted mean, and a common factor of all weights changes nothing.
//!
//! A load-balancing loss ([`RouterBalance`]) is that of the rows of a micro-batch, since the choices of the others are not known in its
//! backward. Each of m has the weight 1/m, so that its coefficient means the same for every m. (transformers' trainer adds those of all m,
//! so its coefficient weighs m times as much.)

use dataloading::{Batch, Counts, ExampleWeights, Packing, Sequences, TopK};
use models::module::{Context, Input, LanguageModel};
use models::{Documents, RouterBalance, module::LossOutput};
use runtime::collectives::Group;
use runtime::ops::TryScalar;
use tch::{Device, Kind, Tensor};

use crate::batches::Batches;
use crate::embedding_noise::strength;
use crate::error::{Error, Result};
use crate::policy::Rollout;
use crate::ranks::BatchPart;

/// The micro-batches of one step.
#[derive(Debug)]
pub struct MicroBatches {
    /// The micro-batches, in order.
    pub batches: Vec<Batch>,
    /// Σ nᵢ.
    pub targets: usize,
    /// Document tokens, without padding.
    pub tokens: usize,
    /// Padding positions.
    pub padding: usize,
    /// Of answers to prompts: what is known of them.
    pub rollout: Option<Rollout>,
}

impl MicroBatches {
    /// Returns the denominator of the summed loss: the targets, the examples of an objective over sequences, or what a rollout says, each
    /// times its weight; 1 without any, so that the loss is 0.
    pub fn denominator(&self) -> f64 {
        if let Some(rollout) = &self.rollout {
            return rollout.denominator.max(1.0);
        }
        self.weighted(|weights| weights.total).unwrap_or_else(|| self.predictions().max(1) as f64)
    }

    /// Returns the number of targets, or of the examples of an objective over sequences.
    pub fn predictions(&self) -> usize {
        self.examples().unwrap_or(self.targets)
    }

    /// The sum of a number of all batches, if their examples have weights and it is not 0.
    fn weighted(&self, number: impl Fn(&ExampleWeights) -> f64) -> Option<f64> {
        let mut weights = self.batches.iter().filter_map(|batch| batch.weights.as_ref()).peekable();
        weights.peek()?;
        Some(weights.map(number).sum()).filter(|total| *total > 0.0)
    }

    /// Returns the number of examples ([`Sequences::examples`]); `None` if the batches have no sequences.
    pub fn examples(&self) -> Option<usize> {
        self.batches.iter().map(|batch| batch.sequences.as_ref().map(Sequences::examples)).sum()
    }

    /// Returns the numbers of sequences that are chosen or desirable, and of the others ([`Sequences::chosen_and_rejected`]).
    pub fn chosen_and_rejected(&self) -> [usize; 2] {
        let sequences = self.batches.iter().filter_map(|batch| batch.sequences.as_ref());
        sequences.fold([0; 2], |[chosen, rejected], sequences| {
            let [own_chosen, own_rejected] = sequences.chosen_and_rejected();
            [chosen + own_chosen, rejected + own_rejected]
        })
    }

    /// Returns the labels of chosen sequences ([`Sequences::chosen_targets`]), each times its weight; 1 without any.
    pub fn chosen_targets(&self) -> f64 {
        let sequences = self.batches.iter().filter_map(|batch| batch.sequences.as_ref());
        let count = || sequences.map(|sequences| sequences.chosen_targets).sum::<usize>().max(1) as f64;
        self.weighted(|weights| weights.chosen_targets).unwrap_or_else(count)
    }

    /// Returns [`MicroBatches::denominator`] in an fp64 scalar on a device, so that a graph can repeat the division by it.
    ///
    /// # Errors
    /// Errors of libtorch.
    pub fn denominator_on(&self, device: Device) -> Result<Tensor> {
        Ok(Tensor::try_full([] as [i64; 0], self.denominator(), (Kind::Double, device))?)
    }

    /// Divides each micro-batch into parts of at most `rows` rows, so that fewer activations exist at a time. The step's loss and
    /// gradients are the same up to the order of their sums; dropout draws other numbers.
    ///
    /// # Errors
    /// Batches with sequences, which an objective takes together; errors of libtorch.
    pub fn split(self, rows: usize) -> Result<Self> {
        let mut batches = Vec::new();
        for batch in self.batches {
            let ends = ends_of_rows(&batch)?;
            if ends.len() <= rows.max(1) {
                batches.push(batch);
            } else {
                batches.extend(parts(&batch, &ends, rows.max(1))?);
            }
        }
        Ok(Self { batches, ..self })
    }
}

/// Returns where each row of a batch ends that may be computed alone, among all positions: rows of its tensors, or of the data if they lie
/// end to end. Padding after these belongs to the last one.
fn ends_of_rows(batch: &Batch) -> Result<Vec<i64>> {
    let (rows, length) = batch.tokens.size2()?;
    Ok(match &batch.packing {
        Some(packing) if packing.is_padding_free && !packing.starts.is_empty() => {
            let mut ends: Vec<i64> = packing.starts[1..].iter().map(|end| i64::from(*end)).collect();
            if batch.counts.padding > 0 {
                ends.remove(ends.len().saturating_sub(2));
            }
            ends
        }
        _ => (1..=rows).map(|row| row * length).collect(),
    })
}

/// Returns the parts of a batch whose rows end at `ends`.
fn parts(batch: &Batch, ends: &[i64], rows: usize) -> Result<Vec<Batch>> {
    if batch.sequences.is_some() {
        let reason = "a micro-batch of sequences is not computed in parts; choose a smaller batch with more accumulation";
        return Err(Error::config("rows at a time", reason));
    }
    let (_, length) = batch.tokens.size2()?;
    // One row of the tensors is divided along its positions.
    let along = i64::from(batch.packing.as_ref().is_some_and(|packing| packing.is_padding_free));
    let part = |number: usize| -> Result<Batch> {
        let (first, last) = (number * rows, (number * rows + rows).min(ends.len()));
        let begin = if first == 0 { 0 } else { ends[first - 1] };
        let end = ends[last - 1];
        let cut = |tensor: &Tensor| match along {
            0 => tensor.f_narrow(0, begin / length, (end - begin) / length),
            _ => tensor.f_narrow(1, begin, end - begin),
        };
        let packing = match &batch.packing {
            None => None,
            Some(packing) => {
                let inside = |start: &&i32| (begin..=end).contains(&i64::from(**start));
                let starts: Vec<i32> =
                    packing.starts.iter().filter(inside).map(|start| start - begin as i32).collect();
                let before = packing.starts.iter().filter(|start| i64::from(**start) < begin).count() as i64;
                Some(Packing {
                    positions: cut(&packing.positions)?,
                    document_ids: cut(&packing.document_ids)?.try_sub_scalar(before)?,
                    cu_seqlens: Tensor::f_from_slice(&starts)?.f_to_device(batch.tokens.device())?,
                    longest: starts.windows(2).map(|ends| i64::from(ends[1] - ends[0])).max().unwrap_or(0),
                    starts,
                    is_padding_free: packing.is_padding_free,
                })
            }
        };
        // The counts stay with the step; the targets of a part are at most these.
        let positions = usize::try_from(end - begin).unwrap_or(usize::MAX);
        let counts = Counts { targets: batch.counts.targets.min(positions), ..Counts::default() };
        let weights = batch.weights.as_ref().map(|whole| -> Result<ExampleWeights> {
            // Only the step's total is used, which stays with the first part.
            let total = if first == 0 { whole.total } else { 0.0 };
            Ok(ExampleWeights {
                positions: cut(&whole.positions)?,
                examples: None,
                total,
                chosen_targets: 0.0,
            })
        });
        let padding = match along {
            0 => batch.padding.iter().skip(first).take(last - first).copied().collect(),
            // At the end of the last part.
            _ if last == ends.len() => batch.padding.clone(),
            _ => Vec::new(),
        };
        Ok(Batch {
            tokens: cut(&batch.tokens)?,
            labels: cut(&batch.labels)?,
            packing,
            padding,
            sequences: None,
            taught: match &batch.taught {
                None => None,
                Some(TopK { tokens, log_probabilities }) => {
                    Some(TopK { tokens: cut(tokens)?, log_probabilities: cut(log_probabilities)? })
                }
            },
            weights: weights.transpose()?,
            counts,
        })
    };
    (0..ends.len().div_ceil(rows)).map(part).collect()
}

/// Fetches `count` micro-batches, or fewer at the end of the data; `None` if there are none left.
///
/// # Errors
/// Errors of the source.
pub fn fetch(source: &mut (impl Batches + ?Sized), count: usize) -> Result<Option<MicroBatches>> {
    let mut all = MicroBatches { batches: Vec::new(), targets: 0, tokens: 0, padding: 0, rollout: None };
    while all.batches.len() < count {
        let Some(batch) = source.next()? else { break };
        all.targets += batch.counts.targets;
        all.tokens += batch.counts.tokens;
        all.padding += batch.counts.padding;
        all.batches.push(batch);
    }
    Ok((!all.batches.is_empty()).then_some(all))
}

/// Parts of a batch's positions to which the number of labels is rounded up.
const LABELLED_PARTS: usize = 8;
/// Fewest labels of such a part.
const LEAST_LABELLED: usize = 64;

/// Returns a bound on the number of `labelled` tokens of a batch of `positions`, rounded up to an eighth of the positions (64 at least), so
/// that batches of one shape have few bounds, and a head few shapes; `None` without labels.
pub(crate) fn labelled_bound(labelled: usize, positions: usize) -> Option<i64> {
    let step = positions.div_ceil(LABELLED_PARTS).max(LEAST_LABELLED);
    let bound = labelled.next_multiple_of(step).min(positions);
    i64::try_from(bound).ok().filter(|bound| *bound > 0)
}

/// Returns the document boundaries of a packed batch; `None` if each row is one document.
///
/// # Errors
/// Errors of libtorch.
pub fn documents(batch: &Batch) -> Result<Option<Documents>> {
    let documents = batch.packing.as_ref().map(|packing| {
        let (ids, cu_seqlens) = (packing.document_ids.shallow_clone(), packing.cu_seqlens.shallow_clone());
        match packing.starts.as_slice() {
            // The inputs of a graph, which repeats a step with other documents.
            [] => Ok(Documents::on_device(ids, cu_seqlens, packing.longest)),
            starts => Documents::from_parts(ids, cu_seqlens, starts.to_vec()),
        }
    });
    Ok(documents.transpose()?)
}

/// Returns the empty sums of a batch's load-balancing loss.
///
/// # Errors
/// Errors of libtorch.
pub fn balance_of(batch: &Batch) -> Result<RouterBalance> {
    let length = batch.tokens.size().last().copied().unwrap_or(0);
    Ok(RouterBalance::new(&batch.padding, length, batch.tokens.device())?)
}

/// Computes the summed loss of a batch; with `accuracy` also the number of correct predictions.
///
/// # Errors
/// Errors of the model.
pub fn forward(
    model: &(impl LanguageModel + ?Sized),
    batch: &Batch,
    training: bool,
    accuracy: bool,
) -> Result<LossOutput> {
    forward_with_balance(model, batch, (training, accuracy), None)
}

/// [`forward`], training or not and with or without `accuracy`, which adds the routers' choices to the sums of a load-balancing loss.
///
/// # Errors
/// Errors of the model.
pub fn forward_with_balance(
    model: &(impl LanguageModel + ?Sized),
    batch: &Batch,
    (training, accuracy): (bool, bool),
    balance: Option<&RouterBalance>,
) -> Result<LossOutput> {
    forward_over(model, batch, (training, accuracy), (balance, None), None)
}

/// [`forward_with_balance`] of this rank's part of each row, if the ranks of `sequence` divide them; with [noise](crate::embedding_noise) of
/// this α.
pub(crate) fn forward_over(
    model: &(impl LanguageModel + ?Sized),
    batch: &Batch,
    (training, accuracy): (bool, bool),
    (balance, sequence): (Option<&RouterBalance>, Option<&Group>),
    noise: Option<f64>,
) -> Result<LossOutput> {
    let noise = noise.map(|alpha| strength(batch, alpha)).transpose()?;
    let part = match sequence {
        None => BatchPart::whole(batch, noise),
        Some(ranks) => BatchPart::of(batch, noise, ranks),
    }?;
    let input = Input {
        tokens: &part.tokens,
        positions: part.positions.as_ref(),
        context: Context {
            documents: part.documents.as_ref(),
            training,
            accuracy,
            labelled_tokens: labelled_bound(batch.counts.targets, part.tokens.numel()),
            label_weights: part.weights.as_ref(),
            embedding_noise: part.noise.as_ref(),
            balance,
            sequence: part.shard.as_ref(),
            ..Context::default()
        },
    };
    Ok(model.loss(&input, &part.labels)?)
}
