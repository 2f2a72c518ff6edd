//! The user that runs the server: the present one, or, for root, one without rights.

use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::{env, fs, io};

use nix::unistd::{Gid, Uid, User, geteuid};

use crate::Error;

/// Whom to run PostgreSQL's programs as.
#[derive(Debug, Clone)]
pub(crate) struct Account {
    name: String,
    uid: Uid,
    gid: Gid,
    /// We are root and have to become this user.
    switch: bool,
}

impl Account {
    /// The present user. Root takes the owner of `data_dir` where that has one, so that existing data keeps its owner;
    /// then `postgres`, then the user who called sudo, then `nobody`.
    pub(crate) fn choose(data_dir: Option<&Path>) -> Result<Self, Error> {
        if !geteuid().is_root() {
            let user = User::from_uid(geteuid()).ok().flatten();
            return Ok(Self {
                name: user.map_or_else(|| geteuid().to_string(), |user| user.name),
                uid: geteuid(),
                gid: nix::unistd::getegid(),
                switch: false,
            });
        }
        let owner = data_dir
            .and_then(|dir| fs::metadata(dir).ok())
            .map(|data| data.uid());
        let sudo = env::var("SUDO_UID").ok().and_then(|uid| uid.parse().ok());
        let by_id = |uid: Option<u32>| User::from_uid(Uid::from_raw(uid?)).ok().flatten();
        let by_name = |name| User::from_name(name).ok().flatten();
        let user = by_id(owner.filter(|&uid| uid != 0))
            .or_else(|| by_name("postgres"))
            .or_else(|| by_id(sudo.filter(|&uid| uid != 0)))
            .or_else(|| by_name("nobody"))
            .ok_or(Error::NoAccount)?;
        Ok(Self {
            name: user.name,
            uid: user.uid,
            gid: user.gid,
            switch: true,
        })
    }

    /// A command that runs as this user, reads nothing and sees none of our `PG…` variables.
    pub(crate) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.stdin(Stdio::null()).current_dir("/");
        for (key, _) in env::vars_os() {
            if key.to_string_lossy().starts_with("PG") {
                command.env_remove(key);
            }
        }
        if self.switch {
            command.uid(self.uid.as_raw()).gid(self.gid.as_raw());
        }
        command
    }

    /// Gives `path` to this user.
    pub(crate) fn give(&self, path: &Path) -> Result<(), Error> {
        if !self.switch {
            return Ok(());
        }
        std::os::unix::fs::chown(path, Some(self.uid.as_raw()), Some(self.gid.as_raw())).map_err(
            Error::io(format!("give {} to {}", path.display(), self.name)),
        )
    }

    /// Refuses a folder, or a link to one, that somebody else has laid in our way.
    pub(crate) fn must_own(&self, folder: &Path) -> Result<(), Error> {
        let what = || format!("use {}", folder.display());
        let owner = fs::symlink_metadata(folder)
            .map_err(Error::io(what()))?
            .uid();
        if owner == self.uid.as_raw() || owner == geteuid().as_raw() {
            return Ok(());
        }
        let taken = io::Error::new(
            io::ErrorKind::PermissionDenied,
            "it belongs to another user; remove it",
        );
        Err(Error::io(what())(taken))
    }

    /// Refuses a path below a folder that this user may not enter: PostgreSQL's own message would not name it.
    pub(crate) fn must_reach(&self, path: &Path) -> Result<(), Error> {
        let closed = path.ancestors().skip(1).find(|folder| {
            fs::metadata(folder).is_ok_and(|data| {
                let bit = if data.uid() == self.uid.as_raw() {
                    0o100
                } else if data.gid() == self.gid.as_raw() {
                    0o010
                } else {
                    0o001
                };
                data.mode() & bit == 0
            })
        });
        match closed {
            Some(folder) if self.switch => Err(Error::Unreachable {
                user: self.name.clone(),
                folder: folder.into(),
            }),
            _ => Ok(()),
        }
    }

    /// Its name, when it is not the present user.
    pub(crate) fn other(&self) -> Option<&str> {
        self.switch.then_some(self.name.as_str())
    }

    /// A short text that differs between users, for file names.
    pub(crate) fn key(&self) -> String {
        self.uid.to_string()
    }
}
