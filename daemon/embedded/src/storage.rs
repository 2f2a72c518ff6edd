//! The folders of a server: where they lie, how a data folder is filled, and that nobody else uses it.
//!
//! `initdb` takes most of a second, so temporary servers copy a template, which is made once for each user and
//! version below the system's folder for temporary files. Lasting data is made by `initdb` itself.

use std::env;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tempfile::TempDir;

use crate::Error;
use crate::account::Account;
use crate::installation::Installation;
use crate::processes::{self, State};

/// A new folder that the server's user owns, for the socket and for temporary data.
pub(crate) fn temporary(account: &Account) -> Result<TempDir, Error> {
    let base = base(account);
    let dir = tempfile::Builder::new()
        .prefix("tenure-pg-")
        .permissions(Permissions::from_mode(0o700))
        .tempdir_in(&base)
        .map_err(Error::io(format!("make a folder in {}", base.display())))?;
    account.must_reach(dir.path())?;
    account.give(dir.path())?;
    Ok(dir)
}

/// Copies the template to `data_dir`, after making it if this is the first server of this user and version.
pub(crate) fn copy_template(
    account: &Account,
    installation: &Installation,
    data_dir: &Path,
) -> Result<(), Error> {
    let home = base(account).join(format!("tenure-pg-templates-{}", account.key()));
    match fs::DirBuilder::new().mode(0o700).create(&home) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(Error::io(format!("make {}", home.display()))(error));
        }
        _ => account.must_own(&home)?,
    }
    let lock = lock(&home)?;
    account.give(&home)?;
    let template = home.join(installation.version());
    // A cleaner of old files may have emptied it.
    if !template.join("global/pg_control").exists() {
        let draft = home.join("draft");
        for leftover in [&draft, &template] {
            if leftover.exists() {
                fs::remove_dir_all(leftover)
                    .map_err(Error::io(format!("remove {}", leftover.display())))?;
            }
        }
        init(
            account,
            installation,
            &draft,
            &["--wal-segsize=1", "--no-sync"],
        )?;
        fs::rename(&draft, &template).map_err(Error::io(format!("rename {}", draft.display())))?;
    }
    drop(lock);
    let mut copy = account.command(Path::new("cp"));
    run(copy
        .args(["-a", "--reflink=auto"])
        .arg(&template)
        .arg(data_dir))
}

/// Makes `data_dir` ready for a server: filled if it was empty, else checked. Gives its full path.
pub(crate) fn prepare_lasting(
    account: &Account,
    installation: &Installation,
    data_dir: &Path,
    sync: bool,
) -> Result<PathBuf, Error> {
    let make = || {
        fs::create_dir_all(data_dir)?;
        data_dir.canonicalize()
    };
    let data_dir = make().map_err(Error::io(format!("make {}", data_dir.display())))?;
    account.must_reach(&data_dir)?;
    let version = data_dir.join("PG_VERSION");
    if let Ok(found) = fs::read_to_string(&version) {
        if found.trim() != installation.major() {
            return Err(Error::OtherVersion {
                data_dir,
                found: found.trim().to_owned(),
                programs: installation.bin_dir().into(),
                installed: installation.version().to_owned(),
            });
        }
        clear_lock(account, &data_dir)?;
        return Ok(data_dir);
    }
    let mut entries =
        fs::read_dir(&data_dir).map_err(Error::io(format!("read {}", data_dir.display())))?;
    if entries.next().is_some() {
        return Err(Error::NotOurs { data_dir });
    }
    account.give(&data_dir)?;
    let no_sync: &[&str] = if sync { &[] } else { &["--no-sync"] };
    init(account, installation, &data_dir, no_sync)?;
    Ok(data_dir)
}

/// Refuses a data folder in which a server runs, and removes the lock of one that is gone.
///
/// PostgreSQL does the latter itself, except where the process id has been taken by another process, or belongs to a
/// zombie that its new parent has not buried yet.
fn clear_lock(account: &Account, data_dir: &Path) -> Result<(), Error> {
    let lock = data_dir.join("postmaster.pid");
    let Ok(text) = fs::read_to_string(&lock) else {
        return Ok(());
    };
    let first = text.lines().next();
    let Some(pid) = first.and_then(|line| line.trim().parse().ok()) else {
        return Ok(());
    };
    if processes::state(pid) == State::Alive && works_in(account, pid, data_dir)? {
        return Err(Error::AlreadyRunning {
            pid,
            data_dir: data_dir.into(),
        });
    }
    processes::wait_until(Duration::from_secs(5), || {
        processes::state(pid) != State::Zombie
    });
    match fs::remove_file(&lock) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Error::io(format!("remove {}", lock.display()))(error))
        }
        _ => Ok(()),
    }
}

/// True if the process `pid` has `data_dir` as its working folder, which is so for a postmaster.
fn works_in(account: &Account, pid: i32, data_dir: &Path) -> Result<bool, Error> {
    // Asked as the server's user: in a container even root may not look into processes of others.
    let output = account
        .command(Path::new("readlink"))
        .arg(format!("/proc/{pid}/cwd"))
        .output()
        .map_err(Error::io("run readlink"))?;
    Ok(output.stdout.trim_ascii_end() == data_dir.as_os_str().as_bytes())
}

fn init(
    account: &Account,
    installation: &Installation,
    data_dir: &Path,
    extra: &[&str],
) -> Result<(), Error> {
    let mut initdb = account.command(&installation.program("initdb"));
    initdb
        .args([
            "--auth=trust",
            "--username=postgres",
            "--encoding=UTF8",
            "--locale=C",
        ])
        .args(extra)
        .arg("--pgdata")
        .arg(data_dir);
    run(&mut initdb)
}

/// Removes all that is in `folder`, which may be one in which only we may make folders.
pub(crate) fn empty(folder: &Path) -> Result<(), Error> {
    let remove = || {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() && !path.is_symlink() {
                fs::remove_dir_all(path)?;
            } else {
                fs::remove_file(path)?;
            }
        }
        Ok(())
    };
    remove().map_err(Error::io(format!("empty {}", folder.display())))
}

/// Runs a helper program to its end.
pub(crate) fn run(command: &mut Command) -> Result<(), Error> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command
        .output()
        .map_err(Error::io(format!("run {program}")))?;
    if output.status.success() {
        return Ok(());
    }
    let text = [output.stdout, output.stderr].concat();
    Err(Error::Program {
        program,
        output: String::from_utf8_lossy(&text).trim().to_owned(),
    })
}

fn lock(home: &Path) -> Result<File, Error> {
    let path = home.join("lock");
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .map_err(Error::io(format!("open {}", path.display())))?;
    file.lock()
        .map_err(Error::io(format!("lock {}", path.display())))?;
    Ok(file)
}

/// The system's folder for temporary files; /tmp where the server's user cannot enter that one, or where it is too long
/// for the 107 bytes of a socket's path.
fn base(account: &Account) -> PathBuf {
    let dir = env::temp_dir();
    let fits = dir.as_os_str().len() <= 60;
    if fits && account.must_reach(&dir.join("x")).is_ok() {
        dir
    } else {
        PathBuf::from("/tmp")
    }
}
