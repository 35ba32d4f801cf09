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
    packed: None,
    pad: 7,
    shuffle: Some(3),
    by_length: 1,
    epochs: Some(2),
    grouping: Grouping::Rows,
};

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
    for layout in
        [PADDED, Layout { packed: Some(9), ..PADDED }, Layout { shuffle: None, ..PADDED }, by_length]
    {
        let mut source = MaskedBatches::new(rows(), layout, Device::Cpu).unwrap();
        assert_eq!(pairs(&mut source), expected, "{layout:?}");
    }
}

#[test]
fn sizes_are_those_of_the_batches() {
    for layout in [PADDED, Layout { packed: Some(9), ..PADDED }, Layout { by_length: 4, ..PADDED }] {
        let mut source = MaskedBatches::new(rows(), layout, Device::Cpu).unwrap();
        let shapes: Vec<BatchShape> = source.shapes(u64::MAX / 2).collect::<Result<_>>().unwrap();
        for shape in &shapes {
            let batch = source.next().unwrap().unwrap();
            let size = batch.tokens.size();
            assert_eq!([shape.rows as i64, shape.length as i64], size[..]);
            assert_eq!(shape.labelled, batch.counts.targets);
        }
        assert!(source.next().unwrap().is_none() && source.shapes(5).next().is_none());
    }
}

#[test]
fn packed_rows_have_document_boundaries() {
    let layout = Layout { packed: Some(9), shuffle: None, batch: 100, ..PADDED };
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
    let error = MaskedBatches::new(rows(), Layout { packed: Some(4), ..PADDED }, Device::Cpu).unwrap_err();
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
