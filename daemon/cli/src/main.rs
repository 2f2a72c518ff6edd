//! The `tenure` binary: reads the command line, carries the command out, and says by its exit code how that went.

mod arguments;
mod commands;
mod config;
mod init;
mod logging;
mod output;

use std::process::ExitCode;

use clap::Parser;

use arguments::{Arguments, Command};
use commands::Context;
use output::{Failure, Format, Output};

fn main() -> ExitCode {
    // One is started for each job: nothing may come before this that takes time.
    let mut words = std::env::args_os().skip(1);
    if words.next().is_some_and(|verb| verb == "supervise") {
        return tenure_runtime::supervisor::main(words);
    }
    let Arguments { common, command } = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return misused(&error),
    };
    if matches!(command, Command::Run)
        && let Some(code) = init::first_process()
    {
        return code;
    }
    if let Command::Guard { lock } = command {
        return tenure_runtime::guard::main(lock.as_deref());
    }
    if let Command::Witness { journal } = command {
        return commands::selftest::witness::main(&journal);
    }
    let output = Output::new(common.output);
    match commands::run(&Context { common, output }, command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failed(output, &failure),
    }
}

/// Help and versions are printed as they are, and so is what is wrong with a command line, except where JSON was asked for.
fn misused(error: &clap::Error) -> ExitCode {
    let words: Vec<String> = std::env::args().collect();
    let json = words.iter().any(|word| word == "--output=json")
        || words.windows(2).any(|two| two == ["--output", "json"]);
    if error.use_stderr() && json {
        let text = error.to_string();
        let first = text.split("\n\n").next().unwrap_or_default();
        let failure = Failure::usage(first.trim_start_matches("error: ")).hint("tenure --help");
        return failed(Output::new(Some(Format::Json)), &failure);
    }
    error.exit()
}

fn failed(output: Output, failure: &Failure) -> ExitCode {
    output.print_failure(failure);
    ExitCode::from(failure.exit() as u8)
}
