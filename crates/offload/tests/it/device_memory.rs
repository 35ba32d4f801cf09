//! A device out of memory. The counts are the whole process's, so no other test may run at the same time.

use crate::support::{assert_intact, assert_same, batch, gradients_of, snapshot, tiny};
use expect_test::{Expect, expect};
use models::Llama;
use models::module::{Input, LanguageModel, trainable};
use offload::{Method, OffloadConfig};
use runtime::autograd::{backward, set_grad};
use runtime::memory::{self, Region};
use tch::Device;

const CPU: Device = Device::Cpu;

/// Runs a step under a limit of `bytes` above the live bytes.
fn step_within(model: &Llama, above: u64) -> Result<(), String> {
    let tokens = batch(60, 7);
    let _limit = memory::limit(CPU, memory::live_bytes(CPU).unwrap() + above).unwrap();
    let loss = model.loss(&Input::new(&tokens), &tokens).map_err(|error| format!("forward: {error}"))?.sum;
    backward(&[&loss]).map_err(|error| format!("backward: {error}"))
}

/// Removes digits, which depend on other live bytes.
fn words(error: &str) -> String {
    let mut text = String::new();
    for letter in error.chars() {
        if !letter.is_ascii_digit() {
            text.push(letter);
        } else if !text.ends_with('#') {
            text.push('#');
        }
    }
    text
}

/// Returns whose backward failed, and why, without the operation that failed first, which depends on other live bytes.
fn ends(error: &str) -> String {
    let whose = error.find("`: ").map_or(error.len(), |at| at + "`: ".len());
    let what = error.find("out of memory").unwrap();
    let end = error.find("(runtime::memory::limit)").unwrap() + "(runtime::memory::limit)".len();
    format!("{}{}", &error[..whose], &error[what..end])
}

fn check(method: Method, expected: Expect) {
    let tokens = batch(60, 7);
    let reference = gradients_of(&*tiny(), &tokens);
    let mut model = tiny();
    let offload = OffloadConfig { method, ..OffloadConfig::default() }.install(&mut *model).unwrap();
    let intact = snapshot(&*model);

    // The first failure: less memory than one layer.
    let mut said = vec![words(&step_within(&model, offload.layer_bytes() - 1).unwrap_err())];
    offload.check_on_host().unwrap();
    assert_intact(&intact, &*model, method.name());
    assert_same(&reference, &gradients_of(&*model, &tokens), method.name());

    // With the ring allocated: from no memory to plenty, allocations fail at one point after the other.
    let region = Region::start(CPU).unwrap();
    gradients_of(&*model, &tokens);
    let enough = region.finish().unwrap().peak_above_start();
    let mut successes = 0;
    for above in (0..=20).map(|part| enough * part / 20) {
        match step_within(&model, above) {
            Err(error) => said.push(words(&error)),
            Ok(()) => successes += 1,
        }
        let case = format!("{}, {above} bytes", method.name());
        assert_intact(&intact, &*model, &case);
        offload.check_on_host().unwrap();
        for (_, tensor) in trainable(&*model) {
            set_grad(tensor, None).unwrap();
        }
        assert_same(&reference, &gradients_of(&*model, &tokens), &case);
        offload.check_on_host().unwrap();
    }
    assert!(successes >= 1, "{enough} bytes are enough");
    // Which points fail depends on timing, but these are always among them.
    said.dedup();
    let first = said.iter().find(|error| error.starts_with("forward")).unwrap();
    let last = said.iter().rfind(|error| error.starts_with("backward: backward of")).unwrap();
    expected.assert_eq(&format!("{first}\n{}\n", ends(last)));
}

#[test]
fn a_step_out_of_memory_fails_and_the_next_works() {
    memory::track_cpu().unwrap();
    check(
        Method::Overlap,
        expect![[r#"
        forward: offload: allocating memory of `a slot of the ring` failed: out of memory on the CPU: # bytes were asked for, # are live and the limit is #; free tensors, take smaller batches, or raise the limit (runtime::memory::limit); the model on the host is unchanged
        backward: backward of `OverlapOffloadFunction`: out of memory on the CPU: # bytes were asked for, # are live and the limit is #; free tensors, take smaller batches, or raise the limit (runtime::memory::limit)
    "#]],
    );
    check(
        Method::Function,
        expect![[r#"
        forward: offload: loading of `layers.#` failed: out of memory on the CPU: # bytes were asked for, # are live and the limit is #; free tensors, take smaller batches, or raise the limit (runtime::memory::limit); the model on the host is unchanged
        backward: backward of `OffloadFunction`: out of memory on the CPU: # bytes were asked for, # are live and the limit is #; free tensors, take smaller batches, or raise the limit (runtime::memory::limit)
    "#]],
    );
    check(
        Method::Checkpointing,
        expect![[r#"
        forward: offload: loading of `layers.#` failed: out of memory on the CPU: # bytes were asked for, # are live and the limit is #; free tensors, take smaller batches, or raise the limit (runtime::memory::limit); the model on the host is unchanged
        backward: backward of `checkpoint`: out of memory on the CPU: # bytes were asked for, # are live and the limit is #; free tensors, take smaller batches, or raise the limit (runtime::memory::limit)
    "#]],
    );
}
