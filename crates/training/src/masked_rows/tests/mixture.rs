//! Mixtures of sources in batches.

use super::*;

/// Rows of 3 tokens, whose first says the source and the second the row.
fn source(source: i64, rows: i64) -> MaskedRows {
    let row = |number| MaskedRow::new(vec![1000 * (source + 1), number, 1], vec![-100, number, 1]);
    MaskedRows::of(&(0..rows).map(row).collect::<Vec<_>>()).unwrap()
}

fn mixed(layout: Layout) -> MaskedBatches {
    let rows = MaskedRows::join([source(0, 10), source(1, 4), source(2, 70)]);
    let mixture = Mixture::new(&[0.5, 0.3, 0.2]).unwrap();
    MaskedBatches::over(&rows, layout, Device::Cpu).unwrap().with_mixture(mixture).unwrap()
}

/// The sources and rows of all batches that are left.
fn read(source: &mut MaskedBatches) -> Vec<(i64, i64)> {
    let mut all = Vec::new();
    while let Some(batch) = source.next().unwrap() {
        let tokens = numbers(&batch.tokens);
        let pairs = tokens.iter().flat_map(|row| row.chunks_exact(2));
        all.extend(pairs.filter(|pair| pair[0] != 7).map(|pair| (pair[0] / 1000 - 1, pair[1])));
    }
    all
}

const SHARES: [f64; 3] = [0.5, 0.3, 0.2];

#[test]
fn a_mixture_has_the_shares_in_every_prefix_and_each_row_as_often() {
    let layout = Layout { batch: 5, epochs: Some(3), ..PADDED };
    for layout in [
        layout,
        Layout { shuffle: None, ..layout },
        Layout { by_length: 3, ..layout },
        Layout { arrangement: Arrangement::PaddingFree, by_length: 3, ..layout },
    ] {
        let all = read(&mut mixed(layout));
        // An epoch has as many rows as the sources.
        assert_eq!(all.len(), 3 * 84);
        let mut given: [Vec<i64>; 3] = Default::default();
        for (position, (source, row)) in all.iter().enumerate() {
            given[*source as usize].push(*row);
            if layout.by_length == 1 {
                for (given, share) in given.iter().zip(SHARES) {
                    assert!((given.len() as f64 - share * (position + 1) as f64).abs() < 1.0);
                }
            }
        }
        for (given, rows) in given.iter().zip([10, 4, 70]) {
            // Whole epochs of a source have each of its rows once, in orders of their own.
            let epochs: Vec<&[i64]> = given.chunks_exact(rows).collect();
            assert!(
                layout.by_length > 1
                    || epochs.iter().all(|epoch| (0..rows as i64).all(|row| epoch.contains(&row)))
            );
            if layout.shuffle.is_some() && epochs.len() > 1 {
                assert!(epochs.windows(2).any(|pair| pair[0] != pair[1]));
            }
        }
    }
}

#[test]
fn a_mixture_resumes_anywhere() {
    let layout = Layout { batch: 5, epochs: Some(2), ..PADDED };
    let (mut whole, mut batches) = (mixed(layout), 0);
    let expected = read(&mut mixed(layout));
    let mut before = Vec::new();
    loop {
        let mut resumed = mixed(layout);
        resumed.resume(&whole.state()).unwrap();
        assert_eq!([before.clone(), read(&mut resumed)].concat(), expected, "batch {batches}");
        let Some(batch) = whole.next().unwrap() else { break };
        before.extend(numbers(&batch.tokens).iter().map(|row| (row[0] / 1000 - 1, row[1])));
        batches += 1;
    }
    assert_eq!(batches, 34);
    let rows = MaskedRows::join([source(0, 10), source(1, 4), source(2, 70)]);
    let over = MaskedBatches::over(&rows, layout, Device::Cpu).unwrap();
    for other in [over.clone(), over.clone().with_mixture(Mixture::new(&[1.0; 3]).unwrap()).unwrap()] {
        let error = other.clone().resume(&whole.state()).unwrap_err().to_string();
        assert!(error.contains("in another order"), "{error}");
    }
}

#[test]
fn packed_rows_are_of_one_source_and_mixed_by_weight() {
    let layout = Layout { batch: 1, arrangement: Arrangement::Packed(8), epochs: Some(2), ..PADDED };
    let mut source = mixed(layout);
    // Four rows of 2 positions in each: 3 packed rows, 1, and 18.
    assert_eq!((source.units(), source.sources.to_vec()), (22, vec![0, 3, 4, 22]));
    let (mut packed, mut at) = ([0; 3], 0);
    while let Some(batch) = source.next().unwrap() {
        let tokens = numbers(&batch.tokens).concat();
        let sources: Vec<i64> =
            tokens.chunks_exact(2).map(|pair| pair[0] / 1000 - 1).filter(|source| *source >= 0).collect();
        assert!(sources.iter().all(|source| *source == sources[0]), "{tokens:?}");
        packed[sources[0] as usize] += 1;
        at += 1;
        for (given, share) in packed.iter().zip(SHARES) {
            assert!((f64::from(*given) - share * f64::from(at)).abs() < 1.0, "{packed:?}");
        }
    }
    assert_eq!(at, 44);
}

#[test]
fn mixtures_that_do_not_fit_the_rows_are_refused() {
    let rows = MaskedRows::join([source(0, 10), source(1, 4)]);
    let refused = |rows: &MaskedRows, weights: &[f64], layout| {
        let batches = MaskedBatches::over(rows, layout, Device::Cpu).unwrap();
        batches.with_mixture(Mixture::new(weights).unwrap()).unwrap_err().to_string()
    };
    assert!(refused(&rows, &[1.0], PADDED).contains("1 weights of a mixture for 2 sources"));
    let silent = MaskedRows::of(&[row(1, 3, 0)]).unwrap();
    let rows = MaskedRows::join([source(0, 10), silent]);
    for layout in [PADDED, PACKED, PADDING_FREE] {
        assert!(refused(&rows, &[1.0, 1.0], layout).contains("source 1 of the mixture has no row"));
    }
}
