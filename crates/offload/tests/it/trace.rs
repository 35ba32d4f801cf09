//! What a trace shows of a step, and that it changes nothing.

use crate::support::{alone, assert_same, batch, gradients_of, tiny};
use offload::{Direction, Method, OffloadConfig, Span, StreamKind};

/// The compute spans of a layer in one direction, which do not overlap.
fn computes(trace: &[Span], layer: usize, direction: Direction) -> usize {
    let of = |span: &&Span| {
        span.stream == StreamKind::Compute && span.layer == layer && span.direction == direction
    };
    let found: Vec<&Span> = trace.iter().filter(of).collect();
    assert!(found.windows(2).all(|pair| pair[0].end <= pair[1].start), "layer {layer}: {found:?}");
    found.len()
}

#[test]
fn backwards_that_autograd_runs_are_computing_too() {
    let _alone = alone();
    let resident = OffloadConfig { resident: vec![0, 1, 2, 3, 4], ..OffloadConfig::default() };
    let with = |method| OffloadConfig { method, ..OffloadConfig::default() };
    for (name, options, backward) in [
        // Recomputation, and autograd's backward of it.
        ("checkpointing", with(Method::Checkpointing), 2),
        ("resident", resident, 2),
        // Both within the function.
        ("function", with(Method::Function), 1),
        ("overlap", with(Method::Overlap), 1),
    ] {
        let mut model = tiny();
        let tokens = batch(60, 1);
        let offload = options.install(&mut *model).unwrap();
        let untraced = gradients_of(&*model, &tokens);
        offload.start_trace().unwrap();
        let traced = gradients_of(&*model, &tokens);
        let trace = offload.take_trace().unwrap();
        assert_same(&untraced, &traced, name);
        for layer in 0..5 {
            assert_eq!(computes(&trace, layer, Direction::Forward), 1, "{name}, layer {layer}");
            assert_eq!(computes(&trace, layer, Direction::Backward), backward, "{name}, layer {layer}");
        }
    }
}
