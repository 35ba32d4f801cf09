//! A frozen output matrix in few bits: the loss and its gradient are those of the dequantized matrix.

use fused_ce::{Chunk, LinearCrossEntropy};
use kernels::nf4::{self, Scales};
use kernels::quantized::{self, blocks};
use runtime::autograd::backward;
use runtime::random::Generator;
use tch::{Kind, Tensor, kind};

#[test]
fn loss_and_gradient_have_the_bits_of_the_dense_weight() {
    let mut generator = Generator::new(5).unwrap();
    let (tokens, hidden, vocabulary) = (80, 256, 1000);
    let weight = generator.normal(&[vocabulary, hidden], kind::FLOAT_CPU).unwrap();
    // Blocks of 8 bits: a scale of 2⁻⁷, and codes.
    let codes = (&weight * 30.0)
        .clamp(-127.0, 127.0)
        .to_kind(Kind::Int8)
        .view_dtype(Kind::Uint8)
        .view([vocabulary, -1, 32]);
    let scale =
        Tensor::from_slice(&[0x00u8, 0x20]).view([1, 1, 2]).expand([vocabulary, hidden / 32, 2], false);
    let bytes: Vec<u8> = Vec::try_from(Tensor::cat(&[&scale, &codes], 2).view([-1])).unwrap();
    let in_blocks = blocks::from_bytes(blocks::BlockType::Q8_0, [vocabulary, hidden], &bytes).unwrap();
    let targets = Tensor::from_slice(&(0..tokens).map(|at| at * 37 % vocabulary).collect::<Vec<_>>());
    let x = generator.normal(&[tokens, hidden], kind::FLOAT_CPU).unwrap();
    for stored in [in_blocks, nf4::quantize(&weight, Scales::Nested).unwrap()] {
        let dense = quantized::dequantize(&stored, Kind::Float).unwrap();
        let loss = LinearCrossEntropy { chunk: Some(Chunk::Tokens(40)), ..LinearCrossEntropy::default() };
        let run = |weight: &Tensor, kind: Kind| {
            let x = x.to_kind(kind).copy().set_requires_grad(true);
            let result = loss.loss(&x, weight, &targets).unwrap();
            backward(&[&result]).unwrap();
            (result.detach(), x.grad())
        };
        assert_eq!(run(&stored, Kind::Float), run(&dense, Kind::Float));
        // In bf16 within the rounding of the operands.
        let (found, expected) = (run(&stored, Kind::BFloat16), run(&dense, Kind::Float));
        let distance = |a: &Tensor, b: &Tensor| {
            let difference = a.to_kind(Kind::Double) - b.to_kind(Kind::Double);
            difference.norm().double_value(&[]) / b.to_kind(Kind::Double).norm().double_value(&[])
        };
        assert!(distance(&found.0, &expected.0) < 1e-2 && distance(&found.1, &expected.1) < 2e-2);
    }
}

#[test]
fn another_width_is_refused_by_name() {
    let stored = nf4::quantize(&Tensor::randn([100, 64], kind::FLOAT_CPU), Scales::Nested).unwrap();
    let (x, targets) =
        (Tensor::randn([3, 32], kind::FLOAT_CPU), Tensor::zeros([3], (Kind::Int64, tch::Device::Cpu)));
    let error = LinearCrossEntropy::default().loss(&x, &stored, &targets).unwrap_err().to_string();
    assert!(error.contains("[vocabulary, 32]"), "{error}");
}
