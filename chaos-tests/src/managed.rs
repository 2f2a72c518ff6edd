//! A cluster that Patroni manages: three daemons on it, and producers. Nobody but Patroni promotes anything here.

use std::ops::{Deref, DerefMut};

use tenure_verdict::uptime;

use crate::balancer::Balancer;
use crate::fleet::Fleet;
use crate::lab::Lab;
use crate::patroni::Patroni;
use crate::plan::Plan;
use crate::pooler::Pooler;

/// How the daemons reach the primary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// All three hosts.
    Direct,
    /// HAProxy is the only host that they know.
    Balancer,
    /// PgBouncer in transaction mode before HAProxy; the heart has `direct_url` with all three hosts.
    Pooler,
}

/// See the module. Everything in it ends when it is dropped. Its [`Fleet`] is at hand as if it were part of it.
#[derive(Debug)]
pub struct Managed<'a> {
    fleet: Fleet<'a, Patroni>,
    _pooler: Option<Pooler>,
    _balancer: Option<Balancer>,
}

impl<'a> Deref for Managed<'a> {
    type Target = Fleet<'a, Patroni>;

    fn deref(&self) -> &Self::Target {
        &self.fleet
    }
}

impl DerefMut for Managed<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.fleet
    }
}

impl<'a> Managed<'a> {
    /// Starts everything, and waits until all daemons live and jobs run.
    ///
    /// # Panics
    /// When something does not start.
    #[must_use]
    pub fn start(scenario: &'a str, plan: Plan<'a>, way: Way, synchronous: bool) -> Self {
        let patroni = Patroni::start(synchronous);
        let ports = patroni.ports();
        let hosts: Vec<String> = ports
            .iter()
            .map(|port| format!("127.0.0.1:{port}"))
            .collect();
        let direct = format!("postgres://postgres@{}/app", hosts.join(","));
        let balancer = (way != Way::Direct).then(|| Balancer::start(&patroni));
        let pooler = match &balancer {
            Some(balancer) if way == Way::Pooler => Some(Pooler::start(balancer.port())),
            _ => None,
        };
        let lab = Lab::on(patroni, direct.clone());
        let set = match (&pooler, &balancer) {
            (Some(pooler), _) => vec![
                format!("database.url={}", pooler.url()),
                format!("database.direct_url={direct}"),
                "database.pooler=transaction".to_owned(),
            ],
            (None, Some(balancer)) => vec![format!(
                "database.url=postgres://postgres@127.0.0.1:{}/app",
                balancer.port()
            )],
            (None, None) => Vec::new(),
        };
        let mut fleet = Fleet::start(scenario, plan, lab, &set);
        fleet.produce(&ports);
        fleet.enqueue("ticks-4", 60);
        fleet.random.dawdle(500);
        Self {
            fleet,
            _pooler: pooler,
            _balancer: balancer,
        }
    }

    /// Does this to the cluster. It is the fault from which on a switch is measured.
    pub fn strike<T>(&mut self, blow: impl FnOnce(&mut Patroni) -> T) -> T {
        self.note_fault();
        self.note_unreplicated();
        blow(&mut self.fleet.lab.server)
    }

    /// Waits until Patroni has made another primary, or has started the same one again.
    pub fn until_switched(&mut self) {
        self.fleet.lab.server.until_another_reign();
        self.note_switch(uptime());
    }

    /// Waits until all nodes are there and replicate.
    pub fn until_whole(&self) {
        self.lab.server.until_whole();
    }
}
