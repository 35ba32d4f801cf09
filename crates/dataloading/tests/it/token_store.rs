//! A store returns what was written, and refuses everything else.

use std::path::Path;

use dataloading::token_store::{TokenStore, VERSION, Writer, WriterConfig};
use dataloading::{Result, Samples};
use expect_test::{Expect, expect};
use proptest::prelude::*;

fn write(path: &Path, documents: &[Vec<u32>], options: &WriterConfig) -> Result<TokenStore> {
    let mut writer = Writer::create(path, options)?;
    for document in documents {
        writer.push(document)?;
    }
    writer.finish()
}

fn all(store: &TokenStore) -> Result<Vec<Vec<u32>>> {
    let read = |index| {
        let mut ids = Vec::new();
        store.read(index, &mut ids).map(|()| ids)
    };
    (0..store.len()).map(read).collect()
}

/// Three documents in two shards of 16-bit ids.
fn example(path: &Path) -> TokenStore {
    let documents = [vec![1, 2, 3], vec![], vec![4, 5, 6, 7]];
    write(path, &documents, &WriterConfig { shard_bytes: 40, ..WriterConfig::new(100) }).unwrap()
}

/// Corrects the last 16 bytes of a header after a deliberate change.
fn sign(header: &mut [u8]) {
    use sha2::{Digest, Sha256};
    let check = Sha256::digest(&header[..112]);
    header[112..128].copy_from_slice(&check[..16]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_documents_round_trip(
        documents in prop::collection::vec(prop::collection::vec(0u32..70_000, 0..40), 0..30),
        narrow in any::<bool>(),
        shard_bytes in 1u64..400,
        part in (0usize..50, 0usize..50),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        let vocabulary = if narrow { 65_536 } else { 70_000 };
        let documents: Vec<Vec<u32>> =
            documents.into_iter().map(|d| d.into_iter().map(|id| id % vocabulary).collect()).collect();
        let options = WriterConfig { shard_bytes, ..WriterConfig::new(vocabulary as usize) };
        let written = write(&path, &documents, &options).unwrap();
        let store = TokenStore::open(&path).unwrap();
        prop_assert_eq!(store.fingerprint(), written.fingerprint());
        store.verify().unwrap();
        prop_assert_eq!(&all(&store).unwrap(), &documents);
        prop_assert_eq!(store.tokens(), documents.iter().map(|d| d.len() as u64).sum::<u64>());
        for (index, document) in documents.iter().enumerate() {
            prop_assert_eq!(store.length(index), document.len());
            let ids = store.document(index).unwrap();
            prop_assert_eq!(&ids.iter().collect::<Vec<_>>(), document);
            prop_assert_eq!(ids.get(document.len()), None);
            if let Some(half) = ids.slice(document.len() / 2..document.len()) {
                prop_assert_eq!(&half.iter().collect::<Vec<_>>(), &document[document.len() / 2..]);
            }
            // Like sequences in memory, also for ranges beyond the end and reversed ranges.
            for (start, end) in [(0, 3), (1, 2), (part.0, part.1), (2, usize::MAX), (usize::MAX, usize::MAX)] {
                let (mut ours, mut theirs) = (vec![9], vec![9]);
                store.read_part(index, start..end, &mut ours).unwrap();
                documents.read_part(index, start..end, &mut theirs).unwrap();
                prop_assert_eq!(ours, theirs, "{}..{}", start, end);
            }
        }
        // A shard is full at its maximum size, unless a single document exceeds it.
        let width = if narrow { 2 } else { 4 };
        for shard in 0..store.shards() {
            let bytes = std::fs::metadata(path.join(format!("{shard:05}.tokens"))).unwrap().len() - 128;
            let longest = documents.iter().map(|d| d.len() as u64).max().unwrap_or(0) * width + 16;
            prop_assert!(bytes <= shard_bytes.max(longest) + 7, "{bytes} of {shard_bytes}");
        }
    }

    #[test]
    fn a_flipped_bit_is_found_and_nothing_panics(at in any::<prop::sample::Index>(), bit in 0u8..8, signed in any::<bool>()) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        example(&path);
        let shard = path.join("00000.tokens");
        let mut bytes = std::fs::read(&shard).unwrap();
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        // With a corrected header checksum the other checks must find the damage; bytes that only that checksum covers are
        // not tested.
        if signed {
            sign(&mut bytes[..128]);
        }
        std::fs::write(&shard, &bytes).unwrap();
        if let Ok(store) = TokenStore::open(&path) {
            for index in 0..store.len() {
                let length = store.length(index);
                if let Ok(ids) = store.document(index) {
                    prop_assert_eq!(ids.len(), length);
                }
            }
            let _ = all(&store);
            // A larger vocabulary with a correct checksum is not detectable; a flip in the header's own checksum is undone
            // by correcting it.
            let harmless = signed && ((40..48).contains(&at) || (112..128).contains(&at));
            prop_assert!(store.verify().is_err() || harmless, "byte {at}, bit {bit}");
        }
    }
}

#[test]
fn every_truncation_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    assert_eq!(example(&path).shards(), 2);
    for shard in ["00000.tokens", "00001.tokens"].map(|name| path.join(name)) {
        let bytes = std::fs::read(&shard).unwrap();
        for length in 0..bytes.len() {
            std::fs::write(&shard, &bytes[..length]).unwrap();
            assert!(TokenStore::open(&path).is_err(), "{length} of {} bytes", bytes.len());
        }
        std::fs::write(&shard, [&bytes[..], &[0; 8]].concat()).unwrap();
        assert!(TokenStore::open(&path).is_err());
        std::fs::write(&shard, &bytes).unwrap();
        TokenStore::open(&path).unwrap().verify().unwrap();
    }
}

/// Returns the error of opening and verifying the example after `damage`.
fn check_damage(damage: impl FnOnce(&Path), expected: Expect) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    example(&path);
    damage(&path);
    let error = TokenStore::open(&path).and_then(|store| store.verify()).unwrap_err().to_string();
    expected.assert_eq(&error.replace(&format!("{}/", folder.path().display()), ""));
}

fn alter(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = std::fs::read(path).unwrap();
    change(&mut bytes);
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn damage_is_reported() {
    let first = |path: &Path| path.join("00000.tokens");
    check_damage(
        |path| alter(&first(path), |b| b.truncate(140)),
        expect![
            "store/00000.tokens: truncated: 140 bytes, but its header says 160; copy or write the store again"
        ],
    );
    check_damage(
        |path| alter(&first(path), |b| b.truncate(50)),
        expect!["store/00000.tokens: truncated within the header: 50 of 128 bytes; copy it again"],
    );
    check_damage(
        |path| std::fs::write(first(path), b"PK\x03\x04 something else").unwrap(),
        expect!["store/00000.tokens: not a shard of a token store: it does not start with FRUGALTK"],
    );
    check_damage(
        |path| std::fs::write(first(path), b"").unwrap(),
        expect!["store/00000.tokens: the file is empty; copy or write the store again"],
    );
    check_damage(
        |path| std::fs::write(path.join("00001.tokens"), b"").unwrap(),
        expect!["store/00001.tokens: the file is empty; copy or write the store again"],
    );
    check_damage(
        |path| std::fs::remove_file(first(path)).unwrap(),
        expect![
            "store: not a token store: it has no 00000.tokens; write one with token_store::tokenize_to_store"
        ],
    );
    check_damage(
        |path| std::fs::remove_file(path.join("00001.tokens")).unwrap(),
        expect!["store/00001.tokens: this shard of 2 is missing; copy the whole folder again"],
    );
    check_damage(
        |path| std::fs::remove_dir_all(path).unwrap(),
        expect!["store: there is no such folder; pass the folder of a store"],
    );
    check_damage(
        |path| alter(&first(path), |b| b[8..12].copy_from_slice(&(VERSION + 1).to_le_bytes())),
        expect![
            "store/00000.tokens: format version 2, but this program reads up to 1; update the program, or write the store with it"
        ],
    );
    check_damage(
        |path| alter(&first(path), |b| b[24] ^= 1),
        expect![
            "store/00000.tokens: the header is damaged (its checksum differs); copy or write the store again"
        ],
    );
    check_damage(
        |path| alter(&first(path), |b| b[128] ^= 1),
        expect![
            "store/00000.tokens: the content is damaged (its checksum differs); copy or write the store again"
        ],
    );
    check_damage(
        |path| {
            std::fs::copy(first(path), path.join("00001.tokens")).unwrap();
        },
        expect!["store/00001.tokens: this shard is of another store; copy the whole folder again"],
    );
}

#[test]
fn damaged_offsets_are_refused_at_the_document() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    write(&path, &[vec![1, 2], vec![3]], &WriterConfig::new(10)).unwrap();
    // 128 bytes of header, 8 of ids, then offsets 0, 2, 3.
    alter(&path.join("00000.tokens"), |b| b[144] = 200);
    let store = TokenStore::open(&path).unwrap();
    let error = store.document(0).unwrap_err().to_string();
    assert!(
        error.ends_with(
            "document 0: its offsets are damaged (0..200 of 3 tokens); copy or write the store again"
        ),
        "{error}"
    );
    assert_eq!(store.length(0), 0);
    assert!(store.read(1, &mut Vec::new()).is_err());
    assert!(store.document(2).unwrap_err().to_string().ends_with("document 2: there are 2, numbered from 0"));
}

#[test]
fn an_id_beyond_the_vocabulary_is_refused_and_the_writer_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let mut writer = Writer::create(&path, &WriterConfig::new(10)).unwrap();
    writer.push(&[9]).unwrap();
    let error = writer.push(&[1, 10]).unwrap_err().to_string();
    assert!(
        error.ends_with(
            "document 1: id 10, but the vocabulary of the store is 10; use the vocabulary of the tokenizer that made the ids"
        ),
        "{error}"
    );
    let store = writer.finish().unwrap();
    assert_eq!(all(&store).unwrap(), [[9]]);
}

#[test]
fn the_width_follows_the_vocabulary() {
    for (vocabulary, bytes) in [(1, 2), (65_536, 2), (65_537, 4), (1 << 32, 4)] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        let largest = (vocabulary - 1) as u32;
        let store = write(&path, &[vec![largest; 8]], &WriterConfig::new(vocabulary)).unwrap();
        assert_eq!(all(&store).unwrap(), [[largest; 8]]);
        let size = std::fs::metadata(path.join("00000.tokens")).unwrap().len();
        assert_eq!(size, 128 + 8 * bytes + 16);
    }
    let folder = tempfile::tempdir().unwrap();
    for vocabulary in [0, (1 << 32) + 1] {
        assert!(Writer::create(&folder.path().join("store"), &WriterConfig::new(vocabulary)).is_err());
    }
}

#[test]
fn an_interrupted_write_leaves_no_store_and_the_next_one_cleans_up() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let partial = folder.path().join(".store.partial");
    let mut writer =
        Writer::create(&path, &WriterConfig { shard_bytes: 40, ..WriterConfig::new(10) }).unwrap();
    (0..20).for_each(|_| writer.push(&[1, 2, 3]).unwrap());
    let leftovers = std::fs::read_dir(&partial).unwrap().count();
    assert!(leftovers > 3, "{leftovers} files");
    let second = Writer::create(&path, &WriterConfig::new(10)).unwrap_err().to_string();
    assert!(second.ends_with("another process is writing this store; wait for it, or choose another name"));
    // A killed process leaves the files without a lock.
    let kept = folder.path().join("kept");
    std::fs::rename(&partial, &kept).unwrap();
    drop(writer);
    std::fs::rename(&kept, &partial).unwrap();
    assert!(!path.exists());
    let store = write(&path, &[vec![5]], &WriterConfig::new(10)).unwrap();
    assert_eq!((store.shards(), all(&store).unwrap()), (1, vec![vec![5]]));
    assert_eq!(std::fs::read_dir(&path).unwrap().count(), 1);
    assert!(!partial.exists());
    // Dropping a writer removes its files.
    drop(Writer::create(&folder.path().join("other"), &WriterConfig::new(10)).unwrap());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn a_store_is_replaced_only_when_asked_and_only_if_it_is_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let old = write(&path, &[vec![1]], &WriterConfig::new(10)).unwrap();
    let error = Writer::create(&path, &WriterConfig::new(10)).unwrap_err().to_string();
    assert!(error.ends_with("the path exists; remove it, choose another name, or allow replacement"));
    let replace = WriterConfig { replace: true, ..WriterConfig::new(10) };
    let new = write(&path, &[vec![2], vec![3]], &replace).unwrap();
    // A process that has the former store open can still read it.
    assert_eq!((all(&old).unwrap(), all(&new).unwrap()), (vec![vec![1]], vec![vec![2], vec![3]]));
    assert_ne!(old.fingerprint(), new.fingerprint());
    let foreign = folder.path().join("photographs");
    std::fs::create_dir(&foreign).unwrap();
    let error = Writer::create(&foreign, &replace).unwrap_err().to_string();
    assert!(
        error.ends_with(
            "the path exists and is not a token store, so it is not replaced; choose another name"
        ),
        "{error}"
    );
}

#[test]
fn an_empty_store_is_valid() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("deep/er/store");
    let store = write(&path, &[], &WriterConfig::new(10)).unwrap();
    store.verify().unwrap();
    assert!(store.is_empty());
    assert_eq!((store.tokens(), store.shards(), store.length(0)), (0, 1, 0));
}

#[test]
fn a_replaced_store_is_unchanged_for_open_readers() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let old = example(&path);
    let options = WriterConfig { replace: true, ..WriterConfig::new(100) };
    let new = write(&path, &[vec![50; 9]], &options).unwrap();
    assert_eq!(all(&old).unwrap(), [vec![1, 2, 3], vec![], vec![4, 5, 6, 7]]);
    old.verify().unwrap();
    assert_eq!(all(&new).unwrap(), [vec![50; 9]]);
    assert_ne!(TokenStore::open(&path).unwrap().fingerprint(), old.fingerprint());
}

/// The state of a process that ended between the two renames.
#[test]
fn a_store_with_an_interrupted_replacement_is_recovered() {
    let folder = tempfile::tempdir().unwrap();
    let (path, aside) = (folder.path().join("store"), folder.path().join(".store.replaced"));
    write(&path, &[vec![1], vec![2]], &WriterConfig::new(10)).unwrap();
    let interrupt = || std::fs::rename(&path, &aside).unwrap();
    interrupt();
    let error = TokenStore::open(&path).unwrap_err().to_string();
    expect![
        "store: its replacement was interrupted, and the former store is in .store.replaced; rename it, or write the store again"
    ]
    .assert_eq(&error.replace(&format!("{}/", folder.path().display()), ""));
    // A writer without permission to replace, and one that does not finish.
    for replace in [false, true] {
        let options = WriterConfig { replace, ..WriterConfig::new(10) };
        assert_eq!(Writer::create(&path, &options).is_ok(), replace);
        assert_eq!(all(&TokenStore::open(&path).unwrap()).unwrap(), [[1], [2]]);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        interrupt();
    }
    let replace = WriterConfig { replace: true, ..WriterConfig::new(10) };
    assert_eq!(all(&write(&path, &[vec![3]], &replace).unwrap()).unwrap(), [[3]]);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    assert_eq!(std::fs::read_dir(&path).unwrap().count(), 1);
}

/// An id outside the vocabulary, for which a model has no embedding.
#[test]
fn a_damaged_id_is_refused_by_every_reader() {
    for (vocabulary, width) in [(100, 2), (70_000, 4)] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        write(&path, &[vec![1, 2], vec![3, 99, 5, 6]], &WriterConfig::new(vocabulary)).unwrap();
        // The fourth id of all, which stands where the document's second does.
        alter(&path.join("00000.tokens"), |bytes| bytes[128 + 3 * width + width - 1] = 1);
        let store = TokenStore::open(&path).unwrap();
        let id = (1_u32 << (8 * width - 8)) + 99;
        let mut out = vec![7];
        for part in [0..usize::MAX, 1..2] {
            let error = store.read_part(1, part, &mut out).unwrap_err().to_string();
            let words = format!(
                "document 1, token 1: id {id}, but the vocabulary of the store is {vocabulary}; copy or write the store again"
            );
            assert!(error.ends_with(&words), "{error}");
        }
        assert!(store.read(1, &mut out).is_err());
        assert_eq!(out, [7]);
        store.read(0, &mut out).unwrap();
        store.read_part(1, 2..4, &mut out).unwrap();
        assert_eq!(out, [7, 1, 2, 5, 6]);
    }
}

/// A document with damaged offsets looks empty, and empty documents are skipped.
#[test]
fn damaged_offsets_are_found_when_a_data_set_is_made() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let documents = [vec![1, 2, 3], vec![], vec![4, 5, 6, 7]];
    let store = write(&path, &documents, &WriterConfig::new(100)).unwrap();
    assert!(dataloading::StandardDataset::new(store, &dataloading::BatchConfig::default()).is_ok());
    let shard = path.join("00000.tokens");
    // The end of the last document: seven ids of two bytes, padded to 16, then four offsets.
    alter(&shard, |bytes| bytes[128 + 16 + 24] = 99);
    let store = TokenStore::open(&path).unwrap();
    assert_eq!((store.length(1), store.length(2)), (0, 0));
    let options = dataloading::BatchConfig::default();
    let error = dataloading::StandardDataset::new(store, &options).unwrap_err().to_string();
    expect![
        "store/00000.tokens: document 2: its offsets are damaged (3..99 of 7 tokens); copy or write the store again"
    ]
    .assert_eq(&error.replace(&format!("{}/", folder.path().display()), ""));
}

#[cfg(target_os = "linux")]
#[test]
fn names_need_not_be_utf_8() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    let folder = tempfile::tempdir().unwrap();
    // Lossy conversion would map both to the same name.
    let [one, two] = [b"a\xff", b"a\xfe"].map(|name| folder.path().join(OsStr::from_bytes(name)));
    let mut first = Writer::create(&one, &WriterConfig::new(10)).unwrap();
    let mut second = Writer::create(&two, &WriterConfig::new(10)).unwrap();
    first.push(&[1]).unwrap();
    second.push(&[2]).unwrap();
    assert_eq!(all(&first.finish().unwrap()).unwrap(), [[1]]);
    assert_eq!(all(&second.finish().unwrap()).unwrap(), [[2]]);
    assert_eq!(all(&TokenStore::open(&one).unwrap()).unwrap(), [[1]]);
    let again = Writer::create(&one, &WriterConfig::new(10)).unwrap_err().to_string();
    assert!(
        again.ends_with("a\u{fffd}: the path exists; remove it, choose another name, or allow replacement")
    );
}

/// The capacity of the output shows how much was copied.
#[test]
fn a_part_of_a_long_document_is_read_alone() {
    let folder = tempfile::tempdir().unwrap();
    let document: Vec<u32> = (0..100_000).map(|position| position % 97).collect();
    let store =
        write(&folder.path().join("store"), std::slice::from_ref(&document), &WriterConfig::new(97)).unwrap();
    let mut part = Vec::new();
    store.read_part(0, 50_000..50_010, &mut part).unwrap();
    assert_eq!(part, document[50_000..50_010]);
    assert!(part.capacity() < 1000, "{} positions for ten tokens", part.capacity());
}
