//! A small process that ends a server, or another program, whose owner died.
//!
//! A test that is killed, or runs out of time, cannot drop its [`Server`](crate::Server). The leash is a shell that reads from a
//! pipe which we hold: a line releases it, the end of the pipe means that we are gone. (PR_SET_PDEATHSIG would not
//! do: it follows the thread that started the server, not the process.)

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::Error;

/// $1 is the process, $2 a folder to remove with it. The signal to continue is for a frozen one. What does not heed QUIT, which
/// ends a PostgreSQL at once, is killed.
const SCRIPT: &str = r#"
read -r released && exit
kill -QUIT "$1"; kill -CONT "$1"
tries=0
while kill -0 "$1" && [ "$tries" -lt 100 ]; do sleep 0.1; tries=$((tries + 1)); done
[ "$tries" -lt 100 ] || kill -KILL "$1"
rm -rf -- "$2"
"#;

/// Holds one process; dropping it lets the process go.
#[derive(Debug)]
pub struct Leash {
    shell: Child,
}

impl Leash {
    /// Ties the process `pid`, and `folder` with it, to the life of this one.
    ///
    /// # Errors
    /// When no shell can be started.
    pub fn tie(pid: i32, folder: &Path) -> Result<Self, Error> {
        let shell = Command::new("/bin/sh")
            .args(["-c", SCRIPT, "leash", &pid.to_string()])
            .arg(folder)
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Ctrl-C and whoever ends our process group must not end it with us.
            .process_group(0)
            .spawn()
            .map_err(Error::io("start /bin/sh"))?;
        Ok(Self { shell })
    }
}

impl Drop for Leash {
    fn drop(&mut self) {
        if let Some(mut pipe) = self.shell.stdin.take() {
            // Only a shell that somebody killed cannot be told.
            let _ = pipe.write_all(b"released\n");
        }
        let _ = self.shell.wait();
    }
}
