//! Starts a handler's process.
//!
//! Invariant: what the process gets is what stands here. No shell, no variable of the daemon's that the settings do not
//! name, no descriptor but the three pipes, the usual signals; it leads its own process group, below
//! a supervisor that the guard knows before it runs.

use std::env;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use nix::errno::Errno;
use nix::libc;
use nix::unistd::Pid;
use tokio::process::{Child, Command};
use tokio::time::sleep;

use super::confine::Confined;
use super::started::{Started, With, pipe};
use super::{Executor, Task};
use crate::cgroup::Cgroup;
use crate::guard::register_self;
use crate::settings::{Confinement, DEFAULT_PATH};
use crate::supervisor::{Deaf, Told};

/// What passes by itself is tried again this often: a program that is just being written, a guard that is being replaced.
const TRIES: u32 = 60;
const BETWEEN_TRIES: Duration = Duration::from_millis(50);

/// What is started.
pub(super) struct Program<'a> {
    /// Program and arguments.
    pub(super) command: &'a [String],
    /// Working directory; `None`: the daemon's.
    pub(super) cwd: Option<&'a Path>,
    /// Names of the daemon's environment variables that it gets.
    pub(super) env: &'a [String],
    /// As whom it runs, and what it may use.
    pub(super) confinement: &'a Confinement,
    /// Further variables.
    pub(super) own: Vec<(String, OsString)>,
}

/// Why there is no process.
pub(super) enum NotSpawned {
    /// It is not wanted any more.
    Stopped(String),
    /// The system refused; for a person to read.
    Refused(String),
}

/// Starts the process below its supervisor, its standard streams piped. The child is the supervisor. `given_up` says why it is not
/// wanted any more, asked while the system refuses.
pub(super) async fn spawn(
    executor: &Executor,
    program: &Program<'_>,
    mut given_up: impl FnMut() -> Option<String>,
) -> Result<Started, NotSpawned> {
    let mut tries = 1;
    loop {
        let error = match try_spawn(executor, program) {
            Ok(started) => return Ok(started),
            Err(error) => error,
        };
        if tries == TRIES || !passes(&error) {
            return Err(NotSpawned::Refused(explain(&error, program)));
        }
        tries += 1;
        sleep(BETWEEN_TRIES).await;
        if let Some(reason) = given_up() {
            return Err(NotSpawned::Stopped(reason));
        }
    }
}

fn try_spawn(executor: &Executor, program: &Program<'_>) -> io::Result<Started> {
    let (name, args) = program
        .command
        .split_first()
        .ok_or(io::ErrorKind::NotFound)?;
    let mut command = Command::new(name);
    command
        .args(args)
        .env_clear()
        .envs(environment(program))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    let confinement = program.confinement;
    let folder = confinement
        .private_tmp
        .then(|| executor.folders.make(confinement.account.as_ref()))
        .transpose()
        .map_err(|error| io::Error::new(error.kind(), NoFolder(error)))?;
    if let Some(folder) = &folder {
        command.env("TMPDIR", folder.path());
    }
    let group = executor
        .cgroups
        .as_ref()
        .filter(|_| !confinement.limits.are_none())
        .map(|groups| groups.make(&confinement.limits))
        .transpose()
        .map_err(|error| io::Error::new(error.kind(), NoGroup(error)))?;
    let entry = group.as_ref().map(Cgroup::entry).transpose()?;
    let entry_at = entry.as_ref().map(AsRawFd::as_raw_fd);
    if let Some(cwd) = program.cwd {
        command.current_dir(cwd);
    }
    let guard = executor
        .guard
        .as_ref()
        .map(|guard| (guard, guard.registry()));
    let socket = guard.as_ref().map(|(_, registry)| registry.as_raw_fd());
    let supervisor = executor.supervisor.clone();
    let confined = Confined::new(confinement);
    let limits = Told::new(&confinement.limits);
    let (report, reporter) = pipe()?;
    let report_at = reporter.as_raw_fd();
    // SAFETY: between fork and exec only async-signal-safe things may be done. All of these make system calls on memory of
    // their own stack and of what was made before; they take no lock and allocate nothing. `socket` and
    // `report_at` are open in the child: `guard` and `reporter` live until spawn has returned, as does `entry`.
    #[expect(
        unsafe_code,
        reason = "only the child can tell the guard of itself before it is the handler"
    )]
    unsafe {
        command.pre_exec(move || {
            let deaf = Deaf::become_deaf()?;
            close_on_exec();
            socket.map_or(Ok(()), register_self)?;
            let handler = supervisor.split(deaf, &limits, report_at)?;
            entry_at.map_or(Ok(()), enter)?;
            confined.apply()?;
            handler.release()
        });
    }
    let child = command.spawn()?;
    if let (Some((guard, registry)), Some(pid)) = (&guard, pid_of(&child)) {
        guard.adopt(pid.as_raw(), registry);
    }
    let with = With::new(report, folder, group);
    Ok(Started { child, with })
}

/// The process id of `child`; `None` once it was reaped.
pub(super) fn pid_of(child: &Child) -> Option<Pid> {
    let pid = i32::try_from(child.id()?).ok()?;
    Some(Pid::from_raw(pid))
}

/// Ours all close on exec, but this daemon may itself have been started with others.
fn close_on_exec() {
    // Linux before 5.11 cannot do this and passes those on. Called by number: the C library has it only lately.
    // SAFETY: the call only sets a flag of descriptors and takes no pointer.
    #[expect(unsafe_code, reason = "there is no safe form of this system call")]
    unsafe {
        libc::syscall(
            libc::SYS_close_range,
            3,
            libc::c_uint::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        );
    }
}

/// Enters a control group, with the right of the daemon's user.
fn enter(entry: RawFd) -> io::Result<()> {
    // SAFETY: the byte outlives the call, and the descriptor is open: who forked this process holds it until it has spawned.
    #[expect(unsafe_code, reason = "the descriptor came by its number only")]
    let written = unsafe { libc::write(entry, b"0".as_ptr().cast(), 1) };
    Errno::result(written)?;
    Ok(())
}

/// There is no control group.
#[derive(Debug, thiserror::Error)]
#[error("no control group for its limits could be made: {0}")]
struct NoGroup(io::Error);

/// There is no folder for temporary files.
#[derive(Debug, thiserror::Error)]
#[error("no folder for its temporary files (private_tmp) could be made in TMPDIR: {0}")]
struct NoFolder(io::Error);

fn environment(program: &Program<'_>) -> Vec<(String, OsString)> {
    let mut variables = vec![("PATH".to_owned(), OsString::from(DEFAULT_PATH))];
    let allowed = program.env.iter();
    variables.extend(allowed.filter_map(|name| Some((name.clone(), env::var_os(name)?))));
    variables.extend(program.own.iter().cloned());
    variables
}

impl Task {
    /// What the process of an `exec` handler finds in its environment.
    pub(super) fn variables(&self, deadline: &str) -> Vec<(String, OsString)> {
        let own = [
            ("TENURE_JOB_ID", self.job.to_string()),
            ("TENURE_JOB_TYPE", self.job_type.clone()),
            ("TENURE_ATTEMPT", self.attempt.to_string()),
            ("TENURE_MAX_ATTEMPTS", self.max_attempts.to_string()),
            ("TENURE_TOKEN", self.token.to_string()),
            ("TENURE_TENANT", self.tenant.clone()),
            ("TENURE_DEADLINE", deadline.to_owned()),
        ];
        let trace = self.traceparent.clone();
        let trace = trace.map(|value| ("TRACEPARENT", value));
        let all = own.into_iter().chain(trace);
        all.map(|(name, value)| (name.to_owned(), value.into()))
            .collect()
    }
}

/// Whether the reason is likely to pass within seconds.
fn passes(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    matches!(
        errno,
        Some(Errno::ETXTBSY | Errno::EAGAIN | Errno::EPIPE | Errno::ECONNRESET | Errno::ENOTCONN)
    )
}

fn explain(error: &io::Error, program: &Program<'_>) -> String {
    let name = program.command.first().map_or("", String::as_str);
    let cwd = program
        .cwd
        .map_or_else(String::new, |cwd| format!(" in {}", cwd.display()));
    let hint = match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::ENOENT) => {
            "is it installed on this host, is its interpreter, and is there such a directory (cwd)?"
        }
        Some(Errno::EACCES | Errno::EPERM) => {
            "is it executable for the user that it runs as (chmod +x), and on no noexec mount?"
        }
        Some(Errno::ENOEXEC) => "it is no program for this machine, or a script without a #! line",
        Some(Errno::EAGAIN | Errno::ENOMEM | Errno::EMFILE | Errno::ENFILE) => {
            "the host is out of processes, memory or descriptors; lower worker.concurrency or raise the limits"
        }
        Some(Errno::E2BIG) => {
            "arguments and environment are too long; the payload belongs on standard input"
        }
        Some(Errno::EPIPE | Errno::ECONNRESET | Errno::ENOTCONN) => {
            "the guard process is gone and could not be replaced; see the daemon's log"
        }
        _ => "see handlers.* in the configuration",
    };
    format!("the handler {name:?} could not be started{cwd}: {error}; {hint}")
}
