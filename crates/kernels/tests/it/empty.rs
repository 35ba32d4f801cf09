//! Tensors without elements, whose address is null: every public pass over memory, with every dimension zero in turn.

use files::mapped::MappedFile;
use kernels::adam::{AdamStep, AdamTensors, adam};
use kernels::attention::{CausalOptions, SingleQueryOptions, causal_attention, single_query_attention};
use kernels::cross_entropy::{
    Coefficients, Cpu, LogitsPass, Reference, Statistics, Targets, TileInputs, Transform, Wanted,
};
use kernels::gradients::unscale_;
use kernels::matmul::{matvec, mm, mm_into};
use kernels::norm::{Norm, Options, add_norm, layer_norm, rms_norm};
use kernels::rope::RotaryTable;
use kernels::swiglu;
use runtime::device::{PinnedBuffer, pinned_empty};
use runtime::random::Generator;
use runtime::{autograd, file};
use tch::{Device, Kind, Tensor};

const FLOATS: [Kind; 2] = [Kind::Float, Kind::Double];

fn ones(size: &[i64], kind: Kind) -> Tensor {
    Tensor::ones(size, (kind, Device::Cpu))
}

/// `size` with each dimension zero in turn, and all of them.
fn emptied(size: &[i64]) -> Vec<Vec<i64>> {
    let one = (0..size.len()).map(|zero| {
        size.iter().enumerate().map(|(index, &n)| if index == zero { 0 } else { n }).collect::<Vec<_>>()
    });
    one.chain([vec![0; size.len()]]).collect()
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.to_kind(Kind::Double).reshape([-1])).unwrap()
}

#[test]
fn empty_tiles_of_logits_have_no_effect() {
    for pass in [&Cpu as &dyn LogitsPass, &Reference] {
        for kind in FLOATS {
            for size in emptied(&[3, 4]) {
                for dense in [false, true] {
                    let (n, columns) = (size[0], size[1]);
                    let case = format!("{pass:?} {kind:?} {size:?}, dense: {dense}");
                    let (bias, weights) = (ones(&[columns], kind), ones(&[columns], kind));
                    let target = if dense {
                        ones(&size, kind)
                    } else {
                        Tensor::zeros([n], (Kind::Int64, Device::Cpu))
                    };
                    let targets = if dense { Targets::Dense(&target) } else { Targets::Columns(&target) };
                    let transform = Transform { bias: Some(&bias), scale: 0.5, softcap: Some(2.0) };
                    let wanted = Wanted { total: true, moment: true, best: true };
                    let mut known = Statistics::new(n, dense, wanted, (kind, Device::Cpu)).unwrap();
                    // The statistics of an earlier tile.
                    let _ = known.maximum.fill_(1.0);
                    let _ = known.sum.fill_(2.0);
                    let mut tile = ones(&size, kind);
                    let inputs = TileInputs { first: 0, transform, targets, class_weights: Some(&weights) };
                    pass.statistics(&mut tile, inputs, &mut known)
                        .unwrap_or_else(|error| panic!("{case}: {error}"));
                    assert_eq!(values(&known.maximum), vec![1.0; n as usize], "{case}");
                    assert_eq!(values(&known.sum), vec![2.0; n as usize], "{case}");
                    for left in [&known.target, known.total.as_ref().unwrap(), known.moment.as_ref().unwrap()]
                    {
                        assert_eq!(values(left), vec![0.0; n as usize], "{case}");
                    }
                    pass.logits(&mut tile, transform).unwrap();
                    let coefficients = Coefficients {
                        maximum: &known.maximum,
                        powers: &known.sum,
                        target: &known.target,
                        constant: known.total.as_ref(),
                    };
                    pass.gradient(&mut tile, inputs, coefficients)
                        .unwrap_or_else(|error| panic!("{case}: {error}"));
                    assert_eq!(tile.size(), size, "{case}");
                }
            }
        }
    }
}

#[test]
fn norms_of_empty_matrices_have_zero_gradients() {
    for kind in FLOATS {
        for size in [&[0i64, 4][..], &[2, 0, 4], &[0, 3, 4]] {
            let x = ones(size, kind).set_requires_grad(true);
            let (weight, bias) = (ones(&[4], kind), ones(&[4], kind));
            let (weight, bias) = (weight.set_requires_grad(true), bias.set_requires_grad(true));
            let residual = ones(size, kind);
            let outputs = [
                layer_norm(&x, Some(&weight), Some(&bias), Options::default()).unwrap(),
                rms_norm(&x, Some(&weight), Options::default()).unwrap(),
                add_norm(Norm::Rms, &x, &residual, Some(&weight), None, Options::default()).unwrap().0,
            ];
            for y in outputs {
                assert_eq!(y.size(), size);
                autograd::backward(&[&y.sum(kind)]).unwrap();
            }
            assert_eq!(x.grad().size(), size);
            assert_eq!((values(&weight.grad()), values(&bias.grad())), (vec![0.0; 4], vec![0.0; 4]));
        }
        for size in [&[3i64, 0][..], &[0, 0]] {
            let error = rms_norm(&ones(size, kind), None, Options::default()).unwrap_err().to_string();
            assert!(error.contains("expected […, width] of width from 1 on"), "{error}");
        }
    }
}

#[test]
fn rotating_empty_tensors_works() {
    let table = RotaryTable::new(4, 8, 1e4, Device::Cpu).unwrap();
    for kind in FLOATS {
        for size in emptied(&[2, 3, 2]) {
            let size = [size[0], size[1], size[2], 4];
            let (q, k) = (ones(&size, kind).set_requires_grad(true), ones(&size, kind));
            let positions = Tensor::zeros([size[0], size[1]], (Kind::Int64, Device::Cpu));
            for positions in [None, Some(&positions)] {
                let (q_turned, k_turned) = table.rotate(&q, &k, positions).unwrap();
                assert_eq!((q_turned.size(), k_turned.size()), (size.to_vec(), size.to_vec()));
                autograd::backward(&[&q_turned.sum(kind)]).unwrap();
            }
            assert_eq!(q.grad().size(), size);
        }
    }
}

/// As `scaled_dot_product_attention`: results without elements, and gradients of zero for keys that no query sees.
#[test]
fn attention_without_elements_is_empty() {
    for kind in [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half] {
        for size in emptied(&[2, 4, 3, 8]) {
            for kv_heads in [size[1], 2] {
                let keys = [size[0], kv_heads, size[2], size[3]];
                let [q, k, v] =
                    [&size[..], &keys, &keys].map(|size| ones(size, kind).set_requires_grad(true));
                let o = causal_attention(&q, &k, &v, CausalOptions::default()).unwrap();
                assert_eq!(o.size(), size);
                autograd::backward(&[&o.sum(kind)]).unwrap();
                for x in [&q, &k, &v] {
                    assert_eq!(values(&x.grad()), vec![0.0; x.numel()], "{kind:?} {size:?}");
                }
            }
        }
        for [batch, heads, head] in [[0, 4, 8], [2, 0, 8], [2, 4, 0]] {
            let (q, k) = (ones(&[batch, heads, head], kind), ones(&[batch, 2, 3, head], kind));
            let o = single_query_attention(&q, &k, &k, SingleQueryOptions::default()).unwrap();
            assert_eq!(o.size(), [batch, heads, head]);
        }
    }
}

#[test]
fn swiglu_of_empty_tensors_works() {
    for kind in FLOATS {
        for size in emptied(&[3, 5]) {
            let tensor = || ones(&size, kind);
            let (silu, mut product) = (tensor(), tensor());
            swiglu::forward(&tensor(), &tensor(), Some(&silu), &mut product).unwrap();
            assert_eq!(product.size(), size);
            let gradients = swiglu::backward(tensor(), tensor(), Some(&silu), tensor()).unwrap();
            for gradient in [gradients.gate, gradients.up, gradients.product] {
                assert_eq!(gradient.size(), size);
            }
            let leaf = tensor().set_requires_grad(true);
            autograd::backward(&[&swiglu::silu_mul(&leaf, &tensor()).unwrap().sum(kind)]).unwrap();
            assert_eq!(leaf.grad().size(), size);
        }
    }
}

#[test]
fn a_step_without_parameters_works() {
    for size in emptied(&[3, 5]) {
        let state: [Tensor; 3] = std::array::from_fn(|_| ones(&size, Kind::Float));
        let (gradient, weight) = (ones(&size, Kind::BFloat16), ones(&size, Kind::BFloat16));
        let [master, exp_avg, exp_avg_sq] = &state;
        for weight in [None, Some(&weight)] {
            let tensors = AdamTensors { gradient: &gradient, master, exp_avg, exp_avg_sq, weight };
            adam(&tensors, &AdamStep::default()).unwrap();
        }
    }
}

#[test]
fn empty_gradients_are_finite_with_norm_zero() {
    let factor = Tensor::from_slice(&[3.0f32]);
    for kind in [Kind::Float, Kind::Double, Kind::BFloat16] {
        for size in emptied(&[3, 5]) {
            let found = unscale_(&[ones(&size, kind), ones(&size, kind)], &factor, true).unwrap();
            assert_eq!((values(&found.found_inf), values(&found.norm.unwrap())), (vec![0.0], vec![0.0]));
        }
        let found = unscale_(&[ones(&[0], kind), ones(&[4], kind)], &factor, true).unwrap();
        assert_eq!(values(&found.norm.unwrap()), [6.0]);
    }
}

#[test]
fn empty_products_are_zero_or_empty() {
    for kind in [Kind::Float, Kind::Double, Kind::BFloat16] {
        for size in emptied(&[3, 4, 5]) {
            let (m, k, n) = (size[0], size[1], size[2]);
            let (a, b) = (ones(&[m, k], kind), ones(&[k, n], kind));
            assert_eq!(mm(&a, &b).unwrap(), Tensor::zeros([m, n], (kind, Device::Cpu)));
            for accumulate in [false, true] {
                let mut out = ones(&[m, n], kind);
                mm_into(&mut out, &a, &b, accumulate).unwrap();
                let each = if accumulate { 1.0 } else { 0.0 };
                assert_eq!(values(&out), vec![each; (m * n) as usize]);
            }
            // `None`: libtorch multiplies.
            assert!(matvec(&a, &ones(&[n, k], kind), None).unwrap().is_none());
        }
    }
}

#[test]
fn empty_reads_of_files_work() {
    let folder = std::env::temp_dir().join(format!("frugal-empty-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("nothing");
    std::fs::write(&path, b"").unwrap();
    let mapped = MappedFile::open(&path).unwrap();
    assert_eq!(mapped.len(), 0);
    mapped.forget(0..0).unwrap();
    for size in emptied(&[2, 3]) {
        assert_eq!(file::tensor_over(&path, 0, &size, Kind::Float).unwrap().size(), size);
        let target = ones(&size, Kind::Float);
        file::read_into(&std::fs::File::open(&path).unwrap(), &path, 0, &target).unwrap();
        file::copy_values(&mapped, Kind::BFloat16, &target).unwrap();
        let error = file::copy_values(&[1, 2], Kind::BFloat16, &target).unwrap_err().to_string();
        assert!(error.starts_with("copy_values: 2 bytes of BFloat16 for a tensor of"), "{error}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn empty_host_memory_works() {
    for size in emptied(&[2, 3]) {
        assert_eq!(pinned_empty(&size, Kind::Float, Device::Cpu).unwrap().size(), size);
    }
    let mut buffer = PinnedBuffer::new(0, Device::Cpu).unwrap();
    assert_eq!(buffer.view(0, &[0, 3], Kind::Int64).unwrap().size(), [0, 3]);
    assert_eq!(buffer.as_mut_slice::<f64>().unwrap(), [0.0; 0]);
    assert_eq!(buffer.as_slice::<u8>().unwrap(), [0; 0]);
}

#[test]
fn empty_random_tensors_work() {
    let mut generator = Generator::new(1).unwrap();
    for size in emptied(&[2, 3]) {
        assert_eq!(generator.normal(&size, (Kind::Float, Device::Cpu)).unwrap().size(), size);
    }
}
