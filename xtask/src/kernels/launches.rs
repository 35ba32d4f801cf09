//! A launch of each kernel as a training step of a large model makes it, on a few rows.

use ptx::{Argument, Data, Kernel, Launch, Memory};

/// A kernel, the size that its time is predicted for, and how it is launched on fewer rows.
pub(super) struct Sample {
    pub(super) file: &'static str,
    pub(super) expression: &'static str,
    /// The predicted size, in words.
    pub(super) size: &'static str,
    pub(super) rows: f64,
    pub(super) launch: fn(&mut Inputs, u32) -> (Launch, Vec<Argument>),
}

/// The buffers of a launch.
#[derive(Default)]
pub(super) struct Inputs {
    pub(super) memory: Memory,
}

impl Inputs {
    fn single(&mut self, name: &str, count: u32) -> Argument {
        // Small numbers of both signs.
        let numbers: Vec<f32> = (0..count).map(|n| (n * 37 % 101) as f32 / 50.0 - 1.0).collect();
        self.memory.add(name, Data::of(&numbers)).into()
    }

    fn half(&mut self, name: &str, count: u32) -> Argument {
        // 1 to 1.5 in bf16.
        let numbers: Vec<u16> = (0..count).map(|n| 0x3f80 + (n % 64) as u16).collect();
        self.memory.add(name, Data::of(&numbers)).into()
    }

    fn labels(&mut self, count: u32) -> Argument {
        self.memory.add("labels", Data::of(&vec![5i64; count as usize])).into()
    }
}

type OfNumbers = fn(&mut Inputs, &str, u32) -> Argument;

const NONE: Argument = Argument::Pointer(0);

fn int(number: u32) -> Argument {
    Argument::I32(number as i32)
}

fn long(number: u32) -> Argument {
    Argument::I64(i64::from(number))
}

const VOCABULARY: u32 = 128_256;
const HIDDEN: u32 = 4096;
const FEATURES: u32 = 14_336;

/// `of` is [`Inputs::single`], or [`Inputs::half`] for a tile in 16 bits.
fn statistics(inputs: &mut Inputs, rows: u32, threads: u32, numbers: OfNumbers) -> (Launch, Vec<Argument>) {
    let mut all =
        vec![numbers(inputs, "tile", rows * VOCABULARY), long(VOCABULARY), int(VOCABULARY), long(0)];
    all.extend([NONE, Argument::F32(1.0), Argument::F32(0.0), inputs.labels(rows), NONE, long(0), NONE]);
    all.extend(["maximum", "sum", "target"].map(|name| inputs.single(name, rows)));
    all.extend([NONE; 4]);
    (Launch::new(rows, threads), all)
}

fn gradient(inputs: &mut Inputs, rows: u32, blocks: Option<u32>, numbers: OfNumbers) -> Vec<Argument> {
    let mut all = vec![numbers(inputs, "tile", rows * VOCABULARY), long(VOCABULARY), int(VOCABULARY)];
    all.extend(blocks.map(int));
    all.extend([Argument::F32(1.0), Argument::F32(0.0), inputs.labels(rows), NONE, long(0), NONE]);
    all.extend(["maximum", "powers", "target"].map(|name| inputs.single(name, rows)));
    all.push(NONE);
    all
}

fn norm_forward(inputs: &mut Inputs, rows: u32) -> (Launch, Vec<Argument>) {
    let mut all = vec![inputs.half("x", rows * HIDDEN), inputs.half("residual", rows * HIDDEN)];
    all.extend([inputs.half("sum", rows * HIDDEN), inputs.half("weight", HIDDEN), NONE]);
    all.extend([inputs.half("y", rows * HIDDEN), NONE, inputs.single("rstd", rows)]);
    all.extend([int(rows), int(HIDDEN), Argument::F32(1e-5)]);
    // Two rows of both matrices, 16 bytes for each of a thread's two packs.
    (Launch { dynamic_shared: 2 * 2 * 2 * 256 * 16, ..Launch::new(rows, 256) }, all)
}

/// The number of partial sums is the same for every number of rows, at most the fewest rows: with many rows their bytes do not count.
fn norm_backward(inputs: &mut Inputs, rows: u32) -> (Launch, Vec<Argument>) {
    const PARTS: u32 = 2;
    let mut all = ["x", "upstream", "added"].map(|name| inputs.half(name, rows * HIDDEN)).to_vec();
    all.extend([inputs.half("weight", HIDDEN), NONE, inputs.single("rstd", rows)]);
    all.extend([inputs.half("grad", rows * HIDDEN), inputs.single("of_weight", PARTS * HIDDEN), NONE]);
    all.extend([int(rows), int(HIDDEN)]);
    // Two rows of both matrices, 16 bytes for each of a thread's two packs.
    (Launch { dynamic_shared: 2 * 2 * 2 * 256 * 16, ..Launch::new(PARTS, 256) }, all)
}

/// Queries of 32 heads and keys of 8, in place.
fn rotate(inputs: &mut Inputs, rows: u32) -> (Launch, Vec<Argument>) {
    const HALF: u32 = 64;
    let mut turned = |name, heads: u32| {
        let x = inputs.half(name, rows * heads * 2 * HALF);
        let strides = [rows * heads * 2 * HALF, heads * 2 * HALF, 2 * HALF].map(long);
        let mut members = vec![x.clone()];
        members.extend(strides.clone());
        members.push(x);
        members.extend(strides);
        members.push(long(heads));
        Argument::Bytes(members.iter().flat_map(member).collect())
    };
    let mut all = vec![turned("q", 32), turned("k", 8)];
    all.extend([inputs.single("table", rows * 2 * HALF), NONE, int(rows), int(HALF)]);
    all.extend([long(rows), Argument::F32(1.0)]);
    (Launch::new(rows, 160), all)
}

fn swiglu(inputs: &mut Inputs, rows: u32, names: &[&str]) -> (Launch, Vec<Argument>) {
    let blocks = FEATURES.div_ceil(256 * 8);
    let argument = |name: &&str| match *name {
        "" => [NONE, long(0)],
        name => [inputs.half(name, rows * FEATURES), long(FEATURES)],
    };
    let mut all: Vec<Argument> = names.iter().flat_map(argument).collect();
    all.extend([int(FEATURES), int(blocks)]);
    (Launch::new(rows * blocks, 256), all)
}

/// A tensor of a block for each row.
fn adam(inputs: &mut Inputs, rows: u32) -> (Launch, Vec<Argument>) {
    const CHUNK: u32 = 1024;
    const TABLE: usize = 60 * 64;
    let numbers = rows * CHUNK;
    let positive = vec![1f32; numbers as usize];
    let entry = [
        inputs.half("gradient", numbers),
        inputs.single("master", numbers),
        inputs.single("exp_avg", numbers),
        inputs.memory.add("exp_avg_sq", Data::of(&positive)).into(),
        inputs.half("weight", numbers),
        inputs.memory.add("step", Data::of(&[10f32])).into(),
        long(numbers),
        long(0),
    ];
    let mut table: Vec<u8> = entry.iter().flat_map(member).collect();
    table.resize(TABLE, 0);
    let mut all = vec![Argument::Bytes(table), int(1), NONE];
    all.extend([1e-3, 0.9, 0.999].map(Argument::F64));
    all.extend([1e-8, 0.9999].map(Argument::F32));
    (Launch::new(rows, 128), all)
}

/// A gradient of a block for each row, with the arguments after the table.
fn gradients(inputs: &mut Inputs, rows: u32, scaled: bool) -> (Launch, Vec<Argument>) {
    const CHUNK: u32 = 16_384;
    const TABLE: usize = 160 * 24;
    let numbers = rows * CHUNK;
    let entry = [inputs.half("gradient", numbers), long(numbers), long(0)];
    let mut table: Vec<u8> = entry.iter().flat_map(member).collect();
    table.resize(TABLE, 0);
    let factor = if scaled { inputs.single("factor", 1) } else { NONE };
    let parts = inputs.memory.add("parts", Data::of(&vec![0f64; rows as usize])).into();
    (Launch::new(rows, 256), vec![Argument::Bytes(table), int(1), factor, parts])
}

/// The parts of 1024 × 16384 numbers for each row.
fn gradient_norm(inputs: &mut Inputs, rows: u32) -> (Launch, Vec<Argument>) {
    let count = rows * 1024;
    let parts = inputs.memory.add("parts", Data::of(&vec![1f64; count as usize])).into();
    let norm = inputs.memory.add("norm", Data::of(&[0f64])).into();
    (Launch::new(1, 1024), vec![parts, long(count), norm, inputs.single("found", 1)])
}

/// Rows of weights with nested scales; 256 of these share a factor.
fn nf4(inputs: &mut Inputs, rows: u32) -> (Launch, Vec<Argument>) {
    let weights = rows * HIDDEN;
    let byte = |n: u32| (n * 37 % 251) as u8;
    let codes: Vec<u8> = (0..weights / 2).map(byte).collect();
    let tables: Vec<u8> = (0..16 + 256).flat_map(|n| (n as f32 / 272.0).to_le_bytes()).collect();
    let blocks = weights / 64;
    let absmax: Vec<u8> = (0..blocks).map(byte).collect();
    let all = vec![
        Argument::Bytes(tables),
        inputs.memory.add("codes", Data::of(&codes)).into(),
        inputs.memory.add("absmax", Data::of(&absmax)).into(),
        inputs.single("factors", blocks.div_ceil(256)),
        inputs.single("mean", 1),
        long(0),
        long(HIDDEN),
        int(HIDDEN / 8),
        int(weights / 8),
        inputs.half("out", weights),
        long(HIDDEN),
    ];
    (Launch::new(weights.div_ceil(8 * 4 * 256), 256), all)
}

/// The 8 bytes of a structure's member.
fn member(argument: &Argument) -> [u8; 8] {
    match argument {
        Argument::Pointer(address) => address.to_le_bytes(),
        Argument::I64(number) => number.to_le_bytes(),
        other => unreachable!("{other:?} has not 8 bytes"),
    }
}

fn scale(inputs: &mut Inputs, rows: u32) -> (Launch, Vec<Argument>) {
    let numbers = rows * 256 * 8;
    (Launch::new(rows, 256), vec![inputs.half("x", numbers), long(numbers), inputs.single("factor", 1)])
}

pub(super) const SAMPLES: [Sample; 17] = [
    Sample {
        file: "adam/adam",
        expression: "adam<bf16, bf16, 8, true, 128, 1024>",
        size: "2²⁸",
        rows: 262_144.0,
        launch: adam,
    },
    Sample {
        file: "cross_entropy/cross_entropy",
        expression: "ce_statistics<float, 4, false, false, 512>",
        size: "4096 × 128256",
        rows: 4096.0,
        launch: |inputs, rows| statistics(inputs, rows, 512, Inputs::single),
    },
    Sample {
        file: "cross_entropy/cross_entropy",
        expression: "ce_gradient<float, 4, false, 256>",
        size: "4096 × 128256",
        rows: 4096.0,
        launch: |inputs, rows| {
            let blocks = VOCABULARY.div_ceil(256 * 4 * 4);
            (Launch::new(rows * blocks, 256), gradient(inputs, rows, Some(blocks), Inputs::single))
        },
    },
    Sample {
        file: "cross_entropy/cross_entropy",
        expression: "ce_gradient_narrow<bf16, 8, false, 512>",
        size: "4096 × 128256",
        rows: 4096.0,
        launch: |inputs, rows| (Launch::new(rows, 512), gradient(inputs, rows, None, Inputs::single)),
    },
    Sample {
        file: "cross_entropy/cross_entropy",
        expression: "ce_statistics<bf16, 8, false, false, 128>",
        size: "4096 × 128256",
        rows: 4096.0,
        launch: |inputs, rows| statistics(inputs, rows, 128, Inputs::half),
    },
    Sample {
        file: "cross_entropy/cross_entropy",
        expression: "ce_gradient<bf16, 8, false, 256>",
        size: "4096 × 128256",
        rows: 4096.0,
        launch: |inputs, rows| {
            let blocks = VOCABULARY.div_ceil(256 * 4 * 8);
            (Launch::new(rows * blocks, 256), gradient(inputs, rows, Some(blocks), Inputs::half))
        },
    },
    Sample {
        file: "gradients/gradients",
        expression: "gradient_squares<bf16, 8, true, 256, 16384>",
        size: "2²⁸",
        rows: 16_384.0,
        launch: |inputs, rows| gradients(inputs, rows, true),
    },
    Sample {
        file: "gradients/gradients",
        expression: "gradient_squares<bf16, 8, false, 256, 16384>",
        size: "2²⁸",
        rows: 16_384.0,
        launch: |inputs, rows| gradients(inputs, rows, false),
    },
    Sample {
        file: "gradients/gradients",
        expression: "gradient_norm<1024>",
        size: "2²⁸ / 16384",
        rows: 16.0,
        launch: gradient_norm,
    },
    Sample {
        file: "gradients/gradients",
        expression: "scale_many<bf16, 8, 256, 16384>",
        size: "2²⁸",
        rows: 16_384.0,
        launch: |inputs, rows| {
            let (launch, mut all) = gradients(inputs, rows, true);
            all.pop();
            (launch, all)
        },
    },
    Sample {
        file: "nf4/nf4",
        expression: "nf4_dequantize<bf16, 8, true, 256, 4>",
        size: "14336 × 4096",
        rows: 14_336.0,
        launch: nf4,
    },
    Sample {
        file: "norm/norm",
        expression: "norm_forward<bf16, bf16, bf16, 8, 256, 2, 2, false>",
        size: "8192 × 4096",
        rows: 8192.0,
        launch: norm_forward,
    },
    Sample {
        file: "norm/norm",
        expression: "norm_backward<bf16, bf16, bf16, 8, 256, 2, 2, false, false>",
        size: "8192 × 4096",
        rows: 8192.0,
        launch: norm_backward,
    },
    Sample {
        file: "rope/rope",
        expression: "rotate<bf16, 8>",
        size: "8192 × (32 + 8) × 128",
        rows: 8192.0,
        launch: rotate,
    },
    Sample {
        file: "swiglu/swiglu",
        expression: "swiglu_forward<bf16, 8, 256>",
        size: "8192 × 14336",
        rows: 8192.0,
        launch: |inputs, rows| swiglu(inputs, rows, &["gate", "up", "", "product"]),
    },
    Sample {
        file: "swiglu/swiglu",
        expression: "swiglu_backward<bf16, 8, 256>",
        size: "8192 × 14336",
        rows: 8192.0,
        launch: |inputs, rows| swiglu(inputs, rows, &["gate", "up", "grad", "of_gate", "of_up", "product"]),
    },
    Sample {
        file: "gradients/scale",
        expression: "scale<bf16, 8, 256>",
        size: "2²⁸",
        rows: 131_072.0,
        launch: scale,
    },
];

/// Runs a sample on some rows; beside the counts, the bytes of shared memory of a block.
pub(super) fn run(sample: &Sample, kernel: &Kernel, rows: u32) -> Result<(ptx::Counts, usize), ptx::Error> {
    let mut inputs = Inputs::default();
    let (launch, arguments) = (sample.launch)(&mut inputs, rows);
    let counts = kernel.launch(launch, &arguments, &mut inputs.memory)?;
    Ok((counts, kernel.shared_bytes() + launch.dynamic_shared))
}
