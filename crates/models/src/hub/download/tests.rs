use super::*;

#[test]
fn metadata_of_other_writers_is_accepted() {
    let (commit, sha256) = ("0123456789abcdef0123456789abcdef01234567", "ab".repeat(32));
    let good = serde_json::json!({
        "id": "tiny/whole", "sha": commit,
        "siblings": [
            { "rfilename": "config.json", "size": 40, "blobId": commit },
            {
                "rfilename": "original/model.safetensors", "size": 4000, "blobId": commit,
                "lfs": { "size": 4000, "sha256": sha256, "pointerSize": 132 },
            },
        ],
    });
    testing::fuzz::run("the hub's description", |random| {
        let text = testing::fuzz::json(random, &good);
        let read = testing::fuzz::within(400 * text.len() + (64 << 10), || Description::read(&text));
        let Ok(description) = read else { return testing::fuzz::Outcome::Refused };
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(json["sha"], *description.sha);
        let siblings = json["siblings"].as_array().unwrap();
        assert_eq!(siblings.len(), description.siblings.len());
        for file in &description.siblings {
            let Some(chosen) = file.chosen() else { continue };
            // Nothing is written outside the cache, or under a name that is not a digest.
            assert!(chosen.blob.chars().all(|c| c.is_ascii_hexdigit()), "{}", chosen.blob);
            assert!(!chosen.path.starts_with('/') && !chosen.path.split('/').any(|part| part == ".."));
            let theirs = siblings.iter().find(|theirs| theirs["rfilename"] == *chosen.path).unwrap();
            assert_eq!(theirs["size"], chosen.size);
            assert_eq!(theirs["lfs"]["sha256"].as_str(), chosen.sha256);
        }
        testing::fuzz::Outcome::Read
    });
}

/// The client checks each redirect as it checks the first address.
#[test]
fn only_a_hub_whose_own_address_is_http_is_read_without_encryption() {
    let http = |endpoint: &str| Http::new(&Hub { endpoint: Some(endpoint.to_owned()), ..Hub::default() });
    // Nobody listens there: a refused address is never asked.
    let elsewhere = "http://127.0.0.1:9/blob";
    for endpoint in ["https://hub.example", "HTTPS://hub.example/", "hub.example"] {
        let http = http(endpoint);
        let error = http.get(elsewhere, 0).unwrap_err();
        assert!(matches!(error, ureq::Error::RequireHttpsOnly(_)), "{endpoint}: {error}");
        let cache = tempfile::tempdir().unwrap();
        let hub = Hub { cache: Some(cache.path().to_owned()), ..Hub::default() };
        let (kind, name, revision) = (RepositoryKind::Model, "tiny/whole", "main");
        let repository = CachedRepository::new(&hub, kind, name, revision).unwrap();
        let request = Request { kind, name, revision, repository, http };
        let words = request.failed(&error).to_string();
        let expected =
            "redirects to http://127.0.0.1:9/blob, which is not encrypted, so nothing was fetched from there";
        assert!(words.contains(expected), "{words}");
    }
    for endpoint in ["http://127.0.0.1:9", "HTTP://127.0.0.1:9/"] {
        let error = http(endpoint).get(elsewhere, 0).unwrap_err();
        assert!(!matches!(error, ureq::Error::RequireHttpsOnly(_)), "{endpoint}: {error}");
    }
}

#[test]
fn addresses_are_encoded_byte_by_byte() {
    for (text, also, expected) in [
        ("main/train-0.parquet", "/", "main/train-0.parquet"),
        ("refs/pr/1", "", "refs%2Fpr%2F1"),
        ("a b?#%ä", "/", "a%20b%3F%23%25%C3%A4"),
    ] {
        assert_eq!(encoded(text, also), expected);
    }
}
