//! The commands of the program without a process for each, because libtorch's initialization takes a third of a second of each new one.
//!
//! Refusals (arguments, error texts, exit statuses) are tested in this process; commands that write results run in a
//! [`session`]; all share one process. `tests/it` shows on processes of the program that what is returned here is what
//! a person reads and what the shell gets.

mod command_line;
mod commands;
mod config_keys;
#[path = "../tests/it/conversations.rs"]
mod conversations;
mod data;
mod data_command;
mod data_notes;
mod device_note;
mod distillation;
mod export;
mod finetune;
mod gguf_merge;
mod gguf_models;
mod gsm8k_format;
mod guide;
#[path = "../tests/it/guide_commands.rs"]
mod guide_commands;
mod heads;
mod mixture;
mod models;
mod new_tokens;
mod nf4;
mod no_effect;
mod outputs;
mod plan;
mod plan_budgets;
mod plan_flags;
mod preferences;
mod prompt_files;
mod rewards;
mod run_plan;
mod session;
mod shipped;
#[path = "../tests/it/tiny_folder/mod.rs"]
mod tiny_folder;
mod train;
mod trainings;
mod unmatched_names;
mod unread_keys;
mod wrong_values;

use expect_test::Expect;
use report::cli::{Failure, error_line};
use tiny_folder::Tiny;

/// Runs a command without its notes, and returns the exit status and what it prints to standard error.
pub(crate) fn end<'w>(words: impl IntoIterator<Item = &'w str>) -> (i32, String) {
    match crate::parse(["frugal", "--quiet"].into_iter().chain(words)) {
        Err(error) => (error.exit_code(), error.to_string()),
        Ok(cli) => match crate::run(&cli) {
            Ok(()) => (0, String::new()),
            Err(error) => (Failure::status_of(&error).into(), error_line(&error) + "\n"),
        },
    }
}

/// The same for arguments between blanks in which `@` is the folder, whose path is left out of the error.
fn ending(tiny: &Tiny, arguments: &str) -> (i32, String) {
    let arguments = arguments.replace('@', &tiny.path("").to_string_lossy());
    let (status, message) = end(arguments.split_whitespace());
    (status, tiny.without_path(&message))
}

/// Checks that a command fails with this error, in one line.
#[track_caller]
fn refused(tiny: &Tiny, arguments: &str, expected: Expect) {
    let (status, message) = ending(tiny, arguments);
    assert_eq!(status, 1, "{arguments}: {message}");
    assert_eq!(message.lines().count(), 1, "one line: {message}");
    expected.assert_eq(&message);
}

/// Checks that a command fails with this status and an error with these words, which is one line unless it is of usage.
#[track_caller]
fn contains(tiny: &Tiny, arguments: &str, status: i32, words: &str) {
    let (actual, message) = ending(tiny, arguments);
    assert_eq!(actual, status, "{arguments}: {message}");
    assert!(message.contains(words), "{arguments}: {message}");
    assert!(status == 2 || message.lines().count() == 1, "one line: {message}");
}
