//! What `frugal plan` tells people and programs.

use expect_test::expect;

use super::session::Session;

/// All in one process.
#[test]
fn plans() {
    let session = Session::new();
    the_memory_of_a_step_for_people(&session);
    the_memory_of_a_step_for_programs(&session);
    the_memory_of_adapters(&session);
    every_question_is_answered_in_json(&session);
    a_plan_for_a_card(&session);
    the_flags_of_a_plan_are_asked_what_fits(&session);
    a_plan_of_several_kinds_of_layers_is_found_again(&session);
    a_budget_below_the_program_ends_like_one_in_which_nothing_fits(&session);
    products_have_the_rate_of_their_dtype(&session);
    a_step_has_all_its_batches(&session);
    layers_in_files_of_another_machine_need_a_rate(&session);
    plans_that_save_nothing_are_left_out(&session);
    a_plan_over_ranks(&session);
    ranks_on_a_cpu_have_a_budget_each_and_flags_to_run_them(&session);
    divided_layers_gather_the_frozen_base_of_adapters_as_often_with_kept_activations(&session);
}

fn plan(session: &Session, arguments: &[&str]) -> String {
    let ended = session.run_words(&[&["plan"], arguments].concat());
    assert_eq!(ended.status, 0, "{}", ended.err);
    ended.out
}

/// Lists of layers are stretched to models of other depths.
fn the_flags_of_a_plan_are_asked_what_fits(session: &Session) {
    let model = ["fit", "--model", "qwen2.5-0.5b", "--hardware", "rtx4090", "--json"];
    for flags in [
        "--activations keep",
        "--activations recompute",
        "--activations every-k --set activations.every=3",
        "--offload host --ring 2 --resident 1,3 --activations recompute",
    ] {
        let words = model.into_iter().chain(flags.split(' ')).collect::<Vec<_>>();
        let answers: serde_json::Value = serde_json::from_str(&plan(session, &words)).unwrap();
        for answer in answers.as_array().unwrap() {
            assert!(answer["answer"].as_u64().is_some_and(|largest| largest > 1), "{flags}: {answer}");
        }
    }
}

fn a_plan_of_several_kinds_of_layers_is_found_again(session: &Session) {
    let asked = "--model qwen2.5-0.5b --hardware rtx4090 --activations recompute --recompute-what offload";
    let text = plan(session, &asked.split(' ').collect::<Vec<_>>());
    let (_, flags) = text.split_once("flags of finetune").unwrap();
    assert!(flags.contains("--activations recompute"), "{flags}");
    let chosen = |text: &str| text.lines().find(|line| line.starts_with('▸')).unwrap().to_owned();
    let again = flags.trim().replace("--max-length", "--length");
    let again = format!("--model qwen2.5-0.5b --hardware rtx4090 {again}");
    assert_eq!(chosen(&plan(session, &again.split(' ').collect::<Vec<_>>())), chosen(&text));
}

fn the_memory_of_a_step_for_people(session: &Session) {
    let flags =
        "memory --model qwen2.5-0.5b --method full --dtype bfloat16 --batch-size 8 --hardware rtx4090";
    let text = plan(session, &flags.split(' ').collect::<Vec<_>>());
    expect![[r#"
        qwen2.5-0.5b, 494,032,768 parameters (494 M)
        all weights are trained, 4 batches of 8 × 512 tokens: keep all

        part               forward    head *  backward
        ──────────────────────────────────────────────
        fixed weights      260 MiB   260 MiB   260 MiB
        optimizer state   5.52 GiB  5.52 GiB  5.52 GiB
        resident layers    683 MiB   683 MiB   683 MiB
        constant          8.06 MiB  8.06 MiB  8.06 MiB
        kept activations  3.23 GiB  3.37 GiB  3.37 GiB
        working memory     172 MiB   931 MiB  91.2 MiB
        gradients          942 MiB   942 MiB   942 MiB
        ──────────────────────────────────────────────
        total             10.8 GiB  11.7 GiB  10.8 GiB

        [foooooooooooooooooooooooooorrrkkkkkkkkkkkkkkkwwwwwgggg··························]
        * peak: 11.7 GiB in the head, 67.2 % of the 17.3 GiB for tensors: fits

        Not counted: the program and its libraries (on a GPU the CUDA context), and the allocator's fragmentation.
    "#]].assert_eq(&text);
    let flags = "fit --model qwen2.5-0.5b --method full --dtype bfloat16 --batch-size 8 --hardware rtx4090";
    let text = plan(session, &flags.split(' ').collect::<Vec<_>>());
    expect![[r#"
        qwen2.5-0.5b, 494,032,768 parameters
        all weights are trained, 4 batches of 8 × 512 tokens; 17.3 GiB for tensors

        question                                                            answer      peak  host memory            the next one                                                                                                plan
        ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
        largest batch, its rows at once                                        504  17.3 GiB     15.2 GiB            does not fit  layers in host memory, ring 1, activations of 1 kept, inputs in host memory, optimizer on the host
        longest row                                                         32,768  16.8 GiB            –  too long for the model                                               recompute the MLP of 21 of 24 layers, 1 row at a time
        largest model of the family      113 B (163 layers, hidden 6086, 98 heads)  17.3 GiB     1.81 TiB            does not fit        layers in host memory, ring 1, inputs in host memory, optimizer on the host, 1 row at a time

        Each question varies one thing and keeps the others. The largest model keeps the vocabulary, the head size
        and the ratios of widths and depth.
    "#]].assert_eq(&text);
}

/// The account is of the way that `plan` chooses, to the byte.
fn the_memory_of_a_step_for_programs(session: &Session) {
    for flags in
        ["--budget 4GiB", "--budget 1GiB", "--method full", "--method full --budget 6GiB --dtype bfloat16"]
    {
        let words = format!("--model qwen2.5-0.5b --hardware rtx4090 --batch-size 2 --json {flags}");
        let words: Vec<&str> = words.split(' ').collect();
        let json = |text: String| serde_json::from_str::<serde_json::Value>(&text).unwrap();
        let memory = json(plan(session, &[&["memory"], &words[..]].concat()));
        let ways = json(plan(session, &words));
        assert_eq!(memory["parameters"], 494_032_768);
        let variants = ways["variants"].as_array().unwrap();
        let chosen = variants.iter().find(|variant| variant["variant"] == ways["chosen"]).unwrap();
        assert_eq!((&memory["peak_bytes"], &memory["fits"]), (&chosen["peak_bytes"], &chosen["fits"]));
        let moments = memory["moments"].as_array().unwrap();
        let totals = moments.iter().map(|moment| moment["total_bytes"].as_u64().unwrap());
        assert_eq!(totals.max(), memory["peak_bytes"].as_u64());
        let at_peak = moments.iter().find(|moment| moment["moment"] == chosen["at_the_peak"]).unwrap();
        for part in chosen["parts"].as_array().unwrap() {
            assert_eq!(at_peak["parts"][part["what"].as_str().unwrap()], part["bytes"], "{flags}: {part}");
        }
    }
}

fn the_memory_of_adapters(session: &Session) {
    let flags = "memory --model qwen2.5-0.5b --batch-size 2 --length 256 --hardware h100 --json";
    let text = plan(session, &flags.split(' ').collect::<Vec<_>>());
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    let summary = value["plan"].as_str().unwrap();
    assert!(summary.contains("adapters of rank 8 on q,k,v,o"), "{summary}");
    let step = value["moments"].as_array().unwrap().last().unwrap();
    // A frozen base in bf16; adapters, their gradients and two moments in fp32; no master weights.
    let (base, adapters) = (494_032_768u64, 1_081_344u64);
    let bytes = |part: &str| step["parts"][part].as_u64().unwrap_or(0);
    assert_eq!(bytes("fixed weights") + bytes("resident layers"), 2 * base + 4 * adapters);
    assert_eq!(bytes("optimizer state"), 8 * adapters);
    let text = plan(session, &["flops", "--model", "qwen2.5-0.5b", "--r", "8"]);
    assert!(text.contains("self_attn.q_proj adapter"), "{text}");
}

fn every_question_is_answered_in_json(session: &Session) {
    let commands: [&[&str]; 7] = [
        &["parameters", "--model", "qwen2.5-7b", "--list"],
        &["flops", "--model", "llama-3-8b"],
        &["memory", "--model", "qwen2.5-7b", "--hardware", "h100", "--list"],
        &[
            "memory",
            "--model",
            "qwen2.5-7b",
            "--r",
            "16",
            "--targets",
            "all",
            "--hardware",
            "t4",
            "--dtype",
            "float32",
        ],
        &["fit", "--model", "qwen2.5-0.5b", "--budget", "8GiB", "--hardware", "h100"],
        &["time", "--parameters", "70B", "--tokens", "15T", "--ranks", "1024"],
        &["kv-cache", "--model", "llama-3-8b", "--budget", "80GB"],
    ];
    for command in commands {
        let text = plan(session, &[command, &["--json"]].concat());
        serde_json::from_str::<serde_json::Value>(&text)
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    }
}

fn a_plan_for_a_card(session: &Session) {
    let flags = ["--model", "qwen2.5-7b", "--budget", "10GiB", "--hardware", "4090", "--length", "2048"];
    expect![[r#"
        parameters     7,615,616,512 (14.2 GiB)
        budget         10.0 GiB
          for tensors  9.70 GiB
        4090 in bf16   1.200e14 FLOP/s of products, 1.008e12 B/s of memory, 2.500e10 B/s of loads
        step           adapters of rank 8 on q,k,v,o, 4 batches of 4 × 2,048 tokens

          plan                                                                             peak    step
          keep all                                                                     38.0 GiB  8.11 s  does not fit: 28.3 GiB too much
          recompute 27 of 28 layers from inputs in host memory                         16.2 GiB  11.7 s  does not fit: 6.52 GiB too much
          layers in host memory, ring 2, 1 resident, activations of 5 kept             9.68 GiB  11.1 s
        ▸ layers in host memory, ring 4, activations of 12 kept, 2 rows at a time      9.65 GiB  10.4 s  chosen: the fastest that fits
          layers in host memory, ring 2, activations of 7 kept, inputs in host memory  9.62 GiB  10.9 s
          layers in host memory, ring 1                                                5.89 GiB  15.8 s
          layers in host memory, ring 1, inputs in host memory                         4.46 GiB  15.8 s
          layers in host memory, ring 1, inputs in host memory, 1 row at a time        3.04 GiB  27.9 s

        at the peak                               backward of layer 27
          fixed weights                           2.03 GiB
          optimizer state                         38.5 MiB
          ring                                    1.74 GiB
          constant                                64.1 MiB
          kept activations                        5.32 GiB
          working memory                          472 MiB
        in host memory                            12.2 GiB
        tokens that hide loads, forward           4,800
        tokens that hide loads, backward, frozen  2,400
        more memory                               --budget 40551MiB: keep all, 8.11 s a step
        less memory                               --budget 10256MiB: layers in host memory, ring 2, activations of 7 kept, inputs in host memory, 10.9 s a step
        flags of finetune                         --offload host --ring 4 --set 'offload.keep=[16,17,18,19,20,21,22,23,24,25,26,27]' --micro-batch-size 2 --dtype bfloat16 --max-length 2048 --budget 10GiB
    "#]].assert_eq(&plan(session, &flags));
    let text = plan(session, &[&flags[..], &["--json"]].concat());
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    let variants = value["variants"].as_array().unwrap();
    for variant in variants {
        let parts = variant["parts"].as_array().unwrap().iter().map(|part| part["bytes"].as_u64().unwrap());
        assert_eq!(variant["peak_bytes"].as_u64(), Some(parts.sum::<u64>()), "{variant}");
    }
    let chosen = variants.iter().find(|variant| variant["variant"] == value["chosen"]).unwrap();
    assert!(chosen["fits"] == true && chosen["peak_bytes"].as_u64().unwrap() <= 10 << 30, "{chosen}");
    assert!(value["flags"].as_str().unwrap().starts_with("--offload host --ring "), "{value}");
}

fn a_budget_below_the_program_ends_like_one_in_which_nothing_fits(session: &Session) {
    let ended = session.run("plan --model qwen2.5-0.5b --budget 1MiB");
    assert_eq!(ended.status, 3, "{}", ended.err);
    assert!(ended.err.contains("error: a budget of 1.00 MiB is below the "), "{}", ended.err);
}

/// The data sheet has 67.5 TFLOP/s in fp32. Products are assumed to reach 0.7 of it, and 550 in bf16.
fn products_have_the_rate_of_their_dtype(session: &Session) {
    let flops = |flags: &str| {
        let words = format!("--model qwen2.5-0.5b --hardware h100 --json {flags}");
        let text = plan(session, &words.split_whitespace().collect::<Vec<_>>());
        serde_json::from_str::<serde_json::Value>(&text).unwrap()["flops"].as_f64().unwrap()
    };
    for (flags, expected) in [
        ("", 550e12),
        ("--dtype nf4", 550e12),
        ("--dtype float32", 0.7 * 67.5e12),
        ("--method full", 0.7 * 67.5e12),
        ("--method full --dtype bfloat16", 550e12),
        ("--method inference --dtype float32", 0.7 * 67.5e12),
        ("--method full --ranks 2", 0.7 * 67.5e12),
        ("--method full --flops 1e13", 1e13),
    ] {
        assert!((flops(flags) / expected - 1.0).abs() < 1e-9, "{flags}: {}", flops(flags));
    }
    for flags in ["--hardware t4", "--hardware v100 --dtype nf4", "--hardware t4 --method inference"] {
        let ended = session.run(&format!("plan --model qwen2.5-0.5b {flags}"));
        assert_eq!(ended.status, 1, "{}", ended.out);
        assert!(
            ended.err.contains("has no products in bf16; plan for float32, or for another GPU"),
            "{}",
            ended.err
        );
    }
}

fn a_step_has_all_its_batches(session: &Session) {
    let step = ["--model", "qwen2.5-0.5b", "--hardware", "h100"];
    for (command, flags, expected) in [
        ("", "", ", 4 batches of 4 × 512 tokens"),
        ("", "--accumulation 1", ", batch 4 × 512 tokens"),
        ("memory", "--accumulation 8 --batch-size 2", ", 8 batches of 2 × 512 tokens"),
        ("fit", "", ", 4 batches of 4 × 512 tokens"),
        ("", "--method inference", ", batch 1 × 512 tokens"),
    ] {
        let words = command.split_whitespace().chain(step).chain(flags.split_whitespace());
        let text = plan(session, &words.collect::<Vec<_>>());
        assert!(text.contains(expected), "{command} {flags}: {text}");
    }
}

fn layers_in_files_of_another_machine_need_a_rate(session: &Session) {
    let asked = "plan --model qwen2.5-7b --hardware rtx4090 --offload file";
    for flags in ["", " --method inference", " --method full --optimizer-on host"] {
        let ended = session.run(&format!("{asked}{flags}"));
        assert_eq!(ended.status, 1, "{flags}: {}", ended.out);
        assert!(
            ended.err.contains("give its bytes per second as --link, or --offload host"),
            "{}",
            ended.err
        );
    }
    let ended = session.run(&format!("{asked} --link 3GB"));
    assert_eq!(ended.status, 0, "{}", ended.err);
    assert!(ended.out.contains("▸ layers in files, ring 3"), "{}", ended.out);
}

fn plans_that_save_nothing_are_left_out(session: &Session) {
    for model in ["qwen2.5-0.5b", "qwen2.5-7b"] {
        let text = plan(session, &["--model", model, "--hardware", "h100"]);
        assert!(text.contains("▸ keep all") && !text.contains(" resident, "), "{text}");
        assert!(text.contains("captured steps ") && text.contains("graphs keep a pool of "), "{text}");
    }
}

fn a_plan_over_ranks(session: &Session) {
    let flags = [
        "--model",
        "qwen2.5-7b",
        "--method",
        "full",
        "--dtype",
        "bfloat16",
        "--hardware",
        "h100",
        "--ranks",
        "16",
        "--nodes",
        "2",
        "--network",
        "100GB",
        "--length",
        "2048",
    ];
    expect![[r#"
        parameters      7,615,616,512 (14.2 GiB)
        budget          59.6 GiB (80 % of the free memory) of each rank
          for tensors   57.8 GiB
        h100 in bf16    5.500e14 FLOP/s of products, 3.350e12 B/s of memory, 5.000e10 B/s of loads
        step            all weights are trained, 16 batches of 1 × 2,048 tokens over 16 ranks
        master weights  fp32

          plan                                     peak    step
        ▸ ZeRO-3 in 2 replicas, keep all       29.9 GiB  213 ms  chosen: the fastest that fits
          ZeRO-3 in 2 replicas, recompute all  22.6 GiB  233 ms
          ZeRO-3, recompute all                14.8 GiB  424 ms

        at the peak            head
          fixed weights        2.03 GiB
          optimizer state      14.2 GiB
          resident layers      1.52 GiB
          constant             1.36 GiB
          kept activations     7.71 GiB
          working memory       3.07 GiB
        bound by               compute
        sent by a rank         37.9 GiB
        waits for other ranks  42.0 ms
        less memory            --budget 24091MiB: ZeRO-3 in 2 replicas, recompute all, 233 ms a step
        to run it              ranks on GPUs have never run, so this is a prediction of the method; FRUGAL_TRY_NCCL=1 before `frugal launch` tries it
    "#]].assert_eq(&plan(session, &flags));
    let text = plan(session, &[&flags[..], &["--json"]].concat());
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    let variants = value["variants"].as_array().unwrap();
    // A replica on each machine is faster than one over both, which takes less.
    let divisions = variants
        .iter()
        .map(|variant| [&variant["zero_stage"], &variant["replicas"]].map(|one| one.as_u64().unwrap()));
    let divisions: Vec<_> = divisions.collect();
    assert!(divisions.contains(&[3, 1]) && divisions[0] == [3, 2], "{divisions:?}");
    // This program connects no ranks on GPUs.
    assert_eq!(value["flags"], serde_json::Value::Null);
    for variant in variants {
        let parts = variant["parts"].as_array().unwrap().iter().map(|part| part["bytes"].as_u64().unwrap());
        assert_eq!(variant["peak_bytes"].as_u64(), Some(parts.sum::<u64>()));
    }
}

fn divided_layers_gather_the_frozen_base_of_adapters_as_often_with_kept_activations(session: &Session) {
    let sent = |stage: &str, activations: &str| {
        let step = "--model qwen2.5-0.5b --hardware h100 --ranks 2 --json --zero-stage";
        let words = format!("{step} {stage} --activations {activations}");
        let text = plan(session, &words.split_whitespace().collect::<Vec<_>>());
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        let [variant] = &value["variants"].as_array().unwrap()[..] else { panic!("{value}") };
        assert_eq!(variant["zero_stage"].to_string(), stage);
        variant["sent_bytes"].as_f64().unwrap()
    };
    let (divided, recomputed) = (sent("3", "keep"), sent("3", "recompute"));
    assert_eq!(divided, recomputed);
    // Two thirds of a gigabyte: half of each of 24 layers in bf16, 45 loads of a layer with 3 slots; and the adapters.
    let layers = 2.0 * 357_897_216.0;
    let share = divided / (0.5 * 45.0 / 24.0 * layers);
    assert!((1.0..1.02).contains(&share), "{share}");
    assert!(sent("2", "keep") < 0.01 * layers);
}

fn ranks_on_a_cpu_have_a_budget_each_and_flags_to_run_them(session: &Session) {
    let step = "plan --model qwen2.5-0.5b --method full --dtype bfloat16 --ranks 2 --length 256";
    let ended = session.run(&format!("{step} --budget 3GiB"));
    assert_eq!(ended.status, 0, "{}", ended.err);
    assert!(
        ended.out.contains("3.00 GiB of each rank") && ended.out.contains("over 2 ranks"),
        "{}",
        ended.out
    );
    let flags = ended.out.lines().find_map(|line| line.strip_prefix("flags of finetune")).unwrap().trim();
    assert!(
        flags.starts_with("--zero-stage 3 --offload file --optimizer-on host --batch 1 --accumulation 2"),
        "{flags}"
    );
    for (wrong, why) in [
        ("--zero-stage 2", "--zero-stage is for several ranks; give their number as --ranks"),
        ("--ranks 4 --replicas 3", "--ranks 4 are not a multiple of --replicas 3"),
        (
            "--ranks 4 --sequence-parallel-size 8",
            "--ranks 4 are not a multiple of --sequence-parallel-size 8",
        ),
        ("--ranks 3 --nodes 2 --network 10GB", "--ranks 3 are not a multiple of --nodes 2"),
        ("--ranks 2 --method inference", "--ranks applies to training only"),
    ] {
        let ended = session.run(&format!("plan --model qwen2.5-0.5b --hardware h100 {wrong}"));
        assert!(ended.status == 1 && ended.err.contains(why), "{wrong}: {}", ended.err);
    }
}
