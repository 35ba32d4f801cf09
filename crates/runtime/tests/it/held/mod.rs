//! Work that is blocked until a test releases it, and a log of what ran.
#![allow(dead_code, unreachable_pub, missing_docs, reason = "each test binary uses its part")]

use std::sync::{Arc, Condvar, Mutex};

use expect_test::Expect;
use runtime::device::{Event, Stream};
use runtime::{Error, Result};
use tch::Device;

/// Blocks threads until it is opened. A failing test opens it too, or its streams would never end.
#[derive(Default)]
pub struct Gate(Key);

/// The gate as the work sees it.
#[derive(Clone, Default)]
pub struct Key(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    pub fn open(&self) {
        self.0.open();
    }

    pub fn key(&self) -> Key {
        self.0.clone()
    }

    /// Work that passes the gate.
    pub fn work(&self) -> impl FnOnce() -> Result<()> + Send + 'static {
        let key = self.key();
        move || {
            key.pass();
            Ok(())
        }
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.open();
    }
}

impl Key {
    pub fn open(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }

    pub fn pass(&self) {
        let mut open = self.0.0.lock().unwrap();
        while !*open {
            open = self.0.1.wait(open).unwrap();
        }
    }
}

#[derive(Clone, Default)]
pub struct Log(Arc<Mutex<Vec<usize>>>);

impl Log {
    pub fn push(&self, entry: usize) -> impl FnOnce() -> Result<()> + Send + 'static {
        let log = self.clone();
        move || {
            log.0.lock().unwrap().push(entry);
            Ok(())
        }
    }

    pub fn read(&self) -> Vec<usize> {
        self.0.lock().unwrap().clone()
    }
}

pub fn stream() -> Stream {
    Stream::new(Device::Cpu).unwrap()
}

pub fn event() -> Event {
    Event::new(Device::Cpu).unwrap()
}

pub fn words(result: Result<()>) -> String {
    result.map_or_else(|error| error.to_string(), |()| "ok".into())
}

pub fn fail(text: &'static str) -> impl FnOnce() -> Result<()> + Send + 'static {
    move || Err(Error::Other(text.into()))
}

pub fn check(result: Result<()>, expected: Expect) {
    expected.assert_eq(&words(result));
}
