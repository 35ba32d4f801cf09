//! Models and data sets by name, from the test's own small hub.
#![cfg(feature = "hub")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Barrier, Mutex};

use crate::hub_server::{COMMIT, Server};
use expect_test::expect;
use models::hub::{self, Hub, Progress, RepositoryKind};
use models::hugging_face::{self, Folder, SHARD_BYTES};
use models::{DecoderConfig, Llama};
use tch::{Device, Kind};

/// The hub's contents: one model in one file, another in shards, a data set.
fn repositories() -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    let config = DecoderConfig { max_position_embeddings: 32, ..DecoderConfig::qwen2(40, 16, 24, 1, 2) };
    let model = Llama::new(&config, (Kind::BFloat16, Device::Cpu)).unwrap();
    for (name, limit) in [("whole", SHARD_BYTES), ("shards", 2_500)] {
        let folder = root.path().join("models/tiny").join(name);
        hugging_face::save(&model, &folder, limit).unwrap();
        fs::write(folder.join("tokenizer.json"), "{}").unwrap();
        fs::write(folder.join("pytorch_model.bin"), "another framework's").unwrap();
        fs::create_dir(folder.join("original")).unwrap();
        fs::write(folder.join("original/consolidated.safetensors"), "not for us").unwrap();
    }
    fs::create_dir_all(root.path().join("models/tiny/none")).unwrap();
    fs::write(root.path().join("models/tiny/none/README.md"), "nothing").unwrap();
    let data = root.path().join("datasets/tiny/sums/main");
    fs::create_dir_all(&data).unwrap();
    fs::write(data.join("train-00000.jsonl"), "{}\n").unwrap();
    fs::write(data.join("test-00000.jsonl"), "{}\n{}\n").unwrap();
    root
}

struct World {
    server: Server,
    cache: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        Self { server: Server::start(repositories()), cache: tempfile::tempdir().unwrap() }
    }

    fn hub(&self, offline: bool) -> Hub {
        Hub {
            endpoint: Some(self.server.address()),
            cache: Some(self.cache.path().to_owned()),
            offline,
            ..Hub::default()
        }
    }

    /// An error's message, without this run's paths.
    fn words(&self, error: &models::Error) -> String {
        let text = error.to_string().replace(&self.server.address(), "HUB");
        text.replace(&self.cache.path().display().to_string(), "CACHE")
    }
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The names in the folder of blobs that a snapshot leads to.
fn blobs(snapshot: &Path) -> Vec<String> {
    names(&snapshot.join("../../blobs"))
}

#[test]
fn a_model_is_fetched_once_and_found_offline() {
    let world = World::new();
    for (name, files) in [("tiny/whole", 3), ("tiny/shards", 6)] {
        let seen: Arc<Mutex<Vec<Progress>>> = Arc::default();
        let note = Arc::clone(&seen);
        let hub = Hub {
            progress: Some(Arc::new(move |progress| note.lock().unwrap().push(progress))),
            ..world.hub(false)
        };
        let path = hub.fetch(name, None).unwrap();
        assert!(path.ends_with(format!("snapshots/{COMMIT}")), "{}", path.display());
        assert_eq!(names(&path).len(), files, "{:?}", names(&path));
        assert!(path.starts_with(world.cache.path().join(format!("models--{}", name.replace('/', "--")))));
        let last = *seen.lock().unwrap().last().unwrap();
        let bytes: u64 = names(&path).iter().map(|name| fs::metadata(path.join(name)).unwrap().len()).sum();
        assert_eq!((last.bytes, last.total), (bytes, bytes));

        let model = Folder::open(&path).unwrap().load(None, Device::Cpu).unwrap();
        assert_eq!(model.decoder_config().hidden_size, 16);

        let before = world.server.bodies();
        assert_eq!(hub.fetch(name, None).unwrap(), path);
        assert_eq!(world.server.bodies(), before, "no file is fetched again");
        let requests = world.server.requests();
        assert_eq!(world.hub(true).fetch(name, None).unwrap(), path);
        assert_eq!(world.hub(true).fetch(name, Some(COMMIT)).unwrap(), path);
        assert_eq!(world.server.requests(), requests, "offline is without the network");
    }
}

#[test]
fn a_revision_is_a_snapshot_of_its_own_name() {
    let world = World::new();
    let path = world.hub(false).fetch("tiny/whole", Some("v1.0")).unwrap();
    assert_eq!(world.hub(true).fetch("tiny/whole", Some("v1.0")).unwrap(), path);
    let error = world.hub(true).fetch("tiny/whole", None).unwrap_err();
    expect!["`tiny/whole`: the cache has no model of this name at revision `main`, and the network is switched off (offline, or HF_HUB_OFFLINE); fetch it once with the network"].assert_eq(&world.words(&error));
    let error = world.hub(false).fetch("tiny/whole", Some("missing")).unwrap_err();
    expect!["`tiny/whole`: the hub has no model of this name at revision `missing`, or it is private or gated (then set HF_TOKEN)"].assert_eq(&world.words(&error));
}

#[test]
fn files_of_a_data_set_are_fetched_by_pattern() {
    let world = World::new();
    let fetch = |patterns: &[&str], offline| {
        world.hub(offline).fetch_files(RepositoryKind::Dataset, "tiny/sums", None, patterns)
    };
    let path = fetch(&["main/train-*.jsonl"], false).unwrap();
    assert_eq!(names(&path.join("main")), ["train-00000.jsonl"]);
    assert_eq!(fetch(&["main/train-*.jsonl"], true).unwrap(), path);
    let error = fetch(&["main/test-*.jsonl"], true).unwrap_err();
    expect!["`tiny/sums`: the cache's copy has no `main/test-*.jsonl`; fetch it once with the network; it has main/train-00000.jsonl"].assert_eq(&world.words(&error));
    let error = fetch(&["main/train-*.jsonl", "socratic/*"], false).unwrap_err();
    expect!["`tiny/sums`: the repository has no `socratic/*`; it has main/test-00000.jsonl, main/train-00000.jsonl"].assert_eq(&world.words(&error));
}

#[test]
fn missing_repositories_and_files_are_clear_errors() {
    let world = World::new();
    let error = world.hub(false).fetch("tiny/absent", None).unwrap_err();
    expect!["`tiny/absent`: the hub has no model of this name at revision `main`, or it is private or gated (then set HF_TOKEN)"].assert_eq(&world.words(&error));
    let error = world.hub(true).fetch("tiny/whole", None).unwrap_err();
    expect!["`tiny/whole`: the cache has no model of this name at revision `main`, and the network is switched off (offline, or HF_HUB_OFFLINE); fetch it once with the network"].assert_eq(&world.words(&error));
    let error = world.hub(false).fetch("tiny/none", None).unwrap_err();
    expect!["`tiny/none`: the repository has no `config.json`; it has README.md"]
        .assert_eq(&world.words(&error));
    for revision in ["", "../x", "/etc", "a/../../b"] {
        for offline in [false, true] {
            let error = world.hub(offline).fetch("tiny/whole", Some(revision)).unwrap_err().to_string();
            assert!(error.contains("is not a revision; expected a branch"), "{revision}: {error}");
        }
    }
    for name in ["", "/", "a/b/c", "../x", "a//b", "a b", "tiny/..", "/etc"] {
        let error = world.hub(false).fetch(name, None).unwrap_err().to_string();
        assert!(error.contains("not a repository name; expected `owner/name`"), "{name}: {error}");
    }
}

#[test]
fn an_interrupted_download_resumes() {
    for ranges in [true, false] {
        let world = World::new();
        world.server.break_off("model.safetensors");
        let error = world.hub(false).fetch("tiny/whole", None).unwrap_err().to_string();
        assert!(error.starts_with("`tiny/whole`: `model.safetensors` was interrupted after "), "{error}");
        assert!(error.ends_with("; try again, or work offline from the cache"), "{error}");
        let error = world.hub(true).fetch("tiny/whole", None).unwrap_err();
        expect!["`tiny/whole`: the cache has no model of this name at revision `main`, and the network is switched off (offline, or HF_HUB_OFFLINE); fetch it once with the network"].assert_eq(&world.words(&error));

        world.server.mend();
        if !ranges {
            world.server.forget_ranges();
        }
        let sent = world.server.sent();
        let path = world.hub(false).fetch("tiny/whole", None).unwrap();
        let sent = world.server.sent() - sent;
        let whole = fs::read(path.join("model.safetensors")).unwrap();
        let tokenizer = fs::metadata(path.join("tokenizer.json")).unwrap().len() as usize;
        let expected = if ranges { whole.len() - whole.len() / 2 } else { whole.len() };
        assert_eq!(sent, expected + tokenizer, "ranges {ranges}: what the cache had is not sent again");
        assert_eq!(whole, fs::read(world.server.file("models/tiny/whole/model.safetensors")).unwrap());
        assert!(!blobs(&path).iter().any(|name| name.ends_with(".part")), "{:?}", blobs(&path));
    }
}

#[test]
fn wrong_content_is_not_cached() {
    // A proxy that answers with its own complete page.
    let world = World::new();
    world.server.replace("model.safetensors", "<html>please log in</html>");
    let error = world.hub(false).fetch("tiny/whole", None).unwrap_err();
    world.server.mend();
    let path = world.hub(false).fetch("tiny/whole", None).unwrap();
    assert!(Folder::open(&path).unwrap().load(None, Device::Cpu).is_ok());
    let whole = fs::metadata(path.join("model.safetensors")).unwrap().len();
    expect!["`tiny/whole`: `model.safetensors` has 26 bytes instead of WHOLE; the download is deleted, fetch it again"]
        .assert_eq(&world.words(&error).replace(&whole.to_string(), "WHOLE"));
}

/// Without the digests, which depend on the weights.
fn without_digests(text: &str) -> String {
    let words: Vec<&str> =
        text.split(' ').map(|word| if word.contains('…') { "DIGEST" } else { word }).collect();
    words.join(" ")
}

#[test]
fn wrong_content_of_the_right_size_is_not_cached() {
    // Corrupt from the start; only in the part before the connection broke; only in the part after it.
    for (before, after) in [(true, true), (true, false), (false, true)] {
        let world = World::new();
        if before {
            world.server.corrupt("model.safetensors");
        }
        if before != after {
            world.server.break_off("model.safetensors");
            world.hub(false).fetch("tiny/whole", None).unwrap_err();
            world.server.mend();
            if after {
                world.server.corrupt_last("model.safetensors");
            }
        }
        let error = world.hub(false).fetch("tiny/whole", None).unwrap_err();
        expect!["`tiny/whole`: `model.safetensors` has the SHA-256 DIGEST but the hub has DIGEST the download is deleted, fetch it again"]
            .assert_eq(&without_digests(&world.words(&error)));
        let blobs = world.cache.path().join("models--tiny--whole/blobs");
        assert!(!names(&blobs).iter().any(|name| name.ends_with(".part")), "{:?}", names(&blobs));
        world.hub(true).fetch("tiny/whole", None).unwrap_err();
        world.server.mend();
        let path = world.hub(false).fetch("tiny/whole", None).unwrap();
        assert!(Folder::open(&path).unwrap().load(None, Device::Cpu).is_ok());
    }
}

#[test]
fn redirects_of_a_hub_are_followed() {
    let world = World::new();
    world.server.redirect();
    let path = world.hub(false).fetch("tiny/shards", None).unwrap();
    assert!(Folder::open(&path).unwrap().load(None, Device::Cpu).is_ok());
}

/// Concurrent fetches into one cache; a reader of the revision's name never sees an incomplete one.
#[test]
fn concurrent_fetches_share_one_cache() {
    let world = World::new();
    let (first, barrier) = (world.hub(false).fetch("tiny/whole", None).unwrap(), Barrier::new(4));
    let reference = world.cache.path().join("models--tiny--whole/refs/main");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                barrier.wait();
                for _ in 0..20 {
                    assert_eq!(world.hub(false).fetch("tiny/whole", None).unwrap(), first);
                    assert_eq!(fs::read_to_string(&reference).unwrap(), COMMIT);
                    // Another process must still find it.
                    let _ = fs::remove_file(first.join("tokenizer.json"));
                }
            });
        }
    });
    world.hub(false).fetch("tiny/whole", None).unwrap();
    assert!(Folder::open(&first).unwrap().load(None, Device::Cpu).is_ok());
    assert_eq!(names(reference.parent().unwrap()), ["main"]);
}

#[test]
fn truncated_and_missing_cache_files_are_fetched_again() {
    let world = World::new();
    let path = world.hub(false).fetch("tiny/whole", None).unwrap();
    let weights = path.join("model.safetensors");
    let whole = fs::read(&weights).unwrap();
    let blob = fs::canonicalize(&weights).unwrap();
    assert_ne!(blob, weights, "a snapshot leads to blobs");
    let damages: [&dyn Fn(); 3] = [
        &|| fs::write(&blob, &whole[..9]).unwrap(),
        &|| fs::remove_file(&blob).unwrap(),
        // A part that is longer than the file, and no file.
        &|| {
            fs::remove_file(&blob).unwrap();
            fs::write(blob.with_extension("part"), [&whole[..], b"more"].concat()).unwrap();
        },
    ];
    for damage in damages {
        damage();
        assert_eq!(world.hub(false).fetch("tiny/whole", None).unwrap(), path);
        assert_eq!(fs::read(&weights).unwrap(), whole);
    }
    // Only the link is missing: the blob exists, and nothing is downloaded.
    fs::remove_file(&weights).unwrap();
    let bodies = world.server.bodies();
    world.hub(false).fetch("tiny/whole", None).unwrap();
    assert_eq!((fs::read(&weights).unwrap(), world.server.bodies()), (whole, bodies));
}

#[test]
fn an_incomplete_model_in_the_cache_is_refused() {
    let world = World::new();
    let path = world.hub(false).fetch("tiny/shards", None).unwrap();
    let shard = names(&path).into_iter().find(|name| name.contains("-00002-of")).unwrap();
    fs::remove_file(path.join(&shard)).unwrap();
    let error = world.hub(true).fetch("tiny/shards", None).unwrap_err();
    let error = world.words(&error);
    assert!(error.contains("shards are missing: model-00002-of-00003.safetensors"), "{error}");
    assert!(error.ends_with("; fetch it once with the network"), "{error}");
    world.hub(false).fetch("tiny/shards", None).unwrap();
    assert!(path.join(shard).is_file());
}

#[test]
fn a_folder_takes_precedence_over_a_repository() {
    let world = World::new();
    let here = tempfile::tempdir().unwrap();
    let text = here.path().display().to_string();
    assert_eq!(world.hub(false).resolve(&text, None).unwrap(), here.path());
    assert!(world.hub(false).resolve("tiny/whole", None).unwrap().starts_with(world.cache.path()));
    let error = world.hub(false).resolve("tiny/absent", None).unwrap_err();
    expect!["`tiny/absent`: no folder has that name, and on the hub: the hub has no model of this name at revision `main`, or it is private or gated (then set HF_TOKEN)"].assert_eq(&world.words(&error));
    for name in ["no/such.gguf", "/no/such.GGUF"] {
        let error = world.hub(false).resolve(name, None).unwrap_err().to_string();
        assert_eq!(error, format!("`{name}`: there is no such file"));
    }
    let error = world.hub(false).resolve("./no/such/folder", None).unwrap_err();
    expect!["`./no/such/folder`: there is no such folder; if it was moved, move it back or link the name to its new place (a run takes --set model.name=PATH, too)"].assert_eq(&world.words(&error));
}

/// Runs itself again with another environment, because a process's own must not change while threads run.
#[test]
fn environment_variables_apply() {
    if std::env::var_os("FRUGAL_TEST_CHILD").is_some() {
        match hub::fetch("tiny/whole", None, false) {
            Ok(path) => eprintln!("FOUND {}", path.display()),
            Err(error) => eprintln!("REFUSED {error}"),
        }
        return;
    }
    let world = World::new();
    let home = world.cache.path().join("home");
    let run = |variables: &[(&str, &Path)]| {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "hub::environment_variables_apply", "--nocapture"])
            .env("FRUGAL_TEST_CHILD", "1")
            .env("HF_ENDPOINT", world.server.address())
            .env("HF_HOME", &home)
            .env_remove("HF_HUB_CACHE")
            .env_remove("HUGGINGFACE_HUB_CACHE")
            .env_remove("HF_HUB_OFFLINE")
            .envs(variables.iter().copied())
            .output()
            .unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        let line = text.lines().find(|line| line.contains("FOUND") || line.contains("REFUSED"));
        line.unwrap_or_else(|| panic!("{text}")).to_owned()
    };
    let offline = ("HF_HUB_OFFLINE", Path::new("1"));
    assert!(run(&[offline]).contains("REFUSED"), "nothing is in the cache yet");
    let found = run(&[]);
    assert!(found.contains(&format!("FOUND {}", home.join("hub").display())), "{found}");
    let requests = world.server.requests();
    assert_eq!(run(&[offline]), found);
    assert_eq!(world.server.requests(), requests);
    let other: PathBuf = world.cache.path().join("other");
    let found = run(&[("HF_HUB_CACHE", &other)]);
    assert!(found.contains(&format!("FOUND {}", other.display())), "{found}");
}
