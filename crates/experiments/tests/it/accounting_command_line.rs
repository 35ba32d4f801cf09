//! What people and programs see of the binary.

use expect_test::expect;

fn accounting(arguments: &[&str]) -> String {
    let output = crate::program("accounting").args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stderr.is_empty());
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn an_estimate_for_people() {
    let text = accounting(&["estimate", "--model", "gpt2", "--batch", "8", "--hardware", "rtx4090"]);
    expect![[r#"
        gpt2, 124,439,808 parameters (124 M)
        batch 8 × 1024 tokens, bf16-master, adamw, flash attention

        part                 loss *  last block  first block  embedding  optimizer step
        ───────────────────────────────────────────────────────────────────────────────
        P parameters        237 MiB     237 MiB      237 MiB    237 MiB         237 MiB
        M master weights    475 MiB     475 MiB      475 MiB    475 MiB         475 MiB
        O optimizer state   949 MiB     949 MiB      949 MiB    949 MiB         949 MiB
        G gradients               –    73.6 MiB      237 MiB    237 MiB         237 MiB
        A activations      2.28 GiB    2.28 GiB      217 MiB   24.2 MiB               –
        L logits and loss  5.37 GiB     785 MiB      785 MiB    785 MiB               –
        T temporaries             –     120 MiB      120 MiB   73.6 MiB         475 MiB
        ───────────────────────────────────────────────────────────────────────────────
          total            9.27 GiB    4.86 GiB     2.95 GiB   2.72 GiB        2.32 GiB

        [PMOOOOAAAAAAAALLLLLLLLLLLLLLLLLLL···············································]
        * peak: 9.27 GiB at the loss, 41.5 % of 22.4 GiB: fits

        Not counted: the CUDA context (about 0.5 GiB), a cuBLAS workspace, the allocator's fragmentation.
    "#]]
    .assert_eq(&text);
}

#[test]
fn an_estimate_for_programs() {
    let text = accounting(&["estimate", "--model", "gpt2", "--json"]);
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(value["parameters"], 124_439_808);
    let peak = value["peak_bytes"].as_u64().unwrap();
    let totals = value["moments"].as_array().unwrap().iter().map(|m| m["total_bytes"].as_u64().unwrap());
    assert_eq!(totals.max(), Some(peak));
}

#[test]
fn an_estimate_of_adapters() {
    let text = accounting(&[
        "estimate",
        "--model",
        "qwen2.5-0.5b",
        "--batch",
        "2",
        "--sequence",
        "256",
        "--recipe",
        "bf16",
        "--lora-rank",
        "8",
        "--lora-targets",
        "q,k,v,o",
        "--loss",
        "linear-cross-entropy",
        "--json",
    ]);
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(value["parameters"], 495_114_112);
    let plan = value["plan"].as_str().unwrap();
    assert!(plan.contains("adapters of rank 8 on q,k,v,o"), "{plan}");
    let step = value["moments"].as_array().unwrap().last().unwrap();
    // A frozen base in bf16; adapters, their gradients and two moments in fp32; no master weights.
    let (base, adapters) = (494_032_768u64, 1_081_344u64);
    assert_eq!(step["parts"]["parameters"], 2 * base + 4 * adapters);
    assert_eq!(step["parts"]["gradients"], 4 * adapters);
    assert_eq!(step["parts"]["optimizer state"], 8 * adapters);
    assert_eq!(step["parts"]["master weights"], 0);
    let text = accounting(&["flops", "--model", "qwen2.5-0.5b", "--lora-rank", "8"]);
    assert!(text.contains("self_attn.q_proj adapter"), "{text}");
}

#[test]
fn the_table_of_number_formats() {
    expect![[r#"
        dtype     bits  sign+exp+man         max   min normal  min subnormal     epsilon  digits  stores 1e-8 as  stores 0.1 as
        ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
        fp64        64       1+11+52  1.7977e308  2.2251e-308    4.9407e-324  2.2204e-16      15       1.0000e-8     0.10000000
        fp32        32        1+8+23   3.4028e38   1.1755e-38     1.4013e-45   1.1921e-7       6       1.0000e-8     0.10000000
        tf32        32        1+8+10   3.4012e38   1.1755e-38     1.1479e-41   9.7656e-4       3       9.9972e-9     0.09997559
        fp16        16        1+5+10       65504    6.1035e-5      5.9605e-8   9.7656e-4       3   0 (underflow)     0.09997559
        bf16        16         1+8+7   3.3895e38   1.1755e-38     9.1835e-41   0.0078125       2       1.0012e-8     0.10009766
        fp8-e4m3     8         1+4+3         448     0.015625    0.001953125       0.125       0   0 (underflow)     0.10156250
        fp8-e5m2     8         1+5+2       57344    6.1035e-5      1.5259e-5        0.25       0   0 (underflow)     0.09375000
        int8         8             –         127            –              1           –       2   0 (underflow)              0
        int4         4             –           7            –              1           –       0   0 (underflow)              0

        tf32 is a format of the multiplier, stored in 32 bits. Integers are shown without a scale; a quantized tensor has one.
    "#]].assert_eq(&accounting(&["dtypes"]));
}

#[test]
fn every_subcommand_speaks_json() {
    let commands: [&[&str]; 10] = [
        &["dtypes", "--shape", "49152,12288"],
        &["parameters", "--model", "qwen2.5-7b", "--list"],
        &["flops", "--model", "llama-3-8b"],
        &["estimate", "--model", "gpt2-like"],
        &[
            "estimate",
            "--model",
            "qwen2.5-7b",
            "--lora-rank",
            "16",
            "--lora-targets",
            "all",
            "--lora-dropout",
        ],
        &["fit", "--model", "gpt2", "--memory", "8GiB"],
        &["time", "--parameters", "70B", "--tokens", "15T", "--devices", "1024"],
        &["kv-cache", "--model", "llama-3-8b", "--memory", "80GB"],
        &["lecture"],
        &["experiment", "--scale", "smoke"],
    ];
    for command in commands {
        let text = accounting(&[command, &["--json"]].concat());
        serde_json::from_str::<serde_json::Value>(&text)
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    }
}

#[test]
fn an_experiment_appends_the_records_of_every_section() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("records.jsonl");
    accounting(&["experiment", "--scale", "paper", "--records", path.to_str().unwrap()]);
    let records = report::read_records(&path).unwrap();
    let mut names: Vec<_> = records.iter().map(|record| record.experiment.as_str()).collect();
    names.dedup();
    assert_eq!(
        names,
        [
            "accounting-published",
            "accounting-dtypes",
            "accounting-flops",
            "accounting-estimate",
            "accounting-fit",
            "accounting-time",
            "long-context",
            "offload-condition"
        ]
    );
    let off = records.iter().filter(|record| record.metric.name == "error_in_half_units");
    let worst = off.map(|record| record.metric.value.unwrap()).fold(0.0, f64::max);
    assert!(worst <= 1.0, "a published figure is missed by {worst} half units");
}

#[test]
fn a_plan_of_offloading() {
    let flags = ["offload", "--model", "qwen2.5-7b", "--budget", "10GiB", "--lora-rank", "8"];
    expect![[r#"
        qwen2.5-7b, 7,615,616,512 parameters (7.62 B), training of adapters of rank 8 on q,k,v,o, 2048 tokens, bf16
        4090 at 1.200e14 FLOP/s, link 2.500e10 B/s

        resident layers          11 of 28
        slots of the ring        4
        optimizer                device
        fixed weights            2,179,996,672 (2.03 GiB)
        optimizer state          40,370,176 (38.5 MiB)
        resident layers          5,135,201,280 (4.78 GiB)
        ring                     1,867,345,920 (1.74 GiB)
        constant                 67,141,632 (64.0 MiB)
        layer inputs             411,041,792 (392 MiB)
        working memory           1,000,382,464 (954 MiB)
        peak, head               10,701,479,936 (9.97 GiB)
        device budget            10,737,418,240 (10.0 GiB)
        host                     7,936,220,160 (7.39 GiB)
        loaded per step          12,137,748,480 (11.3 GiB)
        stored per step          12,255,232 (11.7 MiB)
        step                     774.738 ms
        compute waits            37.498 ms
        step, all resident       737.241 ms
        share of resident speed  0.952

        Tokens of a step at which loads hide behind compute:
        pass              all streamed  by this plan
        ────────────────────────────────────────────
        forward                  4,800         2,915
        backward, frozen         2,400         1,458
    "#]].assert_eq(&accounting(&flags));
    let text = accounting(&[&flags[..], &["--json"]].concat());
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    let parts = value["device"].as_array().unwrap().iter().map(|part| part["bytes"].as_u64().unwrap());
    assert_eq!(value["figures"]["peak_bytes"].as_f64(), Some(parts.sum::<u64>() as f64));
    assert_eq!(value["resident_layers"].as_array().unwrap().len(), 11);
}
