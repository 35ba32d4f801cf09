//! Tensors: creation, memory, number formats, devices, views, element-wise operations and products.

use runtime::memory::live_bytes;
use tch::{Cuda, Device, Kind, Tensor};

use super::{Cell, values};

const CREATION: &str = "1 creating tensors";
const MEMORY: &str = "2 memory of tensors";
const DEVICES: &str = "3 devices";
const VIEWS: &str = "4 storage, views and slices";
const ELEMENTWISE: &str = "5 element-wise operations";
const PRODUCTS: &str = "6 products and broadcasting";

/// Device `index` of CUDA, or the processor without CUDA: the lecture's `get_device`.
fn get_device(index: usize) -> Device {
    if Cuda::is_available() { Device::Cuda(index) } else { Device::Cpu }
}

pub(super) fn cells(device: Device) -> anyhow::Result<Vec<Cell>> {
    let mut cells = Vec::new();
    creation(&mut cells)?;
    memory(&mut cells)?;
    devices(&mut cells, device)?;
    views(&mut cells)?;
    element_wise(&mut cells)?;
    products(&mut cells)?;
    Ok(cells)
}

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

fn creation(cells: &mut Vec<Cell>) -> anyhow::Result<()> {
    let x = Tensor::from_slice2(&[[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]]);
    cells.push(Cell::holds(CREATION, "tensor([[1, 2, 3], [4, 5, 6]]) has shape [2, 3]", x.size() == [2, 3]));
    let sum = |x: &Tensor| -> anyhow::Result<f64> { Ok(f64::try_from(x.f_sum(Kind::Double)?)?) };
    cells.push(Cell::equal(CREATION, "sum of zeros(4, 8)", "", 0.0, sum(&Tensor::f_zeros([4, 8], CPU)?)?));
    cells.push(Cell::equal(CREATION, "sum of ones(4, 8)", "", 32.0, sum(&Tensor::f_ones([4, 8], CPU)?)?));
    let x = Tensor::f_randn([1000, 1000], CPU)?;
    let deviation = f64::try_from(x.f_std(true)?)?;
    let statement = "standard deviation of randn(1000, 1000)";
    cells.push(Cell::equal(CREATION, statement, "", 1.0, deviation).near(0.01));
    let before = live_bytes(Device::Cpu)?;
    let x = Tensor::f_empty([4, 8], CPU)?;
    let bytes = (live_bytes(Device::Cpu)? - before) as f64;
    drop(x);
    cells.push(Cell::equal(CREATION, "bytes that empty(4, 8) takes, by the allocator", "B", 128.0, bytes));
    Ok(())
}

fn memory(cells: &mut Vec<Cell>) -> anyhow::Result<()> {
    let x = Tensor::f_zeros([4, 8], CPU)?;
    let element = x.kind().elt_size_in_bytes();
    cells.push(Cell::equal(MEMORY, "bytes of an fp32 element", "B", 4.0, element as f64));
    cells.push(Cell::equal(
        MEMORY,
        "bytes of a 4 × 8 tensor in fp32",
        "B",
        128.0,
        (x.numel() * element) as f64,
    ));
    let before = live_bytes(Device::Cpu)?;
    let matrix = Tensor::f_empty([4 * 12288, 12288], CPU)?;
    let bytes = (live_bytes(Device::Cpu)? - before) as f64;
    drop(matrix);
    let statement = "a feed-forward matrix of GPT-3 in fp32, by the allocator: 2304 MiB (the lecture's \"2.3 GB\" is 2.25 GiB or 2.42 GB)";
    cells.push(Cell::equal(MEMORY, statement, "B", 2304.0 * f64::from(1 << 20), bytes));
    let half = Tensor::f_zeros([4, 8], (Kind::Half, Device::Cpu))?;
    let element = half.kind().elt_size_in_bytes();
    cells.push(Cell::equal(MEMORY, "bytes of an fp16 element", "B", 2.0, element as f64));

    let bits = 0.5f32.to_bits();
    cells.push(Cell::equal(MEMORY, "0.5 in fp32: sign bit", "", 0.0, f64::from(bits >> 31)));
    cells.push(Cell::equal(
        MEMORY,
        "0.5 in fp32: exponent bits, −1 + 127",
        "",
        126.0,
        f64::from(bits >> 23 & 0xff),
    ));
    cells.push(Cell::equal(MEMORY, "0.5 in fp32: mantissa bits", "", 0.0, f64::from(bits & 0x7f_ffff)));
    let tiny = Tensor::from_slice(&[1e-8f32]);
    let stored = |kind| -> anyhow::Result<f64> { Ok(values(&tiny.f_to_kind(kind)?)?[0]) };
    cells.push(Cell::equal(MEMORY, "1e-8 in fp16 underflows", "", 0.0, stored(Kind::Half)?));
    cells.push(Cell::holds(MEMORY, "1e-8 in bf16 does not", stored(Kind::BFloat16)? != 0.0));
    Ok(())
}

fn devices(cells: &mut Vec<Cell>, device: Device) -> anyhow::Result<()> {
    let x = Tensor::f_zeros([32, 32], CPU)?;
    cells.push(Cell::holds(DEVICES, "a tensor lies on the CPU by default", x.device() == Device::Cpu));
    let count = Cuda::device_count();
    cells.push(Cell::measured(DEVICES, "CUDA devices", "count", Ok(count as f64)));
    for index in 0..count.max(0) as usize {
        let bytes = runtime::device::memory_info(Device::Cuda(index))?.total as f64;
        cells.push(Cell::measured(DEVICES, &format!("memory of CUDA device {index}"), "B", Ok(bytes)));
    }
    let there = Tensor::f_ones([32, 32], (Kind::Float, get_device(0)))?;
    let name = if there.device().is_cuda() { "cuda:0" } else { "cpu, without a CUDA device" };
    let statement = format!("sum of ones(32, 32, device=get_device()), computed there: {name}");
    cells.push(Cell::equal(DEVICES, &statement, "", 1024.0, f64::try_from(there.f_sum(Kind::Double)?)?));
    let moved = x.f_to_device(device)?;
    let made = Tensor::f_zeros([32, 32], (Kind::Float, device))?;
    let there = moved.device() == device && made.device() == device;
    cells.push(Cell::holds(DEVICES, "x.to(device) and zeros(device) lie on the device", there));
    Ok(())
}

fn views(cells: &mut Vec<Cell>) -> anyhow::Result<()> {
    let x = Tensor::from_slice2(&[[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]]);
    let address = |tensor: &Tensor| tensor.data_ptr() as usize;
    let same = |a: &Tensor, b: &Tensor| (address(b)..address(b) + 4 * b.numel()).contains(&address(a));
    let row = x.f_get(0)?;
    cells.push(Cell::holds(
        VIEWS,
        "x[0] is [1, 2, 3] in x's storage",
        values(&row)? == [1.0, 2.0, 3.0] && same(&row, &x),
    ));
    let column = x.f_select(1, 1)?;
    cells.push(Cell::holds(
        VIEWS,
        "x[:, 1] is [2, 5] in x's storage",
        values(&column)? == [2.0, 5.0] && same(&column, &x),
    ));
    let view = x.f_view([3, 2])?;
    cells.push(Cell::holds(VIEWS, "x.view(3, 2) shares x's storage", same(&view, &x)));
    let transposed = x.f_transpose(1, 0)?;
    let noncontiguous = same(&transposed, &x) && !transposed.is_contiguous();
    cells.push(Cell::holds(
        VIEWS,
        "x.transpose(1, 0) shares x's storage and is not contiguous",
        noncontiguous,
    ));
    cells.push(Cell::holds(
        VIEWS,
        "a non-contiguous tensor has no view of another shape",
        transposed.f_view([2, 3]).is_err(),
    ));
    let copied = transposed.f_contiguous()?.f_view([2, 3])?;
    cells.push(Cell::holds(VIEWS, "x.transpose(1, 0).contiguous().view(2, 3) is a copy", !same(&copied, &x)));
    let _ = x.f_get(0)?.f_get(0)?.f_fill_(100.0)?;
    let seen = [&row, &view, &transposed].map(|seen| values(seen).is_ok_and(|v| v[0] == 100.0));
    cells.push(Cell::holds(VIEWS, "x[0][0] = 100 shows in every view", seen == [true; 3]));
    cells.push(Cell::equal(VIEWS, "and not in the copy", "", 1.0, values(&copied)?[0]));
    Ok(())
}

fn element_wise(cells: &mut Vec<Cell>) -> anyhow::Result<()> {
    let x = Tensor::from_slice(&[1.0f32, 4.0, 9.0]);
    let cases: [(&str, Tensor, [f64; 3]); 6] = [
        ("[1, 4, 9].pow(2)", x.f_pow_tensor_scalar(2)?, [1.0, 16.0, 81.0]),
        ("[1, 4, 9].sqrt()", x.f_sqrt()?, [1.0, 2.0, 3.0]),
        ("[1, 4, 9].rsqrt()", x.f_rsqrt()?, [1.0, 0.5, 1.0 / 3.0]),
        ("[1, 4, 9] + itself", x.f_add(&x)?, [2.0, 8.0, 18.0]),
        ("[1, 4, 9] · 2", x.f_mul_scalar(2.0)?, [2.0, 8.0, 18.0]),
        ("[1, 4, 9] / 0.5", x.f_div_scalar(0.5)?, [2.0, 8.0, 18.0]),
    ];
    for (name, computed, expected) in cases {
        let near = values(&computed)?.iter().zip(expected).all(|(a, b)| (a / b - 1.0).abs() < 1e-6);
        let [a, b, c] = expected.map(|value| (1000.0 * value).round() / 1000.0);
        cells.push(Cell::holds(ELEMENTWISE, &format!("{name} is [{a}, {b}, {c}]"), near));
    }
    let mask = values(&Tensor::f_ones([3, 3], CPU)?.f_triu(0)?)?;
    let expected = [1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0];
    cells.push(Cell::holds(ELEMENTWISE, "ones(3, 3).triu() is a causal mask's shape", mask == expected));
    Ok(())
}

fn products(cells: &mut Vec<Cell>) -> anyhow::Result<()> {
    let w = Tensor::f_ones([32, 2], CPU)?;
    let y = Tensor::f_ones([16, 32], CPU)?.f_matmul(&w)?;
    cells.push(Cell::holds(PRODUCTS, "[16, 32] @ [32, 2] has shape [16, 2]", y.size() == [16, 2]));
    let y = Tensor::f_ones([4, 8, 16, 32], CPU)?.f_matmul(&w)?;
    cells.push(Cell::holds(
        PRODUCTS,
        "[4, 8, 16, 32] @ [32, 2] has shape [4, 8, 16, 2]",
        y.size() == [4, 8, 16, 2],
    ));
    let (x, y) = (Tensor::f_ones([2, 2, 3], CPU)?, Tensor::f_ones([2, 2, 3], CPU)?);
    let scores = x.f_matmul(&y.f_transpose(-2, -1)?)?;
    cells.push(Cell::holds(
        PRODUCTS,
        "x [2, 2, 3] @ y.transpose(-2, -1) has shape [2, 2, 2]: batch, sequence, sequence",
        scores.size() == [2, 2, 2],
    ));
    let named = Tensor::f_einsum("bsh,bth->bst", &[&x, &y], None::<i64>)?;
    cells.push(Cell::holds(PRODUCTS, "einsum(\"b s h, b t h -> b s t\") is the same", named == scores));
    Ok(())
}
