//! What `accounting::sharding` predicts, against what ranks send and what their allocators count.

use std::collections::BTreeMap;

use accounting::sharding as predicted;
use report::Record;

#[test]
fn the_prediction_has_the_constants_of_the_implementation() {
    assert_eq!(predicted::BLOCK, sharding::BLOCK as u64);
    assert_eq!(predicted::ALIGNMENT, sharding::ALIGNMENT as u64);
    assert_eq!(predicted::BUCKET_BYTES, sharding::Options::default().bucket_bytes as u64);
    assert_eq!(predicted::PIECE, runtime::collectives::PIECE as u64);
}

#[test]
fn ranks_of_every_stage_send_and_take_what_is_predicted() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = crate::program("sharding");
    command.args("cost --memory --ranks 1,2 --device cpu --seed 0 --records records.jsonl".split(' '));
    let output = command.current_dir(folder.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = std::fs::read_to_string(folder.path().join("records.jsonl")).unwrap();
    let mut found: BTreeMap<String, BTreeMap<String, f64>> = BTreeMap::new();
    for line in text.lines() {
        let record: Record = serde_json::from_str(line).unwrap();
        let figures = found.entry(serde_json::to_string(&record.case).unwrap()).or_default();
        figures.insert(record.metric.name.clone(), record.metric.value.unwrap());
    }
    // Three stages on one and two ranks and on one of 1,024, the third with and without recomputation, and no sharding.
    assert_eq!(found.len(), 13, "{found:?}");
    for (case, figures) in &found {
        assert_eq!(figures.get("sent_difference_bytes").copied().unwrap_or(0.0), 0.0, "{case}: {figures:?}");
        assert!(figures["relative_error"] <= 0.05, "{case}: {figures:?}");
    }
}
