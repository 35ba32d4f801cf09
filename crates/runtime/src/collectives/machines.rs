//! The machines of a run: this one's address, and the names of all.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use super::{Launch, Store};
use crate::error::{Error, Result};

/// Addresses that no machine has (RFC 5737, RFC 3849): the route to them is that to the rest of the world.
const ANYWHERE: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1))];

/// Returns the address of this machine at which the other ranks reach it: that of the network interface whose route leads to `MASTER_ADDR`.
///
/// # Errors
/// A name that does not resolve; no route; on the machine of rank 0, a name that means this machine's loopback interface, and no other interface.
pub(super) fn own_address(launch: &Launch) -> Result<IpAddr> {
    if launch.is_local() {
        return Ok(IpAddr::V4(Ipv4Addr::LOCALHOST));
    }
    let Launch { master_address, master_port, .. } = launch;
    let refuse =
        |reason: String| Error::invalid("group", format!("MASTER_ADDR is {master_address}: {reason}"));
    let addresses = (master_address.as_str(), *master_port).to_socket_addrs();
    let addresses: Vec<SocketAddr> =
        addresses.map_err(|cause| refuse(format!("this machine cannot resolve it: {cause}")))?.collect();
    let found = addresses.iter().find_map(|to| source_address(*to));
    let own = found.ok_or_else(|| refuse(format!("this machine has no route to {addresses:?}")))?;
    // Many systems have the machine's own name in /etc/hosts, as 127.0.1.1.
    let outside = || ANYWHERE.iter().find_map(|to| source_address(SocketAddr::new(*to, *master_port)));
    match Some(own).filter(|own| !own.is_loopback()).or_else(outside).filter(|own| !own.is_loopback()) {
        Some(own) => Ok(own),
        None => Err(refuse(format!(
            "on this machine it is {own}, which other machines cannot reach; set GLOO_SOCKET_IFNAME to the name of the network \
             interface that they reach (`ip address` lists them)"
        ))),
    }
}

/// The address that this machine would send from. Nothing is sent.
fn source_address(to: SocketAddr) -> Option<IpAddr> {
    let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(to).ok()?;
    Some(socket.local_addr().ok()?.ip()).filter(|own| !own.is_unspecified())
}

/// Returns the name of each rank's machine; none where all are on one.
///
/// # Errors
/// A rank that does not come within `timeout`; a store that is gone.
pub(super) fn names(store: &Store, timeout: Duration) -> Result<Arc<[String]>> {
    const ALL: &str = "machines";
    let Launch { rank, world_size, .. } = *store.launch();
    if store.launch().is_local() {
        return Ok(Arc::default());
    }
    let key = |rank: usize| format!("{ALL}/{rank}");
    let own = rustix::system::uname().nodename().to_string_lossy().into_owned();
    store.set(&key(rank), own.as_bytes())?;
    if rank == 0 {
        let each = (0..world_size).map(|rank| store.get(&key(rank), timeout));
        store.set(ALL, &each.collect::<Result<Vec<_>>>()?.join(&b'\n'))?;
    }
    let all = store.get(ALL, timeout)?;
    Ok(String::from_utf8_lossy(&all).split('\n').map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_route_to_a_loopback_address_is_loopback() {
        for to in ["127.0.0.1:1", "127.0.1.1:1"] {
            assert!(source_address(to.parse().unwrap()).unwrap().is_loopback());
        }
    }
}
