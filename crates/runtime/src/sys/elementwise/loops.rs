//! The loops of steps over tiles, each compiled for one set of the processor's instructions and with a target that the
//! compiler knows to be apart.

use super::math::Real;
use super::program::{Binary, Ternary, Unary};

/// Elements that a loop handles at once: four vectors of sixteen, whose chains of operations run side by side. Tiles are filled
/// up to a multiple of it.
pub(super) const BLOCK: usize = 64;

/// Where a loop reads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place<T> {
    pub(super) pointer: *const T,
    /// Elements from one block to the next: 0 where all blocks are the same, else [`BLOCK`].
    pub(super) step: usize,
}

impl<T> Place<T> {
    /// # Safety
    /// Block `index` is there, and nobody writes to it while the reference lives.
    #[inline(always)]
    unsafe fn block<'a>(self, index: usize) -> &'a [T; BLOCK] {
        // SAFETY: as the caller says.
        unsafe { &*self.pointer.add(index * self.step).cast() }
    }
}

/// What a loop computes of up to three numbers. A type and no closure, which would be a function of its own, compiled without
/// the instructions that the loop may use.
pub(super) trait Each<T> {
    fn each(a: T, b: T, c: T) -> T;
}

/// A set of instructions.
pub(super) trait Level {
    /// Computes `F` of the blocks at `from` into those of `to`.
    ///
    /// # Safety
    /// The processor has the instructions. Each place has as many blocks as `to`, and none of them is written meanwhile.
    unsafe fn sweep<T: Real, F: Each<T>>(to: &mut [[T; BLOCK]], from: [Place<T>; 3]);
}

/// # Safety
/// As [`Level::sweep`].
#[inline(always)]
unsafe fn sweep<T: Real, F: Each<T>>(to: &mut [[T; BLOCK]], from: [Place<T>; 3]) {
    for (index, to) in to.iter_mut().enumerate() {
        // SAFETY: as the caller says.
        let [a, b, c] = from.map(|place| unsafe { place.block(index) });
        for (i, to) in to.iter_mut().enumerate() {
            *to = F::each(a[i], b[i], c[i]);
        }
    }
}

macro_rules! levels {
    ($($(#[$attribute:meta])* $name:ident $(: $features:literal)?;)*) => { $(
        $(#[$attribute])*
        pub(super) struct $name;

        $(#[$attribute])*
        impl Level for $name {
            /// # Safety
            /// As [`Level::sweep`].
            #[inline(always)]
            unsafe fn sweep<T: Real, F: Each<T>>(to: &mut [[T; BLOCK]], from: [Place<T>; 3]) {
                $(#[target_feature(enable = $features)])?
                /// # Safety
                /// As [`Level::sweep`].
                #[inline(never)]
                unsafe fn compiled<T: Real, F: Each<T>>(to: &mut [[T; BLOCK]], from: [Place<T>; 3]) {
                    // SAFETY: as the caller says.
                    unsafe { sweep::<T, F>(to, from) }
                }
                // SAFETY: as the caller says.
                unsafe { compiled::<T, F>(to, from) }
            }
        }
    )* };
}

levels! {
    /// Vectors of 512 bits.
    #[cfg(target_arch = "x86_64")]
    Wide: "avx2,fma,f16c,bmi1,bmi2,avx512f,avx512bw,avx512dq,avx512vl";
    /// Vectors of 256 bits.
    #[cfg(target_arch = "x86_64")]
    Narrow: "avx2,fma,f16c,bmi1,bmi2";
    /// What every processor of the architecture has.
    Plain;
}

/// A match with one loop for each function: it must not stand inside of a loop.
macro_rules! one_loop_each {
    ($level:ident, $to:ident, $from:expr; $function:ident: $kind:ident = $($name:ident)*; ($a:ident, $b:ident, $c:ident, $the:ident) $value:expr) => {
        match $function {
            $($kind::$name => {
                struct Function;
                impl<T: Real> Each<T> for Function {
                    #[inline(always)]
                    #[allow(unused_variables, reason = "functions of one or two numbers")]
                    fn each($a: T, $b: T, $c: T) -> T {
                        let $the = $kind::$name;
                        $value
                    }
                }
                // SAFETY: as the caller says.
                unsafe { $level::sweep::<T, Function>($to, $from) }
            })*
        }
    };
}

/// # Safety
/// As [`Level::sweep`].
#[inline(always)]
pub(super) unsafe fn unary<T: Real, L: Level>(function: Unary, to: &mut [[T; BLOCK]], of: Place<T>) {
    one_loop_each!(
        L, to, [of; 3];
        function: Unary = Negate Reciprocal Sqrt Rsqrt Exp Ln Tanh Sigmoid Erf Relu Abs Sign Gelu GeluSlope
            LogisticSlope;
        (a, b, c, name) a.unary(name)
    );
}

/// # Safety
/// As [`Level::sweep`].
#[inline(always)]
pub(super) unsafe fn binary<T: Real, L: Level>(function: Binary, to: &mut [[T; BLOCK]], from: [Place<T>; 2]) {
    one_loop_each!(
        L, to, [from[0], from[1], from[1]];
        function: Binary = Add Subtract Multiply Divide Maximum Minimum Less LessEqual Equal NotEqual;
        (a, b, c, name) a.binary(name, b)
    );
}

/// # Safety
/// As [`Level::sweep`].
#[inline(always)]
pub(super) unsafe fn ternary<T: Real, L: Level>(
    function: Ternary,
    to: &mut [[T; BLOCK]],
    from: [Place<T>; 3],
) {
    one_loop_each!(
        L, to, from;
        function: Ternary = MultiplyAdd MultiplySubtract SubtractProduct Product Select;
        (a, b, c, name) a.ternary(name, b, c)
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fused<L: Level>(x: &[[f32; BLOCK]; 2], shift: &[f32; BLOCK]) -> [[f32; BLOCK]; 2] {
        let mut found = [[0.0; BLOCK]; 2];
        let x = Place { pointer: x.as_ptr().cast(), step: BLOCK };
        let shift = Place { pointer: shift.as_ptr(), step: 0 };
        // SAFETY: the caller has seen that the processor has the instructions; `x` has two blocks, and `shift` one for both.
        unsafe { ternary::<f32, L>(Ternary::MultiplyAdd, &mut found, [x, x, shift]) };
        let squares = found;
        let of = Place { pointer: squares.as_ptr().cast(), step: BLOCK };
        // SAFETY: as above.
        unsafe { unary::<f32, L>(Unary::Sigmoid, &mut found, of) };
        found
    }

    #[test]
    fn every_set_of_instructions_gives_the_same() {
        let x: [[f32; BLOCK]; 2] =
            std::array::from_fn(|block| std::array::from_fn(|i| (block * BLOCK + i) as f32 * 0.03 - 1.5));
        let shift = std::array::from_fn(|i| i as f32 * 0.1 - 4.0);
        let expected = |block: usize, i: usize| (x[block][i] * x[block][i] + shift[i]).unary(Unary::Sigmoid);
        let mut levels = vec![fused::<Plain>(&x, &shift)];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                levels.push(fused::<Narrow>(&x, &shift));
            }
            if is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512dq") {
                levels.push(fused::<Wide>(&x, &shift));
            }
        }
        for found in levels {
            for (block, values) in found.iter().enumerate() {
                for (i, value) in values.iter().enumerate() {
                    assert_eq!(*value, expected(block, i), "block {block}, element {i}");
                }
            }
        }
    }
}
