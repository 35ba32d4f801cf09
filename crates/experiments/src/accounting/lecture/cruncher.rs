//! Models: initialisation, Cruncher with its data, optimizer, memory, training, checkpoint and mixed precision.

use amp::Autocast;
use dataloading::Samples;
use dataloading::token_store::{TokenStore, Writer, WriterConfig};
use runtime::memory::live_bytes;
use runtime::precision;
use runtime::profile::Counter;
use tch::{Device, Kind, Tensor};
use training::optimizer::{AdaGrad, DeviceOptimizer, Group, Rule, Sgd, ZeroGrad};

use super::{Cell, values};

const INIT: &str = "10 initialisation";
const MODEL: &str = "11 Cruncher";
const DATA: &str = "12 data from a memory-mapped file";
const OPTIMIZER: &str = "13 AdaGrad";
const MEMORY: &str = "14 memory and FLOPs of Cruncher";
const TRAINING: &str = "15 training loop";
const CHECKPOINT: &str = "16 checkpoint";
const MIXED: &str = "17 mixed precision";

pub(super) fn cells(device: Device, seed: u64) -> anyhow::Result<Vec<Cell>> {
    let mut cells = Vec::new();
    initialisation(&mut cells, device)?;
    model(&mut cells, device, seed)?;
    data(&mut cells, device)?;
    optimizer(&mut cells, device)?;
    memory(&mut cells, device)?;
    training(&mut cells, device)?;
    checkpoint(&mut cells, device)?;
    mixed_precision(&mut cells, device)?;
    Ok(cells)
}

/// The lecture's model: `layers` matrices `[d, d]` and a final `[d, 1]`, without biases.
struct Cruncher {
    weights: Vec<Tensor>,
}

impl Cruncher {
    fn new(d: i64, layers: i64, device: Device) -> anyhow::Result<Self> {
        let weight = |to: i64| -> anyhow::Result<Tensor> {
            let weight = Tensor::f_randn([d, to], (Kind::Float, device))?.f_div_scalar((d as f64).sqrt())?;
            Ok(weight.f_set_requires_grad(true)?)
        };
        let widths = (0..layers).map(|_| d).chain([1]);
        Ok(Self { weights: widths.map(weight).collect::<anyhow::Result<_>>()? })
    }

    /// Maps `[b, d]` to `[b]`.
    fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        let mut x = x.shallow_clone();
        for weight in &self.weights {
            x = precision::matmul(&x, weight)?;
        }
        Ok(x.f_squeeze_dim(-1)?)
    }

    fn named(&self) -> Vec<(String, Tensor)> {
        self.weights.iter().enumerate().map(|(i, w)| (format!("layers.{i}"), w.shallow_clone())).collect()
    }

    fn parameters(&self) -> i64 {
        self.weights.iter().map(|weight| weight.numel() as i64).sum()
    }
}

fn mse(predicted: &Tensor, target: &Tensor) -> anyhow::Result<Tensor> {
    Ok(precision::widened(predicted)?.f_sub(target)?.f_square()?.f_mean(Kind::Float)?)
}

fn initialisation(cells: &mut Vec<Cell>, device: Device) -> anyhow::Result<()> {
    let (inputs, outputs) = (16_384, 32);
    let options = (Kind::Float, device);
    let deviation = |w: &Tensor| -> anyhow::Result<f64> {
        let x = Tensor::f_randn([256, inputs], options)?;
        Ok(f64::try_from(x.f_matmul(w)?.f_std(true)?)?)
    };
    let w = Tensor::f_randn([inputs, outputs], options)?;
    let statement = "deviation of x @ randn(16384, 32): √16384";
    cells.push(Cell::equal(INIT, statement, "", 128.0, deviation(&w)?).near(0.05));
    let scaled = w.f_div_scalar((inputs as f64).sqrt())?;
    let statement = "the same with the weight divided by √16384";
    cells.push(Cell::equal(INIT, statement, "", 1.0, deviation(&scaled)?).near(0.05));
    let bound = (6.0 / (inputs + outputs) as f64).sqrt();
    let xavier = Tensor::f_empty([inputs, outputs], options)?.f_uniform_(-bound, bound)?;
    let expected = (2.0 / (inputs + outputs) as f64).sqrt();
    let deviation = f64::try_from(xavier.f_std(true)?)?;
    cells.push(
        Cell::equal(
            INIT,
            "deviation of Xavier's uniform weights: √(2 / (in + out))",
            "",
            expected,
            deviation,
        )
        .near(0.02),
    );
    // A normal distribution cut at ±3 deviations has 0.98658 of its deviation left.
    let cut = w.f_masked_select(&w.f_abs()?.f_le(3.0)?)?;
    let deviation = f64::try_from(cut.f_std(true)?)?;
    cells.push(Cell::equal(INIT, "deviation of normal weights cut at ±3", "", 0.98658, deviation).near(0.01));
    Ok(())
}

fn model(cells: &mut Vec<Cell>, device: Device, seed: u64) -> anyhow::Result<()> {
    let (b, d, layers) = (8, 64, 2);
    let model = Cruncher::new(d, layers, device)?;
    let sizes: Vec<usize> = model.weights.iter().map(Tensor::numel).collect();
    cells.push(Cell::holds(
        MODEL,
        "Cruncher(64, 2) has weights of 4096, 4096 and 64 numbers",
        sizes == [4096, 4096, 64],
    ));
    let expected = (d * d * layers + d) as f64;
    cells.push(Cell::equal(MODEL, "parameters: D·D·L + D", "count", expected, model.parameters() as f64));
    let x = Tensor::f_randn([b, d], (Kind::Float, device))?;
    cells.push(Cell::holds(MODEL, "its output for [8, 64] has shape [8]", model.forward(&x)?.size() == [b]));
    let draw = || -> anyhow::Result<Tensor> {
        runtime::random::seed(seed)?;
        Ok(Tensor::f_randn([b, d], (Kind::Float, device))?)
    };
    cells.push(Cell::holds(MODEL, "the same seed gives the same bits", draw()? == draw()?));
    Ok(())
}

/// `get_batch` over a memory-mapped file of tokens, at random positions.
fn get_batch(
    store: &TokenStore,
    rows: i64,
    length: i64,
    device: Device,
) -> anyhow::Result<(Vec<i64>, Tensor)> {
    let starts = Tensor::f_randint(store.length(0) as i64 - length, [rows], (Kind::Int64, Device::Cpu))?;
    let starts = Vec::<i64>::try_from(&starts)?;
    let document = store.document(0)?;
    let tokens: Vec<i64> = starts
        .iter()
        .flat_map(|&start| document.iter().skip(start as usize).take(length as usize).map(i64::from))
        .collect();
    Ok((starts, Tensor::from_slice(&tokens).f_view([rows, length])?.f_to_device(device)?))
}

fn data(cells: &mut Vec<Cell>, device: Device) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("tokens");
    let mut writer = Writer::create(&path, &WriterConfig::new(10_000))?;
    writer.push(&(0..10_000).collect::<Vec<u32>>())?;
    writer.finish()?;
    let store = TokenStore::open(&path)?;
    let (rows, length) = (2, 4);
    let (starts, x) = get_batch(&store, rows, length, device)?;
    cells.push(Cell::holds(
        DATA,
        "get_batch(batch 2, length 4) has shape [2, 4]",
        x.size() == [rows, length],
    ));
    let expected: Vec<f64> =
        starts.iter().flat_map(|start| (0..length).map(move |i| (start + i) as f64)).collect();
    cells.push(Cell::holds(
        DATA,
        "its rows are the file's tokens from the random positions on",
        values(&x)? == expected,
    ));
    Ok(())
}

fn optimizer(cells: &mut Vec<Cell>, device: Device) -> anyhow::Result<()> {
    let model = Cruncher::new(64, 2, device)?;
    let before = model.weights[0].f_detach_copy()?;
    let mut optimizer = DeviceOptimizer::new(AdaGrad::default(), vec![Group::new(model.named(), 0.01)])?;
    let x = Tensor::f_randn([2, 64], (Kind::Float, device))?;
    let target = Tensor::from_slice(&[4.0f32, 5.0]).f_to_device(device)?;
    mse(&model.forward(&x)?, &target)?.f_backward()?;
    let gradient = model.weights[0].grad().f_detach_copy()?;
    optimizer.step()?;
    let moved = model.weights[0].f_detach()?.f_sub(&before)?;
    let by_hand = |inside: f64, outside: f64| -> anyhow::Result<Tensor> {
        let root = gradient.f_square()?.f_add_scalar(inside)?.f_sqrt()?.f_add_scalar(outside)?;
        Ok(gradient.f_div(&root)?.f_mul_scalar(-0.01)?)
    };
    let distance = |a: &Tensor, b: &Tensor| -> anyhow::Result<f64> {
        Ok(f64::try_from(a.f_sub(b)?.f_abs()?.f_max()?)? / 0.01)
    };
    let near = distance(&moved, &by_hand(0.0, 1e-10)?)? < 1e-4;
    cells.push(Cell::holds(OPTIMIZER, "a step is −η·g/(√(Σg²) + ε), as in PyTorch", near));
    let other = distance(&moved, &by_hand(1e-5, 0.0)?)?;
    let statement =
        "largest difference from the lecture's −η·g/√(Σg² + 1e-5), whose ε is inside of the root, over η";
    cells.push(Cell::measured(OPTIMIZER, statement, "ratio", Ok(other)));
    optimizer.zero_grad(ZeroGrad::ToNone)?;
    let none = model.weights.iter().all(|weight| !weight.grad().defined());
    cells.push(Cell::holds(OPTIMIZER, "zero_grad(set_to_none) frees the gradients", none));
    Ok(())
}

fn memory(cells: &mut Vec<Cell>, device: Device) -> anyhow::Result<()> {
    // Whole pages of the allocator, so that its rounding does not show.
    let (b, d, layers) = (512, 256, 2);
    let x = Tensor::f_randn([b, d], (Kind::Float, device))?;
    let target = Tensor::f_zeros([b], (Kind::Float, device))?;
    let start = live_bytes(device)?;
    let since = |before: u64| -> anyhow::Result<f64> { Ok((live_bytes(device)? - before) as f64) };
    let model = Cruncher::new(d, layers, device)?;
    let parameters = model.parameters() as f64;
    let bytes = since(start)?;
    cells.push(Cell::equal(MEMORY, "parameters: 4 bytes · (D·D·L + D)", "B", 4.0 * parameters, bytes));
    let before = live_bytes(device)?;
    let counter = Counter::on_this_thread()?;
    let y = model.forward(&x)?;
    let forward = counter.finish()?.total.flops.dense as f64;
    let output = (4 * b) as f64;
    let activations = (4 * b * d * layers) as f64;
    let statement = "activations between forward and backward: 4 bytes · B·D·L, and the output's 4·B, which the lecture leaves out";
    cells.push(Cell::equal(MEMORY, statement, "B", activations + output, since(before)?));
    let counter = Counter::on_this_thread()?;
    mse(&y, &target)?.f_backward()?;
    let backward = counter.finish()?.total.flops.dense as f64;
    drop(y);
    let mut optimizer = DeviceOptimizer::new(AdaGrad::default(), vec![Group::new(model.named(), 0.01)])?;
    cells.push(Cell::equal(
        MEMORY,
        "gradients: as many bytes as parameters",
        "B",
        4.0 * parameters,
        since(start)? - 4.0 * parameters,
    ));
    optimizer.step()?;
    let state = optimizer.state_bytes() as f64;
    cells.push(Cell::equal(
        MEMORY,
        "AdaGrad's state: as many bytes as parameters",
        "B",
        4.0 * parameters,
        state,
    ));
    let expected = 12.0 * parameters;
    cells.push(
        Cell::equal(
            MEMORY,
            "parameters, gradients and state after a step, by the allocator",
            "B",
            expected,
            since(start)?,
        )
        .near(0.001),
    );
    let expected = 2.0 * b as f64 * parameters;
    cells.push(Cell::equal(
        MEMORY,
        "FLOPs of the forward: 2·B·parameters, counted",
        "FLOP",
        expected,
        forward,
    ));
    let of_input = (2 * b * d * d) as f64;
    let statement =
        "FLOPs of the backward: 4·B·parameters less 2·B·D·D for the input's gradient, which nobody needs";
    cells.push(Cell::equal(MEMORY, statement, "FLOP", 2.0 * expected - of_input, backward));
    Ok(())
}

/// Ten steps on y = x·(0, 1, …, 15) from the same start, batches of 4, learning rate 0.01.
fn training(cells: &mut Vec<Cell>, device: Device) -> anyhow::Result<()> {
    let d = 16;
    let options = (Kind::Float, device);
    let true_w = Tensor::f_arange(d, options)?;
    let held_out = Tensor::f_randn([256, d], options)?;
    let rules: [(&str, Box<dyn Rule>); 2] =
        [("SGD", Box::new(Sgd)), ("AdaGrad", Box::new(AdaGrad::default()))];
    for (name, rule) in rules {
        runtime::random::seed(1)?;
        let model = Cruncher::new(d, 0, device)?;
        let mut optimizer = DeviceOptimizer::boxed(rule, vec![Group::new(model.named(), 0.01)])?;
        let loss = || -> anyhow::Result<f64> {
            let loss = mse(&model.forward(&held_out)?, &held_out.f_matmul(&true_w)?)?;
            Ok(f64::try_from(loss)?)
        };
        let before = loss()?;
        for _ in 0..10 {
            let x = Tensor::f_randn([4, d], options)?;
            mse(&model.forward(&x)?, &x.f_matmul(&true_w)?)?.f_backward()?;
            optimizer.step()?;
            optimizer.zero_grad(ZeroGrad::ToNone)?;
        }
        let after = loss()?;
        let statement = format!(
            "ten steps of {name} on true_w = arange(16) lower the loss on other data from {before:.1}"
        );
        cells.push(Cell::measured(TRAINING, &statement, "", Ok(after)));
        cells.push(Cell::holds(TRAINING, &format!("and it is lower than before ({name})"), after < before));
    }
    Ok(())
}

fn checkpoint(cells: &mut Vec<Cell>, device: Device) -> anyhow::Result<()> {
    let x = Tensor::f_randn([8, 64], (Kind::Float, device))?;
    let target = Tensor::f_zeros([8], (Kind::Float, device))?;
    let step = |model: &Cruncher, optimizer: &mut DeviceOptimizer| -> anyhow::Result<()> {
        mse(&model.forward(&x)?, &target)?.f_backward()?;
        optimizer.step()?;
        Ok(optimizer.zero_grad(ZeroGrad::ToNone)?)
    };
    let make =
        |model: &Cruncher| DeviceOptimizer::new(AdaGrad::default(), vec![Group::new(model.named(), 0.01)]);
    let model = Cruncher::new(64, 3, device)?;
    let mut optimizer = make(&model)?;
    step(&model, &mut optimizer)?;
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model_checkpoint.safetensors");
    let state = optimizer.state();
    let all: Vec<(&str, &Tensor)> = state.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let named = model.named();
    let all: Vec<(String, &Tensor)> = named
        .iter()
        .map(|(name, tensor)| (format!("model.{name}"), tensor))
        .chain(all.into_iter().map(|(name, tensor)| (format!("optimizer.{name}"), tensor)))
        .collect();
    Tensor::write_safetensors(&all, &path)?;

    let loaded = Tensor::read_safetensors(&path)?;
    let other = Cruncher::new(64, 3, device)?;
    let _no_grad = tch::no_grad_guard();
    for (name, tensor) in &loaded {
        if let Some(layer) = name.strip_prefix("model.layers.") {
            other.weights[layer.parse::<usize>()?].shallow_clone().f_copy_(tensor)?;
        }
    }
    drop(_no_grad);
    let mut resumed = make(&other)?;
    let state: Vec<(String, Tensor)> = loaded
        .iter()
        .filter_map(|(name, tensor)| {
            Some((name.strip_prefix("optimizer.")?.to_owned(), tensor.shallow_clone()))
        })
        .collect();
    resumed.load_state(&state)?;
    step(&model, &mut optimizer)?;
    step(&other, &mut resumed)?;
    let same = model.weights.iter().zip(&other.weights).all(|(a, b)| a == b);
    cells.push(Cell::holds(
        CHECKPOINT,
        "model and optimizer, saved and loaded, take the next step to the same bits",
        same,
    ));
    Ok(())
}

fn mixed_precision(cells: &mut Vec<Cell>, device: Device) -> anyhow::Result<()> {
    let model = Cruncher::new(64, 2, device)?;
    let x = Tensor::f_randn([8, 64], (Kind::Float, device))?;
    let autocast = Autocast::new(Kind::BFloat16)?;
    let y = {
        let _autocast = autocast.enter();
        model.forward(&x)?
    };
    cells.push(Cell::holds(
        MIXED,
        "under bf16 autocast the products are in bf16",
        y.kind() == Kind::BFloat16,
    ));
    mse(&y, &Tensor::f_zeros([8], (Kind::Float, device))?)?.f_backward()?;
    let wide = model
        .weights
        .iter()
        .all(|weight| weight.kind() == Kind::Float && weight.grad().kind() == Kind::Float);
    cells.push(Cell::holds(MIXED, "and weights and their gradients stay in fp32", wide));
    Ok(())
}
