//! A primary with two standbys, three daemons that know all of them, and producers: the place where switches happen.
//!
//! A scenario goes: [`Cluster::start`], [`Cluster::load`], [`Cluster::strike`], [`Cluster::promote`], [`Cluster::finish`], with
//! whatever it is about in between. The cluster notes what it does to whom and when, since the verdict needs it.

use std::ops::{Deref, DerefMut};

use tenure_embedded::{Options, Server};
use tenure_verdict::uptime;

use crate::fleet::Fleet;
use crate::lab::Lab;
use crate::plan::{Plan, way};
use crate::proxy::Proxy;
use crate::servers;

/// See the module. Everything in it ends when it is dropped. Its [`Fleet`] is at hand as if it were part of it.
#[derive(Debug)]
pub struct Cluster<'a> {
    fleet: Fleet<'a>,
    /// The other servers: standbys, and old primaries, also dead ones.
    pub others: Vec<Server>,
    /// What the daemons go through, in the order of the hosts at the start; empty for [`Route::Direct`](crate::Route::Direct).
    pub proxies: Vec<Proxy>,
}

impl<'a> Deref for Cluster<'a> {
    type Target = Fleet<'a>;

    fn deref(&self) -> &Self::Target {
        &self.fleet
    }
}

impl DerefMut for Cluster<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.fleet
    }
}

impl<'a> Cluster<'a> {
    /// Starts everything but the producers, and waits until all daemons live.
    ///
    /// # Panics
    /// When something does not start.
    #[must_use]
    pub fn start(scenario: &'a str, plan: Plan<'a>) -> Self {
        let primary = Server::start(Self::options()).expect("PostgreSQL starts");
        let others = servers::two_standbys(&primary);
        let ports = [primary.port(), others[0].port(), others[1].port()];
        let (url, proxies) = way(plan.route, &ports);
        Self {
            fleet: Fleet::start(scenario, plan, Lab::on(primary, url), &[]),
            others,
            proxies,
        }
    }

    /// How its servers are started.
    #[must_use]
    pub fn options() -> Options {
        let mut options = Lab::options();
        options.settings.extend(Server::cluster_settings());
        options
    }

    /// Lets producers enqueue, and waits until jobs run, more wait, and the standbys have all of it.
    pub fn load(&mut self) {
        let ports = self.ports();
        self.produce(&ports);
        self.backlog();
        self.random.dawdle(500);
    }

    /// Puts in more than can run at once, so that a switch finds jobs that nobody has started; waits until the standbys have it.
    pub fn backlog(&mut self) {
        self.enqueue("ticks-4", 60);
        let target = self.lab.server.position().expect("the primary answers");
        self.lab
            .wait_for(|| servers::have_all(&self.others, target));
    }

    /// Does this to the primary. It is the fault from which on a switch is measured, if there is none already.
    pub fn strike<T>(&mut self, blow: impl FnOnce(&mut Server) -> T) -> T {
        self.note_fault();
        self.note_unreplicated();
        blow(&mut self.lab.server)
    }

    /// Ends replication to all standbys: what commits now is lost by the next switch.
    pub fn cut_replication(&mut self) {
        self.note_unreplicated();
        servers::cut_replication(&self.others);
    }

    /// Promotes the standby that is furthest, and lets the others follow it where they can. The old primary is left as it is.
    pub fn promote(&mut self) {
        let furthest = servers::furthest(&self.others);
        self.promote_this(furthest);
        servers::follow(&self.others, furthest, &self.fleet.lab.server);
    }

    /// Promotes this one of the others, and no more.
    pub fn promote_this(&mut self, index: usize) {
        // Without a blow of its own the promotion is the fault: two primaries.
        self.note_fault();
        self.others[index]
            .promote()
            .expect("the standby becomes the primary");
        let writable = uptime();
        std::mem::swap(&mut self.fleet.lab.server, &mut self.others[index]);
        self.note_switch(writable);
    }

    /// Makes one of the others, an old primary that runs or not, a standby of the present one on its old address.
    pub fn rejoin(&mut self, index: usize) {
        self.others[index]
            .follow(&self.fleet.lab.server)
            .expect("the old primary becomes a standby");
    }

    /// Where in the list of others the server with this port is.
    #[must_use]
    pub fn index_of(&self, port: u16) -> usize {
        let place = self.others.iter().position(|server| server.port() == port);
        place.expect("it is one of the others")
    }

    /// The ports of all servers, the primary's first.
    #[must_use]
    pub fn ports(&self) -> Vec<u16> {
        let others = self.others.iter().map(Server::port);
        std::iter::once(self.lab.server.port())
            .chain(others)
            .collect()
    }
}
