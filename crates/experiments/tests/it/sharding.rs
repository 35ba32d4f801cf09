//! Trainings over ranks against what `accounting::sharding` predicts of bytes, and against PyTorch's.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use accounting::sharding as predicted;
use report::Record;
use runtime::collectives::ranks::{Output, Progress, Ranks, RanksConfig};
use serde_json::Value;

#[test]
fn the_prediction_has_the_constants_of_the_implementation() {
    assert_eq!(predicted::BLOCK, sharding::BLOCK as u64);
    assert_eq!(predicted::ALIGNMENT, sharding::ALIGNMENT as u64);
    assert_eq!(predicted::BUCKET_BYTES, sharding::ShardingConfig::default().bucket_bytes as u64);
    for ranks in [1, 2, 17, 18, 100, 1024] {
        let piece = runtime::collectives::piece_bytes(ranks, tch::Device::Cpu);
        assert_eq!(predicted::piece_bytes(ranks as u64), piece as u64);
    }
}

/// The tiny model of a smoke run has buckets that one rank owns alone: it shows whether the buckets begin at the same tensors.
#[test]
fn ranks_of_every_stage_send_and_take_what_is_predicted() {
    for scale in ["smoke", "laptop"] {
        let folder = tempfile::tempdir().unwrap();
        let mut command = crate::program("sharding");
        command.args(
            "cost --memory --ranks 1,2 --device cpu --seed 0 --records records.jsonl --scale".split(' '),
        );
        let output = command.arg(scale).current_dir(folder.path()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = std::fs::read_to_string(folder.path().join("records.jsonl")).unwrap();
        let mut by_case: BTreeMap<String, BTreeMap<String, f64>> = BTreeMap::new();
        for line in text.lines() {
            let record: Record = serde_json::from_str(line).unwrap();
            let figures = by_case.entry(serde_json::to_string(&record.case).unwrap()).or_default();
            figures.insert(record.metric.name.clone(), record.metric.value.unwrap());
        }
        // Three stages on one and two ranks and on one of 1,024, the third with and without recomputation, and no sharding.
        assert_eq!(by_case.len(), 13, "{by_case:?}");
        for (case, figures) in &by_case {
            let sent = figures.get("sent_difference_bytes").copied().unwrap_or(0.0);
            assert_eq!(sent, 0.0, "{scale}, {case}: {figures:?}");
            // With one rank among many, reductions take longer than layers, and the bytes at the peak depend on their pace.
            let most = if case.contains("1024") { 0.1 } else { 0.05 };
            assert!(figures["relative_error"] <= most, "{scale}, {case}: {figures:?}");
        }
    }
}

/// Rows that one, two and four ranks divide.
#[test]
fn parts_of_rows_take_and_send_what_is_predicted() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = crate::program("sharding");
    let words = "rows --tokens 256 --scale smoke --device cpu --seed 0 --records records.jsonl";
    let output = command.args(words.split(' ')).current_dir(folder.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = std::fs::read_to_string(folder.path().join("records.jsonl")).unwrap();
    let mut checked = [0; 3];
    for line in text.lines() {
        let record: Record = serde_json::from_str(line).unwrap();
        let (value, case) = (record.metric.value.unwrap(), &record.case);
        match record.metric.name.as_str() {
            "relative_error" => {
                checked[0] += 1;
                // How far reductions have come at the peak weighs more in a tiny model; `sharding/sequence-peak` has the bound of a larger one.
                assert!(value <= 0.1, "{case:?}: {value}");
            }
            "sent_difference_bytes" => {
                checked[1] += 1;
                assert_eq!(value, 0.0, "{case:?}");
            }
            "loss_difference" => {
                checked[2] += 1;
                assert!(value <= 1e-5, "{case:?}: {value}");
            }
            _ => {}
        }
    }
    // One process sends nothing.
    assert_eq!(checked, [6, 4, 6], "{text}");
}

/// Two machines in one, as far as this process may make them. Headers, acknowledgements and the answers of barriers are on the cable, too.
#[test]
fn bytes_between_machines_are_the_predicted_ones() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = crate::program("sharding");
    let words = "links --tiny --rates 0 --steps 2 --tokens 16 --device cpu --seed 0 --records records.jsonl";
    let output = command.args(words.split(' ')).current_dir(folder.path()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let text = std::fs::read_to_string(folder.path().join("records.jsonl")).unwrap_or_default();
    if text.is_empty() {
        let reason = said.lines().find(|line| line.contains("skipped: ")).expect("a reason");
        eprintln!("{reason}");
        return;
    }
    let records = text.lines().map(|line| serde_json::from_str::<Record>(line).unwrap());
    let ratios: Vec<f64> = records
        .filter(|record| record.metric.name == "link_over_predicted")
        .map(|record| record.metric.value.unwrap())
        .collect();
    assert_eq!(ratios.len(), 4, "{text}");
    assert!(ratios.iter().all(|ratio| (1.0..1.1).contains(ratio)), "{ratios:?}");
}

/// Numbers of `key` of a training.
fn numbers(training: &Value, key: &str) -> Vec<f64> {
    training[key].as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

/// The fixture has the same model, weights, tokens and steps, by DDP and FSDP2: `python xtask/peers/sharding.py --tokens 16 --sizes
/// 64,176,2,256 --records /dev/null --fixture crates/experiments/tests/it/sharding/pytorch.json`.
#[test]
fn losses_and_parameters_of_two_ranks_are_those_of_ddp_and_fsdp2() {
    let fixture: Value = serde_json::from_str(include_str!("sharding/pytorch.json")).unwrap();
    let lines = Arc::new(Mutex::new(Vec::new()));
    let written = lines.clone();
    let command = |_| {
        let mut command = crate::program("sharding");
        command.args(
            "rank --hidden 64 --feed-forward 176 --layers 2 --vocabulary 256 --tokens 16 --steps 8"
                .split(' '),
        );
        command
            .args("--bucket-bytes 65536 --variants".split(' '))
            .arg("ZeRO-1,ZeRO-2,ZeRO-3,ZeRO-3 recomputed");
        command
    };
    let options = RanksConfig { ranks: 2, ..RanksConfig::default() };
    let mut ranks = Ranks::start(&options, command, move |rank, output, line| {
        if rank == 0 && output == Output::Standard {
            written.lock().unwrap().push(line.to_owned());
        }
    })
    .unwrap();
    assert_eq!(ranks.wait(Duration::from_secs(120)).unwrap(), Progress::Done);
    ranks.end(Duration::from_secs(5)).unwrap();
    let lines = std::mem::take(&mut *lines.lock().unwrap());
    assert_eq!(lines.len(), 4, "{lines:?}");
    for line in lines {
        let ours: Value = serde_json::from_str(&line).unwrap();
        let variant = if ours["variant"] == "ZeRO-1" { "DDP" } else { ours["variant"].as_str().unwrap() };
        let theirs = fixture["trainings"].as_array().unwrap();
        let theirs = theirs.iter().find(|theirs| theirs["variant"] == variant).unwrap();
        for key in ["losses", "projections"] {
            let (ours, theirs) = (numbers(&ours, key), numbers(theirs, key));
            assert!(ours.len() == theirs.len() && ours.len() >= 4, "{key}");
            for (ours, theirs) in ours.iter().zip(&theirs) {
                assert!((ours / theirs - 1.0).abs() < 1e-6, "{key} of {variant}: {ours}, expected {theirs}");
            }
        }
    }
}
