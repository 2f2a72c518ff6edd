//! `tenure demo`: everything on one machine, on a PostgreSQL of its own.
//!
//! Starts a server whose data stay from one demo to the next, migrates, and runs the daemon in this process. Beside it the
//! [`tour`] puts jobs in and shows what becomes of them. A signal drains the daemon; the server ends after it.

mod tour;

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::thread;

use nix::unistd::Uid;
use tenure_embedded::{Options, Server};
use tenure_runtime::daemon::targets;
use tenure_runtime::settings::{Listen, Settings};
use tenure_store::migrate::Migrator;
use tenure_store::session::Session;

use super::{Context, block_on, run};
use crate::arguments::DemoArguments;
use crate::output::{Failure, write_out};
use crate::{config, logging};
use tour::Tour;

/// The database of the demo, and who uses it.
const DATABASE: &str = "app";
const USER: &str = "postgres";

/// The handlers' programs.
const SCRIPTS: [(&str, &str); 4] = [
    ("hello.sh", include_str!("hello.sh")),
    ("count.sh", include_str!("count.sh")),
    ("flaky.sh", include_str!("flaky.sh")),
    ("doomed.sh", include_str!("doomed.sh")),
];

/// Runs the demo until a signal ends it.
pub(super) fn demo(context: &Context, arguments: DemoArguments) -> Result<(), Failure> {
    let folder = arguments
        .data_dir
        .unwrap_or_else(|| format!("/var/tmp/tenure-demo-{}", Uid::current()).into());
    make(&folder)?;
    let mut server = start(&folder.join("postgres"))?;
    say(&format!(
        "PostgreSQL {} runs on 127.0.0.1:{}; its data are kept in {}.\n",
        server.version(),
        server.port(),
        folder.display()
    ))?;
    let file = folder.join("tenure.toml");
    write(&file, &configuration(&folder, &server))?;
    let (settings, _) = config::settings(Some(&file), &context.common.set)?;
    logging::start(&settings.log)?;
    block_on(migrate(&settings))?;
    let tour = Tour {
        config: file,
        sql_port: server.port(),
        http: match &settings.api.listen {
            Some(Listen::Tcp(address)) => Some(*address),
            _ => None,
        },
        database: settings.database.clone(),
    };
    // The daemon ends the process; until then the tour goes its own pace, and what fails there is told.
    thread::spawn(move || {
        if let Err(failure) = block_on(tour.walk()) {
            failure.tell();
        }
    });
    let ended = run::daemon(settings);
    // Orderly, or the next start would take it for a crash and wait for workers that may hold jobs.
    server
        .stop_fast()
        .map_err(|error| Failure::failed(error.to_string()))?;
    ended?;
    say("Stopped. The data are kept: the next demo finds them.\n")
}

/// Makes the demo's folder with the handlers' programs.
fn make(folder: &Path) -> Result<(), Failure> {
    let handlers = folder.join("handlers");
    fs::create_dir_all(&handlers).map_err(|error| cannot("made", &handlers, &error))?;
    for (name, text) in SCRIPTS {
        let path = handlers.join(name);
        write(&path, text)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))
            .map_err(|error| cannot("changed", &path, &error))?;
    }
    Ok(())
}

fn start(data_dir: &Path) -> Result<Server, Failure> {
    let options = Options {
        data_dir: Some(data_dir.to_owned()),
        ..Options::default()
    };
    let server = Server::start(options).map_err(|error| Failure::failed(error.to_string()))?;
    let known = server.sql("postgres").and_then(|mut sql| {
        sql.run(&format!(
            "SELECT FROM pg_database WHERE datname = '{DATABASE}'"
        ))
    });
    let made = known.and_then(|rows| {
        if rows.is_empty() {
            server.create_database(DATABASE)
        } else {
            Ok(())
        }
    });
    made.map_err(|error| Failure::failed(format!("the demo's database cannot be made: {error}")))?;
    Ok(server)
}

fn configuration(folder: &Path, server: &Server) -> String {
    let handler = |name: &str| {
        let program = toml_edit::Value::from(
            folder
                .join("handlers")
                .join(format!("{name}.sh"))
                .display()
                .to_string(),
        );
        format!("[handlers.{name}]\nexec = {{ command = [{program}] }}\n")
    };
    format!(
        "# Written by `tenure demo` at each start.\n[database]\nurl = \"{}\"\n\
         [worker]\nname = \"demo\"\n[api]\nlisten = \"127.0.0.1:{}\"\n[log]\nlevel = \"warn\"\n{}{}{}{}\
         [handlers.\"*\".retry]\ndelay = \"2s\"\n",
        server.url(DATABASE, USER),
        free_port(),
        handler("hello"),
        handler("count"),
        handler("flaky"),
        handler("doomed"),
    )
}

/// The usual port of the interface, or another if somebody listens there.
fn free_port() -> u16 {
    let open =
        |port| TcpListener::bind(("127.0.0.1", port)).and_then(|listener| listener.local_addr());
    open(7171)
        .or_else(|_| open(0))
        .map_or(7171, |address| address.port())
}

async fn migrate(settings: &Settings) -> Result<(), Failure> {
    let (_, direct) =
        targets(&settings.database).map_err(|error| Failure::usage(error.to_string()))?;
    let (session, _) = Session::open(&direct).await?;
    let applied = Migrator::new(&session, &settings.database.schema)
        .up()
        .await?;
    match applied.len() {
        0 => say("The schema is there already.\n"),
        count => say(&format!("Applied {count} migrations.\n")),
    }
}

fn write(path: &PathBuf, text: &str) -> Result<(), Failure> {
    fs::write(path, text).map_err(|error| cannot("written", path, &error))
}

fn cannot(what: &str, path: &Path, error: &std::io::Error) -> Failure {
    Failure::failed(format!("{} cannot be {what}: {error}", path.display()))
}

fn say(text: &str) -> Result<(), Failure> {
    write_out(text)
}
