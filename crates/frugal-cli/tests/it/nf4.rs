//! A killed training over a base in NF4 that resumes.

use crate::tiny_folder::Tiny;

const TRAIN: &str = "finetune --model model --dtype nf4 --data problems --r 4 --batch-size 4 --accumulation 1 --lr 0.03 --seed 3 \
                     --lora-dropout 0.1 --steps 6 --checkpoint-every 2 --log-every 1";

#[test]
fn a_killed_training_resumes_with_the_same_bits() {
    let tiny = Tiny::new();
    tiny.succeed(&format!("{TRAIN} --out whole"));
    tiny.kill_at_step(&format!("{TRAIN} --out killed --json"), 3);
    tiny.succeed(&format!("{TRAIN} --out killed --resume"));
    let adapter = "adapter_model.safetensors";
    assert_eq!(tiny.bytes(&format!("killed/{adapter}")), tiny.bytes(&format!("whole/{adapter}")));

    // Another base is refused, also in another dtype.
    let other = TRAIN.replace("--dtype nf4", "--dtype bfloat16");
    let output = tiny.run(&format!("{other} --out killed --resume"));
    assert!(!output.status.success());
}
