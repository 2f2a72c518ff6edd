//! What is special about a scenario with switches.

use crate::proxy::Proxy;

/// How the daemons reach the servers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Route {
    /// All three hosts, directly.
    #[default]
    Direct,
    /// All three hosts, each by a [`Proxy`].
    EachByProxy,
    /// One proxy is the only host that they know, as a DNS name or a virtual address is.
    OneProxy,
}

/// What is special about a scenario. By default it is [nothing](Plan::usual).
#[derive(Debug, Clone, Copy)]
pub struct Plan<'a> {
    /// Settings of the daemons, as `--set` takes them.
    pub set: &'a [&'a str],
    /// How the daemons reach the servers.
    pub route: Route,
    /// What producers enqueue, each entry as likely as the next.
    pub mix: &'a [&'a str],
    /// More handlers, as [`Lab::add_handlers`].
    pub handlers: &'a str,
    /// Kinds of jobs whose handlers want to run again when commits are lost.
    pub rerun: &'a [&'a str],
    /// A person decides that what nobody remembers runs again.
    pub uncovered: bool,
    /// The outage outlasts the daemons' trust: handlers may be ended before their end.
    pub interruptions: bool,
}

impl Plan<'_> {
    /// Nothing special.
    #[must_use]
    pub const fn usual() -> Self {
        Self {
            set: &[],
            route: Route::Direct,
            mix: &MIX,
            handlers: "",
            rerun: &[],
            uncovered: false,
            interruptions: false,
        }
    }
}

impl Default for Plan<'_> {
    fn default() -> Self {
        Self::usual()
    }
}

/// Jobs from 0.2 to 6 seconds; the short ones are many.
pub const MIX: [&str; 12] = [
    "ticks-0",
    "ticks-0",
    "ticks-0",
    "ticks-2",
    "ticks-2",
    "ticks-2",
    "ticks-2",
    "ticks-2",
    "ticks-5",
    "ticks-5",
    "ticks-20",
    "stubborn-10",
];

/// The URL by which daemons find the servers on these ports, and what it leads through.
pub(crate) fn way(route: Route, ports: &[u16]) -> (String, Vec<Proxy>) {
    let (hosts, proxies): (Vec<String>, Vec<Proxy>) = match route {
        Route::Direct => {
            let hosts = ports.iter().map(|port| format!("127.0.0.1:{port}"));
            (hosts.collect(), Vec::new())
        }
        Route::EachByProxy => ports.iter().map(|&port| by_proxy(port)).unzip(),
        Route::OneProxy => ports[..1].iter().map(|&port| by_proxy(port)).unzip(),
    };
    (
        format!("postgres://postgres@{}/app", hosts.join(",")),
        proxies,
    )
}

fn by_proxy(port: u16) -> (String, Proxy) {
    let proxy = Proxy::to(port);
    (proxy.address(), proxy)
}
