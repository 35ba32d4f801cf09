//! Attention with the backend that is measured for its class.

use kernels::attention::{ScaledDotProductOptions, scaled_dot_product};
use runtime::autograd::{Keep, grad};
use runtime::ops::attention::backend::order;
use runtime::random::Generator;
use tch::{Kind, Tensor};

use super::{close, cuda, normal};

#[test]
fn the_measured_backend_computes_attention_and_leaves_the_order() {
    let Some(device) = cuda() else { return };
    let mut generator = Generator::new(8).unwrap();
    for kind in [Kind::BFloat16, Kind::Half] {
        for [heads, kv_heads, tokens, head] in [[4, 4, 64, 64], [8, 2, 200, 128], [4, 1, 129, 96]] {
            let mut draw = |heads: i64| normal(&mut generator, &[2, heads, tokens, head], kind);
            let [q, k, v, upstream] = [draw(heads), draw(kv_heads), draw(kv_heads), draw(heads)];
            let run = |convert: &dyn Fn(&Tensor) -> Tensor, attend: &dyn Fn([&Tensor; 3]) -> Tensor| {
                let [q, k, v] = [&q, &k, &v].map(|tensor| convert(tensor).set_requires_grad(true));
                let o = attend([&q, &k, &v]);
                let upstream = convert(&upstream);
                let gradients = grad(&[&o], &[Some(&upstream)], &[&q, &k, &v], Keep::default()).unwrap();
                std::iter::once(o.detach()).chain(gradients.into_iter().flatten()).collect::<Vec<Tensor>>()
            };
            let expected = run(&|tensor| tensor.copy(), &|[q, k, v]| {
                Tensor::scaled_dot_product_attention(q, k, v, None::<&Tensor>, 0.0, true, None, true)
            });
            let on_device = |tensor: &Tensor| tensor.to_kind(kind).to_device(device);
            let attend = |[q, k, v]: [&Tensor; 3]| {
                scaled_dot_product(q, k, v, ScaledDotProductOptions::default()).unwrap()
            };
            // The first attention measures, and libtorch sets its own order then.
            let _first = run(&on_device, &attend);
            let before = order().unwrap();
            let found = run(&on_device, &attend);
            assert_eq!(order().unwrap(), before);
            for (name, (found, expected)) in ["o", "q", "k", "v"].into_iter().zip(found.iter().zip(&expected))
            {
                close(&format!("{kind:?}, {heads} heads of {head}: {name}"), found, expected, 0.03);
            }
        }
    }
}
