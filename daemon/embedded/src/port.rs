//! Ports for servers.

use std::hash::{BuildHasher, RandomState};
use std::net::{Ipv4Addr, TcpListener};

use crate::Error;

/// A free port below those that the system gives to outgoing connections. One of these could sit on the port while the
/// server is down, and a client that tries to reach the port can even be connected to itself. Somebody else may take it before you do.
///
/// # Errors
/// When a hundred in a row are taken.
pub fn free_port() -> Result<u16, Error> {
    const FIRST: u16 = 20_000;
    const COUNT: u16 = 12_000;
    // A new RandomState is a source of random numbers that needs no crate.
    let random = RandomState::new().hash_one(());
    let start = u16::try_from(random % u64::from(COUNT)).unwrap_or_default();
    let mut last = None;
    for step in 0..100 {
        let port = FIRST + (start + step) % COUNT;
        match TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
            Ok(_) => return Ok(port),
            Err(error) => last = Some(error),
        }
    }
    let none = last.unwrap_or_else(|| std::io::ErrorKind::AddrInUse.into());
    Err(Error::io("find a free port on 127.0.0.1")(none))
}
