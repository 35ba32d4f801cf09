//! Offloading the layers of a model to host memory or files.

use kernels::nf4::Scales;
use kernels::quantized::blocks;
use models::hugging_face::Folder;
use models::init::Init;
use models::module::{
    Block, FunctionalCall, Module, ModuleMapper, NamedTensor, freeze, map_modules, tensors, try_replace,
};
use models::tensors_file::TensorLocation;
use models::{DecoderConfig, Llama};
use runtime::device;
use tch::{Device, Kind};

use crate::blocks::{
    OffloadBlock, OffloadBlockWithCheckpointing, OffloadBlockWithFunction, OffloadedLayer,
    OverlapOffloadBlock, ResidentBlock,
};
use crate::engine::{Counters, Engine};
use crate::error::{Error, Result, refused};
use crate::options::{Method, OffloadConfig};
use crate::storage::Tier;
use crate::trace::Span;

/// A handle on the offloaded layers of a model. The model runs without it; the handle is for queries and control.
#[derive(Debug)]
pub struct Offload {
    engine: Engine,
    blocks: usize,
}

impl OffloadConfig {
    /// Offloads the blocks of `model`, except the resident ones. Other tensors, and tensors that blocks have outside their
    /// parts, stay on the device.
    ///
    /// The model's tensors keep their identity and get new memory, so existing optimizers and adapters keep working, and memory
    /// may be exchanged later: see the [crate's front page](crate#who-owns-a-tensors-memory). Decide what is trained before the
    /// call: with [`Tier::File`], frozen tensors are moved to a file that is only read, and cannot be trained any more.
    ///
    /// # Errors
    /// A layer of the options that does not exist; a tensor on another GPU than [`OffloadConfig::device`]; too little memory or disk space. Blocks
    /// offloaded before the failure stay offloaded, and the model works.
    pub fn install(&self, model: &mut (impl Module + ?Sized)) -> Result<Offload> {
        let mut names = Names::default();
        map_modules(model, &mut names)?;
        check_blocks(self, names.0.count)?;
        check_devices(&tensors(model), self.device)?;
        let mut install = Install { engine: Engine::new(self.clone())?, blocks: Outermost::default() };
        map_modules(model, &mut install)?;
        Ok(Offload { blocks: install.blocks.count, engine: install.engine })
    }
}

impl Offload {
    /// Creates a model with initialised weights, offloading each block before the next is created, so that a model that does
    /// not fit the device can be created, with the same values as without offloading. With [`Tier::File`] its blocks are
    /// frozen unless [`OffloadConfig::train_files`] is set; adapters installed afterwards are trained.
    ///
    /// # Errors
    /// As [`Llama::new`] and [`OffloadConfig::install`].
    pub fn assemble(
        config: &DecoderConfig,
        init: Init,
        kind: Kind,
        options: &OffloadConfig,
    ) -> Result<(Llama, Self)> {
        let mut make = |wrap: &mut Wrap<'_>| Llama::assemble(config, init, (kind, options.device), wrap);
        Self::build(config, options, &Values::default(), &mut make)
    }

    /// Loads a model from a folder. With [`Tier::File`] the blocks stay in the folder's own files, which are never written: a
    /// model larger than the memory opens immediately, with frozen blocks. Otherwise blocks are read into host memory one after
    /// the other.
    ///
    /// A model in NF4 ([`kernels::nf4`]) is quantized layer by layer, and with [`Tier::File`] written to files in the tier's folder; so is
    /// one in another dtype than its files', one whose layers are trained ([`OffloadConfig::train_files`]), and one in the blocks of a GGUF
    /// file ([`blocks::KIND`]), whose matrices keep the file's bytes.
    ///
    /// # Errors
    /// As [`Folder::load`] and [`OffloadConfig::install`].
    pub fn open(folder: &Folder, kind: Option<Kind>, options: &OffloadConfig) -> Result<(Llama, Self)> {
        if options.source.is_some() {
            let reason = "layers are opened into the tier, before their values are read; load the model, then use OffloadConfig::install";
            return Err(refused("source", reason));
        }
        if kind == Some(blocks::KIND) {
            let mut make = |wrap: &mut Wrap<'_>| folder.assemble_blocks(options.device, wrap);
            return Self::build(folder.config(), options, &Values::default(), &mut make);
        }
        let kind = folder.kind_or(kind)?;
        let in_nf4 = Scales::of(kind).is_some();
        let in_files = matches!(options.tier, Tier::File(_));
        let own_files = in_nf4 || options.train_files || folder.kind()? != kind || !folder.has_locations();
        let stored = |name: &str| folder.location(name).filter(|_| in_files && !own_files);
        // What is written to the tier's own files must have its values.
        let fill = |name: &str, block: &dyn Block| {
            let named = tensors(block).into_iter().filter(|_| in_files && own_files);
            named.into_iter().try_for_each(|named| {
                folder.load_tensor(&format!("{name}.{}", named.name), named.tensor).map(|_| ())
            })
        };
        let values = Values { stored: &stored, fill: &fill };
        let mut make = |wrap: &mut Wrap<'_>| {
            Llama::assemble(folder.config(), Init::Uninitialised, (kind, options.device), wrap)
        };
        let (model, offload) = Self::build(folder.config(), options, &values, &mut make)?;
        let resident: Vec<String> =
            options.resident.iter().map(|number| format!("layers.{number}.")).collect();
        folder.load_filtered(&model, &|name| {
            !in_files
                || !name.starts_with("layers.")
                || resident.iter().any(|prefix| name.starts_with(prefix))
        })?;
        Ok((model, offload))
    }

    /// Offloads the blocks of a model that `make` creates, passing each to its argument.
    fn build(
        config: &DecoderConfig,
        options: &OffloadConfig,
        values: &Values<'_>,
        make: &mut dyn FnMut(&mut Wrap<'_>) -> models::Result<Llama>,
    ) -> Result<(Llama, Self)> {
        check_blocks(options, usize::try_from(config.num_hidden_layers).unwrap_or(0))?;
        let engine = Engine::new(options.clone())?;
        let mut blocks = 0;
        let model = make(&mut |number, block| {
            blocks += 1;
            let name = format!("layers.{number}");
            if matches!(options.tier, Tier::File(_)) && !options.train_files {
                freeze(&*block, ".*", true)?;
            }
            (values.fill)(&name, &*block)?;
            let stored = |tensor: &str| (values.stored)(&format!("{name}.{tensor}"));
            let wrapped = wrap(&engine, (&name, number), block, &stored);
            wrapped.map_err(|(_, error)| *error)
        })?;
        Ok((model, Self { engine, blocks }))
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Returns the options.
    pub fn options(&self) -> &OffloadConfig {
        self.engine.options()
    }

    /// Returns the number of blocks of the model.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Returns the bytes of the largest offloaded layer: the size of a slot of the ring, with each tensor at a multiple of 256 bytes.
    pub fn layer_bytes(&self) -> u64 {
        self.engine
            .with_layers(|layers| layers.iter().map(|layer| layer.layout.bytes as u64).max().unwrap_or(0))
    }

    /// Returns the device bytes of the ring; 0 before its first use, and for methods without one.
    pub fn ring_bytes(&self) -> u64 {
        self.engine.ring_bytes()
    }

    /// Frees the ring's device memory until the next use.
    ///
    /// # Errors
    /// A failure of a running transfer.
    pub fn release_ring(&self) -> Result<()> {
        self.engine.release_ring()
    }

    /// Returns the transfers since the model was offloaded.
    pub fn counters(&self) -> Counters {
        self.engine.counters()
    }

    /// Returns the host bytes of layers, gradients and staging, as counted by the allocator, which includes other users of such memory.
    ///
    /// # Errors
    /// A device that does not exist.
    pub fn host_bytes(&self) -> Result<u64> {
        let OffloadConfig { device, pinned, .. } = *self.options();
        Ok(device::pinned_bytes(if pinned { device } else { Device::Cpu })?.live)
    }

    /// Returns the bytes of layer inputs in host memory now, with [`OffloadConfig::inputs_on_host`].
    pub fn input_bytes(&self) -> u64 {
        self.engine.input_bytes()
    }

    /// Starts recording what each stream does and when. Costs two events for each piece of work.
    ///
    /// # Errors
    /// A failure of a running transfer.
    pub fn start_trace(&self) -> Result<()> {
        self.engine.start_trace()
    }

    /// Ends the recording and returns the spans by start time; see [`overlap`](crate::overlap) and
    /// [`to_chrome`](crate::to_chrome).
    ///
    /// # Errors
    /// A failure of a running transfer.
    pub fn take_trace(&self) -> Result<Vec<Span>> {
        self.engine.take_trace()
    }

    /// Waits for all work that reads or writes the layers' host memory: transfers in both directions, also on callers' streams,
    /// and optimizer steps on the host. Afterwards the memory may be read and written from the host until the next forward.
    ///
    /// # Errors
    /// A failure of that work, or of a step since the last call. If gradients could not be stored, all layers' gradients are
    /// cleared.
    pub fn synchronize(&self) -> Result<()> {
        self.engine.synchronize()
    }

    /// Checks that every layer is on the host and none is in use, as between passes: the assignment's `test_model_on_cpu`. Each
    /// backward also checks this when it ends.
    ///
    /// # Errors
    /// The tensor that is not on the host.
    pub fn check_on_host(&self) -> Result<()> {
        self.engine.check_on_host()
    }
}

/// Returns the block to use instead of one, by its number.
type Wrap<'a> = dyn FnMut(usize, Box<dyn Block>) -> models::Result<Box<dyn Block>> + 'a;

/// The values of a model's blocks that do not have them yet, while it is created.
struct Values<'a> {
    /// Where a tensor's values are in a file, by its name in the model.
    stored: &'a dyn Fn(&str) -> Option<TensorLocation>,
    /// Reads the values of a block, by its name, before it is offloaded.
    fill: &'a dyn Fn(&str, &dyn Block) -> models::Result<()>,
}

impl Default for Values<'_> {
    fn default() -> Self {
        Self { stored: &|_| None, fill: &|_, _| Ok(()) }
    }
}

fn check_blocks(options: &OffloadConfig, blocks: usize) -> Result<()> {
    for (what, numbers) in [("resident layers", &options.resident), ("keep", &options.keep)] {
        let Some(number) = numbers.iter().find(|&&number| number >= blocks) else { continue };
        let last = blocks.saturating_sub(1);
        let reason = format!("block {number} does not exist; this model has {blocks} (0 to {last})");
        return Err(refused(what, reason));
    }
    Ok(())
}

/// Refuses a model on a GPU whose layers would run elsewhere: the rest of the model, and its inputs, are there.
fn check_devices(tensors: &[NamedTensor<'_>], device: Device) -> Result<()> {
    let is_elsewhere =
        |named: &&NamedTensor<'_>| named.tensor.device().is_cuda() && named.tensor.device() != device;
    let Some(NamedTensor { name, tensor, .. }) = tensors.iter().find(is_elsewhere) else { return Ok(()) };
    let reason =
        format!("layers would run on {device:?}, and `{name}` is on {:?}; give that device", tensor.device());
    Err(refused("device", reason))
}

/// A block that could not be wrapped, and why.
type NotWrapped = (Box<dyn Block>, Box<Error>);

/// Wraps a block for the method. Returns the block with the error if that fails.
fn wrap(
    engine: &Engine,
    (name, number): (&str, usize),
    block: Box<dyn Block>,
    stored: &dyn Fn(&str) -> Option<TensorLocation>,
) -> std::result::Result<Box<dyn Block>, NotWrapped> {
    let block = FunctionalCall::new(name, block);
    if engine.options().resident.contains(&number) {
        return Ok(Box::new(ResidentBlock::new(block, engine.clone(), number)));
    }
    let layer = match engine.add((name, number), block.named(), stored) {
        Ok(layer) => layer,
        Err(error) => {
            let block = block.into_inner().unwrap_or_else(|block| Box::new(block));
            return Err((block, Box::new(error)));
        }
    };
    let offloaded = OffloadedLayer::new(block, engine.clone(), layer, number);
    Ok(match engine.options().method {
        Method::OneLayer => Box::new(OffloadBlock(offloaded)),
        Method::Checkpointing => Box::new(OffloadBlockWithCheckpointing(offloaded)),
        Method::Function => Box::new(OffloadBlockWithFunction(offloaded)),
        Method::Overlap => Box::new(OverlapOffloadBlock(offloaded)),
    })
}

/// Counts the blocks.
#[derive(Default)]
struct Names(Outermost);

impl ModuleMapper for Names {
    fn block(&mut self, name: &str, _: &mut Box<dyn Block>) -> models::Result<()> {
        self.0.next(name);
        Ok(())
    }
}

/// Numbers the outermost blocks. A block inside another belongs to that one.
#[derive(Default)]
struct Outermost {
    count: usize,
    last: Option<String>,
}

impl Outermost {
    fn next(&mut self, name: &str) -> Option<usize> {
        let inside =
            |last: &String| name.strip_prefix(last.as_str()).is_some_and(|rest| rest.starts_with('.'));
        if self.last.as_ref().is_some_and(inside) {
            return None;
        }
        self.last = Some(name.to_owned());
        self.count += 1;
        Some(self.count - 1)
    }
}

struct Install {
    engine: Engine,
    blocks: Outermost,
}

impl ModuleMapper for Install {
    fn block(&mut self, name: &str, slot: &mut Box<dyn Block>) -> models::Result<()> {
        let Some(number) = self.blocks.next(name) else { return Ok(()) };
        let taken = try_replace(slot, |block| wrap(&self.engine, (name, number), block, &|_| None));
        taken.map_err(|error| *error)
    }
}
