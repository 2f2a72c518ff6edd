//! Servers of its own: a primary with two standbys, and what befalls them.

use std::thread;

use tenure_embedded::{Error, Options, Server};

use crate::output::Failure;

/// What can befall them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Blow {
    Kill,
    KillBehind,
    Freeze,
    SwitchOver,
    Restart,
}

impl Blow {
    pub(super) const ALL: [Self; 5] = [
        Self::Kill,
        Self::KillBehind,
        Self::Freeze,
        Self::SwitchOver,
        Self::Restart,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Kill => "primary killed",
            Self::KillBehind => "primary killed, last commits lost",
            Self::Freeze => "primary frozen",
            Self::SwitchOver => "switchover",
            Self::Restart => "primary restarted",
        }
    }
}

/// See the module. Everything ends when it is dropped.
pub(super) struct Own {
    primary: Server,
    others: Vec<Server>,
}

impl Own {
    /// Starts them.
    pub(super) fn start() -> Result<Self, Failure> {
        let mut options = Options::for_tests();
        options.settings = Server::cluster_settings();
        let primary = Server::start(options).map_err(failed)?;
        let standbys = thread::scope(|scope| {
            let started = [(); 2].map(|()| scope.spawn(|| primary.standby()));
            started.map(|thread| thread.join())
        });
        let mut others = Vec::new();
        for standby in standbys {
            let standby = standby.map_err(|_| Failure::failed("a standby does not start"))?;
            others.push(standby.map_err(failed)?);
        }
        primary
            .create_database("selftest")
            .map_err(|error| Failure::failed(format!("the database cannot be made: {error}")))?;
        Ok(Self { primary, others })
    }

    /// Where daemons and producers find them.
    pub(super) fn url(&self) -> String {
        let servers = std::iter::once(&self.primary).chain(&self.others);
        let hosts: Vec<String> = servers
            .map(|server| format!("127.0.0.1:{}", server.port()))
            .collect();
        format!("postgres://postgres@{}/selftest", hosts.join(","))
    }

    /// For people.
    pub(super) fn version(&self) -> &str {
        self.primary.version()
    }

    /// What must have happened for the blow to have its effect, before the clock starts.
    pub(super) fn prepare(&self, blow: Blow) -> Result<(), Failure> {
        if blow == Blow::KillBehind {
            for standby in &self.others {
                standby.cut_replication().map_err(failed)?;
            }
        }
        Ok(())
    }

    /// Strikes the primary.
    pub(super) fn strike(&mut self, blow: Blow) -> Result<(), Failure> {
        match blow {
            Blow::Kill | Blow::KillBehind => self.primary.kill9(),
            Blow::Freeze => self.primary.freeze(),
            Blow::SwitchOver => self.primary.stop_fast(),
            Blow::Restart => self.primary.restart(),
        }
        .map_err(failed)
    }

    /// Makes another one the primary, as whoever manages a cluster does.
    pub(super) fn succeed(&mut self, blow: Blow) -> Result<(), Failure> {
        if blow == Blow::Restart {
            return Ok(());
        }
        let place = |server: &Server| server.position().unwrap_or_default();
        let furthest = usize::from(place(&self.others[1]) > place(&self.others[0]));
        self.others[furthest].promote().map_err(failed)?;
        std::mem::swap(&mut self.primary, &mut self.others[furthest]);
        Ok(())
    }

    /// Brings the old primary and the other standby back as standbys.
    pub(super) fn restore(&mut self) -> Result<(), Failure> {
        for server in &mut self.others {
            // A frozen one goes on first, and so for a moment there are two that take writes.
            server.thaw().map_err(failed)?;
        }
        for server in &mut self.others {
            // One that is ahead of the new primary cannot just follow it: down, it is taken back first.
            server.stop_fast().map_err(failed)?;
            server.follow(&self.primary).map_err(failed)?;
        }
        Ok(())
    }
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn failed(error: Error) -> Failure {
    Failure::failed(error.to_string())
}
