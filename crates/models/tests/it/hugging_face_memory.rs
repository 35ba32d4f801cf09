//! Memory of loading: the model, and at most its largest tensor in addition. The counts are the whole
//! process's, so no other test may run at the same time.

use models::hugging_face::{self, Folder};
use models::{DecoderConfig, Llama};
use runtime::memory::Region;
use tch::{Device, Kind};

#[test]
fn loading_allocates_the_model_and_at_most_one_tensor() {
    let config = DecoderConfig { max_position_embeddings: 16, ..DecoderConfig::qwen2(2000, 64, 160, 3, 4) };
    let largest = 2000 * 64;
    for file in [Kind::Float, Kind::BFloat16] {
        let place = tempfile::tempdir().unwrap();
        let model = Llama::new(&config, (file, Device::Cpu)).unwrap();
        hugging_face::save(&model, place.path(), 300_000).unwrap();
        let folder = Folder::open(place.path()).unwrap();
        for kind in [Kind::Float, Kind::BFloat16] {
            let width = kind.elt_size_in_bytes() as u64;
            // The rotary embedding's table belongs to the model but is not a weight.
            let region = Region::start(Device::Cpu).unwrap();
            let empty = Llama::new(&config, (kind, Device::Cpu)).unwrap();
            let of_model = region.finish().unwrap();
            let own = of_model.live_after - of_model.live_before;
            drop(empty);
            let weights = config.parameter_count() * width;
            assert!(own >= weights && own < weights + weights / 20, "{own} for {weights}");

            let region = Region::start(Device::Cpu).unwrap();
            let loaded = folder.load(Some(kind), Device::Cpu).unwrap();
            let peak = region.finish().unwrap().peak_above_start();
            let bound = own + largest * width;
            let percent = peak as f64 / own as f64 * 100.0;
            eprintln!("{file:?} into {kind:?}: {peak} bytes at most, {percent:.1} % of the model's {own}");
            assert!(peak <= bound, "{file:?} into {kind:?}: {peak} for {own}, at most {bound}");
            drop(loaded);
        }
    }
}
