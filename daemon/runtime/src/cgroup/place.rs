//! Where this daemon may make control groups.

use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use nix::libc;
use nix::unistd::{AccessFlags, Uid, access, geteuid};

/// The control group that is delegated to this daemon, with room for others below it.
///
/// # Errors
/// Why there is none, for people.
pub(super) fn delegated() -> Result<PathBuf, String> {
    let read =
        |file| fs::read_to_string(file).map_err(|error| format!("{file} cannot be read: {error}"));
    let own = own_group(&read("/proc/self/cgroup")?, &read("/proc/self/mountinfo")?)
        .ok_or("there are no control groups of version 2 here")?;
    let systemd = Path::new("/run/systemd/system").exists();
    // systemd (DelegateSubgroup=) may have put the daemon one below.
    let marked = [Some(own.as_path()), own.parent()]
        .into_iter()
        .flatten()
        .find(|group| is_marked(group));
    let place = match marked {
        Some(group) => group,
        // Root can write everywhere, also where systemd wants to be alone.
        None if systemd && geteuid() == Uid::from_raw(0) => {
            return Err(format!(
                "{} is not delegated (Delegate=yes in the unit)",
                own.display()
            ));
        }
        None => &own,
    };
    for file in ["", "cgroup.procs", "cgroup.subtree_control"] {
        access(&place.join(file), AccessFlags::W_OK).map_err(|error| {
            format!(
                "{} is not writable: {error} (Delegate=yes in the unit)",
                place.join(file).display()
            )
        })?;
    }
    if place == own {
        make_room(&own)?;
    }
    Ok(place.to_owned())
}

/// A group whose members are to be limited has no process of its own, but for the root of all.
fn make_room(own: &Path) -> Result<(), String> {
    if !own.join("cgroup.type").exists() {
        return Ok(());
    }
    let room = own.join("tenure");
    let moved = match fs::create_dir(&room) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => Err(error),
        _ => fs::write(room.join("cgroup.procs"), "0"),
    };
    moved.map_err(|error| format!("this daemon cannot move to {}: {error}", room.display()))
}

/// The folder of this process's group, from `/proc/self/cgroup` and `/proc/self/mountinfo`.
fn own_group(groups: &str, mounts: &str) -> Option<PathBuf> {
    let path = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    let (root, mount) = mounts.lines().find_map(|line| {
        let (fields, kind) = line.split_once(" - ")?;
        let mut fields = fields.split(' ').skip(3);
        let (root, mount) = (fields.next()?, fields.next()?);
        kind.starts_with("cgroup2 ").then_some((root, mount))
    })?;
    let below = Path::new(path).strip_prefix(root).ok()?;
    // A group outside what is mounted here begins with `/..`.
    let inside = !below
        .components()
        .any(|part| part == std::path::Component::ParentDir);
    inside.then(|| Path::new(mount).join(below))
}

/// Whether systemd has marked this group as delegated.
fn is_marked(group: &Path) -> bool {
    ["trusted.delegate", "user.delegate"]
        .into_iter()
        .any(|name| {
            let (Ok(path), Ok(name)) = (
                CString::new(group.as_os_str().as_bytes()),
                CString::new(name),
            ) else {
                return false;
            };
            let mut value = [0u8; 1];
            // SAFETY: both texts end with NUL, and the buffer is as long as is said.
            #[expect(unsafe_code, reason = "there is no safe form of this call")]
            let length = unsafe {
                libc::getxattr(
                    path.as_ptr(),
                    name.as_ptr(),
                    value.as_mut_ptr().cast(),
                    value.len(),
                )
            };
            length == 1 && value == *b"1"
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_group_is_found_wherever_it_is_mounted() {
        let own = |groups, mounts| own_group(groups, mounts);
        let unified =
            "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate";
        assert_eq!(
            own("0::/system.slice/tenure.service\n", unified),
            Some("/sys/fs/cgroup/system.slice/tenure.service".into())
        );
        let hybrid = "1 2 0:5 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n1 2 0:6 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw";
        assert_eq!(
            own("4:memory:/a\n0::/\n", hybrid),
            Some("/sys/fs/cgroup/unified".into())
        );
        let container = "30 23 0:26 /docker/1 /sys/fs/cgroup ro - cgroup2 cgroup rw";
        assert_eq!(
            own("0::/docker/1/x\n", container),
            Some("/sys/fs/cgroup/x".into())
        );
        assert_eq!(own("0::/../2\n", unified), None);
        assert_eq!(own("4:memory:/a\n", hybrid), None);
        assert_eq!(own("0::/\n", ""), None);
    }
}
