//! The update of a dynamic loss scale. The crate `amp` compares the same kernel with its rule on the host on a GPU.

use tch::{Kind, Tensor};

use super::launch::{Given, Shift, launch};
use super::program::{LOSS_SCALE, Program};

/// Growth, backoff, interval, minimum, maximum, hysteresis.
type Options = [f64; 6];

/// The update in the words of its documentation.
fn expected(state: &mut [f64; 5], overflow: bool, options: Options) {
    let [growth_factor, backoff_factor, growth_interval, min_scale, max_scale, hysteresis] = options;
    let [scale, growth_tracker, hysteresis_tracker, skipped, at_min_scale] = state;
    if overflow {
        *at_min_scale += f64::from(u8::from(*scale <= min_scale));
        *skipped += 1.0;
        *growth_tracker = 0.0;
        *hysteresis_tracker = (*hysteresis_tracker - 1.0).max(0.0);
        if *hysteresis_tracker == 0.0 {
            *scale = f64::from((*scale * backoff_factor) as f32).max(min_scale);
        }
        return;
    }
    (*skipped, *at_min_scale) = (0.0, 0.0);
    *growth_tracker += 1.0;
    if *growth_tracker >= growth_interval {
        (*growth_tracker, *hysteresis_tracker) = (0.0, hysteresis);
        let grown = (*scale * growth_factor) as f32;
        if grown.is_finite() {
            *scale = f64::from(grown).min(max_scale);
        }
    }
}

#[test]
fn a_scale_moves_as_documented() {
    let Some(program) = Program::of(LOSS_SCALE, &["update_loss_scale".to_owned()]) else { return };
    let kernel = program.kernel("update_loss_scale");
    let (least, most) = (f64::from(f32::MIN_POSITIVE), f64::from(f32::MAX));
    let cases: [(f64, Options); 5] = [
        (65536.0, [2.0, 0.5, 2.0, least, most, 1.0]),
        (1.1f32.into(), [1.7, 0.3, 3.0, 0.25, 4.0, 2.0]),
        (2.0, [2.0, 0.5, 1.0, 1.0, 4.0, 3.0]),
        (most, [3.0, 0.5, 1.0, least, most, 1.0]),
        (least, [2.0, 0.1, 4.0, least, most, 1.0]),
    ];
    // No overflow, or one of three kinds, alone and in a row.
    let flags = [0.0, 1.0, 0.0, 0.0, 0.0, f32::NAN, 1.0, 1.0, -2.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0];
    for (scale, options) in cases {
        let mut host = [scale, 0.0, options[5], 0.0, 0.0];
        for (step, flag) in flags.into_iter().enumerate() {
            let (state, found_inf) = (Tensor::from_slice(&host), Tensor::from_slice(&[flag]));
            let mut given = vec![Given::In("state", &state), Given::In("found_inf", &found_inf)];
            given.extend(options.map(Given::F64));
            given.extend([
                Given::Out("updated", Kind::Double, vec![5]),
                Given::Out("factors", Kind::Float, vec![2]),
            ]);
            let outcome = launch(kernel, (1, 32), &given, Shift(8));
            expected(&mut host, flag != 0.0, options);
            let found = Vec::<f64>::try_from(&outcome.outputs[0]).unwrap();
            assert_eq!(found, host, "{options:?}, step {step}");
            let factors = Vec::<f32>::try_from(&outcome.outputs[1]).unwrap();
            assert_eq!(factors, [host[0] as f32, (1.0 / host[0]) as f32], "{options:?}, step {step}");
        }
    }
}
