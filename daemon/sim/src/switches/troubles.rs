//! What goes wrong when, and how the cluster's manager answers.

use super::cluster::SERVERS;
use super::daemon::new_job;
use super::network::{Event, Fall, Trouble};
use super::simulation::{DAEMONS, JOBS, Simulation};
use std::ops::Range;
use tenure_core::ids::JobId;
use uuid::Uuid;

/// A primary that falls in a world with one outage does so then.
const OUTAGE_AT: u64 = 20_000;
/// A primary whose clock stands still meanwhile is paused soon after this.
const PAUSE_AT: u64 = 25_000;

/// How long there is trouble in this world.
pub(super) fn until(outage: Option<std::time::Duration>) -> u64 {
    let millis = outage.map(|span| u64::try_from(span.as_millis()).unwrap_or(u64::MAX));
    millis.map_or(100_000, |millis| OUTAGE_AT + millis + 5_000)
}

impl Simulation {
    /// Decides in advance what goes wrong when. Each seed has some of the world's troubles, so that none hides another.
    pub(super) fn plan(&mut self) {
        let peace_at = self.net.peace_at;
        for number in 0..JOBS {
            let time = self.net.random.within(0..peace_at * 3 / 4);
            let named = self.net.random.chance(50);
            let id = JobId(Uuid::from_u128(1 << 100 | u128::from(number)));
            self.net.at(time, Event::Enqueue { named, id });
            // A producer that does not know whether it was heard enqueues again.
            if named && self.net.random.chance(20) {
                let again = self.net.random.within(time..peace_at);
                self.net.at(again, Event::Enqueue { named, id });
            }
        }
        if self.net.random.chance(40) {
            let time = self.net.random.within(5_000..peace_at);
            self.net.at(time, Event::Cancel);
        }
        for _ in 0..4 {
            let time = self.net.random.within(5_000..peace_at);
            self.net.at(time, Event::RetryDead);
        }
        for daemon in 0..DAEMONS {
            self.plan_daemon(daemon);
        }
        self.plan_servers();
        self.net.at(peace_at, Event::Trouble(Trouble::Peace));
    }

    fn plan_daemon(&mut self, daemon: usize) {
        let (net, world) = (&mut self.net, self.world);
        let late = world.daemon_troubles && daemon > 0 && net.random.chance(30);
        let start = net.random.within(0..if late { 70_000 } else { 3_000 });
        net.at(start, Event::Restart { daemon });
        let mut cuts: [Vec<Range<u64>>; SERVERS] = Default::default();
        for cut in &mut cuts {
            if world.bad_network && net.random.chance(35) {
                cut.push(net.some_time(35_000));
            }
        }
        if world.clock_stands && daemon == 0 {
            cuts[0].push(PAUSE_AT - 10_000..net.peace_at);
        }
        net.partitions.push(cuts);
        if !world.daemon_troubles {
            return;
        }
        if net.random.chance(20) {
            let span = net.some_time(40_000);
            let until = span.end;
            net.at(
                span.start,
                Event::Trouble(Trouble::FreezeDaemon { daemon, until }),
            );
        }
        if net.random.chance(25) {
            let crash = net.random.within(5_000..net.peace_at);
            net.at(crash, Event::Trouble(Trouble::Crash { daemon }));
        }
        if net.random.chance(15) {
            let stop = net.random.within(5_000..net.peace_at);
            net.at(stop, Event::Trouble(Trouble::Stop { daemon }));
        }
    }

    fn plan_servers(&mut self) {
        let (net, world) = (&mut self.net, self.world);
        if world.outage.is_some() {
            net.at(OUTAGE_AT, Event::Trouble(Trouble::Fall(Fall::Killed)));
            return;
        }
        if world.clock_stands {
            let pause = net.random.within(PAUSE_AT..PAUSE_AT + 5_000);
            net.at(pause, Event::Trouble(Trouble::Fall(Fall::Paused)));
            return;
        }
        for host in 0..SERVERS {
            if world.bad_replication && net.random.chance(40) {
                let span = net.some_time(30_000);
                net.at(span.start, Event::Trouble(Trouble::Cut { host }));
                net.at(span.end, Event::Trouble(Trouble::Heal { host }));
            }
            self.cluster.servers[host].lag = match net.random.within(0..10) {
                _ if !world.bad_replication => 20,
                0..5 => 20,
                5..8 => net.random.within(20..1_000),
                _ => net.random.within(1_000..3_000),
            };
        }
        let first = net.random.within(8_000..45_000);
        for time in [first, first + 35_000] {
            let fall = match net.random.within(0..100) {
                0..35 => Fall::Killed,
                35..50 => Fall::Frozen,
                50..60 => Fall::Demoted,
                60..70 if world.two_primaries => Fall::Overtaken,
                60..75 => Fall::Crashed,
                75..85 => Fall::Restarted,
                _ => Fall::Paused,
            };
            let time = time + net.random.within(0..5_000);
            net.at(time, Event::Trouble(Trouble::Fall(fall)));
        }
    }

    pub(super) fn trouble(&mut self, trouble: Trouble) {
        let now = self.net.now;
        if now >= self.net.peace_at && !matches!(trouble, Trouble::Peace) {
            return;
        }
        self.cluster.catch_up(now);
        match trouble {
            Trouble::FreezeDaemon { daemon, until } => self.daemons[daemon].thaws = until,
            Trouble::Crash { daemon } => {
                if self.daemons[daemon].running {
                    self.daemons[daemon].die(&mut self.net);
                    let restart = now + self.net.random.within(100..20_000);
                    self.net.at(restart, Event::Restart { daemon });
                }
            }
            Trouble::Stop { daemon } => self.daemons[daemon].stop(&mut self.net),
            Trouble::Cut { host } => self.cluster.servers[host].linked = false,
            Trouble::Heal { host } => self.cluster.servers[host].linked = true,
            Trouble::Fall(fall) => self.fall(fall),
            Trouble::Promote { old } => self.promote(old),
            Trouble::Follow { host } => self.follow(host),
            Trouble::Return { host, lacks } => self.comes_back(host, lacks),
            Trouble::ReturnClean { host } => {
                if host == self.cluster.latest {
                    self.cluster.restarted(host, now);
                }
            }
            Trouble::Peace => self.peace(),
        }
    }

    fn fall(&mut self, fall: Fall) {
        let (now, host) = (self.net.now, self.cluster.latest);
        if !self.cluster.writable(host, now) {
            return;
        }
        let later =
            |net: &mut super::network::Network, range: Range<u64>| now + net.random.within(range);
        match fall {
            Fall::Killed => {
                self.cluster.servers[host].down = true;
                let outage = self.world.outage;
                let promote = match outage {
                    Some(span) => now + u64::try_from(span.as_millis()).unwrap_or(0),
                    None if self.net.random.chance(25) => later(&mut self.net, 20_000..60_000),
                    None => later(&mut self.net, 300..15_000),
                };
                self.schedule(promote, Trouble::Promote { old: host });
                if outage.is_none() {
                    let back = promote + self.net.random.within(500..30_000);
                    self.schedule(back, Trouble::Return { host, lacks: 0 });
                }
            }
            Fall::Frozen => {
                let promote = later(&mut self.net, 1_000..20_000);
                let thaw = promote + self.net.random.within(0..15_000);
                self.freeze(host, thaw);
                self.schedule(promote, Trouble::Promote { old: host });
                // It may be fenced before it thaws, or go on for a while as a primary that does not know that it is none.
                let fenced = if self.net.random.chance(50) {
                    promote
                } else {
                    thaw
                };
                let fenced = fenced + self.net.random.within(1..15_000);
                self.schedule(fenced, Trouble::Return { host, lacks: 0 });
            }
            Fall::Demoted => {
                let heirs = self.heirs();
                if let Some(heir) = heirs.first().copied() {
                    self.cluster.complete(heir, now);
                    self.make_primary(heir);
                    self.cluster.rebuild(host, now);
                }
            }
            Fall::Overtaken => {
                self.promote(host);
                let fenced = later(&mut self.net, 2_000..40_000);
                self.schedule(fenced, Trouble::Return { host, lacks: 0 });
            }
            Fall::Crashed => {
                self.cluster.servers[host].down = true;
                let lacks = usize::try_from(self.net.random.within(0..5)).unwrap_or(0);
                let back = later(&mut self.net, 300..15_000);
                self.schedule(back, Trouble::Return { host, lacks });
            }
            Fall::Restarted => {
                self.cluster.servers[host].down = true;
                let back = later(&mut self.net, 300..12_000);
                self.schedule(back, Trouble::ReturnClean { host });
            }
            Fall::Paused => {
                let until = later(&mut self.net, 500..45_000);
                self.freeze(host, until);
            }
        }
    }

    fn freeze(&mut self, host: usize, until: u64) {
        let now = self.net.now;
        self.cluster.freeze(host, now, until);
        if self.world.clock_stands {
            self.cluster.servers[host].clock -= i64::try_from(until - now).unwrap_or(0);
        }
    }

    fn schedule(&mut self, time: u64, trouble: Trouble) {
        self.net.at(time, Event::Trouble(trouble));
    }

    /// The standbys that could take over, in any order.
    fn heirs(&mut self) -> Vec<usize> {
        let now = self.net.now;
        let mut heirs: Vec<usize> = (0..SERVERS)
            .filter(|host| self.cluster.could_succeed(*host, now))
            .collect();
        if self.net.random.chance(50) {
            heirs.reverse();
        }
        heirs
    }

    fn promote(&mut self, old: usize) {
        let now = self.net.now;
        if self.cluster.latest != old {
            return;
        }
        match self.heirs().first() {
            Some(heir) => self.make_primary(*heir),
            None => self.schedule(now + 1_000, Trouble::Promote { old }),
        }
    }

    fn make_primary(&mut self, host: usize) {
        let now = self.net.now;
        self.judge.switches(&self.cluster);
        let lost = self.cluster.promote(host, now);
        self.judge.promoted(lost);
        for other in (0..SERVERS).filter(|other| *other != host) {
            if !self.cluster.is_primary(other) {
                let time = now + self.net.random.within(50..4_000);
                self.schedule(time, Trouble::Follow { host: other });
            }
        }
        if self.world.outage.is_none() && self.net.random.chance(35) {
            let time = now + self.net.random.within(100..12_000);
            let fall = match self.net.random.within(0..4) {
                0 => Fall::Crashed,
                1 => Fall::Frozen,
                _ => Fall::Killed,
            };
            self.schedule(time, Trouble::Fall(fall));
        }
    }

    fn follow(&mut self, host: usize) {
        let (now, latest) = (self.net.now, self.cluster.latest);
        if host == latest || self.cluster.is_primary(host) {
            return;
        }
        self.cluster.follow(host, latest, now);
        if !self.cluster.follows(host, latest) {
            // It has what the primary lacks, and is made anew.
            let time = now + self.net.random.within(1_000..30_000);
            self.schedule(time, Trouble::Return { host, lacks: 0 });
        }
    }

    fn comes_back(&mut self, host: usize, lacks: usize) {
        let (now, latest) = (self.net.now, self.cluster.latest);
        if host == latest {
            if self.cluster.servers[host].down {
                self.judge.switches(&self.cluster);
                let lost = self.cluster.recover_from_crash(host, now, lacks);
                self.judge.lost(lost);
            }
        } else if self.cluster.writable(latest, now) {
            self.cluster.rebuild(host, now);
        } else {
            self.schedule(now + 1_000, Trouble::Return { host, lacks });
        }
    }

    /// Everything is as it should be, from now on.
    fn peace(&mut self) {
        let (now, latest) = (self.net.now, self.cluster.latest);
        if self.cluster.servers[latest].down {
            self.judge.switches(&self.cluster);
            self.cluster.recover_from_crash(latest, now, 0);
        }
        self.cluster.servers[latest].frozen_until = 0;
        for host in 0..SERVERS {
            self.cluster.servers[host].linked = true;
            self.cluster.servers[host].lag = 20;
            if host != latest {
                self.cluster.rebuild(host, now);
            }
        }
    }

    /// A producer, at the present primary if there is one.
    pub(super) fn enqueue(&mut self, named: bool, id: JobId) {
        let (now, latest) = (self.net.now, self.cluster.latest);
        let time = self.cluster.time(latest, now);
        if !self.cluster.writable(latest, now) {
            self.net.at(now + 500, Event::Enqueue { named, id });
        } else if let Some(database) = self.cluster.primary(latest) {
            let _ = database.enqueue(time, &[new_job(named.then_some(id))]);
            self.cluster.commit(latest, now);
        }
    }
}
