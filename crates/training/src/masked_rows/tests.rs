mod mixture;

use std::collections::BTreeMap;

use dataloading::IGNORE_INDEX;
use tch::Tensor;

use super::*;

fn row(first: i64, prompt: usize, answer: usize) -> MaskedRow {
    let tokens: Vec<i64> = (first..).take(prompt + answer).collect();
    let labels = (0..).zip(&tokens).map(|(at, id)| if at < prompt { IGNORE_INDEX } else { *id }).collect();
    MaskedRow::new(tokens, labels)
}

fn rows() -> Vec<MaskedRow> {
    (0..9).map(|number| row(100 * (number + 1), 2 + number as usize % 4, 1 + number as usize % 3)).collect()
}

const PADDED: Layout = Layout {
    batch: 4,
    arrangement: Arrangement::Padded,
    pad: 7,
    shuffle: Some(3),
    by_length: 1,
    epochs: Some(2),
    grouping: Grouping::Rows,
};

const PACKED: Layout = Layout { arrangement: Arrangement::Packed(9), ..PADDED };
const PADDING_FREE: Layout = Layout { arrangement: Arrangement::PaddingFree, ..PADDED };

fn numbers(tensor: &Tensor) -> Vec<Vec<i64>> {
    Vec::try_from(tensor).unwrap()
}

/// The next token of each document token, over all remaining batches.
fn pairs(source: &mut MaskedBatches) -> BTreeMap<(i64, i64), usize> {
    let mut pairs = BTreeMap::new();
    while let Some(batch) = source.next().unwrap() {
        let (tokens, labels) = (numbers(&batch.tokens), numbers(&batch.labels));
        let all: Vec<(i64, i64)> =
            tokens.concat().into_iter().zip(labels.concat()).filter(|(token, _)| *token != 7).collect();
        assert_eq!(all.len(), batch.counts.tokens);
        assert_eq!(tokens.concat().len(), batch.counts.tokens + batch.counts.padding);
        assert_eq!(all.iter().filter(|(_, label)| *label != IGNORE_INDEX).count(), batch.counts.targets);
        all.into_iter().for_each(|pair| *pairs.entry(pair).or_default() += 1);
    }
    pairs
}

#[test]
fn every_answer_is_predicted_once_an_epoch_padded_and_packed() {
    let mut expected = BTreeMap::new();
    for row in rows() {
        for at in 1..row.tokens.len() {
            expected.insert((row.tokens[at - 1], row.labels[at]), 2);
        }
    }
    let by_length = Layout { by_length: 2, ..PADDED };
    for layout in [
        PADDED,
        PACKED,
        PADDING_FREE,
        Layout { shuffle: None, ..PADDED },
        by_length,
        Layout { by_length: 3, ..PADDING_FREE },
        PADDING_FREE.of_evaluation(),
    ] {
        let mut source = MaskedBatches::new(rows(), layout, Device::Cpu).unwrap();
        let epochs = layout.epochs.unwrap() as usize;
        let expected = expected.keys().map(|pair| (*pair, epochs)).collect();
        assert_eq!(pairs(&mut source), expected, "{layout:?}");
    }
}

#[test]
fn sizes_are_those_of_the_batches() {
    let [sorted, dealt] = [PADDED, PADDING_FREE].map(|layout| Layout { by_length: 4, ..layout });
    for layout in [PADDED, PACKED, PADDING_FREE, sorted, dealt] {
        let mut source = MaskedBatches::new(rows(), layout, Device::Cpu).unwrap();
        let shapes: Vec<BatchShape> = source.shapes(u64::MAX / 2).collect::<Result<_>>().unwrap();
        for shape in &shapes {
            let batch = source.next().unwrap().unwrap();
            let size = batch.tokens.size();
            match &batch.packing {
                Some(packing) if packing.is_padding_free => {
                    assert_eq!(packing.starts.len() - 1, shape.rows);
                    assert_eq!(packing.longest, shape.longest as i64);
                    assert_eq!(size, [1, batch.counts.tokens as i64]);
                    assert_eq!(shape.length, batch.counts.tokens.div_ceil(shape.rows));
                }
                _ => assert_eq!([shape.rows as i64, shape.length as i64], size[..]),
            }
            assert_eq!(shape.labelled, batch.counts.targets);
        }
        assert!(source.next().unwrap().is_none() && source.shapes(5).next().is_none());
    }
}

#[test]
fn packed_rows_have_document_boundaries() {
    let layout = Layout { shuffle: None, batch: 100, ..PACKED };
    let mut source = MaskedBatches::new(rows(), layout, Device::Cpu).unwrap();
    assert!(source.units() < 6, "{:?}", source.together);
    let batch = source.next().unwrap().unwrap();
    let packing = batch.packing.unwrap();
    let (tokens, positions) = (numbers(&batch.tokens).concat(), numbers(&packing.positions).concat());
    for ends in packing.starts.windows(2) {
        let document = ends[0] as usize..ends[1] as usize;
        assert!(positions[document.clone()].iter().copied().eq(0..document.len() as i64));
        let tokens = &tokens[document];
        assert!(tokens[0] == 7 || tokens[0] % 100 == 0, "{tokens:?} does not begin a row");
    }
    assert_eq!(source.tokens_and_padding(), (batch.counts.tokens, batch.counts.padding));
}

#[test]
fn batches_resume_and_epochs_differ() {
    let mut source = MaskedBatches::new(rows(), PADDED, Device::Cpu).unwrap();
    let first = numbers(&source.next().unwrap().unwrap().tokens);
    let (state, rest) = (source.state(), pairs(&mut source));
    let mut other = MaskedBatches::new(rows(), PADDED, Device::Cpu).unwrap();
    other.resume(&state).unwrap();
    assert_eq!(pairs(&mut other), rest);
    other.resume(&json!({ "rows": state["rows"], "position": other.batches_per_epoch() })).unwrap();
    assert_ne!(numbers(&other.next().unwrap().unwrap().tokens), first);
    for layout in [
        Layout { batch: 3, ..PADDED },
        Layout { shuffle: Some(4), ..PADDED },
        Layout { by_length: 2, ..PADDED },
        PADDING_FREE,
    ] {
        let mut other = MaskedBatches::new(rows(), layout, Device::Cpu).unwrap();
        assert!(other.resume(&state).unwrap_err().to_string().contains("same data"), "{layout:?}");
    }
}

#[test]
fn options_without_batches_are_refused() {
    let silent = vec![row(1, 3, 0)];
    assert!(MaskedBatches::new(silent, PADDED, Device::Cpu).is_err());
    assert!(MaskedBatches::new(rows(), Layout { batch: 0, ..PADDED }, Device::Cpu).is_err());
    let error =
        MaskedBatches::new(rows(), Layout { arrangement: Arrangement::Packed(4), ..PADDED }, Device::Cpu)
            .unwrap_err();
    assert!(error.to_string().contains("packed rows have 4"), "{error}");
}

/// Also where a step spans two epochs (9 rows in batches of 4, 4, 1) and where the last one is short.
#[test]
fn a_step_has_the_same_rows_by_length_with_less_padding() {
    let (mut padding, together) = ([0, 0], 2);
    let sorted = Layout { by_length: together, ..PADDED };
    let [mut ordered, mut sorted] =
        [PADDED, sorted].map(|layout| MaskedBatches::new(rows(), layout, Device::Cpu).unwrap());
    loop {
        let mut steps = [&mut ordered, &mut sorted].map(|source| {
            let batches = (0..together).map_while(|_| source.next().unwrap());
            batches.collect::<Vec<Batch>>()
        });
        if steps[0].is_empty() {
            assert!(steps[1].is_empty());
            break;
        }
        let lengths: Vec<i64> = steps[1].iter().map(|batch| batch.tokens.size()[1]).collect();
        assert!(lengths.is_sorted_by(|one, next| one >= next), "{lengths:?}");
        let starts = |batch: &Batch| numbers(&batch.tokens.narrow(1, 0, 1)).concat();
        let [one, other] = [&steps[0], &steps[1]].map(|batches| {
            let mut all: Vec<i64> = batches.iter().flat_map(starts).collect();
            all.sort_unstable();
            all
        });
        assert_eq!(one, other);
        for (sum, batches) in padding.iter_mut().zip(&mut steps) {
            *sum += batches.iter().map(|batch| batch.counts.padding).sum::<usize>();
        }
    }
    assert!(padding[1] < padding[0], "{padding:?}");
}

/// The batches of a step without padding have its rows, and about as many positions each.
#[test]
fn rows_without_padding_are_dealt_to_the_batches_of_a_step() {
    let rows: Vec<MaskedRow> =
        (0..24).map(|number| row(100 * (number + 1), 2, 1 + 3 * number as usize)).collect();
    let layout = Layout { batch: 8, epochs: Some(1), ..PADDING_FREE };
    let positions = |by_length: usize| {
        let source = MaskedBatches::new(rows.clone(), Layout { by_length, ..layout }, Device::Cpu).unwrap();
        let shapes = source.shapes(3).collect::<Result<Vec<_>>>().unwrap();
        assert!(shapes.iter().all(|shape| shape.rows == 8));
        shapes.iter().map(|shape| shape.rows * shape.length).collect::<Vec<_>>()
    };
    let spread = |positions: &[usize]| positions.iter().max().unwrap() - positions.iter().min().unwrap();
    let (drawn, dealt) = (positions(1), positions(3));
    // Lengths differ by 3: the batches by at most the longest row less the shortest, here by one difference and the rounding of the mean.
    assert!(spread(&dealt) <= 3 + 8 && spread(&drawn) > 2 * spread(&dealt), "{drawn:?} {dealt:?}");
    let mut batch = MaskedBatches::new(rows.clone(), Layout { by_length: 3, ..layout }, Device::Cpu).unwrap();
    let packing = batch.next().unwrap().unwrap().packing.unwrap();
    assert!(packing.starts.windows(3).all(|at| at[1] - at[0] >= at[2] - at[1]), "the longest first");
}
