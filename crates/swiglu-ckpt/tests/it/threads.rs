//! Two threads run backward over one graph, one that retains it and one that releases it: each gets the gradients, or an error that
//! the graph was released, and never overwritten values.

use std::sync::Barrier;

use runtime::autograd::{self, Keep};
use runtime::random::Generator;
use swiglu_ckpt::{CheckpointLevel, swiglu};
use tch::{Device, Kind, Tensor};

const LEVELS: [CheckpointLevel; 5] = [
    CheckpointLevel::SaveAll,
    CheckpointLevel::SaveGateUp,
    CheckpointLevel::SaveOne,
    CheckpointLevel::InputOnly,
    CheckpointLevel::InputOnlyTiled { bytes: 3 * 48 * 8 * 16 },
];
const RETAIN: Keep = Keep { graph: true, derivative: false };

#[test]
fn releasing_the_graph_does_not_affect_a_concurrent_backward() {
    let mut generator = Generator::new(5).unwrap();
    let mut leaf = |size: [i64; 2]| {
        generator.normal(&size, (Kind::Double, Device::Cpu)).unwrap().set_requires_grad(true)
    };
    let arguments = [leaf([64, 32]), leaf([32, 48]), leaf([32, 48]), leaf([48, 32])];
    let [x, w, v, u] = &arguments;
    let mut both = 0;
    for level in LEVELS {
        let expected: Vec<Tensor> = {
            let loss = swiglu(x, w, v, u, level).unwrap().square().sum(Kind::Double);
            gradients(&loss, &arguments, Keep::default()).unwrap()
        };
        for _ in 0..40 {
            let loss = swiglu(x, w, v, u, level).unwrap().square().sum(Kind::Double);
            let together = Barrier::new(2);
            let found = std::thread::scope(|scope| {
                let threads = [RETAIN, Keep::default()].map(|keep| {
                    // Its own handles, because tensors are `Send` but not `Sync`.
                    let (loss, arguments) =
                        (loss.shallow_clone(), arguments.each_ref().map(Tensor::shallow_clone));
                    let together = &together;
                    scope.spawn(move || {
                        together.wait();
                        gradients(&loss, &arguments, keep).map_err(|error| error.to_string())
                    })
                });
                threads.map(|thread| thread.join().unwrap())
            });
            both += usize::from(found.iter().all(Result::is_ok));
            for found in found {
                match found {
                    Ok(found) => assert_eq!(found, expected, "{level}"),
                    Err(words) => assert!(words.contains("a second time"), "{level}: {words}"),
                }
            }
        }
    }
    eprintln!("{both} of 200 times both had their gradients");
}

fn gradients(loss: &Tensor, arguments: &[Tensor; 4], keep: Keep) -> runtime::Result<Vec<Tensor>> {
    let found = autograd::grad(&[loss], &[None], &arguments.each_ref(), keep)?;
    Ok(found.into_iter().map(|gradient| gradient.expect("all four take part")).collect())
}
