//! The assignment's split is that of the `datasets` library, to the problem.

use crate::gsm8k_data;
use expect_test::expect;
use frugal::tasks::gsm8k::{Split, split};

#[test]
fn the_parts_are_those_of_the_datasets_library() {
    // datasets 4, `train_test_split(test_size=0.1, seed=42)`, and its test part by `test_size=0.5, seed=42`, of 7473 rows.
    let parts = Split::new(7473, split::SEED).unwrap();
    assert_eq!((parts.train.len(), parts.test.len(), parts.eval.len()), (6725, 374, 374));
    assert_eq!(parts.train[..8], [1624, 3980, 419, 697, 3433, 3311, 5266, 2040]);
    assert_eq!(parts.train[6722..], [5729, 7117, 1672]);
    assert_eq!(parts.test[..8], [3749, 5993, 6827, 6590, 4727, 3762, 2742, 6072]);
    assert_eq!(parts.test[371..], [392, 3730, 3163]);
    assert_eq!(parts.eval[..8], [4306, 5173, 2413, 6355, 828, 3809, 3703, 676]);
    assert_eq!(parts.eval[371..], [289, 1361, 6570]);
}

#[test]
fn sizes_and_orders_of_small_splits_are_theirs_too() {
    let check = |count, share, train: &[usize], test: &[usize]| {
        let found = split::train_test_split(count, share, 7).unwrap();
        assert_eq!((&found.0[..], &found.1[..]), (train, test), "{count} by {share}");
    };
    check(2, 0.1, &[1], &[0]);
    check(3, 0.5, &[1], &[0, 2]);
    check(5, 0.1, &[0, 4, 1, 3], &[2]);
    check(7, 0.3, &[2, 4, 1, 3], &[0, 5, 6]);
    check(10, 0.5, &[6, 2, 4, 5, 9], &[8, 0, 7, 1, 3]);
    for (count, share, test) in [(11, 0.1, 2), (101, 0.1, 11), (101, 0.3, 31), (748, 0.1, 75)] {
        let found = split::train_test_split(count, share, 7).unwrap();
        assert_eq!((found.0.len(), found.1.len()), (count - test, test), "{count} by {share}");
    }
}

#[test]
fn every_problem_is_in_one_part() {
    for (count, seed) in [(12, 0), (100, 1), (7473, 42), (7473, u64::MAX)] {
        let parts = Split::new(count, seed).unwrap();
        let mut all = [parts.train, parts.test, parts.eval].concat();
        all.sort_unstable();
        assert_eq!(all, (0..count).collect::<Vec<_>>(), "{count} by seed {seed}");
    }
}

#[test]
fn what_cannot_be_divided_is_refused() {
    let error = |count, share| split::train_test_split(count, share, 1).unwrap_err().to_string();
    expect!["split: a test share of 1.5; expected one between 0 and 1"].assert_eq(&error(10, 1.5));
    assert!(error(10, f64::NAN).contains("NaN"));
    expect![
        "split: 1 problems cannot be divided with a test share of 0.1: a part would be empty; give more problems"
    ]
    .assert_eq(&error(1, 0.1));
    assert!(error(0, 0.5).contains("0 problems"));
    assert!(Split::new(5, 1).is_err());
}

#[test]
fn numbers_become_problems() {
    let problems = gsm8k_data::problems();
    let chosen = split::select(&problems, &[5, 0, 100_000]);
    assert_eq!(chosen, [problems[5].clone(), problems[0].clone()]);
}
