//! The launches that are compared before and after a mutation.

use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

use super::super::launch::{Given, Shift, try_launch};
use super::super::program::{
    ADAM, CROSS_ENTROPY, DROPOUT, GRADIENTS, LOSS_SCALE, NF4, NORM, Program, ROPE, SCALE, SWIGLU, Source,
};
use super::super::tolerance::normal;
use super::super::{adam, gradients, nf4, rope};

/// A kernel and a launch of it.
#[derive(Clone, Copy)]
pub(super) struct KernelCase {
    pub(super) source: Source,
    pub(super) expression: &'static str,
    pub(super) run: fn(&Program) -> Seen,
}

pub(super) const FORWARD: KernelCase = KernelCase { source: NORM, expression: FORWARD_OF, run: forward };
pub(super) const BACKWARD: KernelCase = KernelCase { source: NORM, expression: BACKWARD_OF, run: backward };
pub(super) const BACKWARD_OF_WIDE_ROWS: KernelCase =
    KernelCase { source: NORM, expression: WIDE_BACKWARD_OF, run: backward_of_wide_rows };
pub(super) const FORWARD_WITH_RESIDUAL: KernelCase =
    KernelCase { source: NORM, expression: FORWARD_OF, run: forward_with_residual };
pub(super) const MANY: KernelCase = KernelCase { source: ADAM, expression: ADAM_OF, run: many };
pub(super) const SUMS: KernelCase = KernelCase { source: NORM, expression: SUMS_OF, run: sums };
pub(super) const STATISTICS: KernelCase =
    KernelCase { source: CROSS_ENTROPY, expression: STATISTICS_OF, run: statistics };
pub(super) const STATISTICS_WITH_NAN: KernelCase =
    KernelCase { source: CROSS_ENTROPY, expression: STATISTICS_OF, run: statistics_with_nan };
pub(super) const IMPOSSIBLE_ROWS: KernelCase =
    KernelCase { source: CROSS_ENTROPY, expression: STATISTICS_OF, run: impossible_rows };
pub(super) const BEST: KernelCase = KernelCase { source: CROSS_ENTROPY, expression: BEST_OF, run: best };
pub(super) const GRADIENT: KernelCase =
    KernelCase { source: CROSS_ENTROPY, expression: GRADIENT_OF, run: gradient };
pub(super) const NARROW: KernelCase =
    KernelCase { source: CROSS_ENTROPY, expression: NARROW_OF, run: narrow };
pub(super) const STATISTICS_OF_ODD_ROWS: KernelCase =
    KernelCase { source: CROSS_ENTROPY, expression: WIDE_STATISTICS_OF, run: statistics_of_odd_rows };
pub(super) const GRADIENT_OF_ODD_ROWS: KernelCase =
    KernelCase { source: CROSS_ENTROPY, expression: WIDE_GRADIENT_OF, run: gradient_of_odd_rows };
pub(super) const STATISTICS_OF_16_BITS: KernelCase =
    KernelCase { source: CROSS_ENTROPY, expression: BF16_STATISTICS_OF, run: statistics_of_16_bits };
pub(super) const GRADIENT_OF_FP16: KernelCase =
    KernelCase { source: CROSS_ENTROPY, expression: F16_GRADIENT_OF, run: gradient_of_fp16 };
pub(super) const NARROW_OF_FEW: KernelCase =
    KernelCase { source: CROSS_ENTROPY, expression: NARROW_OF, run: narrow_of_few };
pub(super) const SWIGLU_16: KernelCase =
    KernelCase { source: SWIGLU, expression: SWIGLU_16_OF, run: swiglu_16 };
pub(super) const SWIGLU_32: KernelCase =
    KernelCase { source: SWIGLU, expression: SWIGLU_32_OF, run: swiglu_32 };
pub(super) const FAR_ROWS: KernelCase =
    KernelCase { source: SWIGLU, expression: SWIGLU_32_OF, run: far_rows };
pub(super) const ROTATE: KernelCase = KernelCase { source: ROPE, expression: ROTATE_OF, run: rotate };
pub(super) const SCALED: KernelCase = KernelCase { source: SCALE, expression: SCALE_OF, run: scale };
pub(super) const SQUARES: KernelCase = KernelCase { source: GRADIENTS, expression: SQUARES_OF, run: squares };
pub(super) const NORM_OF_PARTS: KernelCase =
    KernelCase { source: GRADIENTS, expression: "gradient_norm<1024>", run: norm_of_parts };
pub(super) const SCALED_MANY: KernelCase =
    KernelCase { source: GRADIENTS, expression: SCALE_MANY_OF, run: scale_many };
pub(super) const DEQUANTIZED: KernelCase =
    KernelCase { source: NF4, expression: DEQUANTIZE_OF, run: dequantize };
pub(super) const DROPPED: KernelCase = KernelCase { source: DROPOUT, expression: DROPOUT_OF, run: dropped };
pub(super) const LOSS_SCALED: KernelCase =
    KernelCase { source: LOSS_SCALE, expression: "update_loss_scale", run: loss_scaled };

/// The result of a launch.
#[derive(Debug)]
pub(super) enum Seen {
    Fault(String),
    /// Outputs, and sectors above the minimum.
    Values(Vec<Tensor>, f64),
}

fn seen(program: &Program, expression: &str, grid: (u32, u32), given: &[Given<'_>]) -> Seen {
    seen_of(program, expression, ptx::Launch::new(grid.0, grid.1), given)
}

fn seen_of(program: &Program, expression: &str, launch: ptx::Launch, given: &[Given<'_>]) -> Seen {
    match try_launch(program.kernel(expression), launch, given, Shift::default()) {
        Ok((outputs, counts)) => Seen::Values(outputs, counts.sector_ratio()),
        Err(error) => Seen::Fault(error.to_string()),
    }
}

const FORWARD_OF: &str = "norm_forward<float, float, float, 4, 128, 1, 2, false>";
const BACKWARD_OF: &str = "norm_backward<float, float, float, 4, 128, 1, 3, false, false>";
const WIDE_BACKWARD_OF: &str = "norm_backward<bf16, bf16, bf16, 8, 1024, 4, 0, true, true>";
const DROPOUT_OF: &str = "dropout<float, 4, 256>";
const SUMS_OF: &str = "column_sums<float>";
const ADAM_OF: &str = "adam<bf16, bf16, 8, true, 128, 1024>";
const STATISTICS_OF: &str = "ce_statistics<float, 1, false, false, 512>";
const BEST_OF: &str = "ce_statistics<float, 1, false, true, 512>";
const GRADIENT_OF: &str = "ce_gradient<float, 1, false, 256>";
const WIDE_STATISTICS_OF: &str = "ce_statistics<float, 4, false, false, 512>";
const WIDE_GRADIENT_OF: &str = "ce_gradient<float, 4, false, 256>";
const BF16_STATISTICS_OF: &str = "ce_statistics<bf16, 8, true, false, 512>";
const F16_GRADIENT_OF: &str = "ce_gradient<f16, 8, false, 256>";
const NARROW_OF: &str = "ce_gradient_narrow<bf16, 8, false, 512>";
const SWIGLU_16_OF: &str = "swiglu_forward<bf16, 8, 256>";
const SWIGLU_32_OF: &str = "swiglu_forward<float, 1, 256>";
const ROTATE_OF: &str = "rotate<bf16, 8>";
const SCALE_OF: &str = "scale<float, 4, 256>";
const SQUARES_OF: &str = "gradient_squares<float, 4, false, 256, 16384>";
const SCALE_MANY_OF: &str = "scale_many<float, 4, 256, 16384>";
const DEQUANTIZE_OF: &str = "nf4_dequantize<float, 4, true, 256, 4>";

fn draw(size: &[i64], kind: Kind) -> Tensor {
    normal(&mut Generator::new(7).unwrap(), size, kind).to_kind(kind)
}

/// Two blocks of 128 threads that keep rows of 128 words of 16 bytes in shared memory.
fn ahead(rows: usize) -> ptx::Launch {
    ptx::Launch { dynamic_shared: rows * 128 * 16, ..ptx::Launch::new(2, 128) }
}

fn forward(program: &Program) -> Seen {
    forward_of(program, None)
}

fn forward_with_residual(program: &Program) -> Seen {
    forward_of(program, Some(&draw(&[5, 244], Kind::Float)))
}

fn forward_of(program: &Program, residual: Option<&Tensor>) -> Seen {
    let (x, weight) = (draw(&[5, 244], Kind::Float) * 0.5, draw(&[244], Kind::Float));
    let given = [
        Given::In("x", &x),
        Given::optional("residual", residual),
        residual.map_or(Given::Null, |_| Given::Out("sum", Kind::Float, vec![5, 244])),
        Given::In("weight", &weight),
        Given::Null,
        Given::Out("y", Kind::Float, vec![5, 244]),
        Given::Null,
        Given::Out("rstd", Kind::Float, vec![5]),
        Given::I32(5),
        Given::I32(244),
        Given::F32(1e-5),
    ];
    seen_of(program, FORWARD_OF, ahead(if residual.is_some() { 4 } else { 2 }), &given)
}

fn backward(program: &Program) -> Seen {
    let (x, upstream) = (draw(&[9, 244], Kind::Float), draw(&[9, 244], Kind::Float) * 0.5);
    let rstd = draw(&[9], Kind::Float).abs();
    let given = [
        Given::In("x", &x),
        Given::In("upstream", &upstream),
        Given::Null,
        Given::Null,
        Given::Null,
        Given::In("rstd", &rstd),
        Given::Out("grad", Kind::Float, vec![9, 244]),
        Given::Out("of_weight", Kind::Float, vec![2, 244]),
        Given::Null,
        Given::I32(9),
        Given::I32(244),
    ];
    seen_of(program, BACKWARD_OF, ahead(6), &given)
}

/// Rows whose sums are in registers and in shared memory.
fn backward_of_wide_rows(program: &Program) -> Seen {
    let [x, upstream] = [0.5, 2.0].map(|size| draw(&[3, 8200], Kind::BFloat16) * size);
    let (weight, mean, rstd) =
        (draw(&[8200], Kind::BFloat16), draw(&[3], Kind::Float), draw(&[3], Kind::Float).abs());
    let given = [
        Given::In("x", &x),
        Given::In("upstream", &upstream),
        Given::Null,
        Given::In("weight", &weight),
        Given::In("mean", &mean),
        Given::In("rstd", &rstd),
        Given::Out("grad", Kind::BFloat16, vec![3, 8200]),
        Given::Out("of_weight", Kind::Float, vec![2, 8200]),
        Given::Out("of_bias", Kind::Float, vec![2, 8200]),
        Given::I32(3),
        Given::I32(8200),
    ];
    let launch = ptx::Launch { dynamic_shared: 1024 * 4 * 8 * 4, ..ptx::Launch::new(2, 1024) };
    seen_of(program, WIDE_BACKWARD_OF, launch, &given)
}

/// Three tensors; two end within a word of 16 bytes.
fn many(program: &Program) -> Seen {
    let sizes = [7, 1030, 8];
    let of = |kind| sizes.map(|numbers| draw(&[numbers], kind));
    let (gradients, masters) = (of(Kind::BFloat16), of(Kind::Float));
    let (averages, squares) = (of(Kind::Float), of(Kind::Float).map(|root| &root * &root));
    let (weights, step) = (of(Kind::BFloat16), Tensor::from_slice(&[3f32]));
    let (mut members, mut blocks) = (Vec::new(), 0);
    for (index, numbers) in sizes.into_iter().enumerate() {
        members.extend([
            Given::In("gradient", &gradients[index]),
            Given::InOut("master", &masters[index]),
            Given::InOut("exp_avg", &averages[index]),
            Given::InOut("exp_avg_sq", &squares[index]),
            Given::InOut("weight", &weights[index]),
            Given::In("step", &step),
            Given::I64(numbers),
            Given::I64(blocks),
        ]);
        blocks += (numbers + adam::CHUNK - 1) / adam::CHUNK;
    }
    // Neither a flag to skip nor a learning rate on the device.
    let mut given = vec![Given::Structure(members, adam::TABLE), Given::I32(3), Given::Null, Given::Null];
    given.extend([0.01, 0.9, 0.999].map(Given::F64));
    given.extend([Given::F32(1e-8), Given::F64(0.1)]);
    seen(program, ADAM_OF, (blocks as u32, 128), &given)
}

fn sums(program: &Program) -> Seen {
    let drawn = draw(&[2, 37, 72], Kind::Float);
    let partial = [0, 1].map(|index| drawn.get(index));
    let given = [
        Given::In("first", &partial[0]),
        Given::Out("of_first", Kind::Float, vec![72]),
        Given::In("second", &partial[1]),
        Given::Out("of_second", Kind::Float, vec![72]),
        Given::I32(37),
        Given::I32(72),
    ];
    seen(program, SUMS_OF, (6, 256), &given)
}

fn dropped(program: &Program) -> Seen {
    let x = draw(&[4104], Kind::Float);
    let out = Given::Out("out", Kind::Float, vec![4104]);
    // A seed without a step's base; half of all elements are dropped.
    let (numbers, seed, threshold) = (Given::I64(4104), Given::I64(7), Given::I64(1 << 31));
    let given = [Given::In("x", &x), out, numbers, Given::Null, seed, threshold, Given::F32(2.0)];
    seen(program, DROPOUT_OF, (2, 256), &given)
}

/// An overflow at the minimum scale.
fn loss_scaled(program: &Program) -> Seen {
    let state = Tensor::from_slice(&[4.0f64, 3.0, 1.0, 0.0, 0.0]);
    let found_inf = Tensor::from_slice(&[1f32]);
    let mut given = vec![Given::In("state", &state), Given::In("found_inf", &found_inf)];
    given.extend([2.0, 0.5, 9.0, 4.0, 1e6, 1.0].map(Given::F64));
    given.push(Given::Out("updated", Kind::Double, vec![5]));
    given.push(Given::Out("factors", Kind::Float, vec![2]));
    seen(program, "update_loss_scale", (1, 32), &given)
}

fn statistics_of(program: &Program, expression: &str, tile: &Tensor) -> Seen {
    statistics_of_columns(program, expression, tile, tile.size()[1], 1.0)
}

fn statistics_of_columns(
    program: &Program,
    expression: &str,
    tile: &Tensor,
    columns: i64,
    factor: f64,
) -> Seen {
    let rows = tile.size()[0];
    let row_vector = |value: f64| Tensor::full([rows], value, (Kind::Float, Device::Cpu));
    let (maximum, zero) = (row_vector(f64::NEG_INFINITY), row_vector(0.0));
    let labels = Tensor::ones([rows], (Kind::Int64, Device::Cpu));
    let best = Tensor::full([rows], -1, (Kind::Int64, Device::Cpu));
    let mut given = vec![
        Given::InOut("tile", tile),
        Given::I64(tile.size()[1]),
        Given::I32(columns),
        Given::I64(0),
        Given::Null,
        Given::F32(factor),
        Given::F32(0.0),
        Given::In("labels", &labels),
        Given::Null,
        Given::I64(0),
        Given::Null,
    ];
    given.extend([
        Given::InOut("maximum", &maximum),
        Given::InOut("sum", &zero),
        Given::InOut("target", &zero),
    ]);
    given.extend([Given::Null, Given::Null, Given::Null]);
    given.push(if expression == BEST_OF { Given::InOut("best", &best) } else { Given::Null });
    seen(program, expression, (rows as u32, 512), &given)
}

fn statistics(program: &Program) -> Seen {
    let tile = draw(&[3, 1031], Kind::Float);
    let _ = tile.get(1).narrow(0, 7, 1).fill_(f64::NEG_INFINITY);
    statistics_of(program, STATISTICS_OF, &tile)
}

fn statistics_of_odd_rows(program: &Program) -> Seen {
    statistics_of_columns(program, WIDE_STATISTICS_OF, &draw(&[3, 1032], Kind::Float), 1031, 1.0)
}

/// Logits that are rounded, with a row's last ones too few for a word of 16 bytes.
fn statistics_of_16_bits(program: &Program) -> Seen {
    statistics_of_columns(program, BF16_STATISTICS_OF, &draw(&[3, 1032], Kind::BFloat16), 1031, 0.7)
}

fn statistics_with_nan(program: &Program) -> Seen {
    let tile = draw(&[3, 1031], Kind::Float);
    let _ = tile.get(1).narrow(0, 700, 1).fill_(f64::NAN);
    statistics_of(program, STATISTICS_OF, &tile)
}

fn impossible_rows(program: &Program) -> Seen {
    let tile = draw(&[3, 1031], Kind::Float);
    let _ = tile.get(1).fill_(f64::NEG_INFINITY);
    statistics_of(program, STATISTICS_OF, &tile)
}

fn best(program: &Program) -> Seen {
    let tile = draw(&[3, 1031], Kind::Float);
    let _ = tile.get(1).fill_(2.0);
    statistics_of(program, BEST_OF, &tile)
}

fn gradient_of(program: &Program, expression: &str, columns: i64) -> Seen {
    let kind = if expression == F16_GRADIENT_OF { Kind::Half } else { Kind::Float };
    let word = 16 / kind.elt_size_in_bytes() as i64;
    let stride = if expression == GRADIENT_OF { columns } else { (columns + word - 1) / word * word };
    let tile = draw(&[2, stride], kind);
    let row_vector = Tensor::ones([2], (Kind::Float, Device::Cpu));
    let labels = Tensor::from_slice(&[3i64, columns - 1]);
    let block_columns = if expression == GRADIENT_OF { 1024 } else { 1024 * word };
    let blocks = (columns + block_columns - 1) / block_columns;
    let narrow = expression == NARROW_OF;
    let mut given = vec![Given::InOut("tile", &tile), Given::I64(stride), Given::I32(columns)];
    if !narrow {
        given.push(Given::I32(blocks));
    }
    given.extend([Given::F32(1.0), Given::F32(0.0), Given::In("labels", &labels)]);
    given.extend([Given::Null, Given::I64(0), Given::Null]);
    given.extend(["maximum", "powers", "target"].map(|name| Given::In(name, &row_vector)));
    given.push(Given::Null);
    let grid = if narrow { (2, 512) } else { (2 * blocks as u32, 256) };
    seen(program, expression, grid, &given)
}

fn gradient(program: &Program) -> Seen {
    gradient_of(program, GRADIENT_OF, 1500)
}

fn gradient_of_odd_rows(program: &Program) -> Seen {
    gradient_of(program, WIDE_GRADIENT_OF, 4099)
}

fn gradient_of_fp16(program: &Program) -> Seen {
    gradient_of(program, F16_GRADIENT_OF, 1029)
}

/// Fewer numbers than a word of 16 bytes has.
fn narrow_of_few(program: &Program) -> Seen {
    gradient_of(program, NARROW_OF, 7)
}

fn narrow(program: &Program) -> Seen {
    gradient_of(program, NARROW_OF, 12_304)
}

fn swiglu_of(program: &Program, expression: &str, kind: Kind, width: i64) -> Seen {
    let (gate, up) = (draw(&[2, 2600], kind), draw(&[2, 2600], kind) * 0.5);
    let blocks = (2600 + 256 * width - 1) / (256 * width);
    let given = [
        Given::In("gate", &gate),
        Given::I64(2600),
        Given::In("up", &up),
        Given::I64(2600),
        Given::Null,
        Given::I64(0),
        Given::Out("product", kind, vec![2, 2600]),
        Given::I64(2600),
        Given::I32(2600),
        Given::I32(blocks),
    ];
    seen(program, expression, (2 * blocks as u32, 256), &given)
}

fn swiglu_16(program: &Program) -> Seen {
    swiglu_of(program, SWIGLU_16_OF, Kind::BFloat16, 8)
}

fn swiglu_32(program: &Program) -> Seen {
    swiglu_of(program, SWIGLU_32_OF, Kind::Float, 1)
}

fn rotate(program: &Program) -> Seen {
    let (x, table) = (draw(&[1, 3, 4, 64], Kind::BFloat16), draw(&[9, 2, 32], Kind::Float));
    let y = draw(&[1, 3, 2, 64], Kind::BFloat16);
    let out = |heads| Given::Out("out", Kind::BFloat16, vec![1, 3, heads, 64]);
    let mut given =
        vec![rope::turn(Given::InOut("q", &x), out(4), &x), rope::turn(Given::InOut("k", &y), out(2), &y)];
    given.extend([Given::In("table", &table), Given::Null, Given::I32(3), Given::I32(32)]);
    given.extend([Given::I64(9), Given::F32(1.0)]);
    seen(program, ROTATE_OF, (3, 32), &given)
}

fn scale(program: &Program) -> Seen {
    let (x, factor) = (draw(&[4100], Kind::Float), Tensor::from_slice(&[0.5f32]));
    let given = [Given::InOut("x", &x), Given::I64(4100), Given::In("factor", &factor)];
    seen(program, SCALE_OF, (3, 256), &given)
}

/// Three gradients; two end within a word of 16 bytes, one has numbers whose squares are no fp32.
fn three_gradients() -> [Tensor; 3] {
    let mut all = [7, 17_030, 8].map(|numbers| draw(&[numbers], Kind::Float));
    let _ = all[0].narrow(0, 0, 4).fill_(1e30);
    let _ = all[2].fill_(1e-30);
    all
}

fn squares(program: &Program) -> Seen {
    let all = three_gradients();
    let (table, blocks) = gradients::table(&all, false);
    let parts = Given::Out("parts", Kind::Double, vec![blocks]);
    let given = [table, Given::I32(3), Given::Null, parts];
    seen(program, SQUARES_OF, (blocks as u32, 256), &given)
}

fn norm_of_parts(program: &Program) -> Seen {
    let parts = draw(&[16_000], Kind::Double).square();
    let outputs = [Given::Out("norm", Kind::Double, vec![]), Given::Out("found", Kind::Float, vec![1])];
    let [norm, found] = outputs;
    let given = [Given::In("parts", &parts), Given::I64(16_000), norm, found];
    seen(program, "gradient_norm<1024>", (1, 1024), &given)
}

fn scale_many(program: &Program) -> Seen {
    let (all, factor) = (three_gradients(), Tensor::from_slice(&[0.5f32]));
    let (table, blocks) = gradients::table(&all, true);
    let given = [table, Given::I32(3), Given::In("factor", &factor)];
    seen(program, SCALE_MANY_OF, (blocks as u32, 256), &given)
}

/// A window whose last block of threads has few packs.
fn dequantize(program: &Program) -> Seen {
    let stored =
        kernels::nf4::quantize(&draw(&[37, 320], Kind::Float), kernels::nf4::Scales::Nested).unwrap();
    let parts = kernels::nf4::sections(&stored).unwrap();
    let given = nf4::arguments(&parts, (Kind::Float, 4), [37, 320], [1..36, 8..312]);
    seen(program, DEQUANTIZE_OF, (3, 256), &given)
}

/// Rows so far apart that their distance does not fit into 32 bits.
fn far_rows(program: &Program) -> Seen {
    let (gate, up) = (draw(&[2, 8], Kind::Float), draw(&[2, 8], Kind::Float));
    let far = 1 << 33;
    let given = [
        Given::In("gate", &gate),
        Given::I64(far),
        Given::In("up", &up),
        Given::I64(8),
        Given::Null,
        Given::I64(0),
        Given::Out("product", Kind::Float, vec![2, 8]),
        Given::I64(8),
        Given::I32(8),
        Given::I32(1),
    ];
    seen(program, SWIGLU_32_OF, (2, 256), &given)
}
