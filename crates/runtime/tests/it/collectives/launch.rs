//! torchrun's variables, and what is said where they are not right.

use expect_test::{Expect, expect};
use runtime::collectives::Launch;

const ALL: [(&str, &str); 9] = [
    ("RANK", "3"),
    ("WORLD_SIZE", "4"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "2"),
    ("MASTER_ADDR", "node-0"),
    ("MASTER_PORT", "29500"),
    ("TORCHELASTIC_RESTART_COUNT", "2"),
    ("TORCHELASTIC_RUN_ID", "run"),
    ("TORCHELASTIC_USE_AGENT_STORE", "True"),
];

/// The variables of torchrun, some of them changed or, where the value is empty, missing.
fn read(changes: &[(&str, &str)]) -> runtime::Result<Option<Launch>> {
    Launch::read(|name| {
        let changed = changes.iter().find(|(changed, _)| *changed == name);
        let value = changed.or_else(|| ALL.iter().find(|(known, _)| *known == name));
        value.map(|(_, value)| (*value).to_owned()).filter(|value| !value.is_empty())
    })
}

#[test]
fn the_variables_of_torchrun_are_read() {
    let launch = read(&[]).unwrap().unwrap();
    assert_eq!((launch.rank, launch.world_size), (3, 4));
    assert_eq!((launch.local_rank, launch.local_world_size), (1, 2));
    assert_eq!((&*launch.master_address, launch.master_port), ("node-0", 29500));
    assert_eq!((launch.restart_count, &*launch.run_id, launch.agent_store), (2, "run", true));
    assert!(!launch.is_local());
    let plain = [
        ("TORCHELASTIC_RESTART_COUNT", ""),
        ("TORCHELASTIC_RUN_ID", ""),
        ("TORCHELASTIC_USE_AGENT_STORE", ""),
    ];
    let launch = read(&plain).unwrap().unwrap();
    assert_eq!((launch.restart_count, &*launch.run_id, launch.agent_store), (0, "none", false));
    assert_eq!(read(&[("RANK", ""), ("WORLD_SIZE", "")]).unwrap(), None);
}

#[test]
fn a_variable_that_is_missing_or_invalid_is_named() {
    let check = |changes: &[(&str, &str)], expected: Expect| {
        expected.assert_eq(&read(changes).unwrap_err().to_string());
    };
    check(
        &[("MASTER_ADDR", "")],
        expect![
            "launch: MASTER_ADDR is not set, but the process has a rank; start it with `frugal launch` or torchrun, which set all of their variables"
        ],
    );
    check(
        &[("WORLD_SIZE", "")],
        expect![
            "launch: WORLD_SIZE is not set, but the process has a rank; start it with `frugal launch` or torchrun, which set all of their variables"
        ],
    );
    check(&[("RANK", "-1")], expect![[r#"launch: RANK is "-1"; expected a number"#]]);
    check(&[("RANK", "4")], expect!["launch: RANK is 4; expected a number below WORLD_SIZE, 4"]);
    check(
        &[("LOCAL_RANK", "2")],
        expect!["launch: LOCAL_RANK is 2; expected a number below LOCAL_WORLD_SIZE, 2"],
    );
    check(
        &[("LOCAL_WORLD_SIZE", "5")],
        expect!["launch: LOCAL_WORLD_SIZE is 5; expected at most WORLD_SIZE, 4"],
    );
    check(&[("MASTER_PORT", "70000")], expect![[r#"launch: MASTER_PORT is "70000"; expected a port"#]]);
    check(
        &[("TORCHELASTIC_RESTART_COUNT", "x")],
        expect![[r#"launch: TORCHELASTIC_RESTART_COUNT is "x"; expected a number"#]],
    );
}
