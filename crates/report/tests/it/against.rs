//! Two runs side by side.

use crate::fixed_records::{record, rounds, specs, swiglu};
use expect_test::expect;
use report::against::compare;
use report::{Case, Metric};

#[test]
fn the_same_run_has_no_changes() {
    let changes = compare(&specs(), &swiglu(), &swiglu());
    assert_eq!((changes.changed.len(), changes.same), (0, swiglu().len()));
    expect![[r#"
        0 of 8 measurements changed by more than their spread.
    "#]]
    .assert_eq(&changes.markdown());
}

#[test]
fn changes_outside_the_spread_come_first() {
    let old = swiglu();
    let mut new = swiglu();
    new[0].metric = Metric::of_samples("backward_seconds", "s", &[0.101, 0.103, 0.105]);
    new[3].metric.value = Some(300.0 * 1024.0 * 1024.0);
    new[4].metric = Metric::of_samples("backward_seconds", "s", &[2.0, 2.1, 2.2]);
    new.remove(7);
    new.push(record(
        "swiglu",
        Case::new().with("batch", 16).with("level", "InputOnly"),
        Metric::exact("peak_bytes", "B", 3e9),
    ));
    expect![[r#"
        2 of 7 measurements changed by more than their spread.

        | experiment | case               | metric   |                         old |     new |  change | outside the spread |
        | ---------- | ------------------ | -------- | --------------------------: | ------: | ------: | ------------------ |
        | swiglu     | batch 8, SaveAll   | backward | not measured (needs 12 GiB) |  2.10 s |       – | yes                |
        | swiglu     | batch 1, InputOnly | peak     |                     250 MiB | 300 MiB | +20.0 % | yes                |
        | swiglu     | batch 1, SaveAll   | backward |                      102 ms |  103 ms |  +1.0 % | no                 |

        Only in the new run:

        | experiment | case                | metric |    value |
        | ---------- | ------------------- | ------ | -------: |
        | swiglu     | batch 16, InputOnly | peak   | 2.79 GiB |

        Only in the old run:

        | experiment | case               | metric |    value |
        | ---------- | ------------------ | ------ | -------: |
        | swiglu     | batch 8, InputOnly | peak   | 1.50 GiB |
    "#]].assert_eq(&compare(&specs(), &old, &new).markdown());
}

#[test]
fn rounds_count_as_one_measurement_with_their_ratio() {
    let slower: Vec<_> = rounds()
        .into_iter()
        .map(|mut record| {
            if record.case.get("impl").unwrap() == "frugal" {
                record.metric.value = record.metric.value.map(|seconds| seconds * 1.1);
            }
            record
        })
        .collect();
    expect![[r#"
        1 of 3 measurements changed by more than their spread.

        | experiment  | case            | metric          |    old |    new |  change | outside the spread |
        | ----------- | --------------- | --------------- | -----: | -----: | ------: | ------------------ |
        | swiglu-time | batch 8, frugal | step time ratio |  0.950 |  1.045 | +10.0 % | yes                |
        | swiglu-time | frugal, batch 8 | step            | 3.80 s | 4.18 s | +10.0 % | no                 |
    "#]]
    .assert_eq(&compare(&specs(), &rounds(), &slower).markdown());
}
