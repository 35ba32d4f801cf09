//! `frugal completions` and `frugal man`: what a shell and `man` know of the program.

use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::{Args, CommandFactory};
use clap_complete::Shell;

use super::output::print_text;
use crate::common_flags::Common;

#[derive(Args)]
#[command(after_help = "\
Examples:
  frugal completions bash > ~/.local/share/bash-completion/completions/frugal
  frugal completions zsh > ~/.zfunc/_frugal
  frugal completions fish > ~/.config/fish/completions/frugal.fish")]
pub(crate) struct Completions {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

#[derive(Args)]
pub(crate) struct Man {
    /// Folder for the pages, one for each command
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
    /// Overwrite pages that exist
    #[arg(long)]
    overwrite: bool,
}

pub(crate) fn completions(arguments: &Completions) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut crate::Cli::command(), "frugal", &mut script);
    print_text(&String::from_utf8(script)?);
    Ok(())
}

pub(crate) fn man(common: &Common, arguments: &Man) -> anyhow::Result<()> {
    let folder = &arguments.folder;
    let failed = || format!("{} cannot be written", folder.display());
    let made = tempfile::tempdir()?;
    clap_mangen::generate_to(crate::Cli::command(), made.path()).with_context(failed)?;
    let mut pages = Vec::new();
    for entry in std::fs::read_dir(made.path())? {
        let entry = entry?;
        let (path, page) = (folder.join(entry.file_name()), std::fs::read(entry.path())?);
        // The same page may be written again.
        match std::fs::read(&path) {
            Ok(earlier) if earlier == page => {}
            Ok(_) if !arguments.overwrite => {
                bail!("{} exists; give another folder, or --overwrite to replace it", path.display())
            }
            _ => pages.push((path, page)),
        }
    }
    std::fs::create_dir_all(folder).with_context(failed)?;
    for (path, page) in pages {
        files::atomic_write::file(&path, |out| out.write_all(&page)).with_context(failed)?;
    }
    common
        .note(&format!("the pages are in {0}; read one with `man {0}/frugal-finetune.1`", folder.display()));
    Ok(())
}
