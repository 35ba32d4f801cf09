//! From rows to the tensors of a batch.

use dataloading::{Batch, Counts, IGNORE_INDEX, Packing, Ratings, Sequences, TopK};
use models::Documents;
use runtime::ops::TryScalar;
use tch::{Device, Kind, Tensor};

use super::mismatched::Mismatched;
use super::weights;
use super::{Arrangement, Grouping, Layout, MaskedBatches, MaskedRow, positions};
use crate::error::Result;

/// A row of a batch, or one of those that share a packed row.
pub(crate) struct Item {
    pub(crate) row: MaskedRow,
    /// Whether its prompt is learned, too.
    pub(crate) learns_prompt: bool,
    /// Whether it counts among [`Sequences::chosen_targets`].
    pub(crate) is_chosen: bool,
    /// Its log-probability by a reference model.
    pub(crate) reference: Option<f32>,
    /// A teacher's tokens and the bits of their log-probabilities in fp16, k for each labelled position.
    pub(crate) taught: Option<(Vec<u32>, Vec<u16>)>,
}

impl Item {
    /// A row for itself.
    pub(crate) fn of(row: MaskedRow) -> Self {
        Self { row, learns_prompt: false, is_chosen: false, reference: None, taught: None }
    }

    /// The labels of its sequence.
    fn learned(&self) -> usize {
        self.row.labels[1..].iter().filter(|label| **label != IGNORE_INDEX).count()
    }

    /// Its labels.
    pub(super) fn targets(&self) -> usize {
        if self.learns_prompt { positions(&self.row) } else { self.learned() }
    }
}

impl MaskedBatches {
    /// The batch of these units.
    pub(super) fn batch(&self, units: &[usize]) -> Result<Batch> {
        let (grouping, known) = (self.layout.grouping, self.reference.as_deref());
        let (mut rows, mut mismatched) = (Vec::new(), Mismatched::new(self, known));
        for unit in units {
            let mut together = Vec::new();
            for number in self.unit(*unit) {
                let row = self.rows.row(number)?;
                if grouping == Grouping::Rated {
                    mismatched.add(&row, number)?;
                }
                together.push(Item {
                    row,
                    learns_prompt: grouping.learns_prompt(number),
                    is_chosen: grouping.is_chosen(number),
                    reference: known.map(|known| known[number * grouping.references()]),
                    taught: self
                        .top_k
                        .as_ref()
                        .map(|file| file.row(number, self.rows.size(number)?.learned))
                        .transpose()?,
                });
            }
            match (self.layout.arrangement, rows.last_mut()) {
                (Arrangement::Padded, _) => rows.extend(together.into_iter().map(|item| vec![item])),
                (Arrangement::PaddingFree, Some(row)) => row.extend(together),
                (Arrangement::PaddingFree, None) | (Arrangement::Packed(_), _) => rows.push(together),
            }
        }
        let mut batch = assemble(&rows, &self.layout, self.device)?;
        if let Some(file) = &self.top_k {
            let taught = TopKOfBatch::new(file.header().k, rows.iter().flatten());
            batch.taught = Some(taught.finish(&batch.labels)?);
        }
        if self.has_weights {
            batch.weights =
                Some(weights::of(&rows, batch.tokens.size2()?.1 as usize, grouping, self.device)?);
        }
        if let (Grouping::Rated, Some(sequences)) = (grouping, &mut batch.sequences) {
            let signs: Vec<f32> = rows.iter().flatten().map(|item| item.row.weight.signum()).collect();
            sequences.ratings = Some(Ratings {
                signs: Tensor::f_from_slice(&signs)?.f_to_device(self.device)?,
                desirable: signs.iter().filter(|sign| **sign > 0.0).count(),
                mismatched: Box::new(assemble(&mismatched.rows(), &self.layout, self.device)?),
            });
        }
        Ok(batch)
    }
}

/// Positions of a batch without padding are padded to a multiple on a GPU.
const MULTIPLE: usize = 64;

/// Returns the batch of rows. Each row has the tokens of one item, or of several unless rows are padded.
pub(crate) fn assemble(rows: &[Vec<Item>], layout: &Layout, device: Device) -> Result<Batch> {
    let widths = rows.iter().map(|items| items.iter().map(|item| positions(&item.row)).sum());
    let widest: usize = widths.max().unwrap_or(0);
    let length = match layout.arrangement {
        Arrangement::Packed(capacity) => capacity,
        Arrangement::PaddingFree if device.is_cuda() => widest.next_multiple_of(MULTIPLE),
        Arrangement::PaddingFree | Arrangement::Padded => widest,
    };
    let mut counts = Counts::default();
    let (mut tokens, mut labels, mut places, mut lengths) = (vec![], vec![], vec![], vec![]);
    let (mut padding, mut sequences) = (Vec::new(), SequencesOfBatch::default());
    for items in rows {
        let mut documents = Vec::new();
        for item in items {
            let (row, inputs, targets) = (&item.row, positions(&item.row), item.targets());
            tokens.extend_from_slice(&row.tokens[..inputs]);
            places.extend(0..inputs as i64);
            let learnt = &row.labels[1..];
            labels.extend_from_slice(if item.learns_prompt { &row.tokens[1..] } else { learnt });
            if layout.grouping != Grouping::Rows {
                sequences.add(learnt, item.learned());
                sequences.chosen_targets += if item.is_chosen { targets } else { 0 };
                sequences.reference.extend(item.reference);
            }
            counts.targets += targets;
            counts.tokens += inputs;
            counts.documents += 1;
            documents.push(inputs);
        }
        let empty = length - documents.iter().sum::<usize>();
        padding.push(empty as i64);
        if empty > 0 {
            tokens.extend(std::iter::repeat_n(layout.pad, empty));
            labels.extend(std::iter::repeat_n(IGNORE_INDEX, empty));
            places.extend(0..empty as i64);
            sequences.pad(empty);
            counts.padding += empty;
            documents.push(empty);
        }
        lengths.push(documents);
    }
    let shape = [lengths.len() as i64, length as i64];
    let tensor = |values: &[i64]| -> Result<Tensor> {
        Ok(Tensor::f_from_slice(values)?.f_reshape(shape)?.f_to_device(device)?)
    };
    let packing = match layout.arrangement {
        Arrangement::Padded => None,
        arrangement => {
            let documents = Documents::new(&lengths, device)?;
            Some(Packing {
                positions: tensor(&places)?,
                document_ids: documents.ids().shallow_clone(),
                cu_seqlens: documents.cu_seqlens().shallow_clone(),
                starts: documents.starts().to_vec(),
                longest: documents.longest(),
                is_padding_free: arrangement == Arrangement::PaddingFree,
            })
        }
    };
    let padding = if counts.padding > 0 { padding } else { Vec::new() };
    let sequences = match layout.grouping {
        Grouping::Rows => None,
        Grouping::Pairs { .. } | Grouping::Rated => Some(sequences.finish(shape, device)?),
    };
    Ok(Batch {
        tokens: tensor(&tokens)?,
        labels: tensor(&labels)?,
        packing,
        padding,
        sequences,
        taught: None,
        weights: None,
        counts,
    })
}

/// [`Sequences`] on the host.
#[derive(Default)]
struct SequencesOfBatch {
    /// A label of a prompt has −1 until all sequences are known.
    ids: Vec<i64>,
    lengths: Vec<f32>,
    reference: Vec<f32>,
    chosen_targets: usize,
}

impl SequencesOfBatch {
    /// Adds the sequence of a row: its labels, and how many there are.
    fn add(&mut self, labels: &[i64], learned: usize) {
        let number = self.lengths.len() as i64;
        self.ids.extend(labels.iter().map(|label| if *label == IGNORE_INDEX { -1 } else { number }));
        self.lengths.push(learned as f32);
    }

    fn pad(&mut self, positions: usize) {
        self.ids.extend(std::iter::repeat_n(-1, positions));
    }

    fn finish(mut self, shape: [i64; 2], device: Device) -> Result<Sequences> {
        let count = self.lengths.len() as i64;
        self.ids.iter_mut().filter(|id| **id < 0).for_each(|id| *id = count);
        let on_device = |values: &[f32]| Tensor::f_from_slice(values)?.f_to_device(device);
        let reference = (!self.reference.is_empty()).then(|| on_device(&self.reference)).transpose()?;
        Ok(Sequences {
            ids: Tensor::f_from_slice(&self.ids)?.f_reshape(shape)?.f_to_device(device)?,
            lengths: on_device(&self.lengths)?,
            reference,
            chosen_targets: self.chosen_targets,
            ratings: None,
        })
    }
}

/// [`TopK`] on the host: of the labelled positions of a batch, in the order of its rows.
struct TopKOfBatch {
    k: usize,
    tokens: Vec<i64>,
    bits: Vec<i16>,
}

impl TopKOfBatch {
    fn new<'a>(k: usize, items: impl Iterator<Item = &'a Item>) -> Self {
        let (mut tokens, mut bits) = (Vec::new(), Vec::new());
        for (own, values) in items.filter_map(|item| item.taught.as_ref()) {
            tokens.extend(own.iter().map(|token| i64::from(*token)));
            bits.extend(values.iter().map(|value| value.cast_signed()));
        }
        Self { k, tokens, bits }
    }

    /// Puts them at the labelled positions of `labels` `[rows, length]`.
    fn finish(self, labels: &Tensor) -> Result<TopK> {
        let Self { k, tokens, bits } = self;
        let (device, size) = (labels.device(), labels.size());
        let labels = labels.f_to_device(Device::Cpu)?.f_reshape([-1])?;
        let positions = labels.try_ne(IGNORE_INDEX)?.f_nonzero()?.f_squeeze_dim(1)?;
        let shape = [-1, k as i64];
        let all = |values: Tensor| -> Result<Tensor> {
            let zeros = Tensor::f_zeros([labels.size()[0], k as i64], (values.kind(), Device::Cpu))?;
            let all = zeros.f_index_copy(0, &positions, &values.f_reshape(shape)?)?;
            Ok(all.f_reshape([size[0], size[1], k as i64])?.f_to_device(device)?)
        };
        let values = Tensor::f_from_slice(&bits)?.f_view_dtype(Kind::Half)?.f_to_kind(Kind::Float)?;
        Ok(TopK { tokens: all(Tensor::f_from_slice(&tokens)?)?, log_probabilities: all(values)? })
    }
}
