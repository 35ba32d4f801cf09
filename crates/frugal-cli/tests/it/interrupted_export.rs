//! An export that is interrupted leaves its result or nothing.

use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::tiny_folder::Tiny;

#[test]
fn an_interrupted_export_leaves_no_temporary_file() {
    let tiny = Tiny::new();
    let before: Vec<_> = names(&tiny);
    let (mut whole, mut interrupted) = (0, 0);
    for round in 0..24u64 {
        let mut child = tiny
            .command("export --model model --format gguf --type f32 --out out.gguf")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // Over the time that it takes, with the load of the program.
        std::thread::sleep(Duration::from_millis(15 * round));
        let signal = [Signal::INT, Signal::TERM][round as usize % 2];
        let id = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
        let _ = kill_process(id, signal);
        let status = child.wait().unwrap();
        let is_there = tiny.path("out.gguf").exists();
        if status.success() {
            whole += 1;
            assert!(is_there);
        } else {
            interrupted += 1;
            // A signal before its handler is there ends the process by itself.
            assert!(matches!(status.code(), None | Some(130)), "{status:?}");
        }
        if is_there {
            assert!(std::fs::metadata(tiny.path("out.gguf")).unwrap().len() > 100_000);
            std::fs::remove_file(tiny.path("out.gguf")).unwrap();
        }
        assert_eq!(names(&tiny), before, "round {round}, {status:?}");
    }
    assert!(interrupted > 0, "{whole} ended before the signal");
}

/// What is in the folder, hidden files too, but for caches.
fn names(tiny: &Tiny) -> Vec<String> {
    let entries = std::fs::read_dir(tiny.path("")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name != "cache").collect();
    names.sort();
    names
}
