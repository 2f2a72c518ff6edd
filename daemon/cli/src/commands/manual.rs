//! `tenure completions` and `tenure man`: what shells and people look up, made from the command line itself.

use std::io::{self, Write as _};
use std::path::Path;

use clap::{Command, CommandFactory as _};
use clap_complete::Shell;
use clap_mangen::Man;

use crate::arguments::Arguments;
use crate::output::Failure;

/// Prints the script for one shell.
pub(super) fn completions(shell: Shell) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut shown(), "tenure", &mut script);
    print(&script)
}

/// The command line without what is hidden: completion scripts would offer it.
fn shown() -> Command {
    let all = Arguments::command();
    let below = all.get_subcommands().filter(|it| !it.is_hide_set());
    Command::new("tenure")
        .args(all.get_arguments())
        .subcommands(below)
}

/// Prints `tenure(1)`, or writes the pages of all commands into a folder.
pub(super) fn pages(dir: Option<&Path>) -> Result<(), Failure> {
    let mut all = Arguments::command();
    all.build();
    match dir {
        None => print(&page(all)?),
        Some(dir) => write(dir, all, "tenure"),
    }
}

/// Writes the page of this command and of those below it.
fn write(dir: &Path, command: Command, name: &str) -> Result<(), Failure> {
    for below in command.get_subcommands().filter(|it| !it.is_hide_set()) {
        write(dir, below.clone(), &format!("{name}-{}", below.get_name()))?;
    }
    let file = dir.join(format!("{name}.1"));
    std::fs::write(&file, page(command.display_name(name.to_owned()))?)
        .map_err(|error| Failure::usage(format!("{} cannot be written: {error}", file.display())))
}

fn page(command: Command) -> Result<Vec<u8>, Failure> {
    let mut page = Vec::new();
    Man::new(command)
        .render(&mut page)
        .map_err(|error| Failure::failed(format!("the man page cannot be made: {error}")))?;
    Ok(page)
}

fn print(text: &[u8]) -> Result<(), Failure> {
    match io::stdout().write_all(text) {
        // Whoever reads has seen enough.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(Failure::failed(format!(
            "standard output cannot be written: {error}"
        ))),
        _ => Ok(()),
    }
}
