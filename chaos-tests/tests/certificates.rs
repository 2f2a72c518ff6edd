//! B98: a server that proves who it is, and servers that do not.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use chaos_tests::Lab;

/// An authority, with certificates that it gave.
struct Authority {
    folder: PathBuf,
}

impl Authority {
    fn new(folder: PathBuf) -> Self {
        fs::create_dir(&folder).unwrap();
        let subject = format!("/CN={}", folder.file_name().unwrap().display());
        let new = Self { folder };
        new.openssl(&[
            "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.crt",
            "-subj", &subject, "-days", "2",
        ]);
        new
    }

    /// A certificate and its key for `subject` (as in subjectAltName), for so many days.
    fn certify(&self, name: &str, subject: &str, days: &str) -> PathBuf {
        let (request, key, certificate) = (
            format!("{name}.csr"),
            format!("{name}.key"),
            format!("{name}.crt"),
        );
        let extension = format!("{name}.ext");
        fs::write(
            self.folder.join(&extension),
            format!("subjectAltName={subject}\n"),
        )
        .unwrap();
        self.openssl(&[
            "req",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-keyout",
            &key,
            "-out",
            &request,
            "-subj",
            "/CN=a server",
        ]);
        self.openssl(&[
            "x509",
            "-req",
            "-in",
            &request,
            "-CA",
            "ca.crt",
            "-CAkey",
            "ca.key",
            "-CAcreateserial",
            "-out",
            &certificate,
            "-days",
            days,
            "-extfile",
            &extension,
        ]);
        self.folder.join(name)
    }

    fn openssl(&self, arguments: &[&str]) {
        let said = Command::new("openssl")
            .args(arguments)
            .current_dir(&self.folder)
            .output()
            .unwrap();
        assert!(
            said.status.success(),
            "{arguments:?}: {}",
            String::from_utf8_lossy(&said.stderr)
        );
    }

    fn root(&self) -> String {
        self.folder.join("ca.crt").display().to_string()
    }
}

/// Lets the server show this certificate.
fn show(lab: &Lab, certificate: &Path) {
    let owner = fs::metadata(lab.server.data_dir()).unwrap();
    for (extension, setting) in [("crt", "ssl_cert_file"), ("key", "ssl_key_file")] {
        let file = lab.server.data_dir().join(format!(
            "{}.{extension}",
            certificate.file_name().unwrap().display()
        ));
        fs::copy(certificate.with_extension(extension), &file).unwrap();
        chown(&file, Some(owner.uid()), Some(owner.gid())).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        lab.run(&format!(
            "ALTER SYSTEM SET {setting} = '{}'",
            file.display()
        ));
    }
    lab.run("ALTER SYSTEM SET ssl = on");
}

#[test]
fn only_a_proven_server_is_spoken_to() {
    let mut lab = Lab::start();
    let ours = Authority::new(lab.path("ours"));
    let theirs = Authority::new(lab.path("theirs"));
    let plain = lab.server.url("app", "postgres");
    let verify = |root: &str| format!("{plain}?sslmode=verify-full&sslrootcert={root}");
    let ask = |lab: &Lab, url: &str| {
        let said = lab.tenure(&["stats", "--set", &format!("database.url={url}")]);
        (
            said.status.code().unwrap(),
            String::from_utf8_lossy(&said.stderr).into_owned(),
        )
    };
    let refused = |lab: &Lab, url: &str, why: &str| {
        let (code, words) = ask(lab, url);
        assert_ne!(code, 0, "{url}");
        assert!(words.to_lowercase().contains(why), "{url}: {words}");
    };

    // The server has no TLS, and none of these modes makes do without.
    refused(&lab, &verify(&ours.root()), "tls");
    for mode in ["allow", "prefer"] {
        refused(&lab, &format!("{plain}?sslmode={mode}"), "sslmode");
    }

    show(&lab, &ours.certify("good", "IP:127.0.0.1", "2"));
    lab.server.restart().unwrap();
    assert_eq!(
        ask(&lab, &verify(&ours.root())).0,
        0,
        "{:?}",
        ask(&lab, &verify(&ours.root()))
    );
    assert_eq!(ask(&lab, &format!("{plain}?sslmode=disable")).0, 0);
    refused(&lab, &verify(&theirs.root()), "unknownissuer");
    refused(&lab, &verify("/nowhere/ca.crt"), "/nowhere/ca.crt");

    show(&lab, &ours.certify("other", "DNS:elsewhere.example", "2"));
    lab.server.restart().unwrap();
    refused(&lab, &verify(&ours.root()), "not valid for name");

    show(&lab, &ours.certify("old", "IP:127.0.0.1", "0"));
    lab.server.restart().unwrap();
    // It is good for the second in which it was made.
    lab.wait_for(|| match ask(&lab, &verify(&ours.root())) {
        (0, _) => Err("the certificate is still good".to_owned()),
        (_, words) if words.contains("expired") => Ok(()),
        (_, words) => panic!("{words}"),
    });
}
