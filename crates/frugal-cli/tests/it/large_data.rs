//! Data of several hundred megabytes in a folder of shards: the memory of a run is that of a small one, and a run that was killed goes on to the
//! same bits.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::tiny_folder::Tiny;

const SHARDS: usize = 4;
/// Bytes of a shard of the large data.
const LARGE: usize = 50 << 20;
/// The large data have 200 times these.
const SMALL: usize = 1 << 20;
/// KiB by which the peaks may differ: buffers of rows and of their index are 8 MiB each.
const SLACK: u64 = 40 << 10;

/// Writes shards of about so many bytes, whose rows differ in their first tokens.
fn write(tiny: &Tiny, folder: &str, shards: usize, bytes: usize) {
    std::fs::create_dir(tiny.path(folder)).unwrap();
    let tokens: Vec<String> = (0..180).map(|at| (7 * at * at % 4000).to_string()).collect();
    let rest = tokens.join(",");
    for shard in 0..shards {
        let file = std::fs::File::create(tiny.path(&format!("{folder}/part-{shard}.jsonl"))).unwrap();
        let mut file = std::io::BufWriter::new(file);
        for row in 0..bytes / (rest.len() + 28) {
            writeln!(file, "{{\"input_ids\": [{},{},{rest}]}}", row % 4000, row / 4000 + 100 * shard)
                .unwrap();
        }
    }
}

/// The most memory that a process had, in KiB.
fn peak(mut command: Command) -> u64 {
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0;
    loop {
        let text = std::fs::read_to_string(Path::new(&status)).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let now = line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok());
        peak = peak.max(now.unwrap_or(0));
        if let Some(status) = child.try_wait().unwrap() {
            assert!(status.success());
            return peak;
        }
        std::thread::yield_now();
    }
}

#[test]
#[cfg(target_os = "linux")]
fn memory_does_not_grow_with_the_data() {
    let tiny = Tiny::new();
    write(&tiny, "small", 1, SMALL);
    write(&tiny, "large", SHARDS, LARGE);
    let train = |data: &str| {
        format!(
            "finetune --json --model model --data {data} --held-out 0 --batch-size 2 --accumulation 2 --log-every 1 --steps 6 \
             --checkpoint-every 1 --budget 2GiB --activations keep"
        )
    };
    let small = peak(tiny.command(&format!("{} --out out-small", train("small"))));
    let large = peak(tiny.command(&format!("{} --out whole", train("large"))));
    assert!(small > 10 << 10 && large < small + SLACK, "{small} KiB and {large} KiB");
    // Its rows are read from where they were prepared, each when it is needed.
    let run = format!("{} --out killed --resume", train("large"));
    tiny.kill_at_step(&run, 3);
    tiny.succeed(&run);
    assert_eq!(tiny.losses("killed"), tiny.losses("whole"));
    assert!(tiny.bytes("killed/adapter_model.safetensors") == tiny.bytes("whole/adapter_model.safetensors"));
}
