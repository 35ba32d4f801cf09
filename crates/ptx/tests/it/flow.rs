//! Branches, barriers, exchanges between lanes.

use crate::kernel::run;
use ptx::{Class, Launch};

#[test]
fn lanes_part_and_meet_again() {
    // Lane t adds 1 t times in a loop, odd ones 100 more; then all take part in a shuffle.
    let body = "mov.u32 %r0, 0; mov.u32 %r1, 0;
    LOOP: setp.ge.u32 %p0, %r1, %t; @%p0 bra DONE;
        add.u32 %r0, %r0, 1; add.u32 %r1, %r1, 1; bra LOOP;
    DONE: and.b32 %r2, %t, 1; setp.eq.u32 %p1, %r2, 0; @%p1 bra EVEN;
        add.u32 %r0, %r0, 100;
    EVEN: shfl.sync.bfly.b32 %r3, %r0, 1, 31, -1;
        cvt.u64.u32 %d0, %r3; st.global.u64 [%out], %d0;";
    let (found, counts) = run(body, Launch::new(1, 32), &[0; 32]).unwrap();
    let expected: Vec<u64> = (0..32u64).map(|t| t ^ 1).map(|t| t + 100 * (t % 2)).collect();
    assert_eq!(found, expected);
    // Each lane leaves the loop alone, and all store together.
    assert_eq!((counts.divergent_branches, counts.sectors), (32, 8));
    assert_eq!(counts.of(Class::Shuffle), 1);
}

#[test]
fn threads_that_leave_early_do_nothing_more() {
    let body = "setp.ge.u32 %p0, %t, 5; @%p0 ret; mov.u64 %d0, 1; st.global.u64 [%out], %d0;";
    let (found, _) = run(body, Launch::new(1, 32), &[0; 32]).unwrap();
    assert_eq!(found.iter().sum::<u64>(), 5);
}

#[test]
fn shared_memory_behind_a_barrier_in_every_order() {
    // Reverses the words of a block.
    let body = "mul.lo.u32 %r0, %t, 8; cvt.u64.u32 %d0, %r0; mov.u64 %d1, memory; add.u64 %d0, %d1, %d0;
        ld.global.u64 %d2, [%in]; st.shared.u64 [%d0], %d2;
        bar.sync 0;
        mov.u32 %r1, 127; sub.u32 %r1, %r1, %t; mul.lo.u32 %r1, %r1, 8; cvt.u64.u32 %d3, %r1;
        add.u64 %d3, %d1, %d3; ld.shared.u64 %d4, [%d3]; st.global.u64 [%out], %d4;";
    let input: Vec<u64> = (0..256).collect();
    for seed in 0..4 {
        let (found, counts) = run(body, Launch::new(2, 128).seed(seed), &input).unwrap();
        let expected: Vec<u64> = (0..128).rev().chain((128..256).rev()).collect();
        assert_eq!(found, expected);
        assert_eq!((counts.barriers, counts.bank_conflicts), (2, 0));
    }
}

#[test]
fn generic_addresses_reach_both_memories() {
    let body =
        "mov.u64 %d0, memory; cvta.shared.u64 %d0, %d0; mul.wide.u32 %d1, %t, 8; add.u64 %d0, %d0, %d1;
        ld.u64 %d2, [%in]; st.u64 [%d0], %d2; ld.u64 %d3, [%d0]; st.u64 [%out], %d3;";
    assert_eq!(run(body, Launch::new(1, 32), &[9; 32]).unwrap().0, [9; 32]);
}

#[test]
fn votes_and_warp_barriers() {
    let body = "setp.lt.u32 %p0, %t, 3; vote.sync.ballot.b32 %r0, %p0, -1; vote.sync.any.pred %p1, %p0, -1;
        selp.b32 %r1, 1000, 0, %p1; bar.warp.sync -1; add.u32 %r0, %r0, %r1; cvt.u64.u32 %d0, %r0;
        st.global.u64 [%out], %d0;";
    assert_eq!(run(body, Launch::new(1, 32), &[0; 32]).unwrap().0, [1007; 32]);
}

#[test]
fn inline_assembly_has_registers_of_its_own() {
    let body =
        "mov.u64 %d1, 1; { .reg .b64 %d1; mov.u64 %d1, 50; add.u64 %d2, %d1, 0; } add.u64 %d0, %d1, %d2;
        st.global.u64 [%out], %d0;";
    assert_eq!(run(body, Launch::new(1, 1), &[0]).unwrap().0, [51]);
}

/// Each thread copies 16 bytes to the launch's own shared memory, and again while the first are on their way.
const COPIES: &str = "mul.lo.u32 %r0, %t, 16; mov.u64 %d1, more; cvt.u32.u64 %r1, %d1; add.u32 %r0, %r0, %r1;
    cvt.u64.u32 %d0, %t; mul.lo.u64 %d0, %d0, 8; add.u64 %d0, %in, %d0;
    cp.async.cg.shared.global [%r0], [%d0], 16; cp.async.commit_group;
    cp.async.ca.shared.global [%r0+512], [%d0], 16; cp.async.commit_group;
    WAIT
    ld.shared.v2.u64 {%d2, %d3}, [%r0+AT]; add.u64 %d2, %d2, %d3; st.global.u64 [%out], %d2;";

fn copies(wait: &str, at: &str) -> Result<Vec<u64>, String> {
    let launch = Launch { dynamic_shared: 1024, ..Launch::new(1, 32) };
    let body = COPIES.replace("WAIT", wait).replace("AT", at);
    run(&body, launch, &(0..64).collect::<Vec<_>>()).map(|found| found.0).map_err(|error| error.to_string())
}

#[test]
fn asynchronous_copies_have_values_once_their_group_is_waited_for() {
    // Thread t reads words 2t and 2t + 1.
    let expected: Vec<u64> = (0..32).map(|t| 4 * t + 1).collect();
    assert_eq!(copies("cp.async.wait_group 1;", "0"), Ok(expected.clone()));
    assert_eq!(copies("cp.async.wait_group 0;", "512"), Ok(expected.clone()));
    assert_eq!(copies("cp.async.wait_all;", "512"), Ok(expected));
    for (wait, at) in [("", "0"), ("cp.async.wait_group 2;", "0"), ("cp.async.wait_group 1;", "512")] {
        let message = copies(wait, at).unwrap_err();
        assert!(message.contains("is read, but was never written"), "{message}");
    }
    // Data that another thread copied needs a barrier, too.
    let message = copies("cp.async.wait_all; xor.b32 %r0, %r0, 16;", "0").unwrap_err();
    assert!(message.contains("a race"), "{message}");
    assert!(copies("cp.async.wait_all; bar.sync 0; xor.b32 %r0, %r0, 16;", "0").is_ok());
    // The second of two copies to one place has to begin after the wait for the first.
    let again = "cp.async.cg.shared.global [%r0], [%d0], 16; cp.async.wait_all;";
    assert!(copies(&format!("cp.async.wait_group 1; {again}"), "0").is_ok());
    let message = copies(&format!("cp.async.wait_group 2; {again}"), "0").unwrap_err();
    assert!(message.contains("begins while another one to it is in flight"), "{message}");
}

#[test]
fn a_structure_by_value_is_read_at_computed_addresses() {
    let text =
        ".version 8.0 .target sm_80 .entry k(.param .u32 n, .param .align 8 .b8 table[24], .param .u64 to) {
        .reg .b32 %r<3>; .reg .b64 %d<6>;
        ld.param.u32 %r1, [n]; mov.b64 %d1, table; mul.wide.u32 %d2, %r1, 8; add.s64 %d2, %d1, %d2;
        ld.param.u64 %d3, [%d2+8]; ld.param.u64 %d4, [to]; st.global.u64 [%d4], %d3; ret; }";
    let module = ptx::Module::parse(text).unwrap();
    let mut memory = ptx::Memory::new();
    let to = memory.add("to", ptx::Data::unwritten::<u64>(1));
    let table: Vec<u8> = [5u64, 6, 7].iter().flat_map(|number| number.to_le_bytes()).collect();
    let mut launch = |n| {
        let arguments = [ptx::Argument::U32(n), ptx::Argument::Bytes(table.clone()), to.into()];
        let launched = module.kernel("k").unwrap().launch(Launch::new(1, 1), &arguments, &mut memory);
        launched.map(|_| memory.read::<u64>(to).unwrap()[0]).map_err(|error| error.to_string())
    };
    assert_eq!((launch(0), launch(1)), (Ok(6), Ok(7)));
    assert!(
        launch(9).unwrap_err().contains("8 bytes at the parameters + 88 (of 40 bytes) are out of bounds")
    );
}
