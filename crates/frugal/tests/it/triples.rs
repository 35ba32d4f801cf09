//! Triples of the techniques that [`pairs`](crate::pairs) crosses, in full fine-tuning of the smallest model.

use std::collections::BTreeSet;

use frugal::Recipe;

use crate::pairs::{Family, TECHNIQUES, base, cross, distinct};

/// Each pair that works together is met in a triple that does.
#[test]
fn triples_of_full_fine_tuning_that_have_every_pair_keep_their_promises() {
    let of: Vec<usize> =
        (0..TECHNIQUES.len()).filter(|index| TECHNIQUES[*index].group != "adapter").collect();
    let mut sets = Vec::new();
    for (at, one) in of.iter().enumerate() {
        for (next, two) in of.iter().enumerate().skip(at + 1) {
            sets.extend(of[next + 1..].iter().map(|three| vec![*one, *two, *three]));
        }
    }
    let mut met = BTreeSet::new();
    sets.retain(|set| {
        let mut config = base();
        set.iter().for_each(|index| (TECHNIQUES[*index].set)(&mut config, Family::Llama));
        let works = distinct(set) && Recipe::new(&config).is_ok();
        works && [[0, 1], [0, 2], [1, 2]].map(|[a, b]| met.insert([set[a], set[b]])).contains(&true)
    });
    let (refused, failures) = cross(Family::Llama, &sets);
    assert!(failures.is_empty() && refused.is_empty(), "\n{}{}", failures.join("\n"), refused.join("\n"));
    assert!(sets.len() > 50 && met.len() > 100, "{} triples, {} pairs", sets.len(), met.len());
}
