//! Word problems in GSM8K's format (Cobbe et al. 2021): a question, steps with `<<a*b=c>>`, and `#### answer`.

use std::collections::BTreeSet;

use serde_json::json;

use super::facts::capital;
use super::random::Random;

pub(super) const PEOPLE: [(&str, &str, &str); 16] = [
    ("Ada", "she", "her"),
    ("Ben", "he", "his"),
    ("Clara", "she", "her"),
    ("David", "he", "his"),
    ("Emma", "she", "her"),
    ("Felix", "he", "his"),
    ("Grace", "she", "her"),
    ("Hugo", "he", "his"),
    ("Irene", "she", "her"),
    ("Jonas", "he", "his"),
    ("Laura", "she", "her"),
    ("Martin", "he", "his"),
    ("Nina", "she", "her"),
    ("Oscar", "he", "his"),
    ("Rosa", "she", "her"),
    ("Simon", "he", "his"),
];
pub(super) const THINGS: [&str; 10] = [
    "apples",
    "pencils",
    "stickers",
    "marbles",
    "cookies",
    "postcards",
    "candles",
    "notebooks",
    "muffins",
    "buttons",
];
pub(super) const BOXES: [&str; 5] = ["boxes", "bags", "baskets", "packs", "crates"];
const SHOPS: [&str; 5] = ["market", "school fair", "bakery", "corner shop", "garden sale"];
const CROPS: [&str; 6] = ["pumpkins", "tomatoes", "cabbages", "peppers", "melons", "carrots"];

/// A problem as it grows: its steps, each one a calculation.
struct Steps(Vec<String>);

impl Steps {
    /// `before <<a op b=c>>c after`, and `c`. Divisions come out even.
    fn step(&mut self, before: &str, (a, op, b): (i64, char, i64), after: &str) -> i64 {
        let c = match op {
            '+' => a + b,
            '-' => a - b,
            '*' => a * b,
            _ => a / b,
        };
        self.0.push(format!("{before} {a} {op} {b} = <<{a}{op}{b}={c}>>{c} {after}."));
        c
    }
}

type Template = fn(&mut Random) -> (String, Steps);

const TEMPLATES: [Template; 14] = [
    selling, packing, saving, reading, travelling, harvest, baking, sharing, wages, ages, discount, painting,
    collecting, fencing,
];

/// `count` problems as JSON lines; no question is in `taken`, and all are put there.
pub(super) fn problems(random: &Random, count: usize, taken: &mut BTreeSet<String>) -> String {
    let (mut out, mut made, mut number) = (String::new(), 0, 0);
    while made < count {
        let mut random = random.fork(number);
        number += 1;
        let (question, steps) = random.pick(&TEMPLATES)(&mut random);
        if !taken.insert(question.clone()) {
            continue;
        }
        let answer = steps.0.last().and_then(|step| step.split_once(">>")?.1.split(' ').next());
        let answer = format!("{}\n#### {}", steps.0.join("\n"), answer.unwrap_or_default());
        out.push_str(&json!({"question": question, "answer": answer}).to_string());
        out.push('\n');
        made += 1;
    }
    out
}

fn selling(r: &mut Random) -> (String, Steps) {
    let (&(name, he, _), thing, shop) = (r.pick(&PEOPLE), *r.pick(&THINGS), *r.pick(&SHOPS));
    let (boxes, each, price) = (r.range(3, 15), r.range(4, 20), r.range(2, 9));
    let kept = r.range(2, boxes * each / 2);
    let mut question = format!(
        "{name} brings {boxes} {} of {each} {thing} each to the {shop}. {} keeps {kept} {thing} and sells the others for \
         ${price} each.",
        r.pick(&BOXES),
        capital(he)
    );
    let mut s = Steps(Vec::new());
    let all = s.step(&format!("{name} brings"), (boxes, '*', each), thing);
    let sold = s.step(&format!("{} sells", capital(he)), (all, '-', kept), thing);
    let earned = s.step(&format!("{} earns", capital(he)), (sold, '*', price), "dollars");
    if r.chance(50) {
        let stall = r.range(2, earned / 2);
        question += &format!(" The stall costs ${stall}. How many dollars does {name} have left?");
        s.step(&format!("After paying for the stall {he} has"), (earned, '-', stall), "dollars left");
    } else {
        question += &format!(" How many dollars does {he} earn?");
    }
    (question, s)
}

fn packing(r: &mut Random) -> (String, Steps) {
    let (thing, boxes) = (*r.pick(&THINGS), *r.pick(&BOXES));
    let (each, full, broken) = (r.range(3, 12), r.range(5, 30), r.range(2, 40));
    let days = r.range(2, 6);
    // There are none from before, or several.
    let broken = broken + i64::from((each * full + broken) % days == 1);
    let total = each * full + broken;
    let per_day = total / days;
    let extra = total - per_day * days;
    let mut s = Steps(Vec::new());
    let made = s.step("The workers make", (per_day, '*', days), thing);
    let all = if extra > 0 { s.step("With the old ones there are", (made, '+', extra), thing) } else { made };
    let good = s.step("Without the broken ones there are", (all, '-', broken), thing);
    s.step("They fill", (good, '/', each), boxes);
    let old = if extra > 0 { format!(" There are {extra} {thing} from before.") } else { String::new() };
    let question = format!(
        "A workshop makes {per_day} {thing} a day for {days} days.{old} {broken} of all the {thing} are broken and thrown \
         away. The rest are put into {boxes} of {each}. How many {boxes} are filled?"
    );
    (question, s)
}

fn saving(r: &mut Random) -> (String, Steps) {
    let (&(name, he, his), weeks) = (r.pick(&PEOPLE), r.range(4, 20));
    let (allowance, spent, gift) = (r.range(8, 25), r.range(1, 7), r.range(10, 60));
    let mut s = Steps(Vec::new());
    let kept = s.step(&format!("Each week {name} saves"), (allowance, '-', spent), "dollars");
    let saved = s.step(&format!("In {weeks} weeks {he} saves"), (kept, '*', weeks), "dollars");
    let has = s.step(&format!("With the gift {he} has"), (saved, '+', gift), "dollars");
    let thing = r.pick(&["bicycle", "guitar", "camera", "telescope", "sewing machine"]);
    let mut question = format!(
        "{name} gets ${allowance} a week and spends ${spent} of it. {} grandmother gives {} ${gift} once.",
        capital(his),
        if he == "he" { "him" } else { "her" }
    );
    if r.chance(50) {
        let price = has + r.range(5, 90);
        question +=
            &format!(" A {thing} costs ${price}. How many dollars are still missing after {weeks} weeks?");
        s.step("Still missing are", (price, '-', has), "dollars");
    } else {
        question += &format!(" How many dollars does {name} have for a {thing} after {weeks} weeks?");
    }
    (question, s)
}

fn reading(r: &mut Random) -> (String, Steps) {
    let (&(name, he, _), first, times, days) =
        (r.pick(&PEOPLE), r.range(12, 40), r.range(2, 3), r.range(3, 9));
    let second = first * times;
    let left = r.range(3, 20) * days;
    let pages = first + second + left;
    let mut s = Steps(Vec::new());
    let on_second = s.step(&format!("On the second day {name} reads"), (first, '*', times), "pages");
    let read = s.step(&format!("In two days {he} reads"), (first, '+', on_second), "pages");
    let rest = s.step("There remain", (pages, '-', read), "pages");
    s.step(&format!("So {he} must read"), (rest, '/', days), "pages a day");
    let many = if times == 2 { "twice" } else { "three times" };
    let question = format!(
        "{name} reads a book of {pages} pages. On the first day {he} reads {first} pages, and on the second day {many} as \
         many. {} wants to finish the book in {days} more days, with the same number of pages each day. How many pages must \
         {he} read a day?",
        capital(he)
    );
    (question, s)
}

fn travelling(r: &mut Random) -> (String, Steps) {
    let vehicle = *r.pick(&["bus", "train", "lorry", "van"]);
    let (fast, hours, slow, more) = (r.range(60, 110), r.range(2, 6), r.range(30, 58), r.range(1, 5));
    let mut s = Steps(Vec::new());
    let first = s.step(&format!("First the {vehicle} drives"), (fast, '*', hours), "kilometres");
    let second = s.step("Then it drives", (slow, '*', more), "kilometres");
    let there = s.step("One way is", (first, '+', second), "kilometres");
    let start = format!(
        "A {vehicle} drives for {hours} hours at {fast} kilometres an hour, and then for {more} more {} at {slow} \
         kilometres an hour.",
        if more == 1 { "hour" } else { "hours" }
    );
    if r.chance(50) {
        s.step("There and back it is", (there, '*', 2), "kilometres");
        (format!("{start} It comes back the same way. How many kilometres does it drive in all?"), s)
    } else {
        (format!("{start} How many kilometres does it drive?"), s)
    }
}

fn harvest(r: &mut Random) -> (String, Steps) {
    let (&(name, he, his), crop) = (r.pick(&PEOPLE), *r.pick(&CROPS));
    let (rows, each, percent) = (r.range(2, 9) * 10, r.range(3, 12), r.range(1, 4) * 10);
    let price = r.range(2, 6);
    let mut s = Steps(Vec::new());
    let all = s.step(&format!("{name} grows"), (rows, '*', each), crop);
    let tenths = s.step("A tenth of them is", (all, '/', 10), crop);
    let lost = s.step("The frost takes", (tenths, '*', percent / 10), crop);
    let left = s.step("There remain", (all, '-', lost), crop);
    s.step(&format!("{} earns", capital(he)), (left, '*', price), "dollars");
    let question = format!(
        "{name} has {rows} rows of {crop} in {his} field, with {each} in each row. Frost destroys {percent}% of them. {} \
         sells all the others for ${price} each. How many dollars does {he} earn?",
        capital(he)
    );
    (question, s)
}

fn baking(r: &mut Random) -> (String, Steps) {
    let (&(name, he, _), per_batch, batches) = (r.pick(&PEOPLE), r.range(2, 6), r.range(3, 12));
    let (bag, price) = (*r.pick(&[2, 3, 4, 5]), r.range(3, 9));
    let batches = batches * bag;
    let mut s = Steps(Vec::new());
    let cups = s.step(&format!("{name} needs"), (per_batch, '*', batches), "cups of flour");
    let bags = s.step("That is", (cups, '/', bag), "bags");
    s.step("The flour costs", (bags, '*', price), "dollars");
    let what = r.pick(&["bread", "cake", "biscuits", "pancakes"]);
    let question = format!(
        "One batch of {what} takes {per_batch} cups of flour. {name} makes {batches} batches. A bag holds {bag} cups of \
         flour and costs ${price}. How many dollars does {he} pay for the flour?"
    );
    (question, s)
}

fn sharing(r: &mut Random) -> (String, Steps) {
    let (&(name, he, his), thing, friends) = (r.pick(&PEOPLE), *r.pick(&THINGS), r.range(3, 9));
    let (each, bought) = (r.range(4, 20), r.range(5, 30));
    let had = each * friends + r.range(1, 20);
    let rest = (had + bought) % friends;
    let mut s = Steps(Vec::new());
    let all = s.step(&format!("{name} has"), (had, '+', bought), thing);
    let left = if rest > 0 { s.step("To share there are", (all, '-', rest), thing) } else { all };
    s.step("Each friend gets", (left, '/', friends), thing);
    let keeps = if rest > 0 {
        format!(" {} keeps {rest} of them for {}self.", capital(he), if he == "he" { "him" } else { "her" })
    } else {
        String::new()
    };
    let question = format!(
        "{name} has {had} {thing} and buys {bought} more.{keeps} The others are shared equally among {his} {friends} friends. \
         How many {thing} does each friend get?"
    );
    (question, s)
}

fn wages(r: &mut Random) -> (String, Steps) {
    let (&(name, he, _), pay, hours) = (r.pick(&PEOPLE), r.range(9, 24), r.range(4, 9));
    let (days, bonus, weeks) = (r.range(3, 6), r.range(10, 60), r.range(2, 8));
    let mut s = Steps(Vec::new());
    let daily = s.step(&format!("{name} earns"), (pay, '*', hours), "dollars a day");
    let weekly = s.step("That is", (daily, '*', days), "dollars a week");
    let all = s.step("With the bonus it is", (weekly, '+', bonus), "dollars a week");
    s.step(&format!("In {weeks} weeks {he} earns"), (all, '*', weeks), "dollars");
    let question = format!(
        "{name} works {hours} hours a day, {days} days a week, for ${pay} an hour. Each week there is a bonus of ${bonus}. \
         How many dollars does {he} earn in {weeks} weeks?"
    );
    (question, s)
}

fn ages(r: &mut Random) -> (String, Steps) {
    let (&(name, _, his), &(other, _, _)) = (r.pick(&PEOPLE), r.pick(&PEOPLE));
    let other = if other == name { "Vera" } else { other };
    let (age, times, older, years) = (r.range(3, 14), r.range(2, 4), r.range(2, 12), r.range(2, 15));
    let mut s = Steps(Vec::new());
    let mother = s.step(&format!("{other} is"), (age, '*', times), "years old");
    let uncle = s.step("The uncle is", (mother, '+', older), "years old");
    s.step(&format!("In {years} years the uncle will be"), (uncle, '+', years), "years old");
    let question = format!(
        "{name} is {age} years old. {other} is {times} times as old as {name}, and {his} uncle is {older} years older than \
         {other}. How old will the uncle be in {years} years?"
    );
    (question, s)
}

fn discount(r: &mut Random) -> (String, Steps) {
    let (&(name, he, _), thing) =
        (r.pick(&PEOPLE), *r.pick(&["shirts", "chairs", "lamps", "blankets", "plates"]));
    let (price, percent, count) = (r.range(2, 12) * 10, r.range(1, 6) * 10, r.range(2, 7));
    let mut s = Steps(Vec::new());
    let tenth = s.step("A tenth of the price is", (price, '/', 10), "dollars");
    let off = s.step("The discount is", (tenth, '*', percent / 10), "dollars");
    let each = s.step("Each one costs", (price, '-', off), "dollars");
    let all = s.step(&format!("{name} pays"), (each, '*', count), "dollars");
    let mut question = format!(
        "The {thing} in a shop cost ${price} each and are sold with a discount of {percent}%. {name} buys {count}"
    );
    if r.chance(50) {
        let note = all + r.range(1, 90);
        question += &format!(" and gives the cashier ${note}. How many dollars does {he} get back?");
        s.step(&format!("{} gets back", capital(he)), (note, '-', all), "dollars");
    } else {
        question += &format!(" of them. How many dollars does {he} pay?");
    }
    (question, s)
}

fn painting(r: &mut Random) -> (String, Steps) {
    let (&(name, he, _), width, height) = (r.pick(&PEOPLE), r.range(3, 12), r.range(2, 4));
    let (walls, price) = (r.range(2, 6), r.range(4, 15));
    let mut s = Steps(Vec::new());
    let wall = s.step("One wall has", (width, '*', height), "square metres");
    let all = s.step("All walls have", (wall, '*', walls), "square metres");
    s.step("The paint costs", (all, '*', price), "dollars");
    let question = format!(
        "{name} paints {walls} walls. Each wall is {width} metres wide and {height} metres high. Paint for one square metre \
         costs ${price}. How many dollars does {he} pay for the paint?"
    );
    (question, s)
}

fn collecting(r: &mut Random) -> (String, Steps) {
    let (&(name, _, _), &(other, _, _), thing) = (r.pick(&PEOPLE), r.pick(&PEOPLE), *r.pick(&THINGS));
    let other = if other == name { "Peter" } else { other };
    let (half, more, third) = (r.range(4, 40), r.range(3, 30), r.range(2, 5));
    let has = half * 2;
    let mut s = Steps(Vec::new());
    let theirs = s.step(&format!("{other} has"), (has, '/', 2), thing);
    let sister = s.step("The sister has", (theirs, '+', more), thing);
    let brother = s.step("The brother has", (sister, '*', third), thing);
    let two = s.step(&format!("{name} and {other} have"), (has, '+', theirs), thing);
    let three = s.step("With the sister they have", (two, '+', sister), thing);
    s.step("All four have", (three, '+', brother), thing);
    let question = format!(
        "{name} has {has} {thing}, and {other} has half as many. Their sister has {more} more than {other}, and their brother \
         has {third} times as many as the sister. How many {thing} do all four have together?"
    );
    (question, s)
}

fn fencing(r: &mut Random) -> (String, Steps) {
    let (&(name, he, his), long, wide) = (r.pick(&PEOPLE), r.range(12, 60), r.range(4, 30));
    let (gate, price) = (r.range(1, 4), r.range(3, 20));
    let mut s = Steps(Vec::new());
    let half = s.step("One long and one short side are", (long, '+', wide), "metres");
    let round = s.step("All around it is", (half, '*', 2), "metres");
    let fence = s.step("Without the gate it is", (round, '-', gate), "metres");
    s.step("The fence costs", (fence, '*', price), "dollars");
    let question = format!(
        "{name} puts a fence around {his} garden, which is {long} metres long and {wide} metres wide. The gate is {gate} {} \
         wide and needs no fence. One metre of fence costs ${price}. How many dollars does {he} pay?",
        if gate == 1 { "metre" } else { "metres" }
    );
    (question, s)
}
