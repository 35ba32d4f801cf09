//! Every option of every command, with every kind of wrong value: an error in words, never a panic.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

use clap::{Arg, ArgAction, Command, CommandFactory};
use report::cli::error_line;

use super::tiny_folder::Tiny;

/// A command that works, without the option that is tried; `@` is the folder.
const WORKS: [(&str, &str); 9] = [
    ("train", "--width=16 --heads=2 --vocabulary=32 --length=16 --batch-size=2 --steps=1 --out=@out"),
    ("finetune", "--model=@model --data=@problems --batch-size=2 --steps=1 --out=@out"),
    (
        "eval",
        "--model=@model --data=@problems/test.jsonl --format=gsm8k --limit=1 --shots=1 --max-new-tokens=2",
    ),
    ("generate", "--model=@model --prompt=a --max-new-tokens=2"),
    ("merge", "--model=@model --adapter=@model --out=@out"),
    ("export", "--model=@model --format=hf --out=@out"),
    ("data", "--model=@model @problems"),
    ("info", "@model"),
    ("plan", "--model=@model"),
];

/// These are not run: they ask, start processes or measure.
const NOT_RUN: [&str; 5] = ["chat", "launch", "doctor", "completions", "man"];

/// Larger numbers may be valid and take for ever; they are read and not run.
const LARGE: [&str; 2] = ["18446744073709551616", "1e999"];

fn wrong_values() -> Vec<OsString> {
    let words = ["", " ", "abc", "-1", "0", "nan", "inf", "nowhere/none", "\u{202e}é\u{0}", "1KiB,", "--"];
    let mut values: Vec<OsString> = words.iter().chain(&LARGE).map(OsString::from).collect();
    values.push(OsString::from_vec(vec![b'a', 0xff, 0xfe]));
    values.push("x".repeat(5000).into());
    values
}

/// What belongs to the implementation and tells a person nothing.
const FOREIGN: [&str; 9] = [
    "panicked",
    "unwrap()",
    "ParseInt",
    "InvalidDigit",
    " literal",
    "Os {",
    "Utf8Error",
    "frame #",
    "Exception raised",
];

/// The process works in another folder until this is dropped: some values are relative paths.
struct InFolder(PathBuf);

impl InFolder {
    fn of(tiny: &Tiny) -> Self {
        let before = std::env::current_dir().unwrap();
        std::env::set_current_dir(tiny.path("")).unwrap();
        Self(before)
    }
}

impl Drop for InFolder {
    fn drop(&mut self) {
        std::env::set_current_dir(&self.0).unwrap();
    }
}

/// The options of a command that take a value.
fn options(command: &Command) -> Vec<&Arg> {
    let takes = |argument: &&Arg| {
        argument.get_long().is_some() && matches!(argument.get_action(), ArgAction::Set | ArgAction::Append)
    };
    command.get_arguments().filter(takes).collect()
}

#[test]
fn every_option_refuses_what_is_no_value_of_it_in_words() {
    let tiny = Tiny::new();
    let _folder = InFolder::of(&tiny);
    let mut program = crate::Cli::command();
    program.build();
    let (mut tried, mut refused, mut failures) = (0, 0, Vec::new());
    for command in program.get_subcommands().filter(|command| command.get_name() != "help") {
        let name = command.get_name();
        let works = WORKS.iter().find(|(of, _)| *of == name).map_or("", |(_, works)| works);
        let works = works.replace('@', &tiny.path("").to_string_lossy());
        for option in options(command) {
            let long = option.get_long().unwrap_or_default();
            for value in wrong_values() {
                let mut words: Vec<OsString> = ["frugal", name, "--quiet"].map(OsString::from).to_vec();
                let others = works.split_whitespace();
                words.extend(
                    others.filter(|word| !word.starts_with(&format!("--{long}="))).map(OsString::from),
                );
                let mut last = OsString::from(format!("--{long}="));
                last.push(&value);
                words.push(last);
                tried += 1;
                let runs = !NOT_RUN.contains(&name) && !LARGE.iter().any(|large| value == *large);
                let outcome = catch_unwind(AssertUnwindSafe(|| end(words, runs)));
                let Ok(outcome) = outcome else {
                    failures.push(format!("{name} --{long}={value:?}: a panic"));
                    continue;
                };
                let Some(said) = outcome else { continue };
                refused += 1;
                if said.trim().is_empty() || FOREIGN.iter().any(|word| said.contains(word)) {
                    failures.push(format!("{name} --{long}={value:?}: {said}"));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{} of {tried}:\n{}", failures.len(), failures.join("\n"));
    assert!(tried > 2000 && refused > tried / 3, "{tried} tried, {refused} refused");
}

/// The error of a command; `None` if there is none.
fn end(words: Vec<OsString>, runs: bool) -> Option<String> {
    match crate::parse(words) {
        Err(error) => Some(error.to_string()),
        Ok(cli) if runs => crate::run(&cli).err().map(|error| error_line(&error)),
        Ok(_) => None,
    }
}
