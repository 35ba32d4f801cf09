//! Every command of the guide runs, in the order of the pages, over a tiny model in the hub's cache under the name that it says. The page
//! about ranks starts processes, and is in `tests/it`.

use super::guide_commands::{commands, prepare};
use super::session::Session;

/// The pages with commands, in the order of the guide.
const PAGES: [&str; 5] = [
    include_str!("../guide/first_fine_tuning.md"),
    include_str!("../guide/your_own_data.md"),
    include_str!("../guide/how_a_plan_is_chosen.md"),
    include_str!("../guide/larger_than_memory.md"),
    include_str!("../guide/where_every_byte_goes.md"),
];

#[test]
fn every_command_of_the_guide_runs() {
    let session = Session::new();
    prepare(&session);
    for words in PAGES.into_iter().flat_map(commands) {
        let ended = session.run_words(&words);
        assert_eq!(ended.status, 0, "{words:?}: {}", ended.err);
    }
}
