//! Kernels of a few lines.

use ptx::{Argument, Buffer, Counts, Data, Error, Launch, Memory, Module};

/// A kernel `k` with pointers `in` and `out`, whose thread's own words are at `%in` and `%out`. `body` may use `%r`, `%d`, `%f`,
/// `%h` and `%p` registers 0 to 9.
pub(crate) fn text(body: &str) -> String {
    format!(
        ".version 8.0
.target sm_80
.address_size 64 .extern .shared .align 16 .b8 more[];
.visible .entry k(.param .u64 from, .param .u64 to)
{{
    .reg .pred %p<10>;
    .reg .b16 %h<10>;
    .reg .b32 %r<10>;
    .reg .b64 %d<10>;
    .reg .f32 %f<10>;
    .reg .f64 %g<10>;
    .reg .b32 %t, %b, %n;
    .reg .b64 %in, %out, %at;
    .shared .align 16 .b8 memory[1024];
    ld.param.u64 %in, [from];
    ld.param.u64 %out, [to];
    mov.u32 %t, %tid.x;
    mov.u32 %b, %ctaid.x;
    mov.u32 %n, %ntid.x;
    mad.lo.u32 %n, %b, %n, %t;
    mul.wide.u32 %at, %n, 8;
    add.u64 %in, %in, %at;
    add.u64 %out, %out, %at;
{body}
    ret;
}}"
    )
}

/// Runs `body` and returns `out`, a word of 64 bits for each thread.
pub(crate) fn run(body: &str, launch: Launch, input: &[u64]) -> Result<(Vec<u64>, Counts), Error> {
    let module = Module::parse(&text(body))?;
    let mut memory = Memory::new();
    let from = memory.add("in", Data::of(input).read_only());
    let to: Buffer = memory.add("out", Data::of(&vec![0u64; (launch.blocks * launch.threads) as usize]));
    let arguments: [Argument; 2] = [from.into(), to.into()];
    let counts = module.kernel("k")?.launch(launch, &arguments, &mut memory)?;
    Ok((memory.read(to)?, counts))
}

/// The error that `body` ends with, of one block of `threads`.
pub(crate) fn error(body: &str, threads: u32) -> String {
    run(body, Launch::new(1, threads), &vec![7; threads as usize]).unwrap_err().to_string()
}
