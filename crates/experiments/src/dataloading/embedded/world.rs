//! The invented world that all articles are about: its names, and how often each occurs.

use std::collections::BTreeSet;

use super::random::Random;

const PLACE_STARTS: [&str; 30] = [
    "Ar", "Bel", "Bran", "Cal", "Dorn", "El", "Fal", "Gar", "Hal", "Is", "Kel", "Lor", "Mar", "Nor", "Ost",
    "Pel", "Ros", "Sel", "Tar", "Ul", "Vel", "Wes", "Al", "Ber", "Cor", "Den", "Har", "Lin", "Mor", "Tel",
];
const PLACE_ENDS: [&str; 26] = [
    "den", "ford", "mark", "stead", "wick", "haven", "burg", "dale", "minster", "ton", "feld", "brook",
    "holm", "gard", "port", "mouth", "ley", "ham", "stow", "berg", "ona", "una", "ista", "mere", "worth",
    "by",
];
const NAME_STARTS: [&str; 28] = [
    "Ad", "Bar", "Bren", "Cas", "Dor", "Ed", "Fer", "Gal", "Hen", "Il", "Jor", "Kar", "Lam", "Mel", "Nev",
    "Or", "Pas", "Ren", "Sand", "Tol", "Ur", "Var", "Wil", "Zan", "Hol", "Lund", "Mat", "Pol",
];
const NAME_ENDS: [&str; 20] = [
    "ack", "elin", "ero", "ane", "ison", "mann", "ovar", "well", "ett", "ick", "uso", "ard", "enko", "ier",
    "ström", "ley", "orn", "as", "eira", "quist",
];
const MEN: [&str; 24] = [
    "Adrian",
    "Anton",
    "Bruno",
    "Daniel",
    "Edgar",
    "Emil",
    "Felix",
    "Frederick",
    "George",
    "Hugo",
    "Ivan",
    "Jonas",
    "Julian",
    "Karl",
    "Leo",
    "Martin",
    "Oscar",
    "Paul",
    "Peter",
    "Robert",
    "Simon",
    "Stefan",
    "Thomas",
    "Victor",
];
const WOMEN: [&str; 24] = [
    "Ada", "Agnes", "Anna", "Beatrice", "Clara", "Dora", "Edith", "Elena", "Emma", "Eva", "Flora", "Helen",
    "Ida", "Irene", "Julia", "Laura", "Louise", "Maria", "Martha", "Nina", "Olga", "Rosa", "Sophia", "Vera",
];
const RIVER_STARTS: [&str; 20] = [
    "Al", "Bre", "Ca", "Dra", "El", "Fa", "Ga", "I", "Lo", "Me", "Ne", "O", "Pra", "Ru", "Sa", "Te", "U",
    "Va", "We", "Yo",
];
const RIVER_ENDS: [&str; 14] =
    ["lme", "nna", "rva", "sse", "tava", "vre", "der", "gna", "mber", "rth", "lda", "na", "sk", "ver"];

/// Names, the most frequent first.
#[derive(Debug)]
pub(super) struct World {
    pub(super) countries: Vec<String>,
    pub(super) regions: Vec<String>,
    pub(super) places: Vec<String>,
    pub(super) rivers: Vec<String>,
    pub(super) surnames: Vec<String>,
}

impl World {
    pub(super) fn new(random: &mut Random) -> Self {
        let mut taken = BTreeSet::new();
        let mut names = |count: usize, starts: &[&str], ends: &[&str], suffix: &str| {
            let mut names = Vec::with_capacity(count);
            while names.len() < count {
                let name = format!("{}{}{suffix}", random.pick(starts), random.pick(ends));
                if taken.insert(name.clone()) {
                    names.push(name);
                }
            }
            names
        };
        Self {
            countries: names(
                5,
                &["Vald", "Ost", "Carr", "Lethr", "Marv"],
                &["oria", "ania", "inia", "aria"],
                "",
            ),
            regions: names(14, &PLACE_STARTS, &["land", "shire", "mark", "ia"], ""),
            places: names(150, &PLACE_STARTS, &PLACE_ENDS, ""),
            rivers: names(90, &RIVER_STARTS, &RIVER_ENDS, ""),
            surnames: names(220, &NAME_STARTS, &NAME_ENDS, ""),
        }
    }

    /// A person, and whether it is a woman.
    pub(super) fn person(&self, random: &mut Random) -> (String, String, bool) {
        let woman = random.chance(45);
        let given = if woman { random.pick_ranked(&WOMEN) } else { random.pick_ranked(&MEN) };
        let surname = random.pick_ranked(&self.surnames).clone();
        (format!("{given} {surname}"), surname, woman)
    }
}
