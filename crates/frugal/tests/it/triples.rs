//! Triples of the techniques that [`pairs`](crate::pairs) crosses, in full fine-tuning of the smallest model.

use std::collections::BTreeSet;

use frugal::Recipe;

use crate::pairs::{base, cross, distinct};
use crate::techniques::{Family, TECHNIQUES};

/// Settings of the loop, which meet each pair once; of the others every triple runs that a recipe takes.
const SETTINGS: [&str; 6] = ["rows", "clipping", "freezing", "accumulation", "noise", "weights"];

#[test]
fn every_triple_of_full_fine_tuning_keeps_its_promises() {
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
        let is_setting = set.iter().any(|index| SETTINGS.contains(&TECHNIQUES[*index].group));
        let pairs = [[0, 1], [0, 2], [1, 2]].map(|[a, b]| [set[a], set[b]]);
        works && (pairs.map(|pair| met.insert(pair)).contains(&true) || !is_setting)
    });

    let (refused, failures) = cross(Family::Llama, &sets);
    assert!(failures.is_empty() && refused.is_empty(), "\n{}{}", failures.join("\n"), refused.join("\n"));
    assert!(sets.len() > 300 && met.len() > 100, "{} triples, {} pairs", sets.len(), met.len());
}
