//! Parses a trace.
//!
//! The file is parsed one event at a time, and only what the analysis needs is kept: a trace of 100 MB has about 300 000
//! events, and a tenth of its bytes are kept. Names are stored once.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::error::ProfileError;

mod event;

pub use event::Dims;
use event::Event;

/// The longest trace whose nanoseconds can be summed without overflow: about 115 days.
const LONGEST_MICROSECONDS: f64 = 1e13;
/// Beyond any clock in microseconds.
const LATEST_MICROSECONDS: f64 = 4e15;

/// Index of a name in its [`Profile`].
pub(super) type Name = u32;

/// An input of an operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Input {
    /// Kineto's word for its dtype: `float`, `c10::BFloat16`, `long int`, `TensorList`, `Scalar`, or empty if it is not a
    /// tensor.
    pub(super) kind: Name,
    /// Its shape, or those of a list of tensors.
    pub dims: Dims,
}

/// A call of an operator, or a node of the autograd graph.
#[derive(Debug, Clone)]
pub struct Operator {
    pub(super) name: Name,
    /// The operating system's number of its thread.
    pub thread: i64,
    /// Nanoseconds on the trace's clock.
    pub start: i64,
    /// Nanoseconds on the trace's clock.
    pub end: i64,
    /// Its inputs, if shapes were recorded.
    pub inputs: Box<[Input]>,
}

/// A named range.
#[derive(Debug, Clone)]
pub struct RangeEvent {
    pub(super) name: Name,
    /// Its thread.
    pub thread: i64,
    /// Nanoseconds on the trace's clock.
    pub start: i64,
    /// Nanoseconds on the trace's clock.
    pub end: i64,
}

/// The kind of a device's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceWork {
    /// A kernel.
    Kernel,
    /// A copy.
    Copy,
    /// A fill.
    Set,
}

/// A kernel, a copy or a fill on a CUDA device.
#[derive(Debug, Clone)]
pub struct DeviceEvent {
    pub(super) name: Name,
    /// The kind of work.
    pub work: DeviceWork,
    /// Nanoseconds on the trace's clock.
    pub start: i64,
    /// Nanoseconds on the trace's clock.
    pub end: i64,
    /// Bytes of a copy or a fill; 0 for a kernel.
    pub bytes: u64,
}

/// An allocation (bytes above 0) or a release (below).
#[derive(Debug, Clone, Copy)]
pub struct Memory {
    /// Nanoseconds on the trace's clock.
    pub at: i64,
    /// Bytes, negative for a release.
    pub bytes: i64,
}

/// The events of a trace that concern time and memory.
#[derive(Debug, Default)]
pub struct Profile {
    names: Vec<Box<str>>,
    index: HashMap<Box<str>, Name>,
    /// Operators and autograd nodes, in the file's order.
    pub operators: Vec<Operator>,
    /// Named ranges.
    pub ranges: Vec<RangeEvent>,
    /// Kernels, copies and fills of CUDA devices.
    pub device: Vec<DeviceEvent>,
    /// Allocations and releases.
    pub memory: Vec<Memory>,
    /// Whether a CUDA device took part.
    pub cuda: bool,
}

impl Profile {
    /// Reads a file written by `runtime::profile::Trace::save`.
    ///
    /// # Errors
    /// [`ProfileError::Read`], [`ProfileError::Truncated`] and [`ProfileError::Foreign`].
    pub fn read(path: &Path) -> Result<Self, ProfileError> {
        let read = |cause| ProfileError::Read { path: path.to_owned(), cause };
        let file = File::open(path).map_err(read)?;
        Self::parse(BufReader::with_capacity(1 << 20, file)).map_err(|error| {
            if error.is_io() {
                read(error.into())
            } else if error.is_eof() {
                ProfileError::Truncated { path: path.to_owned(), line: error.line() }
            } else {
                ProfileError::Foreign { path: path.to_owned(), reason: error.to_string() }
            }
        })
    }

    fn parse(reader: impl Read) -> serde_json::Result<Self> {
        let mut profile = Self::default();
        let mut json = serde_json::Deserializer::from_reader(reader);
        TraceSeed(&mut profile).deserialize(&mut json)?;
        json.end()?;
        Ok(profile)
    }

    /// Returns the name of an operator such as `aten::mm`, or of a node such as `MmBackward0`.
    #[must_use]
    pub fn operator_name(&self, operator: &Operator) -> &str {
        self.name(operator.name)
    }

    /// Returns the name of a range.
    #[must_use]
    pub fn range_name(&self, range: &RangeEvent) -> &str {
        self.name(range.name)
    }

    /// Returns the name of a kernel, or of a copy such as `Memcpy HtoD (Pageable -> Device)`.
    #[must_use]
    pub fn device_name(&self, event: &DeviceEvent) -> &str {
        self.name(event.name)
    }

    /// Returns Kineto's word for an input's dtype; see [`Input`].
    #[must_use]
    pub fn input_kind(&self, input: &Input) -> &str {
        self.name(input.kind)
    }

    pub(super) fn name(&self, name: Name) -> &str {
        &self.names[name as usize]
    }

    fn intern(&mut self, name: &str) -> Name {
        if let Some(&known) = self.index.get(name) {
            return known;
        }
        let new = self.names.len() as Name;
        self.names.push(name.into());
        self.index.insert(name.into(), new);
        new
    }

    fn take(&mut self, event: Event) -> Result<(), String> {
        let is_memory = event.ph == "i" && event.name == "[memory]";
        if event.ph != "X" && !is_memory {
            return Ok(());
        }
        let nanoseconds = |what: &str, value: f64, limit: f64| {
            if value.abs() <= limit {
                return Ok((value * 1e3).round() as i64);
            }
            Err(format!("the event {:?} has the {what} {value:e} µs, beyond any clock", event.name))
        };
        let start = nanoseconds("time", event.ts, LATEST_MICROSECONDS)?;
        if event.dur < 0.0 {
            return Err(format!("the event {:?} lasts {} µs", event.name, event.dur));
        }
        let end = start + nanoseconds("length", event.dur, LONGEST_MICROSECONDS)?;
        if is_memory {
            self.memory.push(Memory { at: start, bytes: event.args.bytes });
            return Ok(());
        }
        let name = self.intern(&event.name);
        let thread = event.tid.0;
        match &*event.cat {
            "cpu_op" => {
                let kinds = event.args.kinds.iter().map(String::as_str).chain(std::iter::repeat(""));
                let inputs = event.args.dims.into_iter().zip(kinds);
                let inputs = inputs.map(|(dims, kind)| Input { kind: self.intern(kind), dims }).collect();
                self.operators.push(Operator { name, thread, start, end, inputs });
            }
            "user_annotation" => self.ranges.push(RangeEvent { name, thread, start, end }),
            "kernel" | "gpu_memcpy" | "gpu_memset" => {
                let work = match &*event.cat {
                    "kernel" => DeviceWork::Kernel,
                    "gpu_memcpy" => DeviceWork::Copy,
                    _ => DeviceWork::Set,
                };
                let bytes = u64::try_from(event.args.copied).unwrap_or(0);
                self.device.push(DeviceEvent { name, work, start, end, bytes });
                self.cuda = true;
            }
            // A CPU trace queries the runtime for devices, too.
            "cuda_runtime" | "cuda_driver" => self.cuda |= puts_work_on_the_device(&event.name),
            _ => {}
        }
        Ok(())
    }
}

/// Whether a runtime call submits work: `cudaLaunchKernel`, `cuLaunchKernelEx`, `cudaGraphLaunch`, `cudaMemcpyAsync`,
/// `cudaMemsetAsync` and the like.
fn puts_work_on_the_device(call: &str) -> bool {
    ["Launch", "Memcpy", "Memset"].iter().any(|work| call.contains(work))
}

/// The file's outermost object.
struct TraceSeed<'a>(&'a mut Profile);

impl<'de> DeserializeSeed<'de> for TraceSeed<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for TraceSeed<'_> {
    type Value = ();
    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an object with \"traceEvents\"")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut has_events = false;
        while let Some(key) = map.next_key::<String>()? {
            if key == "traceEvents" {
                map.next_value_seed(EventsSeed(self.0))?;
                has_events = true;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        if has_events { Ok(()) } else { Err(serde::de::Error::missing_field("traceEvents")) }
    }
}

/// The array of events, which are parsed one at a time.
struct EventsSeed<'a>(&'a mut Profile);

impl<'de> DeserializeSeed<'de> for EventsSeed<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for EventsSeed<'_> {
    type Value = ();
    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an array of events")
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut events: A) -> Result<(), A::Error> {
        while let Some(event) = events.next_element::<Event>()? {
            self.0.take(event).map_err(serde::de::Error::custom)?;
        }
        Ok(())
    }
}

/// A thread: a number for the host's, text for Kineto's own rows.
#[derive(Debug, Clone, Copy)]
struct Thread(i64);

impl Default for Thread {
    fn default() -> Self {
        Self(-1)
    }
}

impl<'de> Deserialize<'de> for Thread {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = serde_json::Value::deserialize(deserializer)?;
        Ok(value.as_i64().map(Self).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use super::*;

    fn refused(text: &str, expected: &Expect) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.json");
        std::fs::write(&path, text).unwrap();
        let error = Profile::read(&path).unwrap_err().to_string();
        expected.assert_eq(&error.replace(&*folder.path().to_string_lossy(), "…"));
    }

    #[test]
    fn a_file_that_is_not_a_trace_is_refused() {
        refused(
            "",
            &expect![
                "the trace …/t.json ends too early, in line 1: the program that wrote it was stopped, or the disk was full; record it again"
            ],
        );
        refused(
            "loss,step\n1,2\n",
            &expect![[
                r#"…/t.json is no trace in Chrome's format, which is a JSON object with an array "traceEvents": expected value at line 1 column 1; give a file that runtime::profile::Trace::save wrote, unpacked if it was packed"#
            ]],
        );
        refused(
            "{\"schemaVersion\": 1}",
            &expect![[
                r#"…/t.json is no trace in Chrome's format, which is a JSON object with an array "traceEvents": missing field `traceEvents` at line 1 column 20; give a file that runtime::profile::Trace::save wrote, unpacked if it was packed"#
            ]],
        );
        refused(
            "{\"traceEvents\": 3}",
            &expect![[
                r#"…/t.json is no trace in Chrome's format, which is a JSON object with an array "traceEvents": invalid type: integer `3`, expected an array of events at line 1 column 18; give a file that runtime::profile::Trace::save wrote, unpacked if it was packed"#
            ]],
        );
        refused(
            r#"{"traceEvents": [{"ph": "X", "name": "a", "ts": 1e300, "dur": 1}]}"#,
            &expect![[
                r#"…/t.json is no trace in Chrome's format, which is a JSON object with an array "traceEvents": the event "a" has the time 1e300 µs, beyond any clock at line 1 column 65; give a file that runtime::profile::Trace::save wrote, unpacked if it was packed"#
            ]],
        );
        refused(
            r#"{"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": -3}]}"#,
            &expect![[
                r#"…/t.json is no trace in Chrome's format, which is a JSON object with an array "traceEvents": the event "a" lasts -3 µs at line 1 column 62; give a file that runtime::profile::Trace::save wrote, unpacked if it was packed"#
            ]],
        );
    }

    /// A trace as Kineto writes it, with parts that only CUDA has, and with a list of tensors.
    const WHOLE: &str = r#"{"schemaVersion": 1, "deviceProperties": [{"id": 0}], "traceEvents": [
        {"ph": "X", "cat": "cpu_op", "name": "aten::cat", "pid": 7, "tid": 8, "ts": 4403203454221.914, "dur": 1.913,
         "args": {"External id": 1, "Concrete Inputs": ["", "0"], "Input type": ["TensorList", "Scalar"],
                  "Input Dims": [[[2, 3], [4, 3]], []]}},
        {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 7, "tid": 8, "ts": 4403203454222.1,
         "args": {"Total Allocated": 72, "Bytes": -72, "Device Type": 0}},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "pid": 0, "tid": 7,
         "ts": 4403203454230, "dur": 2, "args": {"device": 0, "stream": 7, "bytes": 4096}},
        {"ph": "X", "cat": "Trace", "ts": 4403203454000, "dur": 9, "pid": "Spans", "tid": "PyTorch Profiler", "name": "P"},
        {"name": "thread_name", "ph": "M", "ts": 4403203454000, "pid": 7, "tid": 8, "args": {"name": "main"}}
        ], "traceName": "t"}"#;

    #[test]
    fn events_are_parsed_to_the_nanosecond() {
        let profile = Profile::parse(WHOLE.as_bytes()).unwrap();
        let [cat] = &profile.operators[..] else { panic!("{:?}", profile.operators) };
        assert_eq!(profile.operator_name(cat), "aten::cat");
        assert_eq!((cat.thread, cat.end - cat.start), (8, 1913));
        assert_eq!(cat.inputs[0].dims, Dims::List(vec![[2, 3].into(), [4, 3].into()]));
        assert_eq!(profile.input_kind(&cat.inputs[0]), "TensorList");
        assert_eq!(profile.memory[0].bytes, -72);
        let [copy] = &profile.device[..] else { panic!("{:?}", profile.device) };
        assert_eq!((copy.work, copy.bytes, copy.end - copy.start), (DeviceWork::Copy, 4096, 2000));
        assert!(profile.cuda && profile.ranges.is_empty());
    }

    #[test]
    fn a_trace_cut_anywhere_is_reported_as_truncated() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.json");
        for length in 0..WHOLE.len() {
            std::fs::write(&path, &WHOLE.as_bytes()[..length]).unwrap();
            let error = Profile::read(&path).unwrap_err();
            assert!(matches!(error, ProfileError::Truncated { .. }), "{length} bytes: {error}");
        }
    }
}
