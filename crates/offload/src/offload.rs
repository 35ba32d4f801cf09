//! Moving the layers of a model to host memory or files.

use models::hugging_face::Folder;
use models::init::Init;
use models::module::{Block, FunctionalCall, Module, ModuleMapper, freeze, map_modules, try_replace_block};
use models::tensors_file::TensorLocation;
use models::{Llama, LlamaConfig};
use runtime::device;
use tch::{Device, Kind};

use crate::blocks::{
    Away, OffloadBlock, OffloadBlockWithCheckpointing, OffloadBlockWithFunction, OverlapOffloadBlock,
    ResidentBlock,
};
use crate::engine::{Counters, Engine};
use crate::error::{Error, Result};
use crate::home::Tier;
use crate::options::{Method, Options};
use crate::trace::Span;

/// A handle on the layers of a model that is offloaded. The model itself holds all that it needs to run: the handle is for asking.
#[derive(Debug)]
pub struct Offload {
    engine: Engine,
    blocks: usize,
}

impl Offload {
    /// Takes the blocks of `model` home, but for the resident ones. The other tensors, and what blocks have beside their tensors, stay
    /// where they are: on the device that the model runs on.
    ///
    /// The model's tensors stay the ones that they are, with new memory under them, so an optimizer or an adapter made before goes on
    /// working, and memory may be exchanged under them afterwards: see the [crate's front page](crate#who-owns-a-tensors-memory). Choose
    /// what is trained before: with [`Tier::File`], frozen tensors go to a file and cannot be trained any more.
    ///
    /// # Errors
    /// A number of a resident layer that the model does not have; too little memory, or room on the disk. Blocks that were taken
    /// home before the failure stay there, and the model works.
    pub fn apply(model: &mut (impl Module + ?Sized), options: &Options) -> Result<Self> {
        let mut names = Names::default();
        map_modules(model, &mut names)?;
        check_resident(&options.resident, names.0.count)?;
        let mut install = Install { engine: Engine::new(options.clone())?, blocks: Outermost::default() };
        map_modules(model, &mut install)?;
        Ok(Self { blocks: install.blocks.count, engine: install.engine })
    }

    /// A model with new weights, each of whose blocks is taken home before the next is made: what does not fit the device as a whole
    /// can be made there, with the values that it would have. With [`Tier::File`] its blocks are frozen: adapters that are installed
    /// afterwards are trained.
    ///
    /// # Errors
    /// As [`Llama::new`] and [`Offload::apply`].
    pub fn assemble(
        config: &LlamaConfig,
        init: Init,
        kind: Kind,
        options: &Options,
    ) -> Result<(Llama, Self)> {
        Self::build(config, init, kind, options, &|_| None)
    }

    /// A model of a folder. With [`Tier::File`] the blocks stay in the folder's own files, which nothing writes: a model larger than the
    /// memory opens at once, its blocks frozen. Otherwise they are read into the host's memory, one after the other.
    ///
    /// # Errors
    /// As [`Folder::load`] and [`Offload::apply`]; with [`Tier::File`], another dtype than the files'.
    pub fn open(folder: &Folder, kind: Option<Kind>, options: &Options) -> Result<(Llama, Self)> {
        let kind = kind.map_or_else(|| folder.kind(), Ok)?;
        let in_files = matches!(options.tier, Tier::File(_));
        if in_files && folder.kind()? != kind {
            let reason = format!(
                "its weights are {:?}, and layers that stay in files are not converted; take them in that dtype, or with the host \
                 tier",
                folder.kind()?
            );
            return Err(Error::File { path: folder.path().to_owned(), reason });
        }
        let stored = |name: &str| folder.location(name).filter(|_| in_files);
        let (model, offload) = Self::build(folder.config(), Init::Uninitialised, kind, options, &stored)?;
        let resident: Vec<String> =
            options.resident.iter().map(|number| format!("layers.{number}.")).collect();
        folder.load_filtered(&model, &|name| {
            !in_files
                || !name.starts_with("layers.")
                || resident.iter().any(|prefix| name.starts_with(prefix))
        })?;
        Ok((model, offload))
    }

    fn build(
        config: &LlamaConfig,
        init: Init,
        kind: Kind,
        options: &Options,
        stored: &dyn Fn(&str) -> Option<TensorLocation>,
    ) -> Result<(Llama, Self)> {
        check_resident(&options.resident, usize::try_from(config.num_hidden_layers).unwrap_or(0))?;
        let engine = Engine::new(options.clone())?;
        let mut blocks = 0;
        let model = Llama::assemble(config, init, (kind, options.device), &mut |number, block| {
            blocks += 1;
            let name = format!("layers.{number}");
            if matches!(options.tier, Tier::File(_)) {
                // What is trained stays in the host's memory, which would be the whole model.
                freeze(&*block, ".*", true)?;
            }
            let wrapped =
                wrap(&engine, (&name, number), block, &|tensor| stored(&format!("{name}.{tensor}")));
            Ok(wrapped.map_err(|(_, error)| *error)?)
        })?;
        Ok((model, Self { engine, blocks }))
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.engine
    }

    /// How it was offloaded.
    pub fn options(&self) -> &Options {
        self.engine.options()
    }

    /// Blocks of the model.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Bytes of the largest layer that moves: a slot of the ring, its tensors each at a multiple of 256 bytes.
    pub fn layer_bytes(&self) -> u64 {
        self.engine.with_layers(|layers| layers.iter().map(|layer| layer.bytes()).max().unwrap_or(0))
    }

    /// Bytes of the ring on the device; 0 before its first use, and without one.
    pub fn ring_bytes(&self) -> u64 {
        self.engine.ring_bytes()
    }

    /// Gives the ring's memory back to the device until the next use.
    ///
    /// # Errors
    /// A failure of what was on its way.
    pub fn release_ring(&self) -> Result<()> {
        self.engine.release_ring()
    }

    /// What was moved since the model was offloaded.
    pub fn counters(&self) -> Counters {
        self.engine.counters()
    }

    /// Host memory that layers, gradients and staging hold, by the allocator's count, that of other users of such memory included.
    ///
    /// # Errors
    /// A device that is not there.
    pub fn host_bytes(&self) -> Result<u64> {
        let Options { device, pinned, .. } = *self.options();
        Ok(device::pinned_bytes(if pinned { device } else { Device::Cpu })?.live)
    }

    /// Begins to note what each lane does and when. Costs two events for each piece of work.
    ///
    /// # Errors
    /// A failure of what was on its way.
    pub fn start_trace(&self) -> Result<()> {
        self.engine.start_trace()
    }

    /// Ends the trace, by the spans' beginning; see [`overlap`](crate::overlap) and [`to_chrome`](crate::to_chrome).
    ///
    /// # Errors
    /// A failure of what was on its way.
    pub fn take_trace(&self) -> Result<Vec<Span>> {
        self.engine.take_trace()
    }

    /// Waits for everything that reads or writes memory of the layers: transfers both ways, also those on the streams of who computes,
    /// and steps of the optimizer on the host. After this the memory may be read and written from the host, until the next forward.
    ///
    /// # Errors
    /// A failure of that, or of a step since the last call. Gradients that could not be stored are gone: every tensor of a layer is
    /// without one.
    pub fn synchronize(&self) -> Result<()> {
        self.engine.synchronize()
    }

    /// That every layer is at home and none in use, as it is between passes: the assignment's `test_model_on_cpu`, which each
    /// backward also checks when it ends.
    ///
    /// # Errors
    /// The tensor that is elsewhere.
    pub fn check_at_home(&self) -> Result<()> {
        self.engine.check_at_home()
    }
}

fn check_resident(resident: &[usize], blocks: usize) -> Result<()> {
    let Some(number) = resident.iter().find(|&&number| number >= blocks) else { return Ok(()) };
    let reason = format!(
        "{number} is not a block of this model, which has {blocks} (0 to {})",
        blocks.saturating_sub(1)
    );
    Err(Error::config("resident layers", reason))
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
    let away = Away::new(block, engine.clone(), layer, number);
    Ok(match engine.options().method {
        Method::OneLayer => Box::new(OffloadBlock(away)),
        Method::Checkpointing => Box::new(OffloadBlockWithCheckpointing(away)),
        Method::Function => Box::new(OffloadBlockWithFunction(away)),
        Method::Overlap => Box::new(OverlapOffloadBlock(away)),
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

/// Numbers blocks. One inside another is a part of that, and goes where it goes.
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
        let taken = try_replace_block(slot, |block| wrap(&self.engine, (name, number), block, &|_| None));
        taken.map_err(|error| (*error).into())
    }
}
