//! A way to PostgreSQL that can be blocked.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// Passes connections on to a server. Lives until the process ends.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    state: Arc<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Where new connections go.
    port: AtomicU16,
    /// Nothing moves; what was sent arrives later.
    blocked: AtomicBool,
    /// How many connections there were.
    opened: AtomicUsize,
    /// Both ends of each connection that there was.
    ends: Mutex<Vec<TcpStream>>,
    /// What these first connections send arrives never.
    swallowed: AtomicUsize,
    /// How long each piece takes in each direction, in milliseconds.
    delay: AtomicU64,
    /// Of so many answers of the server one is withheld, and its connection ends; 0 for none.
    withhold: AtomicUsize,
    /// How many answers there were.
    answers: AtomicUsize,
}

impl State {
    /// Whether this answer is the one that never arrives.
    fn withholds(&self) -> bool {
        let number = self.answers.fetch_add(1, SeqCst) + 1;
        match self.withhold.load(SeqCst) {
            0 => false,
            one_of => number.is_multiple_of(one_of),
        }
    }

    /// Returns when things move.
    fn wait(&self) {
        while self.blocked.load(SeqCst) {
            thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Proxy {
    /// A proxy to `port` of this machine.
    #[must_use]
    pub fn to(port: u16) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port is free");
        let address = listener.local_addr().expect("a listener has an address");
        let state = Arc::new(State {
            port: port.into(),
            ..State::default()
        });
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let number = shared.opened.fetch_add(1, SeqCst);
                let state = Arc::clone(&shared);
                thread::spawn(move || carry(&client, number, &state));
            }
        });
        Self { address, state }
    }

    /// Where to connect to, for this database and user.
    #[must_use]
    pub fn url(&self, database: &str, user: &str) -> String {
        format!("postgres://{user}@{}/{database}", self.address)
    }

    /// Where to connect to.
    #[must_use]
    pub fn address(&self) -> String {
        self.address.to_string()
    }

    /// Leads new connections to another port. Those that there are stay where they are.
    pub fn point_to(&self, port: u16) {
        self.state.port.store(port, SeqCst);
    }

    /// Ends all connections that there are.
    pub fn cut(&self) {
        let mut ends = self.state.ends.lock().expect("nothing panics with it");
        for end in ends.drain(..) {
            // Over already, maybe.
            let _ = end.shutdown(Shutdown::Both);
        }
    }

    /// Holds everything back, new connections too, or lets it go on where it was.
    pub fn block(&self, blocked: bool) {
        self.state.blocked.store(blocked, SeqCst);
    }

    /// Lets everything take so long in each direction.
    pub fn delay(&self, delay: Duration) {
        let milliseconds = u64::try_from(delay.as_millis()).expect("a delay is short");
        self.state.delay.store(milliseconds, SeqCst);
    }

    /// Of each so many answers of the server, over all connections, withholds one and ends its connection: what was asked is done, and
    /// who asked does not know. 0 ends that.
    pub fn withhold(&self, one_of: usize) {
        self.state.withhold.store(one_of, SeqCst);
    }

    /// What is sent over the connections that there are now arrives never, and nobody is told. New connections work.
    pub fn swallow(&self) {
        self.state
            .swallowed
            .store(self.state.opened.load(SeqCst), SeqCst);
    }
}

/// Leads one connection to the server. While nothing moves, nobody is told either whether there is one.
fn carry(client: &TcpStream, number: usize, state: &Arc<State>) {
    state.wait();
    let Ok(server) = TcpStream::connect((Ipv4Addr::LOCALHOST, state.port.load(SeqCst))) else {
        return;
    };
    if let (Ok(one), Ok(other)) = (client.try_clone(), server.try_clone()) {
        state
            .ends
            .lock()
            .expect("nothing panics with it")
            .extend([one, other]);
    }
    for (from, to, answers) in [(client, &server, false), (&server, client, true)] {
        if let (Ok(from), Ok(to)) = (from.try_clone(), to.try_clone()) {
            let state = Arc::clone(state);
            thread::spawn(move || pump(from, to, number, answers, &state));
        }
    }
}

fn pump(mut from: TcpStream, mut to: TcpStream, number: usize, answers: bool, state: &State) {
    let mut buffer = vec![0; 1 << 16];
    loop {
        // A connection that broke is at its end too.
        let length = from.read(&mut buffer).unwrap_or_default();
        thread::sleep(Duration::from_millis(state.delay.load(SeqCst)));
        state.wait();
        if answers && length > 0 && state.withholds() {
            let _ = from.shutdown(Shutdown::Both);
            break;
        }
        let swallow = number < state.swallowed.load(SeqCst);
        if length == 0 && !swallow {
            break;
        }
        if length == 0 || !swallow && to.write_all(&buffer[..length]).is_err() {
            return;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}
