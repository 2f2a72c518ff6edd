//! A receiver that accepts each job (202) and has it finished later, by whichever daemon.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::http;
use crate::lab::{PATIENCE, nap};

/// See the module. Its threads end with the process.
#[derive(Debug, Clone)]
pub struct Receiver {
    port: u16,
    /// The tokens that it was given, by job.
    tokens: Arc<Mutex<BTreeMap<String, Vec<String>>>>,
}

impl Receiver {
    /// Listens on a port of its own.
    ///
    /// # Panics
    /// When there is none.
    #[must_use]
    pub fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("there is a port");
        let port = listener.local_addr().expect("it listens").port();
        let new = Self {
            port,
            tokens: Arc::default(),
        };
        let tokens = Arc::clone(&new.tokens);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let tokens = Arc::clone(&tokens);
                thread::spawn(move || serve(stream, &tokens));
            }
        });
        new
    }

    /// Its handler for jobs of type `later`, as TOML.
    #[must_use]
    pub fn handler(&self) -> String {
        format!(
            "[handlers.later]\nhttp = {{ url = \"http://127.0.0.1:{}/\" }}\nretry = {{ delay = \"1s\" }}\n",
            self.port
        )
    }

    /// How often each job was brought to it.
    #[must_use]
    pub fn brought(&self) -> BTreeMap<String, usize> {
        let tokens = self.tokens.lock().expect("no panic");
        let times = tokens.iter();
        times.map(|(job, all)| (job.clone(), all.len())).collect()
    }

    /// Says to the daemon at this port that the job is done, until it has an answer other than 503; answers with the status.
    ///
    /// # Panics
    /// When there is none for long.
    #[must_use]
    pub fn complete(&self, job: &str, api: u16) -> u16 {
        let token = self.tokens.lock().expect("no panic")[job].last().cloned();
        let body = json!({"token": token, "result": {"by": api}});
        for _ in 0..PATIENCE.as_millis() / 100 {
            let path = format!("/v1/jobs/{job}/complete");
            match http::post(api, &path, &body, Duration::from_secs(20)) {
                Some((503, _)) | None => nap(),
                Some((status, _)) => return status,
            }
        }
        panic!("nobody says what became of job {job}")
    }

    /// The same for many jobs, several at once; all have to be taken.
    pub fn complete_all(&self, jobs: &[String], api: u16) {
        thread::scope(|scope| {
            for some in jobs.chunks(jobs.len().div_ceil(8).max(1)) {
                scope.spawn(move || {
                    for job in some {
                        assert_eq!(self.complete(job, api), 200, "job {job}");
                    }
                });
            }
        });
    }
}

fn serve(stream: TcpStream, tokens: &Mutex<BTreeMap<String, Vec<String>>>) {
    let Ok(mut answers) = stream.try_clone() else {
        return;
    };
    let mut requests = BufReader::new(stream);
    loop {
        let mut length = 0;
        loop {
            let mut line = String::new();
            match requests.read_line(&mut line) {
                Ok(0) | Err(_) => return,
                Ok(_) if line == "\r\n" => break,
                Ok(_) => {}
            }
            if let Some((name, value)) = line.split_once(':')
                && name.eq_ignore_ascii_case("content-length")
            {
                length = value.trim().parse().unwrap_or(0);
            }
        }
        let mut body = vec![0; length];
        if requests.read_exact(&mut body).is_err() {
            return;
        }
        let job: Value = serde_json::from_slice(&body).expect("an envelope is JSON");
        let text = |key: &str| job[key].as_str().unwrap_or_default().to_owned();
        let mut all = tokens.lock().expect("no panic");
        all.entry(text("id")).or_default().push(text("token"));
        drop(all);
        let accepted = b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n";
        if answers.write_all(accepted).is_err() {
            return;
        }
    }
}
