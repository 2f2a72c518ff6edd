//! What is behind a lab, and what is done to a primary with standbys.

use std::fs;
use std::thread;

use tenure_embedded::{Server, Sql, SqlError};

/// What is behind a lab: one server, or several of which one at a time is the primary.
pub trait Servers {
    /// Logs in to the present primary, as superuser.
    ///
    /// # Errors
    /// When none answers.
    fn log_in(&self, database: &str) -> Result<Sql, SqlError>;

    /// The port of the present primary.
    fn primary(&self) -> u16;

    /// Everything that they have logged.
    fn logged(&self) -> String;
}

impl Servers for Server {
    fn log_in(&self, database: &str) -> Result<Sql, SqlError> {
        self.sql(database)
    }

    fn primary(&self) -> u16 {
        self.port()
    }

    fn logged(&self) -> String {
        // One that never started has none.
        let log = fs::read(self.log_file()).unwrap_or_default();
        String::from_utf8_lossy(&log).into_owned()
    }
}

/// Starts two standbys of this primary.
///
/// # Panics
/// When one does not start.
#[must_use]
pub fn two_standbys(primary: &Server) -> Vec<Server> {
    thread::scope(|scope| {
        let started = [(); 2].map(|()| scope.spawn(|| primary.standby()));
        started
            .into_iter()
            .map(|thread| thread.join().expect("no panic").expect("a standby starts"))
            .collect()
    })
}

/// Whether it runs as a standby.
#[must_use]
pub fn streams(server: &Server) -> bool {
    server.pid().is_some() && server.is_standby().unwrap_or(false)
}

/// Whether all standbys among these have what the primary has written up to `target`.
///
/// # Errors
/// Who has not.
pub fn have_all(standbys: &[Server], target: u64) -> Result<(), String> {
    let behind = standbys
        .iter()
        .filter(|server| streams(server))
        .find(|server| server.position().unwrap_or_default() < target);
    behind.map_or(Ok(()), |server| {
        Err(format!("the standby {} is behind", server.port()))
    })
}

/// Ends replication to the standbys among these.
///
/// # Panics
/// When it cannot be ended.
pub fn cut_replication(standbys: &[Server]) {
    for standby in standbys.iter().filter(|server| streams(server)) {
        standby.cut_replication().expect("replication can be cut");
    }
}

/// The place of the standby that has received most.
///
/// # Panics
/// When there is none.
#[must_use]
pub fn furthest(standbys: &[Server]) -> usize {
    (0..standbys.len())
        .filter(|&index| standbys[index].is_standby().unwrap_or(false))
        .max_by_key(|&index| standbys[index].position().unwrap_or_default())
        .expect("there is a standby")
}

/// Lets the standbys among these follow the new primary, who was in the place `promoted`. There is the old one now, which may be
/// frozen: nobody asks it.
///
/// # Panics
/// When one does not.
pub fn follow(others: &[Server], promoted: usize, primary: &Server) {
    for (index, standby) in others.iter().enumerate() {
        if index != promoted && standby.is_standby().unwrap_or(false) {
            let healed = standby.heal_replication(primary);
            healed.expect("the other standby follows");
        }
    }
}
