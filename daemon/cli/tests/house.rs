//! A server, a migrated database, and the binary that speaks to it.

use std::io::Write;
use std::process::{Command, Output, Stdio};

use tenure_embedded::{Options, Server};

/// A server with the database `app`.
pub(crate) struct House {
    pub(crate) server: Server,
    url: String,
}

/// What a command said.
pub(crate) struct Said {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl House {
    /// A database without a schema.
    pub(crate) fn bare() -> Self {
        let server = Server::start(Options::for_tests()).unwrap();
        server.create_database("app").unwrap();
        let url = server.url("app", "postgres");
        Self { server, url }
    }

    /// A migrated database.
    pub(crate) fn new() -> Self {
        let house = Self::bare();
        house.ok(&["migrate"]);
        house
    }

    /// The binary, told where the database is.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = binary();
        command
            .args(arguments)
            .env("TENURE_DATABASE__URL", &self.url);
        command
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Said {
        self.command(arguments).output().unwrap().into()
    }

    /// Runs a command with something on its standard input.
    pub(crate) fn feed(&self, arguments: &[&str], input: &str) -> Said {
        let mut command = self.command(arguments);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child
            .stdin
            .take()
            .unwrap()
            .write_all(input.as_bytes())
            .unwrap();
        child.wait_with_output().unwrap().into()
    }

    /// Runs a command that must succeed, and returns what it printed, without the line end.
    pub(crate) fn ok(&self, arguments: &[&str]) -> String {
        let said = self.run(arguments);
        assert_eq!(said.code, 0, "{arguments:?}: {}{}", said.out, said.err);
        said.out.trim_end().to_owned()
    }

    /// Runs a command with `--output json` that must succeed, and returns its data.
    pub(crate) fn json(&self, arguments: &[&str]) -> serde_json::Value {
        let said = self.run(&[arguments, &["--output", "json"]].concat());
        let envelope: serde_json::Value = serde_json::from_str(&said.out).unwrap();
        assert_eq!(
            envelope["success"], true,
            "{arguments:?}: {}{}",
            said.out, said.err
        );
        assert!(envelope["error"].is_null());
        envelope["data"].clone()
    }

    /// Runs SQL as the owner of everything.
    pub(crate) fn sql(&self, sql: &str) -> Vec<Vec<Option<String>>> {
        self.server.sql("app").unwrap().run(sql).unwrap()
    }
}

/// The binary in an environment without other settings.
pub(crate) fn binary() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tenure"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("TENURE_") {
            command.env_remove(name);
        }
    }
    command
}

impl From<Output> for Said {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code().unwrap_or(-1),
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }
}
