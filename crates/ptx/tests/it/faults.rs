//! Every mistake that is noticed, and its words.

use crate::kernel::{error, run};
use expect_test::{Expect, expect};
use ptx::Launch;

fn check(body: &str, threads: u32, expected: Expect) {
    expected.assert_eq(&error(body, threads));
}

#[test]
fn addresses() {
    check(
        "ld.global.u64 %d0, [%in+8];",
        32,
        expect![
            "k, line 24 `ld.global.u64 %d0, [%in+8]`, block 0, thread 31: 8 bytes at `in` + 256 (of 256 bytes) are out of bounds"
        ],
    );
    check(
        "ld.global.u64 %d0, [%in+4];",
        32,
        expect![
            "k, line 24 `ld.global.u64 %d0, [%in+4]`, block 0, thread 0: 8 bytes at `in` + 4 (of 256 bytes) are not aligned"
        ],
    );
    check(
        "mov.u64 %d1, 0; ld.global.u32 %r0, [%d1];",
        1,
        expect![
            "k, line 24 `ld.global.u32 %r0, [%d1]`, block 0, thread 0: 4 bytes at address 0x0, which is of no buffer, are out of bounds"
        ],
    );
    check(
        "mov.u64 %d1, 1024; mov.u32 %r0, 1; st.shared.u32 [%d1], %r0;",
        1,
        expect![
            "k, line 24 `st.shared.u32 [%d1], %r0`, block 0, thread 0: 4 bytes at `shared memory` + 1024 (of 1024 bytes) are out of bounds"
        ],
    );
    check(
        "mov.u64 %d1, 5; st.global.u64 [%in], %d1;",
        1,
        expect![
            "k, line 24 `st.global.u64 [%in], %d1`, block 0, thread 0: a write to `in` + 0 (of 8 bytes), which is read-only"
        ],
    );
}

#[test]
fn values_that_nothing_wrote() {
    check(
        "add.u32 %r0, %r1, 1; st.shared.u32 [memory], %r0;",
        1,
        expect![
            "k, line 24 `st.shared.u32 [memory], %r0`, block 0, thread 0: register %r0 has no value: it, or what it was computed from, was never written"
        ],
    );
    // Neither a copy nor a computation is a use, since compilers compute ahead; a branch is.
    check(
        "setp.lt.u32 %p0, %t, 9; @%p0 mov.u32 %r1, 1; mov.u32 %r2, %r1; setp.eq.u32 %p1, %r2, 1; @%p1 ret;",
        32,
        expect![
            "k, line 24 `@%p1 ret`, block 0, thread 9: register %p1 has no value: it, or what it was computed from, was never written"
        ],
    );
    check(
        "ld.shared.u32 %r0, [memory+12];",
        1,
        expect![
            "k, line 24 `ld.shared.u32 %r0, [memory+12]`, block 0, thread 0: `shared memory` + 12 (of 1024 bytes) is read, but was never written"
        ],
    );
}

#[test]
fn races() {
    check(
        "st.shared.u32 [memory], %t;",
        32,
        expect![
            "k, line 24 `st.shared.u32 [memory], %t`, block 0, thread 1: a race: the write of `shared memory` + 0 (of 1024 bytes); unordered with the write of block 0, thread 0 at line 24"
        ],
    );
    let neighbours = |barrier: &str, distance: u32| {
        format!(
            "mul.wide.u32 %d0, %t, 4; mov.u64 %d1, memory; add.u64 %d0, %d0, %d1; st.shared.u32 [%d0], %t; {barrier}
            xor.b32 %r1, %t, {distance}; mul.wide.u32 %d2, %r1, 4; add.u64 %d2, %d2, %d1;
            ld.shared.u32 %r0, [%d2];"
        )
    };
    check(
        &neighbours("", 1),
        32,
        expect![
            "k, line 26 `ld.shared.u32 %r0, [%d2]`, block 0, thread 0: a race: the read of `shared memory` + 4 (of 1024 bytes); unordered with the write of block 0, thread 1 at line 24"
        ],
    );
    let launch = Launch::new(1, 64);
    assert!(run(&neighbours("bar.warp.sync -1;", 1), launch, &[0; 64]).is_ok());
    assert!(run(&neighbours("bar.warp.sync -1;", 32), launch, &[0; 64]).is_err(), "another warp's");
    assert!(run(&neighbours("bar.sync 0;", 32), launch, &[0; 64]).is_ok());
    // Two blocks write one place, in whatever order they run.
    let blocks = "mul.wide.u32 %d0, %b, 256; sub.u64 %out, %out, %d0; st.global.u64 [%out], %d0;";
    for seed in 0..4 {
        let message = run(blocks, Launch::new(2, 32).seed(seed), &[0; 64]).unwrap_err().to_string();
        assert!(message.contains("a race: the write of `out`"), "{message}");
    }
}

#[test]
fn barriers() {
    check(
        "setp.lt.u32 %p0, %t, 8; @%p0 bra HERE; bra THERE; HERE: bar.sync 0; THERE:",
        32,
        expect![
            "k, line 24 `bar.sync 0`, block 0, thread 0: a barrier that lanes 0xffffff00 of the warp do not reach"
        ],
    );
    check(
        "setp.lt.u32 %p0, %t, 32; @%p0 bra HERE; bra THERE; HERE: bar.sync 0; THERE:",
        64,
        expect![
            "k, line 24 `bar.sync 0`, block 0, thread 0: a barrier that warp 1 does not reach: it has ended"
        ],
    );
    check(
        "setp.lt.u32 %p0, %t, 32; @%p0 bra HERE; bar.sync 0; bra THERE;\nHERE: bar.sync 0; THERE:",
        64,
        expect![
            "k, line 25 `bar.sync 0`, block 0, thread 0: a barrier that warp 1 does not reach: it waits at line 24"
        ],
    );
}

#[test]
fn masks_of_exchanges() {
    check(
        "shfl.sync.bfly.b32 %r0, %t, 1, 31, 0xffff;",
        32,
        expect![
            "k, line 24 `shfl.sync.bfly.b32 %r0, %t, 1, 31, 0xffff`, block 0, thread 16: the mask 0x0000ffff of an exchange between lanes: lane 16 runs it and is not in the mask"
        ],
    );
    check(
        "setp.lt.u32 %p0, %t, 16; @%p0 shfl.sync.bfly.b32 %r0, %t, 1, 31, -1;",
        32,
        expect![
            "k, line 24 `@%p0 shfl.sync.bfly.b32 %r0, %t, 1, 31, -1`, block 0, thread 0: the mask 0xffffffff of an exchange between lanes: lanes 0xffff0000 are in it and do not run"
        ],
    );
    check(
        "setp.lt.u32 %p0, %t, 16; @%p0 shfl.sync.bfly.b32 %r0, %t, 16, 31, 0xffff;",
        32,
        expect![
            "k, line 24 `@%p0 shfl.sync.bfly.b32 %r0, %t, 16, 31, 0xffff`, block 0, thread 0: the mask 0x0000ffff of an exchange between lanes: lane 16, which this one reads, is not there"
        ],
    );
}

#[test]
fn traps_and_endless_loops() {
    check(
        "setp.eq.u32 %p0, %t, 3; @%p0 trap;",
        32,
        expect!["k, line 24 `@%p0 trap`, block 0, thread 3: the kernel traps"],
    );
    let launch = Launch { limit: 100_000, ..Launch::new(1, 32) };
    let message = run("AGAIN: bra AGAIN;", launch, &[0; 32]).unwrap_err().to_string();
    expect!["k, line 24 `bra AGAIN`, block 0, thread 0: 100000 instructions of warps were executed and the kernel has not ended"]
        .assert_eq(&message);
}
