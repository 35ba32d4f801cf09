//! The FLOPs predicted by `accounting` equal those counted in the dispatcher.

use accounting::Decoder;
use accounting::decoder_flops::{Recomputation, Workload, step};
use accounting::model::{Family, Sizes};
use accounting::recompute::{Recompute, SwigluLevel};
use runtime::Result;
use runtime::autograd::{self, Checkpoint, Keep};
use runtime::profile::{Counter, Counts};
use swiglu_ckpt::{CheckpointLevel, swiglu};
use tch::{Kind, Tensor, kind};

const SIZES: Sizes = Sizes {
    family: Family::Llama,
    vocabulary: 101,
    context: 64,
    embedding: 48,
    hidden: 48,
    layers: 2,
    heads: 6,
    kv_heads: 2,
    head_dim: 8,
    feed_forward: 80,
    tied: false,
    attention_bias: false,
    mlp_bias: false,
    experts: None,
    linear: None,
    windows: None,
    gemma4: None,
};
const WORK: Workload = Workload { batch: 3, sequence: 20 };

struct Block {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    mlp: [Tensor; 3],
}

impl Block {
    fn new() -> Self {
        let (h, f) = (SIZES.hidden as i64, SIZES.feed_forward as i64);
        let (q, kv) = ((SIZES.heads * SIZES.head_dim) as i64, (SIZES.kv_heads * SIZES.head_dim) as i64);
        Self {
            q: weight(h, q),
            k: weight(h, kv),
            v: weight(h, kv),
            o: weight(q, h),
            mlp: [weight(h, f), weight(h, f), weight(f, h)],
        }
    }

    fn weights(&self) -> impl Iterator<Item = &Tensor> {
        [&self.q, &self.k, &self.v, &self.o].into_iter().chain(&self.mlp)
    }

    fn shared(&self) -> Self {
        let clone = Tensor::shallow_clone;
        let mlp = std::array::from_fn(|i| clone(&self.mlp[i]));
        Self { q: clone(&self.q), k: clone(&self.k), v: clone(&self.v), o: clone(&self.o), mlp }
    }

    fn forward(&self, x: &Tensor, level: Option<CheckpointLevel>) -> Result<Tensor> {
        let (b, t, d) = (WORK.batch as i64, WORK.sequence as i64, SIZES.head_dim as i64);
        let heads =
            |w: &Tensor| -> Result<Tensor> { Ok(x.f_matmul(w)?.f_view([b, t, -1, d])?.f_transpose(1, 2)?) };
        let group = (SIZES.heads / SIZES.kv_heads) as i64;
        let repeat = |kv: Tensor| kv.repeat_interleave_self_int(group, 1, None);
        let (q, k, v) = (heads(&self.q)?, repeat(heads(&self.k)?), repeat(heads(&self.v)?));
        let attention =
            Tensor::f_scaled_dot_product_attention(&q, &k, &v, None::<Tensor>, 0.0, true, None, false)?;
        let x = x + attention.f_transpose(1, 2)?.f_reshape([b, t, -1])?.f_matmul(&self.o)?;
        let [gate, up, down] = &self.mlp;
        let mlp = match level {
            None => x.f_matmul(gate)?.f_silu()?.f_mul(&x.f_matmul(up)?)?.f_matmul(down)?,
            Some(level) => swiglu(&x, gate, up, down, level)?,
        };
        Ok(&x + mlp)
    }
}

fn weight(rows: i64, columns: i64) -> Tensor {
    (Tensor::randn([rows, columns], kind::FLOAT_CPU) * 0.1).set_requires_grad(true)
}

/// One step of the whole decoder, counted.
fn count(level: Option<CheckpointLevel>, checkpoint_blocks: bool) -> Counts {
    let embedding = weight(SIZES.vocabulary as i64, SIZES.hidden as i64);
    let head = weight(SIZES.hidden as i64, SIZES.vocabulary as i64);
    let blocks: Vec<Block> = (0..SIZES.layers).map(|_| Block::new()).collect();
    let ids =
        Tensor::randint(SIZES.vocabulary as i64, [WORK.batch as i64, WORK.sequence as i64], kind::INT64_CPU);

    let counter = Counter::on_this_thread().unwrap();
    let mut x = Tensor::embedding(&embedding, &ids, -1, false, false);
    for block in &blocks {
        let shared = block.shared();
        let options = Checkpoint { recompute: checkpoint_blocks, ..Checkpoint::default() };
        [x] = options.run(move |[x]| Ok([shared.forward(x, level)?]), [&x]).unwrap();
    }
    let logits = x.matmul(&head).view([-1, SIZES.vocabulary as i64]);
    let loss = logits.cross_entropy_for_logits(&ids.view([-1]));
    autograd::backward_with(&[&loss], &[None], Keep::default()).unwrap();
    let counts = counter.finish().unwrap();
    for weight in blocks.iter().flat_map(Block::weights).chain([&embedding, &head]) {
        assert!(weight.grad().defined());
    }
    counts
}

fn check(level: Option<CheckpointLevel>, checkpoint_blocks: bool, choice: Recomputation) {
    let counts = count(level, checkpoint_blocks);
    let expected = step(&Decoder::new(SIZES).unwrap(), WORK, &choice).unwrap();
    let hardware = expected.hardware().unwrap();
    let found = counts.total.flops;
    assert_eq!(
        (u128::from(found.dense), u128::from(found.causal)),
        (hardware.dense, hardware.causal),
        "{level:?} {checkpoint_blocks} {choice:?}\n{counts}"
    );
    assert_eq!(counts.unknown, Vec::<String>::new());
    // The scores that the attention's own backward computes again are inside one operator, so they cannot be told apart.
    let scores: u128 =
        expected.rows.iter().filter(|row| row.name == "Q·Kᵀ").map(|row| row.forward.dense).sum();
    assert_eq!(
        u128::from(counts.recomputed.flops.dense),
        expected.recomputed.dense - scores,
        "{level:?}\n{counts}"
    );
}

#[test]
fn a_decoders_step_has_exactly_the_predicted_flops() {
    check(None, false, Recomputation::default());
    let full = Recomputation { checkpoint: Recompute::Full, ..Recomputation::default() };
    check(None, true, full);
    for (level, swiglu) in [
        (CheckpointLevel::SaveAll, SwigluLevel::SaveAll),
        (CheckpointLevel::SaveGateUp, SwigluLevel::SaveGateUp),
        (CheckpointLevel::SaveOne, SwigluLevel::SaveOne),
        (CheckpointLevel::InputOnly, SwigluLevel::InputOnly),
        (CheckpointLevel::InputOnlyTiled { bytes: 20_000 }, SwigluLevel::InputOnly),
    ] {
        check(Some(level), false, Recomputation { swiglu, ..Recomputation::default() });
    }
    // A product large enough for this project's own backend counts the same.
    let (a, b) = (Tensor::ones([300, 200], kind::FLOAT_CPU), Tensor::ones([200, 100], kind::FLOAT_CPU));
    let counter = Counter::on_this_thread().unwrap();
    let product = kernels::matmul::mm(&a, &b).unwrap();
    assert_eq!(counter.finish().unwrap().total.flops.dense, 2 * 300 * 200 * 100);
    assert_eq!(product.double_value(&[0, 0]), 200.0);
    assert_eq!(product.kind(), Kind::Float);
}
