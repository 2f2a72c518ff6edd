//! Finds the program of a handler, as the kernel will find it later.

use std::path::{Path, PathBuf};

use nix::unistd::{AccessFlags, access};

/// The file that `program` names: itself if it has a slash (from `cwd` if it is relative), else the first of that name
/// in the folders of `search`. The error says what is missing.
pub(crate) fn find(program: &str, cwd: Option<&Path>, search: &str) -> Result<PathBuf, String> {
    if program.is_empty() || program.contains('\0') {
        return Err("the program's name is empty or holds a NUL".to_owned());
    }
    if program.contains('/') {
        let path = cwd.unwrap_or(Path::new("")).join(program);
        return match usable(&path) {
            Ok(()) => Ok(path),
            Err(why) => Err(format!("missing handler binary: {} {why}", path.display())),
        };
    }
    let mut refused = None;
    for folder in search.split(':').filter(|folder| !folder.is_empty()) {
        let path = Path::new(folder).join(program);
        match usable(&path) {
            Ok(()) => return Ok(path),
            Err(Unusable::Missing) => {}
            Err(why) => refused = Some(format!("missing handler binary: {} {why}", path.display())),
        }
    }
    Err(refused.unwrap_or_else(|| {
        format!(
            "missing handler binary: no `{program}` in {search}; install it or give its full path"
        )
    }))
}

/// Why a file is no program.
enum Unusable {
    Missing,
    NoFile,
    NotExecutable,
}

impl std::fmt::Display for Unusable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Missing => "does not exist",
            Self::NoFile => "is not a file",
            Self::NotExecutable => "is not executable for this user (chmod +x)",
        })
    }
}

fn usable(path: &Path) -> Result<(), Unusable> {
    let data = path.metadata().map_err(|_| Unusable::Missing)?;
    if !data.is_file() {
        return Err(Unusable::NoFile);
    }
    access(path, AccessFlags::X_OK).map_err(|_| Unusable::NotExecutable)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use tenure_runtime::settings::DEFAULT_PATH;

    use super::*;

    #[test]
    fn a_program_is_found_as_the_kernel_finds_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.sh");
        std::fs::write(&path, "#!/bin/sh\n").unwrap();
        let here = folder.path().to_str().unwrap();
        let refused = find("run.sh", None, here).unwrap_err();
        assert!(refused.contains("not executable"), "{refused}");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(find("run.sh", None, here), Ok(path));
        assert_eq!(
            find("./run.sh", Some(folder.path()), ""),
            Ok(folder.path().join("./run.sh"))
        );
        assert_eq!(
            find("sh", None, DEFAULT_PATH).map(|path| path.is_absolute()),
            Ok(true)
        );
    }

    #[test]
    fn what_is_missing_is_said() {
        let missing = find("no-such-program", None, "/bin").unwrap_err();
        assert!(
            missing.contains("missing handler binary: no `no-such-program` in /bin"),
            "{missing}"
        );
        assert!(
            find("/bin", None, "")
                .unwrap_err()
                .contains("is not a file")
        );
        assert!(find("", None, "/bin").is_err());
    }
}
