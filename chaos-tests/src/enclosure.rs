//! A network or a file system of a thread's own, with all that it starts: what is done to it, nobody else notices.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use tempfile::TempDir;

/// The loopback of this thread alone. It ends with the last process in it.
#[derive(Debug)]
pub struct Network(());

impl Network {
    /// Takes this thread there, and all that it starts from now on.
    ///
    /// # Panics
    /// Without root.
    #[must_use]
    pub fn enter() -> Self {
        unshare(CloneFlags::CLONE_NEWNET).expect("a network of one's own takes root");
        run(Command::new("ip").args(["link", "set", "lo", "up"]));
        Self(())
    }

    /// Lets all packets to this port of a server vanish.
    pub fn drop_requests(&self, port: u16) {
        self.drop("--dport", port);
    }

    /// Lets all packets from this port of a server vanish.
    pub fn drop_answers(&self, port: u16) {
        self.drop("--sport", port);
    }

    fn drop(&self, which: &str, port: u16) {
        run(Command::new("iptables")
            .args(["-A", "INPUT", "-p", "tcp", which, &port.to_string()])
            .args(["-j", "DROP"]));
    }

    /// Lets all packets pass.
    pub fn heal(&self) {
        run(Command::new("iptables").arg("-F"));
    }
}

/// A small file system that only this thread and what it starts can see.
#[derive(Debug)]
pub struct Disk {
    folder: TempDir,
}

impl Disk {
    /// Makes one of so many megabytes.
    ///
    /// # Panics
    /// Without root.
    #[must_use]
    pub fn of(megabytes: u32) -> Self {
        unshare(CloneFlags::CLONE_NEWNS).expect("a file system of one's own takes root");
        let nothing = None::<&str>;
        mount(
            nothing,
            "/",
            nothing,
            MsFlags::MS_REC | MsFlags::MS_PRIVATE,
            nothing,
        )
        .expect("mounts can be kept to ourselves");
        // Below /tmp every user can reach it.
        let folder = tempfile::Builder::new()
            .tempdir_in("/tmp")
            .expect("there is room for files");
        let options = format!("size={megabytes}m,mode=755");
        mount(
            Some("tmpfs"),
            folder.path(),
            Some("tmpfs"),
            MsFlags::empty(),
            Some(options.as_str()),
        )
        .expect("memory can be mounted");
        Self { folder }
    }

    /// A folder on it, not made yet.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Fills it to the last byte.
    pub fn fill(&self) {
        let mut file = File::options()
            .create(true)
            .append(true)
            .open(self.ballast())
            .expect("a file can be made");
        for size in [1 << 20, 1 << 12, 1] {
            while file.write_all(&vec![b'x'; size]).is_ok() {}
        }
    }

    /// Gives the space back.
    pub fn relieve(&self) {
        fs::remove_file(self.ballast()).expect("it was filled");
    }

    fn ballast(&self) -> PathBuf {
        self.path("ballast")
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // What is mounted ends with this thread; the folder below it must be free for its removal.
        let _ = nix::mount::umount2(
            Path::new(self.folder.path()),
            nix::mount::MntFlags::MNT_DETACH,
        );
    }
}

fn run(command: &mut Command) {
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}; scripts/setup test installs it"));
    assert!(
        output.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}
