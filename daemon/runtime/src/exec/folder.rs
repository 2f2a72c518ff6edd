//! Folders for temporary files that are a handler's alone, and are removed after it.
//!
//! All of a daemon's are in one folder in `TMPDIR`, on which it holds a lock for as long as it lives. Whoever starts later removes
//! the folders of daemons that are dead. Invariant: nothing is removed by way of a symbolic link.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{
    DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, chown,
};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use nix::fcntl::{Flock, FlockArg};
use nix::libc;
use nix::unistd::geteuid;
use uuid::Uuid;

use crate::settings::Account;

/// How the folders of daemons begin.
const PREFIX: &str = "tenure-";

/// Makes folders; clones make them in the same place.
#[derive(Debug, Clone, Default)]
pub struct Folders(Arc<Mutex<Option<Base>>>);

#[derive(Debug)]
struct Base {
    path: PathBuf,
    _lock: Flock<File>,
}

/// One handler's folder. Dropping it removes it.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    _base: Folders,
}

impl Folders {
    /// To make folders in `TMPDIR`, from which those of dead daemons are removed now.
    #[must_use]
    pub fn in_tmpdir() -> Self {
        remove_left_overs(&std::env::temp_dir());
        Self::default()
    }

    /// Makes a folder that only `account` can use; without one, only the daemon's user.
    ///
    /// # Errors
    /// Those of the file system.
    pub(super) fn make(&self, account: Option<&Account>) -> io::Result<Folder> {
        let path = self.base()?.join(Uuid::new_v4().simple().to_string());
        DirBuilder::new().mode(0o700).create(&path)?;
        let folder = Folder {
            path,
            _base: self.clone(),
        };
        if let Some(account) = account {
            chown(&folder.path, Some(account.user), Some(account.group))?;
        }
        Ok(folder)
    }

    fn base(&self) -> io::Result<PathBuf> {
        let mut base = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(base) = &*base {
            return Ok(base.path.clone());
        }
        let path = std::env::temp_dir().join(format!("{PREFIX}{}", Uuid::new_v4().simple()));
        // Others may pass, and see nothing.
        DirBuilder::new().mode(0o711).create(&path)?;
        let lock =
            Flock::lock(open(&path)?, FlockArg::LockSharedNonblock).map_err(|(_, errno)| errno)?;
        *base = Some(Base {
            path: path.clone(),
            _lock: lock,
        });
        Ok(path)
    }
}

impl Drop for Base {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.path);
    }
}

impl Folder {
    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.path) {
            tracing::warn!(folder = %self.path.display(), %error, "A handler's temporary folder could not be removed.");
        }
    }
}

/// Removes what dead daemons of this user have left in `place`.
fn remove_left_overs(place: &Path) {
    let entries = fs::read_dir(place).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| is_ours(&entry.file_name().to_string_lossy())) {
        let path = entry.path();
        // A link is not opened, and a folder of somebody else is left alone.
        let Ok(folder) = open(&path) else { continue };
        let ours = folder
            .metadata()
            .is_ok_and(|about| about.uid() == geteuid().as_raw());
        if ours
            && let Ok(_lock) = Flock::lock(folder, FlockArg::LockExclusiveNonblock)
            && let Err(error) = remove(&path)
        {
            tracing::warn!(folder = %path.display(), %error, "Temporary files of a dead daemon could not be removed.");
        }
    }
}

fn is_ours(name: &str) -> bool {
    let id = name.strip_prefix(PREFIX);
    id.is_some_and(|id| id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW)
        .open(path)
}

/// Removes a folder with all that is in it, also what its owner has closed to himself.
fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            open_up(path);
            fs::remove_dir_all(path)
        }
        other => other,
    }
}

/// Gives the owner back the use of all folders below `path`. Nobody is left who could put a link in their place meanwhile.
fn open_up(path: &Path) {
    let is_folder = fs::symlink_metadata(path).is_ok_and(|about| about.is_dir());
    if is_folder && fs::set_permissions(path, fs::Permissions::from_mode(0o700)).is_ok() {
        for entry in fs::read_dir(path).into_iter().flatten().flatten() {
            open_up(&entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn only_what_dead_daemons_left_is_removed_and_no_link_is_followed() {
        let place = tempfile::tempdir().unwrap();
        let name = |n: u8| place.path().join(format!("{PREFIX}{n:032x}"));
        let precious = place.path().join("precious");
        fs::create_dir(&precious).unwrap();
        fs::write(precious.join("file"), "x").unwrap();
        for n in [1, 2] {
            fs::create_dir_all(name(n).join("job/closed")).unwrap();
            symlink(&precious, name(n).join("job/link")).unwrap();
            fs::set_permissions(name(n).join("job/closed"), PermissionsExt::from_mode(0o000))
                .unwrap();
        }
        symlink(&precious, name(3)).unwrap();
        let living = Flock::lock(open(&name(2)).unwrap(), FlockArg::LockSharedNonblock).unwrap();
        remove_left_overs(place.path());
        assert!(!name(1).exists());
        assert!(name(2).join("job").exists());
        assert!(name(3).is_symlink() && precious.join("file").exists());
        drop(living);
        remove_left_overs(place.path());
        assert!(!name(2).exists() && precious.join("file").exists());
    }

    #[test]
    fn other_names_are_nobodys_left_overs() {
        assert!(is_ours("tenure-00000000000000000000000000000000"));
        for other in [
            "tenure-",
            "tenure-data",
            "tenure-x0000000000000000000000000000000",
            "other",
        ] {
            assert!(!is_ours(other), "{other}");
        }
    }
}
