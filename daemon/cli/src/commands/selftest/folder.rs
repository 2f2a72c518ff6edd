//! Where notes and logs of a self-test lie.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::output::Failure;

/// Notes and logs; they go unless somebody wants them.
pub(super) enum Folder {
    Temporary(Option<TempDir>, PathBuf),
    Named(PathBuf),
}

impl Folder {
    pub(super) fn new(named: Option<&Path>) -> Result<Self, Failure> {
        let failed = |path: &Path, error| Failure::failed(format!("{}: {error}", path.display()));
        match named {
            Some(path) => {
                fs::create_dir_all(path).map_err(|error| failed(path, error))?;
                let full = path.join("witnesses").exists();
                if full {
                    return Err(Failure::usage(format!(
                        "{} holds the notes of another self-test",
                        path.display()
                    )));
                }
                let path = path.canonicalize().map_err(|error| failed(path, error))?;
                Ok(Self::Named(path))
            }
            None => {
                let made = tempfile::Builder::new()
                    .prefix("tenure-selftest-")
                    .tempdir();
                let made = made.map_err(|error| failed(&std::env::temp_dir(), error))?;
                let path = made.path().to_owned();
                Ok(Self::Temporary(Some(made), path))
            }
        }
    }

    pub(super) fn path(&self) -> &Path {
        match self {
            Self::Temporary(_, path) | Self::Named(path) => path,
        }
    }

    /// Leaves it, and says where it is.
    pub(super) fn keep(&mut self) -> String {
        if let Self::Temporary(made, _) = self
            && let Some(made) = made.take()
        {
            let _ = made.keep();
        }
        format!("notes and logs are in {}", self.path().display())
    }
}
