//! How the ranks of a run find each other: each reaches rank 0's machine, and rank 0 waits for all. Where one does not come, or comes
//! with another number of ranks, all say so.

use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use super::{Launch, Store};
use crate::error::{Error, Result};

/// Of rank 0: the number of ranks; that all have come; and why the run is given up.
const WORLD: &str = "world size";
const ALL: &str = "all ranks";
const GIVEN_UP: &str = "given up";
/// Between two looks at the store, or two attempts to reach it.
const PAUSE: Duration = Duration::from_millis(20);
/// For the value of a key that is set. A lost packet alone costs TCP 200 ms.
const ANSWER: Duration = Duration::from_secs(30);
/// One attempt to reach another machine.
const ATTEMPT: Duration = Duration::from_secs(5);
/// How much longer than rank 0 the others wait, so that its reason is theirs.
const GRACE: Duration = Duration::from_secs(5);

/// Waits until the machine of rank 0 can be reached at its port.
///
/// # Errors
/// A name that does not resolve; nothing that listens there within `timeout`.
pub(super) fn reach(launch: &Launch, timeout: Duration) -> Result<()> {
    let Launch { rank, world_size, master_address: host, master_port: port, .. } = launch;
    let refuse = |reason: String| Error::invalid("store", format!("rank {rank} of {world_size}: {reason}"));
    let addresses = (host.as_str(), *port).to_socket_addrs().map_err(|cause| {
        refuse(format!(
            "this machine does not know the name {host} ({cause}); give the name or address of the machine of rank 0"
        ))
    })?;
    let (addresses, until) = (addresses.collect::<Vec<SocketAddr>>(), Instant::now() + timeout);
    loop {
        let mut last = None;
        for address in &addresses {
            let left = until.saturating_duration_since(Instant::now()).clamp(PAUSE, ATTEMPT);
            match TcpStream::connect_timeout(address, left) {
                Ok(_) => return Ok(()),
                Err(cause) => last = Some(cause),
            }
        }
        if Instant::now() >= until {
            let cause = last.map_or_else(|| "no address".to_owned(), |cause| cause.to_string());
            return Err(refuse(format!(
                "the machine of rank 0 was not reached at {host}:{port} for {timeout:?} ({cause}); start the same command there, too, and see \
                 that its name, its port (29500 unless it is given) and the firewall are right"
            )));
        }
        thread::sleep(PAUSE);
    }
}

/// Waits until all ranks have come, with the same number of ranks.
///
/// # Errors
/// A rank that has not come at `until`, the end of `timeout`; another number of ranks; another run that has this one's address.
pub(super) fn meet(store: &Store, until: Instant, timeout: Duration) -> Result<()> {
    let Launch { rank, world_size, .. } = *store.launch();
    if rank == 0 {
        store.set(WORLD, world_size.to_string().as_bytes())?;
        return wait_for_all(store, until, timeout);
    }
    let late = || {
        let reason =
            format!("rank {rank} of {world_size}: rank 0 has not come for {timeout:?}; see its output");
        Error::invalid("store", reason)
    };
    let until = until + GRACE;
    wait_for(store, WORLD, until)?.ok_or_else(late)?;
    let of_first = String::from_utf8_lossy(&store.get(WORLD, ANSWER)?).into_owned();
    if of_first != world_size.to_string() {
        let reason = format!(
            "WORLD_SIZE is {of_first} on rank 0 and {world_size} on rank {rank}; start all ranks with the same: as many on each machine"
        );
        store.set(GIVEN_UP, reason.as_bytes())?;
        return Err(Error::invalid("store", reason));
    }
    // An agent's store outlives a run.
    if !store.launch().agent_store && store.has(ALL)? {
        let Launch { master_address, master_port, .. } = store.launch();
        let reason = format!(
            "rank {rank} of {world_size}: another run has {master_address}:{master_port}; give this one another port on all machines"
        );
        return Err(Error::invalid("store", reason));
    }
    store.set(&key(rank), b"")?;
    wait_for(store, ALL, until)?.ok_or_else(late)
}

fn key(rank: usize) -> String {
    format!("has come/{rank}")
}

/// Waits for a key; `None` if it is not set in time.
///
/// # Errors
/// The run is given up.
fn wait_for(store: &Store, key: &str, until: Instant) -> Result<Option<()>> {
    while !store.has(key)? {
        if store.has(GIVEN_UP)? {
            let reason = String::from_utf8_lossy(&store.get(GIVEN_UP, ANSWER)?).into_owned();
            return Err(Error::invalid("store", reason));
        }
        if Instant::now() >= until {
            return Ok(None);
        }
        thread::sleep(PAUSE);
    }
    Ok(Some(()))
}

/// Rank 0's part.
fn wait_for_all(store: &Store, until: Instant, timeout: Duration) -> Result<()> {
    let world_size = store.launch().world_size;
    for rank in 1..world_size {
        if wait_for(store, &key(rank), until)?.is_some() {
            continue;
        }
        let mut missing = Vec::new();
        for rank in rank..world_size {
            if !store.has(&key(rank))? {
                missing.push(rank);
            }
        }
        let remedy = match store.launch().is_local() {
            true => "see their output",
            false => "start the same command on their machine, with its own number, or see the output there",
        };
        let reason = format!("{} of {world_size} did not come for {timeout:?}; {remedy}", listed(&missing));
        if !store.launch().agent_store {
            store.set(GIVEN_UP, reason.as_bytes())?;
            // So that those that have come read it before the store ends with this process.
            thread::sleep(5 * PAUSE);
        }
        return Err(Error::invalid("store", reason));
    }
    store.set(ALL, b"")
}

/// Ranks as in `ranks 2, 4 to 7`.
fn listed(ranks: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &rank in ranks {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => runs.push((rank, rank)),
        }
    }
    let text = |&(first, last): &(usize, usize)| match last - first {
        0 => first.to_string(),
        1 => format!("{first}, {last}"),
        _ => format!("{first} to {last}"),
    };
    let runs: Vec<String> = runs.iter().map(text).collect();
    format!("{} {}", if ranks.len() == 1 { "rank" } else { "ranks" }, runs.join(", "))
}

#[cfg(test)]
mod tests {
    use super::listed;

    #[test]
    fn ranks_are_listed_by_runs() {
        assert_eq!(listed(&[3]), "rank 3");
        assert_eq!(listed(&[2, 3]), "ranks 2, 3");
        assert_eq!(listed(&[1, 4, 5, 6, 7]), "ranks 1, 4 to 7");
    }
}
