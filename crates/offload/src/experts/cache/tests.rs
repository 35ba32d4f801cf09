//! Passes on several threads over reads that fail, panic, or end in any order: each read waits for the test's word.

use std::sync::mpsc::{Receiver, Sender, channel};

use super::*;

const BYTES: i64 = 256;

/// What a read does.
enum Word {
    Give,
    Fail,
    Panic,
}

/// A layer whose expert e has bytes of value e + 1.
struct Gated {
    begun: Mutex<Sender<usize>>,
    words: Mutex<Receiver<Word>>,
}

impl StoredExperts for Gated {
    fn count(&self) -> usize {
        4
    }

    fn slot_bytes(&self) -> u64 {
        BYTES as u64
    }

    fn read_bytes(&self) -> u64 {
        BYTES as u64
    }

    fn check(&self, _: usize) -> Result<()> {
        Ok(())
    }

    fn read(&self, expert: usize, slot: &Tensor) -> Result<()> {
        self.begun.lock().send(expert).unwrap();
        match self.words.lock().recv().unwrap() {
            Word::Give => {
                let _ = slot.shallow_clone().fill_(expert as i64 + 1);
                Ok(())
            }
            Word::Fail => Err(refused("experts", "the disk is gone")),
            Word::Panic => panic!("a bug"),
        }
    }

    fn matrices(&self, slot: &Tensor) -> Result<[Tensor; 3]> {
        Ok([slot.shallow_clone(), slot.shallow_clone(), slot.shallow_clone()])
    }
}

/// A cache of two slots, the experts whose reads begin, and the words of the reads.
fn cache() -> (Arc<Cache>, Receiver<usize>, Sender<Word>) {
    let ((begun, begins), (word, words)) = (channel(), channel());
    let layer = Gated { begun: Mutex::new(begun), words: Mutex::new(words) };
    (Cache::new(vec![Box::new(layer)], 2 * BYTES as u64).unwrap(), begins, word)
}

fn begin(cache: &Cache, experts: &[usize]) -> u64 {
    cache.begin(0, experts).unwrap().0
}

/// Waits for an expert and returns its slot, whose values are its own.
fn wait(cache: &Cache, pass: u64, expert: usize) -> Tensor {
    let [slot, ..] = cache.wait(pass, (0, expert)).unwrap();
    check(&slot, expert);
    slot
}

fn check(slot: &Tensor, expert: usize) {
    assert_eq!(*slot, slot.full_like(expert as i64 + 1), "the slot has another expert than {expert}");
}

#[test]
fn a_failed_read_fails_the_passes_that_waited_for_it_and_leaves_others_their_pins() {
    let (cache, begins, word) = cache();
    let first = begin(&cache, &[0]);
    assert_eq!(begins.recv().unwrap(), 0);
    // It begins with what is being read.
    let second = begin(&cache, &[0]);
    word.send(Word::Fail).unwrap();
    for pass in [first, second] {
        let error = cache.wait(pass, (0, 0)).unwrap_err().to_string();
        assert!(error.contains("the disk is gone"), "{error}");
    }
    let third = begin(&cache, &[0]);
    assert_eq!(begins.recv().unwrap(), 0);
    word.send(Word::Give).unwrap();
    let slot = wait(&cache, third, 0);
    cache.cancel(first, [(0, 0)].into_iter());
    cache.cancel(second, [(0, 0)].into_iter());

    // Two more experts have but one slot, for that of the third pass is in use.
    let fourth = begin(&cache, &[1, 2]);
    for expert in [1, 2] {
        assert_eq!(begins.recv().unwrap(), expert);
        word.send(Word::Give).unwrap();
        let other = wait(&cache, fourth, expert);
        assert_ne!(other.data_ptr(), slot.data_ptr());
        check(&slot, 0);
        cache.release(fourth, (0, expert));
    }
    cache.release(third, (0, 0));
    assert_eq!(cache.counters().loads, 3);
}

#[test]
fn an_expert_that_another_pass_requested_is_pinned_by_each_pass_that_uses_it() {
    let (cache, begins, word) = cache();
    let first = begin(&cache, &[0]);
    assert_eq!(begins.recv().unwrap(), 0);
    let second = begin(&cache, &[1]);
    let third = begin(&cache, &[2, 3]);
    let fourth = begin(&cache, &[1]);
    word.send(Word::Give).unwrap();
    let _ = wait(&cache, first, 0);
    assert_eq!(begins.recv().unwrap(), 1);
    word.send(Word::Give).unwrap();
    let _ = wait(&cache, second, 1);
    // The reader waits for a slot for expert 2, and has not come to the fourth pass' request.
    let slot = wait(&cache, fourth, 1);
    cache.release(second, (0, 1));
    cache.release(first, (0, 0));
    for expert in [2, 3] {
        assert_eq!(begins.recv().unwrap(), expert);
        word.send(Word::Give).unwrap();
        let other = wait(&cache, third, expert);
        assert_ne!(other.data_ptr(), slot.data_ptr());
        check(&slot, 1);
        cache.release(third, (0, expert));
    }
    cache.release(fourth, (0, 1));
}

#[test]
fn a_panic_of_a_read_is_an_error_of_the_pass_and_the_next_read_works() {
    let (cache, begins, word) = cache();
    let first = begin(&cache, &[2]);
    assert_eq!(begins.recv().unwrap(), 2);
    word.send(Word::Panic).unwrap();
    let error = cache.wait(first, (0, 2)).unwrap_err().to_string();
    assert!(error.contains("the thread that reads experts panicked: a bug"), "{error}");
    cache.cancel(first, [(0, 2)].into_iter());
    let second = begin(&cache, &[2]);
    assert_eq!(begins.recv().unwrap(), 2);
    word.send(Word::Give).unwrap();
    let _ = wait(&cache, second, 2);
    cache.release(second, (0, 2));
}
