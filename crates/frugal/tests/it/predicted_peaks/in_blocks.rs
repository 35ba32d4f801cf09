//! A frozen base whose matrices stay in the blocks of a GGUF file.

use frugal::kernels::quantized::blocks;
use gguf::TensorType;
use tch::Kind;

use super::{ADAPTED, Case, alone, compare_in, dora, files, mixed, pissa, recompute, token_rows};
use crate::blocks_file::Shape;

/// The share of the measured peak by which a prediction may be wrong.
const TOLERANCE: f64 = 0.03;

/// All logits are one chunk: of several, a batch of fewer labels may have larger ones.
const IN_BLOCKS: Case = Case { name: "blocks", kind: blocks::KIND, chunk: 256, ..ADAPTED };
const CASES: [Case; 10] = [
    IN_BLOCKS,
    Case { name: "blocks, no dropout", adapters: Some(alone), length: 24, rows: 2, ..IN_BLOCKS },
    Case { name: "blocks, packed", packed: Some(64), length: 25, ..IN_BLOCKS },
    Case { name: "blocks, recomputed", placement: recompute, length: 100, ..IN_BLOCKS },
    Case { name: "blocks, mixed plan", placement: mixed, accumulation: 2, ..IN_BLOCKS },
    Case { name: "blocks, two rows at a time", at_once: Some(2), ..IN_BLOCKS },
    Case { name: "blocks, DoRA", adapters: Some(dora), ..IN_BLOCKS },
    Case { name: "blocks, PiSSA, recomputed", adapters: Some(pissa), placement: recompute, ..IN_BLOCKS },
    Case { name: "blocks, rows of tokens", adapters: Some(token_rows), ..IN_BLOCKS },
    Case { name: "blocks, layers in files", placement: files, ..IN_BLOCKS },
];

/// The widths are whole blocks of every type. A tile of the larger output matrix is not the whole matrix, in either direction.
const SHAPES: [(&str, Shape); 2] = [
    (
        "qwen2",
        Shape {
            architecture: "qwen2",
            vocabulary: 600,
            hidden: 256,
            inner: 512,
            layers: 4,
            embedding: TensorType::Q6K,
            output: None,
        },
    ),
    (
        "llama, untied",
        Shape {
            architecture: "llama",
            vocabulary: 20_000,
            hidden: 256,
            inner: 768,
            layers: 5,
            embedding: TensorType::Q4K,
            output: Some(TensorType::Q8_0),
        },
    ),
];

#[test]
fn predicted_peaks_of_a_base_in_blocks_are_those_of_the_allocator() {
    let mut wrong = Vec::new();
    for (name, shape) in &SHAPES {
        let scratch = tempfile::tempdir().unwrap();
        let folder = shape.open(scratch.path());
        assert_eq!(folder.config().tie_word_embeddings, shape.output.is_none());
        assert_eq!(folder.kind().unwrap(), Kind::BFloat16);
        // All labels of a batch may be in the rows of one pass: that is a bound, wide where there are many logits.
        let (exact, bounds): (Vec<Case>, Vec<Case>) =
            CASES.into_iter().partition(|case| case.at_once.is_none());
        wrong.extend(compare_in(name, &folder, &exact, TOLERANCE));
        if shape.output.is_none() {
            wrong.extend(compare_in(name, &folder, &bounds, 0.05));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
