//! Texts that are not PTX, or more than this interpreter knows; launches that do not fit.

use crate::kernel::text;
use expect_test::{Expect, expect};
use ptx::{Argument, Data, Launch, Memory, Module};

fn check(source: &str, expected: Expect) {
    expected.assert_eq(&Module::parse(source).err().map(|error| error.to_string()).unwrap_or_default());
}

#[test]
fn what_is_not_known_is_refused_before_anything_runs() {
    let unknown = |body: &str| text(body);
    check(
        &unknown("lop3.b32 %r0, %r1, %r2, %r3, 0x80;"),
        expect!["line 24: `lop3.b32 %r0, %r1, %r2, %r3, 0x80` is not supported: unknown"],
    );
    check(
        &unknown("add.rz.f32 %f0, %f1, %f2;"),
        expect!["line 24: `add.rz.f32 %f0, %f1, %f2` is not supported: unknown"],
    );
    check(
        &unknown("ld.global.acquire.u32 %r0, [%in];"),
        expect![
            "line 24: `ld.global.acquire.u32 %r0, [%in]` is not supported: the modifier `acquire` is not known"
        ],
    );
    check(
        &unknown("bar.sync 1;"),
        expect![
            "line 24: `bar.sync 1` is not supported: only barrier 0 of the whole block, and that of a warp, are known"
        ],
    );
    check(
        &unknown("mov.u32 %r0, %clock;"),
        expect![
            "line 24: `mov.u32 %r0, %clock` is not supported: `%clock` is neither a register of the kernel nor a special one"
        ],
    );
    check(
        &unknown("bra NOWHERE;"),
        expect!["line 24: `bra NOWHERE` is not supported: there is no such label"],
    );
    check(
        &unknown("ld.global.u32 %r0, [table];"),
        expect!["line 24: `ld.global.u32 %r0, [table]` is not supported: `table` is not known here"],
    );
    check(
        &unknown("add.u32 %r0, %r1;"),
        expect!["line 24: `add.u32 %r0, %r1` is not supported: expected 3 operands"],
    );
}

#[test]
fn what_is_not_ptx_is_refused_with_its_line() {
    check(".version 8.0\nnonsense", expect!["line 2: expected a directive of a module, found `nonsense`"]);
    check(".entry k(.param .u64 a) { ret;", expect!["line 1: expected `}`, found the end"]);
    check(".entry k(.param .x64 a) { ret; }", expect!["line 1: expected a type, found `.x64`"]);
    check("/* no end", expect!["line 1: a comment without an end"]);
    check(".entry k() { add.u32 1 2; }", expect!["line 1: expected `;`, found `2`"]);
    check("", expect![""]);
}

#[test]
fn a_launch_must_fit_the_kernel() {
    let source =
        ".version 8.0 .target sm_90 .entry k(.param .u32 n, .param .u64 p) .maxntid 64, 1, 1 { ret; }";
    let module = Module::parse(source).unwrap();
    assert_eq!(module.target(), "sm_90");
    let mut memory = Memory::new();
    let buffer = memory.add("b", Data::unwritten::<f32>(3));
    let kernel = module.kernel("k").unwrap();
    let mut check = |launch, arguments: &[Argument], expected: Expect| {
        expected.assert_eq(&kernel.launch(launch, arguments, &mut memory).unwrap_err().to_string());
    };
    let good = [Argument::U32(1), buffer.into()];
    check(Launch::new(1, 64), &good[..1], expect!["k: 1 arguments; the kernel has 2 parameters"]);
    check(
        Launch::new(1, 128),
        &good,
        expect!["k: 1 blocks of 128 threads; expected one block or more, of 1 to 64 threads"],
    );
    check(
        Launch::new(1, 64),
        &[buffer.into(), buffer.into()],
        expect!["k: argument 0 is Pointer(68719476736); the kernel's parameter has 4 bytes"],
    );
    assert!(kernel.launch(Launch::new(1, 64), &good, &mut memory).is_ok());
    let unwritten = memory.read::<f32>(buffer).unwrap_err().to_string();
    expect!["buffer `b`: 12 of 12 bytes were never written, the first at offset 0"].assert_eq(&unwritten);
    let missing = module.kernel("other").err().map(|error| error.to_string());
    assert_eq!(missing.as_deref(), Some("the module has no kernel `other`; it has k"));
}
