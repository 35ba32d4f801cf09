//! Autocast: what is cast, what is not, where the policy applies, and what the cache holds.

use amp::Autocast;
use kernels::linear::linear;
use models::module::{Context, Input, LanguageModel, Projection, tensors, trainable};
use models::{Gpt2Like, Gpt2LikeConfig, LayerNorm, Linear, RmsNorm};
use runtime::precision;
use runtime::random::Generator;
use tch::{Device, Kind, Tensor, kind};

const LOW: [Kind; 2] = [Kind::BFloat16, Kind::Half];

fn random(size: &[i64]) -> Tensor {
    Tensor::randn(size, kind::FLOAT_CPU)
}

/// Returns the distance from the f64 result in units in the last place of the dtype.
fn distance_in_ulps(found: &Tensor, exact: &Tensor, dtype: Kind) -> f64 {
    let exact = exact.to_kind(Kind::Double);
    let epsilon = if dtype == Kind::Half { 2f64.powi(-10) } else { 2f64.powi(-7) };
    let scale = exact.abs().max().double_value(&[]);
    (found.to_kind(Kind::Double) - &exact).abs().max().double_value(&[]) / (scale * epsilon)
}

#[test]
fn a_linear_layer_has_the_numerics_of_its_dtype() {
    for dtype in LOW {
        for (size, bias) in [(vec![5, 33], true), (vec![2, 3, 33], false), (vec![33], true)] {
            let layer = Linear::new(33, 17, bias, kind::FLOAT_CPU).unwrap();
            let x = random(&size).set_requires_grad(true);
            let y = {
                let _scope = Autocast::new(dtype).unwrap().enter();
                layer.forward(&x, &Context::default()).unwrap()
            };
            assert_eq!(y.kind(), dtype);
            // The same rounded operands, multiplied in f64.
            let wide = |t: &Tensor| t.detach().to_kind(dtype).to_kind(Kind::Double);
            let leaf = |t: &Tensor| wide(t).set_requires_grad(true);
            let (x64, w64) = (leaf(&x), leaf(&layer.weight));
            let b64 = layer.bias.as_ref().map(leaf);
            let y64 = x64.linear(&w64, b64.as_ref());
            let error = distance_in_ulps(&y, &y64, dtype);
            assert!(error <= 0.51, "{dtype:?} {size:?}: {error}");

            let upstream = random(&y.size()).to_kind(dtype);
            runtime::autograd::backward(&[&(&y * &upstream).sum(Kind::Float)]).unwrap();
            runtime::autograd::backward(&[&(&y64 * upstream.to_kind(Kind::Double)).sum(Kind::Double)])
                .unwrap();
            let mut pairs = vec![("x", x.grad(), x64.grad()), ("w", layer.weight.grad(), w64.grad())];
            if let (Some(bias), Some(b64)) = (&layer.bias, &b64) {
                pairs.push(("b", bias.grad(), b64.grad()));
            }
            for (name, found, exact) in pairs {
                assert_eq!(found.kind(), Kind::Float, "the gradient of an fp32 {name} is fp32");
                let error = distance_in_ulps(&found, &exact, dtype);
                assert!(error <= 1.0, "{dtype:?} {size:?} {name}: {error}");
            }
        }
    }
}

#[test]
fn norms_softmax_and_losses_stay_in_fp32_and_fp64_is_left_alone() {
    for dtype in LOW {
        let _scope = Autocast::new(dtype).unwrap().enter();
        let x = random(&[3, 8]).to_kind(dtype);
        assert_eq!(
            LayerNorm::new(8, 1e-5, kind::FLOAT_CPU).unwrap().forward(&x).unwrap().kind(),
            Kind::Float
        );
        assert_eq!(RmsNorm::new(8, 1e-6, kind::FLOAT_CPU).unwrap().forward(&x).unwrap().kind(), Kind::Float);
        assert_eq!(precision::widened(&x).unwrap().kind(), Kind::Float);
        let a = random(&[4, 4]);
        assert_eq!(precision::matmul(&a, &a).unwrap().kind(), dtype);
        let double = Linear::new(4, 4, true, kind::DOUBLE_CPU).unwrap();
        assert_eq!(
            double.forward(&a.to_kind(Kind::Double), &Context::default()).unwrap().kind(),
            Kind::Double
        );
    }
}

/// Returns the same model every time, independent of the default generator.
fn model() -> Gpt2Like {
    let config = Gpt2LikeConfig {
        vocab_size: 64,
        embedding_dim: 32,
        hidden_dim: 32,
        num_heads: 4,
        ff_dim: 64,
        max_length: 16,
        dropout: 0.0,
        ..Gpt2LikeConfig::default()
    };
    let model = Gpt2Like::new(&config, kind::FLOAT_CPU).unwrap();
    let mut generator = Generator::new(1).unwrap();
    for named in tensors(&model).into_iter().filter(|named| !named.name.contains("norm")) {
        let drawn = generator.normal(&named.tensor.size(), kind::FLOAT_CPU).unwrap();
        named.tensor.detach().copy_(&(drawn * 32f64.powf(-0.5)));
    }
    model
}

fn loss(model: &dyn LanguageModel) -> Tensor {
    let tokens = (Tensor::arange(32, (Kind::Int64, Device::Cpu)) * 7).remainder(64).view([2, 16]);
    let input = Input { tokens: &tokens, positions: None, context: Context::default() };
    let hidden = model.hidden(&input).unwrap();
    model.head().loss(&hidden, &tokens.roll([-1], [1]), &input.context).unwrap().sum / 32.0
}

#[test]
fn a_model_under_autocast_is_close_to_fp32() {
    // A ReLU unit that rounding switches on or off changes the gradient more than rounding itself.
    for (dtype, tolerance, of_gradient) in [(Kind::BFloat16, 1e-3, 0.05), (Kind::Half, 1e-4, 0.025)] {
        let (low, full) = (model(), model());
        let expected = loss(&full);
        let found = {
            let _scope = Autocast::new(dtype).unwrap().enter();
            loss(&low)
        };
        assert_eq!(found.kind(), Kind::Float);
        for l in [&found, &expected] {
            runtime::autograd::backward(&[l]).unwrap();
        }
        let off = (found.double_value(&[]) / expected.double_value(&[]) - 1.0).abs();
        assert!(off < tolerance, "{dtype:?}: {off}");
        assert!(off > 0.0, "{dtype:?}: nothing was rounded");
        // Over the whole gradient: some of its parts are small differences of large numbers.
        let (mut distance, mut norm) = (0.0, 0.0);
        for (ours, theirs) in tensors(&low).iter().zip(tensors(&full)) {
            let (ours, theirs) = (ours.tensor.grad(), theirs.tensor.grad());
            if theirs.defined() {
                distance += (&ours - &theirs).norm().double_value(&[]).powi(2);
                norm += theirs.norm().double_value(&[]).powi(2);
            }
        }
        let share = (distance / norm).sqrt();
        assert!(share < of_gradient, "{dtype:?}: the gradient is off by {share}");
    }
}

#[test]
fn scopes_nest_and_end_with_a_panic() {
    let (bf16, fp16) = (Autocast::new(Kind::BFloat16).unwrap(), Autocast::new(Kind::Half).unwrap());
    let layer = Linear::new(4, 4, true, kind::FLOAT_CPU).unwrap();
    let kind_now = || layer.forward(&random(&[1, 4]), &Context::default()).unwrap().kind();
    let outer = bf16.enter();
    assert_eq!(kind_now(), Kind::BFloat16);
    {
        let _inner = fp16.enter();
        assert_eq!(kind_now(), Kind::Half);
        let _off = Autocast::disabled();
        assert_eq!(kind_now(), Kind::Float);
    }
    let panicked = std::panic::catch_unwind(|| {
        let _inner = fp16.enter();
        panic!("within");
    });
    assert!(panicked.is_err());
    assert_eq!(kind_now(), Kind::BFloat16);
    drop(outer);
    assert_eq!(kind_now(), Kind::Float);
    assert_eq!((bf16.statistics().bytes, fp16.statistics().bytes), (0, 0), "the caches are empty");
    let error = Autocast::new(Kind::Float).unwrap_err();
    assert_eq!(error.to_string(), "autocast: Float is not a low-precision dtype; expected Half or BFloat16");
}

/// `set_data`, as a merge of adapters does, changes neither the tensor nor its version.
#[test]
fn a_weight_with_other_memory_is_cast_again() {
    for requires_grad in [true, false] {
        let autocast = Autocast::new(Kind::BFloat16).unwrap();
        let _scope = autocast.enter();
        let x = Tensor::ones([1, 4], kind::FLOAT_CPU);
        let weight = Tensor::ones([2, 4], kind::FLOAT_CPU).set_requires_grad(requires_grad);
        let product = || linear(&x, &weight, None).unwrap().double_value(&[0, 0]);
        assert_eq!(product(), 4.0);
        for value in 2..6 {
            let other = Tensor::full([2, 4], f64::from(value), kind::FLOAT_CPU);
            weight.shallow_clone().f_set_data(&other).unwrap();
            assert_eq!(product(), 4.0 * f64::from(value));
        }
        assert_eq!(autocast.statistics().bytes, 16, "one cast is held");
    }
}

/// Without a graph every tensor is a leaf, also one that was just computed.
#[test]
fn casts_of_tensors_made_for_one_use_do_not_pile_up() {
    let autocast = Autocast::new(Kind::BFloat16).unwrap();
    let _scope = autocast.enter();
    let (x, weight) = (random(&[2, 8]), random(&[8, 8]));
    for _ in 0..2000 {
        let product = |w: &Tensor| drop(linear(&x, w, None).unwrap());
        tch::no_grad(|| product(&(&weight * 2.0)));
        product(&weight.detach().set_requires_grad(true));
        product(&weight);
    }
    let seen = autocast.statistics();
    assert_eq!(seen.hits, 1999, "the weight itself is cast once");
    assert!(seen.peak_bytes <= 64 * 128, "{seen:?}");
    let before = autocast.statistics();
    for _ in 0..3 {
        let _uncached = precision::uncached();
        assert_eq!(linear(&x, &weight, None).unwrap().kind(), Kind::BFloat16);
    }
    assert_eq!(autocast.statistics(), before);
}

#[test]
fn a_weight_is_cast_once_per_version() {
    let autocast = Autocast::new(Kind::BFloat16).unwrap();
    let weight = random(&[8, 8]).set_requires_grad(true);
    let frozen = random(&[8, 8]);
    let x = random(&[2, 8]);
    let product = |w: &Tensor| linear(&x, w, None).unwrap();
    {
        let _scope = autocast.enter();
        for _ in 0..3 {
            assert!(product(&weight).requires_grad());
            assert!(!product(&frozen).requires_grad());
        }
        let seen = autocast.statistics();
        assert_eq!((seen.misses, seen.hits, seen.bytes), (2, 4, 2 * 64 * 2));

        // Code that computes its own products shares the cast.
        assert_eq!(precision::weight(&weight).unwrap().kind(), Kind::BFloat16);
        assert_eq!(autocast.statistics().hits, seen.hits + 1);
        let operand = precision::operand(&x).unwrap();
        assert_eq!((operand.kind(), autocast.statistics().misses), (Kind::BFloat16, seen.misses));
        assert_eq!(precision::operand(&x.to_kind(Kind::Double)).unwrap().kind(), Kind::Double);

        // Without gradients the cast has none; with gradients it has one.
        tch::no_grad(|| assert!(!product(&weight).requires_grad()));
        assert!(product(&weight).requires_grad());

        // An in-place change by an optimizer is noticed.
        let before = product(&weight).to_kind(Kind::Float);
        tch::no_grad(|| {
            let _ = weight.shallow_clone().f_mul_scalar_(3.0).unwrap();
        });
        let after = product(&weight).to_kind(Kind::Float);
        let exact = x.linear(&weight.detach(), None::<&Tensor>);
        assert!(((&after - &exact).abs().max() / exact.abs().max()).double_value(&[]) < 0.02);
        assert!((after - before).abs().max().double_value(&[]) > 0.1);

        // Another leaf with the same memory is another tensor.
        let twin = weight.detach().set_requires_grad(true);
        runtime::autograd::backward(&[&product(&twin).sum(Kind::Float)]).unwrap();
        assert!(twin.grad().defined() && !weight.grad().defined());

        // Activations are not cached.
        let misses = autocast.statistics().misses;
        let activation = &weight * 2.0;
        let _ = product(&activation);
        assert_eq!(autocast.statistics().misses, misses);
    }
    assert_eq!(autocast.statistics().bytes, 0);
    // Both uses of one cast contribute to the gradient of the weight.
    let grads = |cached: bool| {
        let autocast = Autocast::new(Kind::BFloat16).unwrap();
        let w = weight.detach().copy().set_requires_grad(true);
        let product = |x: &Tensor| {
            let _scope = autocast.enter();
            linear(x, &w, None).unwrap()
        };
        let y = {
            // The cache is cleared at the end of the outermost scope.
            let _scope = cached.then(|| autocast.enter());
            product(&product(&x))
        };
        runtime::autograd::backward(&[&y.sum(Kind::Float)]).unwrap();
        w.grad()
    };
    let (with, without) = (grads(true), grads(false));
    let off = ((&with - &without).norm() / without.norm()).double_value(&[]);
    assert!(off < 0.01, "{off}");
}

#[test]
fn recomputation_on_engine_threads_uses_the_policy_of_forward() {
    for dtype in LOW {
        let layer = Linear::new(16, 16, true, kind::FLOAT_CPU).unwrap();
        let x = random(&[4, 16]);
        let grads = |checkpointed: bool| {
            for (_, parameter) in trainable(&layer) {
                runtime::autograd::set_grad(parameter, None).unwrap();
            }
            let input = x.copy().set_requires_grad(true);
            let autocast = Autocast::new(dtype).unwrap();
            let [y] = {
                let _scope = autocast.enter();
                let (weight, bias) =
                    (layer.weight.shallow_clone(), layer.bias.as_ref().map(Tensor::shallow_clone));
                let run = move |[x]: [&Tensor; 1]| {
                    let y = linear(x, &weight, bias.as_ref())?;
                    assert_eq!(y.kind(), dtype);
                    Ok([y])
                };
                if checkpointed { runtime::autograd::checkpoint(run, [&input]) } else { run([&input]) }
                    .unwrap()
            };
            // Backward runs outside the scope, on another thread.
            let sum = y.sum(Kind::Float);
            std::thread::spawn(move || runtime::autograd::backward(&[&sum]).unwrap()).join().unwrap();
            assert_eq!(autocast.statistics().bytes, 0);
            (input.grad(), layer.weight.grad())
        };
        assert_eq!(grads(true), grads(false), "{dtype:?}: to the bit");
    }
}
