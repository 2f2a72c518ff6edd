//! What the demo shows: jobs put in by SQL, on the command line and over HTTP, and how each of them ends.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tenure_embedded::Sql;
use tenure_runtime::daemon::targets;
use tenure_runtime::settings::Database;
use tenure_store::session::Session;
use tenure_store::view::Ending;
use uuid::Uuid;

use super::{DATABASE, USER, say};
use crate::output::Failure;

/// Between two looks at the jobs.
const LOOK: Duration = Duration::from_millis(100);
/// How many looks before the tour gives up.
const LOOKS: u32 = 600;

/// Everything that the tour needs to find its way.
pub(super) struct Tour {
    pub(super) config: PathBuf,
    pub(super) sql_port: u16,
    pub(super) http: Option<SocketAddr>,
    pub(super) database: Database,
}

impl Tour {
    /// Waits for the daemon, puts jobs in, shows their ends, and says where to look on.
    pub(super) async fn walk(&self) -> Result<(), Failure> {
        let (target, _) =
            targets(&self.database).map_err(|error| Failure::usage(error.to_string()))?;
        let (session, _) = Session::open(&target).await?;
        self.wait_for_worker(&session).await?;
        let mut jobs = vec![
            ("hello", "SQL", self.by_sql("hello", r#"{"name": "SQL"}"#)?),
            ("count", "the command line", self.by_command("count")?),
            ("flaky", "SQL", self.by_sql("flaky", "{}")?),
            ("doomed", "SQL", self.by_sql("doomed", "{}")?),
        ];
        if let Some(address) = self.http {
            jobs.push((
                "hello",
                "HTTP",
                by_http(
                    address,
                    r#"{"job_type": "hello", "data": {"name": "HTTP"}}"#,
                )?,
            ));
        }
        say("\nJobs that were put in:\n")?;
        for (job_type, way, id) in &jobs {
            say(&format!("  {id}  {job_type:<7} by {way}\n"))?;
        }
        say("\nHow they end:\n")?;
        self.watch(&session, jobs).await?;
        self.farewell()
    }

    async fn wait_for_worker(&self, session: &Session) -> Result<(), Failure> {
        for _ in 0..LOOKS {
            if session
                .workers(false)
                .await?
                .iter()
                .any(|worker| worker.status == "live")
            {
                return Ok(());
            }
            tokio::time::sleep(LOOK).await;
        }
        Err(Failure::failed(
            "the daemon did not register with the database",
        ))
    }

    fn by_sql(&self, job_type: &str, data: &str) -> Result<Uuid, Failure> {
        let rows = Sql::connect(self.sql_port, DATABASE, USER)
            .and_then(|mut sql| sql.run(&format!("SELECT tenure.enqueue('{job_type}', '{data}')")))
            .map_err(|error| {
                Failure::failed(format!("the job cannot be put in by SQL: {error}"))
            })?;
        let id = rows
            .first()
            .and_then(|row| row.first())
            .cloned()
            .flatten()
            .unwrap_or_default();
        read(&id)
    }

    fn by_command(&self, job_type: &str) -> Result<Uuid, Failure> {
        let failed = |error: std::io::Error| {
            Failure::failed(format!("tenure enqueue cannot be run: {error}"))
        };
        let program = std::env::current_exe().map_err(failed)?;
        let output = Command::new(program)
            .args(["enqueue", job_type])
            .env("TENURE_CONFIG", &self.config)
            .output()
            .map_err(failed)?;
        read(String::from_utf8_lossy(&output.stdout).trim())
    }

    /// Shows each job once it has ended.
    async fn watch(
        &self,
        session: &Session,
        mut jobs: Vec<(&str, &str, Uuid)>,
    ) -> Result<(), Failure> {
        for _ in 0..LOOKS {
            let mut left = Vec::new();
            for (job_type, way, id) in jobs {
                let ending = session.ending(id).await?;
                match ending.status.as_str() {
                    "completed" | "failed" | "cancelled" | "discarded" => told(job_type, &ending)?,
                    _ => left.push((job_type, way, id)),
                }
            }
            if left.is_empty() {
                return Ok(());
            }
            jobs = left;
            tokio::time::sleep(LOOK).await;
        }
        say("  The others take longer; look at them with `tenure job list`.\n")
    }

    fn farewell(&self) -> Result<(), Failure> {
        // Whoever built it has the program nowhere on the search path.
        let path = std::env::current_exe()
            .ok()
            .and_then(|program| program.parent().map(Path::to_owned));
        let path = path.map_or_else(String::new, |folder| {
            format!("  export PATH={}:$PATH\n", folder.display())
        });
        let http = self.http.map_or_else(String::new, |address| {
            format!("  curl http://{address}/v1/jobs\n  curl http://{address}/metrics\n")
        });
        say(&format!(
            "\nIt goes on running. In another terminal:\n{path}  export TENURE_CONFIG={}\n  tenure job list\n  tenure dead list\n  \
             tenure enqueue hello --data '{{\"name\": \"you\"}}' --wait\n{http}  psql -h 127.0.0.1 -p {} -U {USER} {DATABASE}\n\
             Ctrl-C stops it.\n",
            self.config.display(),
            self.sql_port,
        ))
    }
}

fn told(job_type: &str, ending: &Ending) -> Result<(), Failure> {
    let what = match (&ending.result, &ending.last_error) {
        (Some(result), _) => result.0.clone(),
        (None, Some(error)) => error.clone(),
        (None, None) => String::new(),
    };
    say(&format!(
        "  {}  {job_type:<7} {:<10} {what}\n",
        ending.id, ending.status
    ))
}

/// Posts one job, as any program does that speaks HTTP.
fn by_http(address: SocketAddr, body: &str) -> Result<Uuid, Failure> {
    let post = || {
        let mut stream = TcpStream::connect(address)?;
        write!(
            stream,
            "POST /v1/jobs HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        )?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    let answer = post().map_err(|error: std::io::Error| {
        Failure::failed(format!("POST /v1/jobs failed: {error}"))
    })?;
    let body = answer
        .split_once("\r\n\r\n")
        .map(|(_, body)| body)
        .unwrap_or_default();
    let value: serde_json::Value = serde_json::from_str(body).unwrap_or_default();
    read(value["data"]["id"].as_str().unwrap_or(body))
}

fn read(id: &str) -> Result<Uuid, Failure> {
    id.parse()
        .map_err(|_| Failure::failed(format!("the id of a job was expected, and this came: {id}")))
}
