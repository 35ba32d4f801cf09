//! The budgets of `frugal plan`: the default, the host's, and those that it advises.

use serde_json::Value;

use super::session::{Ended, Session};

/// All in one process.
#[test]
fn budgets() {
    let session = Session::new();
    a_gpu_that_is_named_has_the_default_budget_of_a_training_on_it(&session);
    inputs_on_the_host_count_in_its_budget(&session);
    the_budget_that_is_advised_is_accepted(&session);
    the_host_budget_that_is_advised_is_accepted(&session);
    every_command_ends_alike_where_nothing_fits(&session);
}

fn json(session: &Session, arguments: &str) -> Value {
    let ended = session.run(&format!("plan {arguments} --json"));
    assert_eq!(ended.status, 0, "{arguments}: {}", ended.err);
    serde_json::from_str(ended.out.lines().last().unwrap()).unwrap()
}

/// 80 % of 80 GB, and 3 % of them in reserve.
fn a_gpu_that_is_named_has_the_default_budget_of_a_training_on_it(session: &Session) {
    let plan = json(session, "--model qwen2.5-0.5b --hardware h100");
    assert_eq!(
        (&plan["budget_bytes"], &plan["budget"]),
        (&64_000_000_000u64.into(), &62_080_000_000u64.into())
    );
    let same = json(session, "--model qwen2.5-0.5b --hardware h100 --budget 64GB");
    assert_eq!((&plan["budget"], &plan["variants"]), (&same["budget"], &same["variants"]));
    let inference = json(session, "--model qwen2.5-0.5b --hardware h100 --method inference");
    assert_eq!(inference["budget"], plan["budget"]);
}

/// A layer's input is batch × positions × hidden size numbers of two bytes; a row of n tokens has n − 1 positions.
fn inputs_on_the_host_count_in_its_budget(session: &Session) {
    let asked = "--model qwen2.5-7b --hardware h100 --batch-size 4 --length 512";
    let plan = json(session, &format!("{asked} --activations recompute --recompute-what offload"));
    // The last layer of 28 keeps its activations.
    let (layers, hidden) = (27u64, 3584u64);
    let variant =
        plan["variants"].as_array().unwrap().iter().find(|one| one["variant"] == plan["chosen"]).unwrap();
    assert_eq!(variant["host_bytes"], layers * 4 * 511 * hidden * 2, "{variant}");
    // Without room for them nothing is kept there.
    let plan = json(session, &format!("{asked} --host-budget 1MiB"));
    let fitting = plan["variants"].as_array().unwrap().iter().filter(|one| one["fits"] == true);
    assert!(fitting.clone().count() > 1, "{plan}");
    assert!(fitting.clone().all(|one| one["host_bytes"] == 0), "{plan}");
}

/// The text behind a word of an answer, up to the next blank, comma or colon.
fn after(text: &str, words: &str) -> Vec<String> {
    let budgets = text.split(words).skip(1);
    budgets.map(|rest| rest.split([' ', ',', ':', ';', '\n']).next().unwrap_or_default().to_owned()).collect()
}

fn the_budget_that_is_advised_is_accepted(session: &Session) {
    for step in [
        "--model qwen2.5-0.5b --budget 1GiB --hardware h100",
        "--model qwen2.5-0.5b --budget 120MiB --hardware h100",
        "--model qwen2.5-0.5b --method full --hardware h100",
        "--model qwen2.5-0.5b --method full --dtype bfloat16 --budget 1GiB --hardware rtx4090",
        "--model qwen2.5-0.5b --method inference --budget 200MiB --hardware rtx4090",
        "--model qwen2.5-7b --dtype nf4 --hardware rtx3090",
        "--model qwen2.5-7b --method dora --hardware a100",
        "--model llama-3-8b --hardware a100 --batch-size 8 --length 2048",
        "--model llama-3-8b --method full --hardware h100 --budget 2GiB",
        "--model llama-3-8b --method full --dtype bfloat16 --ranks 2 --hardware h100 --budget 1GiB",
    ] {
        let Ended { status, out, err } = session.run(&format!("plan {step}"));
        let mut budgets = after(&err, "give --budget ");
        assert_eq!(budgets.len(), usize::from(status == 3), "{step}: {err}");
        let lines =
            out.lines().filter(|line| line.starts_with("more memory") || line.starts_with("less memory"));
        let lines: Vec<&str> = lines.collect();
        budgets.extend(after(&lines.join("\n"), "--budget "));
        assert!(!budgets.is_empty(), "{step}: {out}{err}");
        let named = step.split(" --budget ").next().unwrap();
        let rest = step
            .split_once(" --budget ")
            .and_then(|(_, rest)| rest.split_once(' '))
            .map_or("", |(_, rest)| rest);
        for budget in budgets {
            let ended = session.run(&format!("plan {named} {rest} --budget {budget}"));
            assert_eq!(ended.status, 0, "{step}, {budget}: {}", ended.err);
        }
    }
    let tried = "finetune --model model --data problems --steps 2 --dry-run";
    let advised = after(&session.run(tried).err, "--budget ");
    assert!(!advised.is_empty());
    for budget in advised {
        let ended = session.run(&format!("{tried} --budget {budget}"));
        assert_eq!(ended.status, 0, "{budget}: {}", ended.err);
    }
}

fn the_host_budget_that_is_advised_is_accepted(session: &Session) {
    for step in [
        "--model qwen2.5-7b --budget 8GiB --hardware rtx4090",
        "--model qwen2.5-3b --method full --hardware rtx4090",
        "--model qwen2.5-7b --hardware rtx4090 --offload host --ring 2",
    ] {
        let ended = session.run(&format!("plan {step} --host-budget 100MiB"));
        assert_eq!(ended.status, 3, "{step}: {}{}", ended.out, ended.err);
        assert!(ended.err.contains("nothing fits a host budget of 100 MiB"), "{}", ended.err);
        let [budget] = &after(&ended.err, "give --host-budget ")[..] else { panic!("{}", ended.err) };
        let ended = session.run(&format!("plan {step} --host-budget {budget}"));
        assert_eq!(ended.status, 0, "{step}, {budget}: {}", ended.err);
        // The largest model has no more on the host.
        let fit = json(session, &format!("fit {step} --host-budget {budget}"));
        for answer in fit.as_array().unwrap() {
            let host = accounting::quantity::parse_bytes(budget).unwrap();
            assert!(answer["host_bytes"].as_u64().is_none_or(|bytes| bytes <= host), "{step}: {answer}");
        }
    }
    let ended = session.run("plan fit --model qwen2.5-0.5b --hardware rtx4090");
    assert!(
        ended.out.lines().any(|line| line.contains("peak") && line.contains("host memory")),
        "{}",
        ended.out
    );
}

fn every_command_ends_alike_where_nothing_fits(session: &Session) {
    for command in ["", "memory", "fit"] {
        let step = "--model qwen2.5-7b --hardware rtx4090 --budget 400MiB";
        let ended = session.run(&format!("plan {command} {step}"));
        assert_eq!(ended.status, 3, "{command}: {}", ended.out);
        assert!(ended.err.contains("nothing fits 400 MiB; the least takes "), "{}", ended.err);
        assert!(ended.err.contains("a lower rank") && !ended.out.is_empty(), "{}", ended.err);
        let ended = session.run(&format!("plan {command} {step} --method full"));
        assert_eq!(ended.status, 3, "{command}: {}", ended.out);
        assert!(!ended.err.contains("rank") && ended.err.contains("--method lora"), "{}", ended.err);
    }
}
