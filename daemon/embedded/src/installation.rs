//! Which PostgreSQL programs to run.

use std::path::{self, Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use crate::Error;

/// The folder of a server's programs, and their version.
#[derive(Debug, Clone)]
pub(crate) struct Installation {
    bin_dir: PathBuf,
    version: String,
}

impl Installation {
    /// Takes `bin_dir`, else `TENURE_PG_BIN`, else the highest version in /usr/lib/postgresql, else what PATH holds.
    pub(crate) fn find(bin_dir: Option<&Path>) -> Result<Self, Error> {
        let named = bin_dir
            .map(PathBuf::from)
            .or_else(|| env::var_os("TENURE_PG_BIN").map(PathBuf::from));
        let bin_dir = match named {
            Some(dir) => dir,
            None => debian()
                .or_else(in_path)
                .ok_or_else(|| Error::NotInstalled {
                    searched: format!("{DEBIAN}/*/bin and PATH"),
                })?,
        };
        let bin_dir =
            path::absolute(&bin_dir).map_err(Error::io(format!("find {}", bin_dir.display())))?;
        for program in ["initdb", "postgres"] {
            let path = bin_dir.join(program);
            if !path.is_file() {
                return Err(Error::ProgramMissing { path });
            }
        }
        let output = Command::new(bin_dir.join("postgres"))
            .arg("--version")
            .output()
            .map_err(Error::io(format!("run postgres in {}", bin_dir.display())))?;
        // "postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)"
        let text = String::from_utf8_lossy(&output.stdout);
        let version = text
            .split_whitespace()
            .find(|word| word.starts_with(|first: char| first.is_ascii_digit()))
            .ok_or_else(|| Error::Program {
                program: bin_dir.join("postgres").display().to_string(),
                output: format!("{text}{}", String::from_utf8_lossy(&output.stderr)),
            })?;
        Ok(Self {
            version: version.to_owned(),
            bin_dir,
        })
    }

    /// Path of one of its programs.
    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.bin_dir.join(name)
    }

    /// The folder of the programs.
    pub(crate) fn bin_dir(&self) -> &Path {
        &self.bin_dir
    }

    /// As PostgreSQL says it: `15.18`, `19beta1`.
    pub(crate) fn version(&self) -> &str {
        &self.version
    }

    /// What the file PG_VERSION of a data folder says: `15`.
    pub(crate) fn major(&self) -> &str {
        let end = self.version.find(|c: char| !c.is_ascii_digit());
        &self.version[..end.unwrap_or(self.version.len())]
    }
}

const DEBIAN: &str = "/usr/lib/postgresql";

fn debian() -> Option<PathBuf> {
    fs::read_dir(DEBIAN)
        .ok()?
        .flatten()
        .filter_map(|entry| {
            Some((
                entry.file_name().to_str()?.parse::<u32>().ok()?,
                entry.path().join("bin"),
            ))
        })
        .filter(|(_, bin)| is_complete(bin))
        .max()
        .map(|(_, bin)| bin)
}

fn in_path() -> Option<PathBuf> {
    env::split_paths(&env::var_os("PATH")?).find(|dir| is_complete(dir))
}

fn is_complete(bin: &Path) -> bool {
    bin.join("initdb").is_file() && bin.join("postgres").is_file()
}
