//! A text file to packed batches with a loader that resumes: `cargo run -p dataloading --example packed_batches`.
#![allow(clippy::print_stdout, unreachable_pub)]

use std::error::Error;
use std::sync::Arc;

use dataloading::embedded;
use dataloading::packing::PackingConfig;
use dataloading::text::{Corpus, Format};
use dataloading::token_store::{TokenizeConfig, WriterConfig, tokenize_to_store};
use dataloading::{Loader, LoaderConfig, PackedConfig, PackedDataset, TokenStore, Tokenizer};

/// Tokenizes, packs, loads and resumes.
pub fn main() -> Result<(), Box<dyn Error>> {
    let data = embedded::folder()?;
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("tokens");

    // Once: tokenize the articles of a text file into a memory-mapped store.
    let tokenizer = Tokenizer::from_file(&data.join("tokenizer.json"))?;
    let corpus = Corpus::new([data.join("corpus/valid.txt")], Format::Articles);
    let tokenize =
        TokenizeConfig { end_of_text: Some(tokenizer.end_of_text()?), ..TokenizeConfig::default() };
    tokenize_to_store(
        &corpus,
        &tokenizer,
        &tokenize,
        &path,
        &WriterConfig::new(tokenizer.vocabulary()),
        |_| {},
    )?;

    // Before training: pack the documents into rows of 256 tokens, four rows per batch.
    let plan = PackingConfig { capacity: 256, ..PackingConfig::default() };
    let options = PackedConfig { rows: 4, plan, seed: 7, ..PackedConfig::default() };
    let dataset = Arc::new(PackedDataset::new(TokenStore::open(&path)?, &options)?);
    println!("{} rows, {:.1} % filled", dataset.plan().rows(), 100.0 * dataset.plan().fill());

    // Training: worker threads prefetch; the state is a few integers.
    let mut loader = Loader::new(dataset.clone(), &LoaderConfig::default())?;
    for batch in loader.by_ref().take(10) {
        let batch = batch?;
        let packing = batch.packing.ok_or("the batch is packed")?;
        println!(
            "tokens {:?}, {} documents, {} labels, longest {}",
            batch.tokens.size(),
            batch.counts.documents,
            batch.counts.targets,
            packing.longest
        );
    }
    let state = serde_json::to_string(&loader.state())?;
    println!("checkpoint: {state}");
    let next = loader.next().ok_or("the epoch has more batches")??;

    // Resuming: the same batch, without replaying the former ones.
    let mut resumed = Loader::resume(dataset, &LoaderConfig::default(), &serde_json::from_str(&state)?)?;
    let again = resumed.next().ok_or("the epoch has more batches")??;
    if next.tokens == again.tokens { Ok(()) } else { Err("the resumed batch differs".into()) }
}
