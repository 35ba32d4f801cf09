//! What each kind of article is about: facts that agree with each other throughout it.

use std::collections::BTreeMap;

use super::grammar::{Teller, number};
use super::random::Random;
use super::world::World;

/// A kind of article.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Topic {
    Town,
    River,
    Species,
    Person,
    Album,
    Ship,
}

impl Topic {
    pub(super) const ALL: [Topic; 6] =
        [Topic::Town, Topic::River, Topic::Species, Topic::Person, Topic::Album, Topic::Ship];

    pub(super) fn grammar(self) -> &'static str {
        match self {
            Topic::Town => include_str!("grammar/towns.txt"),
            Topic::River => include_str!("grammar/rivers.txt"),
            Topic::Species => include_str!("grammar/species.txt"),
            Topic::Person => include_str!("grammar/people.txt"),
            Topic::Album => include_str!("grammar/albums.txt"),
            Topic::Ship => include_str!("grammar/ships.txt"),
        }
    }
}

const GOODS: [&str; 10] =
    ["timber", "grain", "linen", "salt fish", "copper", "cider", "glass", "hides", "slate", "honey"];
const INDUSTRIES: [&str; 9] = [
    "paper making",
    "glass making",
    "shipbuilding",
    "brewing",
    "machine tools",
    "pottery",
    "food processing",
    "textiles",
    "printing",
];
const MATERIALS: [&str; 6] =
    ["red brick", "grey granite", "sandstone", "limestone", "oak and clay", "yellow brick"];
const FAIRS: [&str; 8] = ["apple", "horse", "lantern", "cheese", "wool", "honey", "boat", "book"];
const SAINTS: [&str; 7] = ["Anne", "Bride", "Colman", "Hilda", "Oswald", "Piran", "Ursula"];
const HILLS: [&str; 12] = [
    "Grey Tor",
    "Long Ridge",
    "Crow Fell",
    "Bald Top",
    "Hollow Hill",
    "Old Crown",
    "Raven Rock",
    "Sheep Fell",
    "Three Stones",
    "White Tor",
    "Wind Ridge",
    "Bell Hill",
];
const KINDS: [(&str, &str); 8] = [
    ("otter", "small fish and crayfish"),
    ("hare", "herbs, grass and buds"),
    ("marten", "mice, birds and eggs"),
    ("owl", "mice and large insects"),
    ("newt", "worms, snails and larvae"),
    ("duck", "seeds, snails and water plants"),
    ("bat", "moths and beetles"),
    ("hedgehog", "worms, beetles and slugs"),
];
const LOOKS: [&str; 14] = [
    "reed",
    "stone",
    "moss",
    "frost",
    "ember",
    "marsh",
    "silver",
    "long-tailed",
    "white-throated",
    "red-backed",
    "striped",
    "crested",
    "dusky",
    "golden",
];
const GENERA: [&str; 10] = [
    "Lutrella", "Palorus", "Mardelia", "Strigona", "Aquarina", "Vesperus", "Noctella", "Borealis",
    "Corvinia", "Silvana",
];
const EPITHETS: [&str; 12] = [
    "borealis",
    "minor",
    "vulgaris",
    "montana",
    "palustris",
    "rufa",
    "elegans",
    "robusta",
    "pallida",
    "maculata",
    "littoralis",
    "silvestris",
];
const TRADES: [&str; 10] = [
    "astronomer",
    "composer",
    "novelist",
    "botanist",
    "engineer",
    "painter",
    "historian",
    "map maker",
    "chemist",
    "architect",
];
const WORK_STARTS: [&str; 9] = [
    "The Book of",
    "An Atlas of",
    "A History of",
    "Songs of",
    "The Theory of",
    "Letters on",
    "A Treatise on",
    "The Garden of",
    "Notes on",
];
const WORK_ENDS: [&str; 14] = [
    "Winter Rivers",
    "the Northern Sky",
    "Small Towns",
    "Salt and Iron",
    "Slow Machines",
    "Hidden Valleys",
    "the Long Coast",
    "Wild Bees",
    "Broken Bells",
    "the Old Roads",
    "Falling Water",
    "Distant Harbours",
    "the Seven Hills",
    "Light and Glass",
];
const ALBUM_STARTS: [&str; 12] = [
    "Silent", "Paper", "Northern", "Broken", "Velvet", "Hollow", "Electric", "Winter", "Crooked", "Golden",
    "Distant", "Burning",
];
const ALBUM_ENDS: [&str; 12] = [
    "Harbour", "Lanterns", "Rooms", "Machines", "Orchard", "Weather", "Signals", "Bridges", "Mirrors",
    "Gardens", "Stations", "Tides",
];
const SONGS: [&str; 24] = [
    "Leave the Light",
    "Seven Miles",
    "Ferry Song",
    "Cold Hands",
    "Nobody's Road",
    "Rain on Tin",
    "The Last Tram",
    "Salt",
    "Glass Town",
    "Under the Pier",
    "Slow Train",
    "My Brother's Coat",
    "Half a Moon",
    "Wires",
    "Sleepwalker",
    "Empty Chairs",
    "Morning Bell",
    "Two Rivers",
    "Lighthouse",
    "Postcards",
    "Dust",
    "A Map of You",
    "Close the Door",
    "Harbour Lights",
];
const GENRES: [&str; 6] = ["folk rock", "jazz", "indie rock", "synth pop", "soul", "progressive rock"];
const SHIP_NAMES: [&str; 16] = [
    "Albatross",
    "Aurora",
    "Constance",
    "Defiance",
    "Endeavour",
    "Evening Star",
    "Fortune",
    "Gannet",
    "Meteor",
    "Perseverance",
    "Queen Agnes",
    "Queen Ursula",
    "Resolute",
    "Sea Lark",
    "Swift",
    "Vigilant",
];

/// The facts of a new article and its title, which is not in `taken` and is put there.
pub(super) fn gather<'a>(
    topic: Topic,
    world: &'a World,
    mut random: Random,
    taken: &mut std::collections::BTreeSet<String>,
) -> (String, Teller<'a>) {
    loop {
        let (title, teller) = draw(topic, world, random.fork(taken.len() as u64));
        if taken.insert(title.clone()) {
            return (title, teller);
        }
        random = random.fork(1);
    }
}

fn draw(topic: Topic, world: &World, mut random: Random) -> (String, Teller<'_>) {
    let r = &mut random;
    let mut facts: BTreeMap<&'static str, String> = BTreeMap::new();
    let three = distinct(r, &world.rivers);
    for (name, value) in ["river", "stream", "creek"].into_iter().zip(three) {
        facts.insert(name, value);
    }
    facts.insert("town", r.pick(&world.places).clone());
    facts.insert("mouth", r.pick_ranked(&world.places).clone());
    facts.insert("country", r.pick_ranked(&world.countries).clone());
    facts.insert("region", r.pick_ranked(&world.regions).clone());
    for (name, list) in [
        ("good", &GOODS[..]),
        ("industry", &INDUSTRIES),
        ("material", &MATERIALS),
        ("fair", &FAIRS),
        ("saint", &SAINTS),
        ("hill", &HILLS),
    ] {
        facts.insert(name, (*r.pick(list)).into());
    }
    for name in [
        "founder",
        "author",
        "spouse",
        "singer",
        "guitarist",
        "drummer",
        "producer",
        "designer",
        "captain",
        "lastcaptain",
    ] {
        facts.insert(name, world.person(r).0);
    }
    facts.insert("railway", r.range(1845, 1890).to_string());
    let (mut end, mut recent) = (2010, 1975);
    let (start, title);
    match topic {
        Topic::Town => {
            start = r.range(1080, 1520);
            title = facts["town"].clone();
            facts.insert("census", r.range(1990, 2018).to_string());
            facts.insert("population", number(r.range(12, 900) * 100 + r.range(1, 99)));
            facts.insert("rank", (*r.pick(&["second", "third", "fourth", "sixth", "ninth", "tenth"])).into());
        }
        Topic::River => {
            start = r.range(1150, 1600);
            title = format!("{} (river)", facts["river"]);
            facts.insert("length", number(r.range(90, 840)));
            facts.insert("basin", number(r.range(12, 320) * 100));
        }
        Topic::Species => {
            start = r.range(1760, 1890);
            let (kind, food) = *r.pick(&KINDS);
            let common = format!("{} {kind}", r.pick(&LOOKS));
            title = capital(&common);
            facts.insert("described", start.to_string());
            facts.insert("latin", format!("{} {}", r.pick(&GENERA), r.pick(&EPITHETS)));
            for (name, epithet) in ["epithet", "epithet2", "epithet3"].into_iter().zip(distinct(r, &EPITHETS))
            {
                facts.insert(name, epithet);
            }
            facts.insert("kind", kind.into());
            facts.insert("food", food.into());
            facts.insert("common", common);
        }
        Topic::Person => {
            let (name, surname, woman) = world.person(r);
            start = r.range(1690, 1900);
            end = start + r.range(52, 88);
            recent = end + 10;
            let pronouns = if woman { ["she", "her", "her"] } else { ["he", "his", "him"] };
            for (key, word) in ["he", "his", "him"].into_iter().zip(pronouns) {
                facts.insert(key, word.into());
            }
            facts.insert("He", capital(pronouns[0]));
            facts.insert("His", capital(pronouns[1]));
            title = name.clone();
            facts.insert("name", name);
            facts.insert("surname", surname);
            facts.insert("trade", (*r.pick(&TRADES)).into());
            facts.insert("old", (end - 14).to_string());
            facts.insert("youth", (start + 13).to_string());
            let spouse = loop {
                let (spouse, _, other) = world.person(r);
                if other != woman {
                    break spouse;
                }
            };
            facts.insert("spouse", spouse);
            facts.insert("work", format!("{} {}", r.pick(&WORK_STARTS), r.pick(&WORK_ENDS)));
            facts.insert("workyear", (end - r.range(8, 20)).to_string());
            let school = r.pick_ranked(&world.places);
            facts.insert("school", format!("the {} of {school}", r.pick(&["university", "academy"])));
            facts.insert("end", end.to_string());
        }
        Topic::Album => {
            start = r.range(1964, 2004);
            recent = start + 6;
            title = format!("{} {}", r.pick(&ALBUM_STARTS), r.pick(&ALBUM_ENDS));
            facts.insert("album", title.clone());
            facts.insert(
                "band",
                format!(
                    "The {} {}",
                    r.pick(&ALBUM_STARTS),
                    r.pick(&["Sons", "Wolves", "Clerks", "Pilots", "Sisters", "Kings"])
                ),
            );
            facts.insert("label", (*r.pick(&["Tower", "Bluebird", "Anchor", "Meridian", "Parlour"])).into());
            facts.insert("genre", (*r.pick(&GENRES)).into());
            for (name, song) in ["song", "song2", "song3", "newsong"].into_iter().zip(distinct(r, &SONGS)) {
                facts.insert(name, song);
            }
        }
        Topic::Ship => {
            start = r.range(1865, 1925);
            end = start + r.range(14, 34);
            recent = end + 25;
            let name = *r.pick(&SHIP_NAMES);
            title = format!("{name} ({start} ship)");
            facts.insert("late", ((start + end) / 2).to_string());
            let crew = r.range(60, 900);
            facts.insert("ship", name.into());
            facts.insert("crew", number(crew));
            facts.insert("lost", number(r.range(9, crew - 10)));
            facts.insert("length", number(r.range(60, 190)));
            facts.insert("tonnage", number(r.range(12, 180) * 100));
            facts.insert("yard", r.pick_ranked(&world.surnames).clone());
            facts.insert("end", end.to_string());
        }
    }
    facts.insert("start", start.to_string());
    (title, Teller { world, random, facts, year: start, end, recent })
}

/// Four that differ.
fn distinct<T: ToString + PartialEq>(random: &mut Random, list: &[T]) -> Vec<String> {
    let mut found: Vec<&T> = Vec::new();
    while found.len() < 4 {
        let one = random.pick(list);
        if !found.contains(&one) {
            found.push(one);
        }
    }
    found.into_iter().map(T::to_string).collect()
}

/// With a capital at its start.
pub(super) fn capital(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}
