//! The passes over tiles of logits.

use kernels::cross_entropy::{
    Coefficients, Cpu, LogitsPass, Statistics, Targets, TileInputs, Transform, Wanted,
};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

use super::launch::{Given, Outcome, Shift, launch};
use super::program::{CROSS_ENTROPY, Program, type_of};
use super::tolerance::{close, normal};

const ROW: u32 = 512;
/// Threads of a block of the statistics of short rows.
const SHORT: u32 = 128;
const THREADS: u32 = 256;

/// The kernels for tiles of a dtype.
pub(super) fn expressions(kind: Kind) -> Vec<String> {
    let (of, mut all) = (type_of(kind), Vec::new());
    for width in [1, 16 / kind.elt_size_in_bytes()] {
        for (changes, extra) in [(false, false), (false, true), (true, false), (true, true)] {
            for threads in [SHORT, ROW] {
                all.push(format!("ce_statistics<{of}, {width}, {changes}, {extra}, {threads}>"));
            }
        }
        all.push(format!("ce_logits<{of}, {width}, {THREADS}>"));
        for extra in [false, true] {
            all.push(format!("ce_gradient<{of}, {width}, {extra}, {THREADS}>"));
            for narrow in ["bf16", "f16"].into_iter().filter(|_| kind == Kind::Float) {
                let width = if width == 4 { 8 } else { 1 };
                all.push(format!("ce_gradient_narrow<{narrow}, {width}, {extra}, {ROW}>"));
            }
        }
    }
    all
}

/// The options of a test.
#[derive(Clone, Copy)]
pub(super) struct Case<'a> {
    pub(super) transform: Transform<'a>,
    pub(super) targets: Targets<'a>,
    pub(super) weights: Option<&'a Tensor>,
    pub(super) plain: bool,
    /// The dtype of the tile.
    pub(super) kind: Kind,
    pub(super) width: i64,
    /// Elements between a tile's rows.
    pub(super) stride: i64,
    pub(super) first: i64,
}

impl Case<'_> {
    fn extra(&self) -> bool {
        !self.plain || matches!(self.targets, Targets::Dense(_))
    }

    pub(super) fn changes(&self) -> bool {
        self.transform.bias.is_some() || self.transform.softcap.is_some() || self.transform.scale != 1.0
    }

    fn shift(&self) -> Shift {
        // The labels are of 8 bytes, everything else of 4 or 2.
        Shift(if self.width == 1 { 8 } else { 16 })
    }

    /// The tile with its stride; what separates rows is NaN, and must neither be read nor change.
    fn padded(&self, tile: &Tensor) -> Tensor {
        let (rows, columns) = (tile.size()[0], tile.size()[1]);
        let all = Tensor::full([rows, self.stride], f64::NAN, (self.kind, Device::Cpu));
        all.narrow(1, 0, columns).copy_(tile);
        all
    }

    /// The outcome with the columns alone of its first output.
    fn without_padding(&self, mut outcome: Outcome, columns: i64) -> Outcome {
        for outputs in [&mut outcome.outputs, &mut outcome.perturbed] {
            let rest = outputs[0].narrow(1, columns, self.stride - columns);
            assert_eq!(rest.isnan().all().int64_value(&[]), 1, "what separates rows has changed");
            outputs[0] = outputs[0].narrow(1, 0, columns).contiguous();
        }
        outcome
    }

    fn transform(&self) -> [Given<'_>; 3] {
        let Transform { bias, scale, softcap } = self.transform;
        [Given::optional("bias", bias), Given::F32(scale), Given::F32(softcap.unwrap_or(0.0))]
    }

    fn targets(&self) -> [Given<'_>; 3] {
        match self.targets {
            Targets::Columns(labels) => [Given::In("labels", labels), Given::Null, Given::I64(0)],
            Targets::Dense(dense) => [Given::Null, Given::In("dense", dense), Given::I64(dense.size()[1])],
        }
    }

    /// The logits and the accumulated statistics.
    pub(super) fn statistics(&self, program: &Program, tile: &Tensor, known: &[Tensor]) -> Outcome {
        let (rows, columns) = (tile.size()[0], tile.size()[1]);
        let (changes, extra) = (self.changes(), self.extra());
        let threads = if columns < 2000 { SHORT } else { ROW };
        let name =
            format!("ce_statistics<{}, {}, {changes}, {extra}, {threads}>", type_of(self.kind), self.width);
        let tile = self.padded(tile);
        let mut given = vec![
            Given::InOut("tile", &tile),
            Given::I64(self.stride),
            Given::I32(columns),
            Given::I64(self.first),
        ];
        given.extend(self.transform());
        given.extend(self.targets());
        given.push(Given::optional("weights", self.weights));
        let mut known = known.iter();
        let mut next = |name, wanted: bool| match known.next() {
            Some(tensor) if wanted => Given::InOut(name, tensor),
            _ => Given::Null,
        };
        given.extend([next("maximum", true), next("sum", true), next("target", true)]);
        let dense = matches!(self.targets, Targets::Dense(_));
        given.push(if dense { next("mass", true) } else { Given::Null });
        for name in ["total", "moment", "best"] {
            given.push(if self.plain { Given::Null } else { next(name, true) });
        }
        let outcome = launch(program.kernel(&name), (rows, threads), &given, self.shift());
        self.without_padding(outcome, columns)
    }

    pub(super) fn logits(&self, program: &Program, tile: &Tensor) -> Outcome {
        let (rows, columns) = (tile.size()[0], tile.size()[1]);
        let block_columns = self.width * i64::from(THREADS);
        let blocks = (columns + block_columns - 1) / block_columns;
        let tile = self.padded(tile);
        let mut given = vec![
            Given::InOut("tile", &tile),
            Given::I64(self.stride),
            Given::I32(columns),
            Given::I32(blocks),
        ];
        given.extend(self.transform());
        let name = format!("ce_logits<{}, {}, {THREADS}>", type_of(self.kind), self.width);
        let outcome = launch(program.kernel(&name), (rows * blocks, THREADS), &given, self.shift());
        self.without_padding(outcome, columns)
    }

    /// The gradient in the tile's dtype, or rounded in place to the beginning of each row.
    pub(super) fn gradient(
        &self,
        program: &Program,
        tile: &Tensor,
        numbers: &[Tensor; 4],
        narrow: Option<Kind>,
    ) -> Outcome {
        let (rows, columns) = (tile.size()[0], tile.size()[1]);
        let tile = self.padded(tile);
        let mut given = vec![Given::InOut("tile", &tile), Given::I64(self.stride), Given::I32(columns)];
        let block_columns = self.width * 4 * i64::from(THREADS);
        let blocks = (columns + block_columns - 1) / block_columns;
        if narrow.is_none() {
            given.push(Given::I32(blocks));
        }
        let [_, scale, cap] = self.transform();
        given.extend([scale, cap]);
        given.extend(self.targets());
        given.push(Given::optional("weights", self.weights));
        let [maximum, powers, target, constant] = numbers;
        given.extend([
            Given::In("maximum", maximum),
            Given::In("powers", powers),
            Given::In("target", target),
        ]);
        given.push(Given::optional("constant", (!self.plain).then_some(constant)));
        let extra = self.extra();
        let (name, grid) = match narrow {
            None => {
                let of = type_of(self.kind);
                (format!("ce_gradient<{of}, {}, {extra}, {THREADS}>", self.width), (rows * blocks, THREADS))
            }
            Some(kind) => {
                let width = if self.width == 4 { 8 } else { 1 };
                let of = type_of(kind);
                (format!("ce_gradient_narrow<{of}, {width}, {extra}, {ROW}>"), (rows, ROW))
            }
        };
        let outcome = launch(program.kernel(&name), grid, &given, self.shift());
        if narrow.is_some() { outcome } else { self.without_padding(outcome, columns) }
    }
}

pub(super) fn listed(statistics: Statistics) -> Vec<Tensor> {
    let Statistics { maximum, sum, target, mass, total, moment, best } = statistics;
    [Some(maximum), Some(sum), Some(target), mass, total, moment, best].into_iter().flatten().collect()
}

#[test]
fn every_option_of_the_passes_is_correct() {
    let Some(program) = Program::of(CROSS_ENTROPY, &expressions(Kind::Float)) else { return };
    let mut generator = Generator::new(4).unwrap();
    let (rows, first) = (3, 3);
    for (columns, stride) in
        [(1, 1), (3, 4), (4, 4), (13, 16), (509, 509), (509, 512), (2055, 2056), (2056, 2056)]
    {
        for (bias, softcap, scale) in [(false, None, 1.0), (true, Some(5.0), 0.5)] {
            for (dense, plain) in [(false, true), (false, false), (true, true), (true, false)] {
                let products = normal(&mut generator, &[rows, columns], Kind::Float) * 4.0;
                let bias = bias.then(|| normal(&mut generator, &[columns], Kind::Float));
                let weights = (!plain).then(|| normal(&mut generator, &[columns], Kind::Float).abs());
                let labels = Tensor::randint_low(-2, columns + 2, [rows], (Kind::Int64, Device::Cpu));
                let distributions =
                    normal(&mut generator, &[rows, columns], Kind::Float).softmax(-1, Kind::Float);
                let numbers = normal(&mut generator, &[3, rows], Kind::Float);
                if columns > 4 && softcap.is_none() {
                    let _ = products.get(1).narrow(0, 2, 1).fill_(f64::NEG_INFINITY);
                }
                let single = |t: &Tensor| t.to_kind(Kind::Float);
                let wide = |t: &Tensor| t.to_kind(Kind::Double);
                let asked =
                    if plain { Wanted::default() } else { Wanted { total: true, moment: true, best: true } };
                let tiles = [&products * 1.0, &products * 0.7];
                let what = format!(
                    "{columns} of {stride} columns, softcap {softcap:?}, dense {dense}, plain {plain}"
                );

                // The CPU's passes in f64.
                let in_f64 = |t: &Option<Tensor>| t.as_ref().map(wide);
                let (bias_f64, weights_f64, dense_f64) =
                    (in_f64(&bias), in_f64(&weights), wide(&distributions));
                let transform = Transform { bias: bias_f64.as_ref(), scale, softcap };
                let targets = if dense { Targets::Dense(&dense_f64) } else { Targets::Columns(&labels) };
                let mut known = Statistics::new(rows, dense, asked, (Kind::Double, Device::Cpu)).unwrap();
                let inputs = TileInputs { first, transform, targets, class_weights: weights_f64.as_ref() };
                let mut expected = tiles.each_ref().map(Tensor::copy);
                for (index, tile) in expected.iter_mut().enumerate() {
                    let inputs = TileInputs { first: first + index as i64 * columns, ..inputs };
                    Cpu.statistics(tile, inputs, &mut known).unwrap();
                }
                let known = listed(known);

                // The kernels.
                let in_f32 = |t: &Option<Tensor>| t.as_ref().map(single);
                let (bias_f32, weights_f32, dense_f32) =
                    (in_f32(&bias), in_f32(&weights), single(&distributions));
                let mut case = Case {
                    transform: Transform { bias: bias_f32.as_ref(), scale, softcap },
                    targets: if dense { Targets::Dense(&dense_f32) } else { Targets::Columns(&labels) },
                    weights: weights_f32.as_ref(),
                    plain,
                    kind: Kind::Float,
                    width: if stride % 4 == 0 { 4 } else { 1 },
                    stride,
                    first,
                };
                let begin = Statistics::new(rows, dense, asked, (Kind::Float, Device::Cpu)).unwrap();
                let one = case.statistics(&program, &single(&tiles[0]), &listed(begin));
                case.first += columns;
                let two = case.statistics(&program, &single(&tiles[1]), &one.outputs[1..]);
                let perturbed = case.statistics(&program, &single(&tiles[1]), &one.perturbed[1..]).perturbed;
                for (index, known) in known.iter().enumerate() {
                    close(&format!("{what}: statistic {index}"), &two.outputs[index + 1], known, 2e-5);
                    close(
                        &format!("{what}: statistic {index}, approximate"),
                        &perturbed[index + 1],
                        known,
                        2e-5,
                    );
                }
                close(&format!("{what}: logits"), &one.outputs[0], &expected[0], 2e-5);
                if case.changes() {
                    let alone = case.logits(&program, &single(&tiles[1]));
                    close(&format!("{what}: logits alone"), &alone.outputs[0], &expected[1], 2e-5);
                }

                // The gradient of the first tile, with its own coefficients.
                let row_numbers = |index: i64| numbers.get(index);
                let constant = (!plain).then(|| wide(&row_numbers(2)));
                let coefficients = Coefficients {
                    maximum: &wide(&known[0]),
                    powers: &wide(&row_numbers(0)),
                    target: &wide(&row_numbers(1)),
                    constant: constant.as_ref(),
                };
                let logits = single(&expected[0]);
                let mut gradient = expected[0].copy();
                Cpu.gradient(&mut gradient, inputs, coefficients).unwrap();
                let numbers = [
                    single(&known[0]),
                    single(&row_numbers(0)),
                    single(&row_numbers(1)),
                    single(&row_numbers(2)),
                ];
                let found = case.gradient(&program, &logits, &numbers, None);
                close(&format!("{what}: gradient"), &found.outputs[0], &gradient, 2e-5);
                close(&format!("{what}: gradient, approximate"), &found.perturbed[0], &gradient, 2e-5);
                // A number has the same bits wherever its row begins.
                let unaligned = Case { width: 1, stride: columns, ..case };
                let alone = unaligned.gradient(&program, &logits, &numbers, None);
                assert!(alone.outputs[0].equal(&found.outputs[0]), "{what}: other bits in unaligned rows");
                let kind = if plain { Kind::BFloat16 } else { Kind::Half };
                let narrow = case.gradient(&program, &logits, &numbers, Some(kind));
                let rounded = narrow.outputs[0].view_dtype(kind).narrow(1, 0, columns);
                assert!(rounded.equal(&found.outputs[0].to_kind(kind)), "{what}: rounded once");
                if columns > 2000 {
                    // The narrow gradient reads the 32 bytes of each thread in two halves. Distributions whose rows are not aligned are
                    // read one number at a time.
                    let odd = dense && columns % 4 != 0;
                    let most = if odd { [3.0, 3.0, 4.0] } else { [1.15, 1.15, 2.0] };
                    for (counts, most) in [&one.counts, &found.counts, &narrow.counts].into_iter().zip(most) {
                        assert!(counts.sector_ratio() <= most, "{what}: {counts:?}");
                        assert_eq!(counts.bank_conflicts, 0, "{what}");
                    }
                }
            }
        }
    }
}

/// Rows that are all −∞, and rows with a NaN.
#[test]
fn rows_of_impossible_classes_and_rows_with_nan_are_correct() {
    for (kind, columns, width) in
        [(Kind::Float, 5, 1), (Kind::Float, 2048, 4), (Kind::BFloat16, 2048, 8), (Kind::Half, 2048, 8)]
    {
        let Some(program) = Program::of(CROSS_ENTROPY, &expressions(kind)) else { return };
        let tile = Tensor::ones([4, columns], (kind, Device::Cpu));
        let _ = tile.get(1).narrow(0, columns / 2, 1).fill_(f64::NAN);
        let _ = tile.get(2).fill_(f64::NEG_INFINITY);
        let _ = tile.get(3).narrow(0, 0, 1).fill_(f64::INFINITY);
        let labels = Tensor::zeros([4], (Kind::Int64, Device::Cpu));
        let case = Case {
            transform: Transform::default(),
            targets: Targets::Columns(&labels),
            weights: None,
            plain: true,
            kind,
            width,
            stride: columns,
            first: 0,
        };
        let begin = Statistics::new(4, false, Wanted::default(), (Kind::Float, Device::Cpu)).unwrap();
        let found = case.statistics(&program, &tile, &listed(begin));
        let numbers = |t: &Tensor| Vec::<f32>::try_from(t).unwrap();
        let (maximum, sum) = (numbers(&found.outputs[1]), numbers(&found.outputs[2]));
        assert_eq!((maximum[0], maximum[2], maximum[3]), (1.0, f32::NEG_INFINITY, f32::INFINITY));
        assert_eq!((sum[0], sum[2]), (columns as f32, 0.0));
        assert!(maximum[1].is_nan() && sum[1].is_nan() && sum[3].is_nan());
        let one = Tensor::ones([4], (Kind::Float, Device::Cpu));
        let coefficients = [found.outputs[1].copy(), one.copy(), one.copy(), one];
        let gradient = case.gradient(&program, &tile, &coefficients, None);
        let nan = |row: i64| gradient.outputs[0].get(row).isnan().all().int64_value(&[]) == 1;
        assert_eq!([nan(0), nan(1)], [false, true]);
    }
}
