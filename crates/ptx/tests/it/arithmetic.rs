//! Instructions on numbers, one warp with one number for each lane.

use crate::kernel::run;
use ptx::Launch;

/// The instruction on `%d1`, `%d2` (64 bits), `%r1`, `%r2` (their low 32), `%f1`, `%f2` (as fp32), `%h1` (16) to `%d0`.
fn of(instruction: &str, a: u64, b: u64) -> u64 {
    let body = format!(
        "ld.global.u64 %d1, [%in]; mov.u64 %d2, {b};
        cvt.u32.u64 %r1, %d1; cvt.u32.u64 %r2, %d2; cvt.u16.u64 %h1, %d1;
        mov.b32 %f1, %r1; mov.b32 %f2, %r2; mov.b64 %g1, %d1; mov.b64 %g2, %d2;
        {instruction}
        st.global.u64 [%out], %d0;"
    );
    run(&body, Launch::new(1, 1), &[a]).unwrap().0[0]
}

fn to_32(instruction: &str, a: u64, b: u64) -> u64 {
    of(&format!("{instruction} cvt.u64.u32 %d0, %r0;"), a, b)
}

fn to_float(instruction: &str, a: f32, b: f32) -> f32 {
    let body = format!("{instruction} mov.b32 %r0, %f0; cvt.u64.u32 %d0, %r0;");
    f32::from_bits(of(&body, a.to_bits().into(), b.to_bits().into()) as u32)
}

#[test]
fn integers() {
    assert_eq!(to_32("sub.s32 %r0, %r1, %r2;", 3, 5), 0xffff_fffe);
    assert_eq!(of("mul.wide.s32 %d0, %r1, %r2;", (-3i32) as u32 as u64, 5), (-15i64) as u64);
    assert_eq!(of("mul.wide.u32 %d0, %r1, %r2;", (-3i32) as u32 as u64, 5), 0xffff_fffdu64 * 5);
    assert_eq!(to_32("mul.hi.u32 %r0, %r1, %r2;", 0x8000_0000, 6), 3);
    assert_eq!(to_32("div.s32 %r0, %r1, %r2;", (-7i64) as u64, 2), (-3i32) as u32 as u64);
    assert_eq!(to_32("rem.u32 %r0, %r1, %r2;", 7, 4), 3);
    assert_eq!(to_32("shr.s32 %r0, %r1, %r2;", 0x8000_0000, 40), 0xffff_ffff);
    assert_eq!(to_32("shr.u32 %r0, %r1, %r2;", 0x8000_0000, 40), 0);
    assert_eq!(to_32("shl.b32 %r0, %r1, %r2;", 1, 32), 0);
    assert_eq!(to_32("min.s32 %r0, %r1, %r2;", 0xffff_ffff, 3), 0xffff_ffff);
    assert_eq!(to_32("not.b32 %r0, %r1;", 5, 0), 0xffff_fffa);
    assert_eq!(to_32("bfi.b32 %r0, %r1, %r2, 5, 27;", 3, 0xffff_ffff), 0x7f);
    assert_eq!(to_32("bfe.u32 %r0, %r1, 4, 8;", 0xabcd, 0), 0xbc);
    assert_eq!(to_32("prmt.b32 %r0, %r1, %r2, 0x5410;", 0x1111_2222, 0x3333_4444), 0x4444_2222);
    assert_eq!(to_32("shf.l.wrap.b32 %r0, %r1, %r1, 8;", 0x1234_5678, 0), 0x3456_7812);
    assert_eq!(to_32("popc.b32 %r0, %r1; clz.b32 %r2, %r1; add.u32 %r0, %r0, %r2;", 0xff, 0), 32);
}

#[test]
fn floats() {
    assert_eq!(to_float("fma.rn.f32 %f0, %f1, %f2, 0fBF800000;", 3.0, 0.5), 0.5);
    assert!(to_float("max.NaN.f32 %f0, %f1, %f2;", f32::NAN, 1.0).is_nan());
    assert_eq!(to_float("max.f32 %f0, %f1, %f2;", f32::NAN, 1.0), 1.0);
    assert_eq!(to_float("max.f32 %f0, %f1, %f2;", -0.0, 0.0).to_bits(), 0);
    assert_eq!(to_float("min.f32 %f0, %f1, %f2;", 0.0, -0.0).to_bits(), 0x8000_0000);
    assert_eq!(to_float("copysign.f32 %f0, %f1, %f2;", -1.0, 3.0), -3.0);
    assert_eq!(to_float("add.f32 %f0, %f1, %f2;", f32::INFINITY, f32::NEG_INFINITY).to_bits(), 0x7fff_ffff);
    // 2^-127 is subnormal.
    assert_eq!(to_float("ex2.approx.ftz.f32 %f0, %f1;", -127.0, 0.0), 0.0);
    assert_eq!(to_float("ex2.approx.f32 %f0, %f1;", -127.0, 0.0), 2f32.powi(-127));
    assert_eq!(to_float("ex2.approx.ftz.f32 %f0, %f1;", f32::NEG_INFINITY, 0.0), 0.0);
    assert_eq!(to_float("rsqrt.approx.f32 %f0, %f1;", 4.0, 0.0), 0.5);
}

#[test]
fn comparisons_with_nan() {
    let test = |operator: &str| {
        let body = format!("setp.{operator}.f32 %p1, %f1, %f2; selp.b64 %d0, 1, 0, %p1;");
        of(&body, f32::NAN.to_bits().into(), 1f32.to_bits().into())
    };
    let found: Vec<u64> = ["eq", "ne", "lt", "ge", "neu", "ltu", "equ", "nan", "num"].map(test).to_vec();
    assert_eq!(found, [0, 0, 0, 0, 1, 1, 1, 1, 0]);
    let both = "setp.gt.s32 %p0, %r1, 0; setp.lt.and.s32 %p1, %r1, %r2, %p0; selp.b64 %d0, 1, 0, %p1;";
    assert_eq!([of(both, 1, 2), of(both, 0, 2), of(both, 3, 2)], [1, 0, 0]);
}

#[test]
fn conversions() {
    let half = |name: &str, number: f32| {
        let body = format!("cvt.rn.{name}.f32 %h0, %f1; cvt.u64.u16 %d0, %h0;");
        of(&body, number.to_bits().into(), 0)
    };
    let table = [
        (1.0, 0x3c00, 0x3f80),
        (-2.5, 0xc100, 0xc020),
        // Halfway between two numbers of bf16: to the even one.
        (1.003_906_3, 0x3c04, 0x3f80),
        (1.011_718_8, 0x3c0c, 0x3f82),
        (65_520.0, 0x7c00, 0x4780),
        (6e-8, 0x0001, 0x3381),
        (f32::INFINITY, 0x7c00, 0x7f80),
        (f32::NAN, 0x7fff, 0x7fff),
        (-0.0, 0x8000, 0x8000),
        (3.4e38, 0x7c00, 0x7f80),
    ];
    for (number, f16, bf16) in table {
        assert_eq!(half("f16", number), f16, "{number}");
        assert_eq!(half("bf16", number), bf16, "{number}");
    }
    // The first operand is in the upper half.
    let two = of("cvt.rn.bf16x2.f32 %r0, %f1, %f2; cvt.u64.u32 %d0, %r0;", 0x3f80_0000, 0x4000_0000);
    assert_eq!(two, 0x3f80_4000);
    for bits in (0..=u16::MAX).step_by(61) {
        let wide = of_half(bits);
        if !wide.is_nan() {
            assert_eq!(half("f16", wide), bits.into());
        }
    }
    assert_eq!(of("cvt.s64.s32 %d0, %r1;", 0xffff_ffff, 0), u64::MAX);
    assert_eq!(
        of("cvt.rzi.s32.f32 %r0, %f1; cvt.s64.s32 %d0, %r0;", (-2.7f32).to_bits().into(), 0),
        (-2i64) as u64
    );
    assert_eq!(
        of("cvt.rn.f32.u64 %f0, %d1; mov.b32 %r0, %f0; cvt.u64.u32 %d0, %r0;", 1 << 40, 0),
        0x5380_0000
    );
}

/// By the interpreter, which must agree with the format.
fn of_half(bits: u16) -> f32 {
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f32::from(bits & 1023));
    let size = match exponent {
        31 if fraction > 0.0 => f32::NAN,
        31 => f32::INFINITY,
        0 => fraction * 2f32.powi(-24),
        _ => (1024.0 + fraction) * 2f32.powi(exponent - 25),
    };
    let found = to_float("cvt.f32.f16 %f0, %h1;", f32::from_bits(bits.into()), 0.0);
    let expected = if bits >> 15 == 1 { -size } else { size };
    assert!(found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan(), "{bits:#x}");
    expected
}

#[test]
fn approximations_are_moved_by_no_more_than_is_said() {
    let body = "ld.global.u64 %d1, [%in]; cvt.u32.u64 %r1, %d1; mov.b32 %f1, %r1;
        ex2.approx.f32 %f2, %f1; mov.b32 %r2, %f2; cvt.u64.u32 %d2, %r2; st.global.u64 [%out], %d2;";
    let input: Vec<u64> = (0..32).map(|n| (n as f32 / 7.0).to_bits().into()).collect();
    let exact = run(body, Launch::new(1, 32), &input).unwrap().0;
    let near = run(body, Launch { approximation_error: 2, ..Launch::new(1, 32) }, &input).unwrap().0;
    assert!(exact.iter().zip(&near).all(|(a, b)| a.abs_diff(*b) <= 2));
    assert!(exact.iter().zip(&near).filter(|(a, b)| a != b).count() > 16);
}
