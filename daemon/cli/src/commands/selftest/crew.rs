//! The daemons of a self-test: processes of this same binary.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::Serialize;
use tenure_embedded::Leash;
use tenure_verdict::switches::Absence;
use tenure_verdict::uptime;

use super::place::SCHEMA;
use crate::output::Failure;

/// How long a daemon may take to end after SIGTERM: it waits for its handlers, at most 30 s.
const STOPPING: Duration = Duration::from_secs(90);

/// What can befall a daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Blow {
    Kill,
    Freeze,
    Restart,
}

impl Blow {
    pub(super) const ALL: [Self; 3] = [Self::Kill, Self::Freeze, Self::Restart];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Kill => "daemon killed",
            Self::Freeze => "daemon frozen",
            Self::Restart => "daemon restarted",
        }
    }
}

/// What the largest of the daemons uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct Use {
    pub(super) memory_kib: u64,
    pub(super) open_files: usize,
}

struct Member {
    child: Child,
    // Should this process be killed, the daemon ends too.
    _leash: Leash,
}

/// The daemons. They and their handlers end when this is dropped.
pub(super) struct Crew {
    binary: PathBuf,
    folder: PathBuf,
    environment: Vec<(&'static str, String)>,
    members: Vec<Member>,
    /// When which of them could not speak.
    pub(super) absences: Vec<Absence>,
}

impl Crew {
    /// Starts so many, each with a configuration, a log and a `state_dir` in `folder`. By `environment` they find the database, so that no
    /// password lies in a file.
    pub(super) fn start(
        folder: &Path,
        environment: Vec<(&'static str, String)>,
        count: usize,
    ) -> Result<Self, Failure> {
        let binary = std::env::current_exe()
            .map_err(|error| Failure::failed(format!("this program cannot be found: {error}")))?;
        let mut crew = Self {
            binary,
            folder: folder.to_owned(),
            environment,
            members: Vec::new(),
            absences: Vec::new(),
        };
        for number in 0..count {
            let text = crew.configuration(number);
            fs::write(crew.file(number, "toml"), text)
                .map_err(|error| Failure::failed(format!("{}: {error}", folder.display())))?;
            let member = crew.spawn(number)?;
            crew.members.push(member);
        }
        Ok(crew)
    }

    fn configuration(&self, number: usize) -> String {
        let text = |path: &Path| toml_edit::Value::from(path.display().to_string()).to_string();
        let (binary, journal) = (text(&self.binary), text(&self.folder.join("witnesses")));
        let state = text(&self.file(number, "state"));
        format!(
            "[handlers.\"selftest-*\"]\nexec = {{ command = [{binary}, \"witness\", {journal}], kill_grace = \"500ms\" }}\n\
             retry = {{ delay = \"1s\" }}\n\
             [worker]\nname = \"selftest-{number}\"\nconcurrency = 4\nlease_ttl = \"10s\"\nheartbeat = \"1s\"\nstate_dir = {state}\n\
             [api]\nlisten = \"off\"\n[log]\nformat = \"text\"\n[database]\nschema = \"{SCHEMA}\"\n"
        )
    }

    fn file(&self, number: usize, extension: &str) -> PathBuf {
        self.folder.join(format!("daemon-{number}.{extension}"))
    }

    fn spawn(&self, number: usize) -> Result<Member, Failure> {
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.file(number, "log"));
        let child = log.and_then(|log| {
            let mut command = Command::new(&self.binary);
            // What else this command was told by variables is not for them.
            for (name, _) in std::env::vars_os() {
                if name.to_string_lossy().starts_with("TENURE_") {
                    command.env_remove(name);
                }
            }
            command
                .envs(self.environment.iter().map(|(key, value)| (key, value)))
                .arg("run")
                .arg("--config")
                .arg(self.file(number, "toml"))
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(log)
                .spawn()
        });
        let child =
            child.map_err(|error| Failure::failed(format!("a daemon does not start: {error}")))?;
        // A folder that is not there: notes and logs are to stay.
        let leash = Leash::tie(child.id().cast_signed(), &self.folder.join("nothing"));
        Ok(Member {
            child,
            _leash: leash.map_err(|error| Failure::failed(error.to_string()))?,
        })
    }

    fn pid(&self, number: usize) -> i32 {
        self.members[number].child.id().cast_signed()
    }

    fn signal(&self, number: usize, signal: Signal) -> Result<(), Failure> {
        kill(Pid::from_raw(self.pid(number)), signal).map_err(|errno| {
            Failure::failed(format!("daemon {number} cannot be signalled: {errno}"))
        })
    }

    /// Strikes one of them. It is there again when this returns; a frozen one was away for `pause`.
    pub(super) fn strike(
        &mut self,
        number: usize,
        blow: Blow,
        pause: Duration,
    ) -> Result<(), Failure> {
        // What ended a second ago is written.
        let lately = uptime().saturating_sub(Duration::from_secs(1));
        let absence = Absence {
            daemon: self.pid(number),
            safe_before: lately,
            until: Duration::MAX,
        };
        match blow {
            Blow::Kill => {
                self.absences.push(absence);
                self.signal(number, Signal::SIGKILL)?;
            }
            Blow::Freeze => {
                self.signal(number, Signal::SIGSTOP)?;
                thread::sleep(pause);
                self.signal(number, Signal::SIGCONT)?;
                self.absences.push(Absence {
                    until: uptime(),
                    ..absence
                });
                return Ok(());
            }
            Blow::Restart => {
                // What it had finished is safe; what was cut off is given back.
                self.absences.push(Absence {
                    safe_before: Duration::MAX,
                    ..absence
                });
                self.signal(number, Signal::SIGTERM)?;
            }
        }
        self.wait(number)?;
        self.members[number] = self.spawn(number)?;
        Ok(())
    }

    fn wait(&mut self, number: usize) -> Result<Option<i32>, Failure> {
        let begun = uptime();
        loop {
            match self.members[number].child.try_wait() {
                Ok(Some(status)) => return Ok(status.code()),
                Ok(None) if uptime().saturating_sub(begun) > STOPPING => {
                    return Err(Failure::failed(format!(
                        "daemon {number} does not end within {STOPPING:?} after SIGTERM"
                    ))
                    .hint(format!("see {}", self.file(number, "log").display())));
                }
                Ok(None) => thread::sleep(super::LOOK),
                Err(error) => {
                    return Err(Failure::failed(format!("daemon {number} is lost: {error}")));
                }
            }
        }
    }

    /// What the largest of them uses; nothing where the system does not tell.
    pub(super) fn largest(&self) -> Option<Use> {
        let of = |pid: u32| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
            let memory = status
                .lines()
                .find_map(|line| line.strip_prefix("VmRSS:")?.split_whitespace().next());
            Some(Use {
                memory_kib: memory?.parse().ok()?,
                open_files: fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count(),
            })
        };
        let uses = self
            .members
            .iter()
            .filter_map(|member| of(member.child.id()));
        uses.reduce(|one, other| Use {
            memory_kib: one.memory_kib.max(other.memory_kib),
            open_files: one.open_files.max(other.open_files),
        })
    }

    /// Whether one has ended by itself, which none should.
    pub(super) fn check(&mut self) -> Result<(), Failure> {
        for number in 0..self.members.len() {
            if let Ok(Some(status)) = self.members[number].child.try_wait() {
                return Err(Failure::failed(format!(
                    "daemon {number} has ended by itself ({status})"
                ))
                .hint(format!("see {}", self.file(number, "log").display())));
            }
        }
        Ok(())
    }

    /// Asks all to stop, and waits. Says which did not end well.
    pub(super) fn stop(&mut self) -> Result<(), Failure> {
        for number in 0..self.members.len() {
            self.signal(number, Signal::SIGTERM)?;
        }
        for number in 0..self.members.len() {
            let code = self.wait(number)?;
            if code != Some(0) {
                return Err(Failure::failed(format!(
                    "daemon {number} ended with {code:?} after SIGTERM"
                ))
                .hint(format!("see {}", self.file(number, "log").display())));
            }
        }
        Ok(())
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        for member in &mut self.members {
            // Most have ended; their guards end the handlers of the others.
            let _ = member.child.kill();
            let _ = member.child.wait();
        }
    }
}
