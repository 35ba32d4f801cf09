"""A training step of a Qwen2 in transformers: of adapters with PEFT, or of all weights.

Adapters have rank 8 on q, k, v and o, without dropout; fused AdamW over what is trained; labels on the last part of each row. The
model computes the loss itself, over the logits of all tokens, as transformers does when it is given labels. In bf16 all weights are bf16,
the adapters too (`autocast_adapter_dtype=False`), so that nothing is cast; AdamW keeps its moments in bf16, as PyTorch does.

Levels: eager; forward, loss and backward compiled by torch.compile (`torch.compile`), and with CUDA graphs besides
(`reduce-overhead`); Liger's kernels and its fused loss, eager (`liger`), in a process of their own, since they replace transformers'
classes. Where a level cannot run, its record says why. Compilation is measured apart. `process_bytes` is the most that the process held in
RAM during the measured steps (`VmHWM`, reset before them), `peak_bytes` the most that lived in torch's allocator (on a CPU: as its
profiler tells it, above what lived before the step, plus that). Writes one JSON record per figure.
"""

import argparse
import statistics
import time

import peft
import torch

from decoders import NAMES, SHAPES, liger_missing, qwen2, reset_resident_peak, resident_peak
from measure import busy_of, peak_of, synchronize
from records import DTYPES, Records, add_arguments, environment, metric, not_measured, progress
from turns import Delegate, Turns

COMPILED = {"torch.compile": "default", "reduce-overhead": "reduce-overhead"}
LEVELS = ["eager", *COMPILED, "liger"]
# Kernels that a level would need, and why they are not at hand.
NOT_COMPARED = {
    "unsloth": "not compared: it needs bitsandbytes, xformers and its own versions of torch",
    "torchao": "not compared: its quantised bases are no bf16 or fp32 step",
}


class Prepared:
    """A model, its optimizer and a batch."""

    def __init__(self, args, dtype, device):
        torch.manual_seed(args.seed)
        model = qwen2(args.shape, dtype, device)
        if args.train == "adapters":
            modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
            config = peft.LoraConfig(
                r=8, lora_alpha=16, lora_dropout=0.0, target_modules=modules, task_type="CAUSAL_LM"
            )
            model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
        model.train()
        self.model, self.device, self.dtype = model, device, dtype
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4, fused=True)
        self.ids = torch.randint(SHAPES[args.shape]["vocab_size"], (args.batch, args.sequence), device=device)
        self.labels = self.ids.clone()
        self.labels[:, : args.sequence - round(args.sequence * args.answers)] = -100

    def select(self, method):
        if method == "recompute":
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            self.model.gradient_checkpointing_disable()
        torch.compiler.reset()

    def loss(self):
        return self.model(input_ids=self.ids, labels=self.labels).loss

    def step(self, loss_of):
        # Results of the last replay may be overwritten.
        torch.compiler.cudagraph_mark_step_begin()
        synchronize(self.device)
        start = time.perf_counter()
        loss = loss_of()
        loss.backward()
        del loss
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        synchronize(self.device)
        return time.perf_counter() - start

    def held(self):
        """Bytes that live before a step."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        return weights + 2 * sum(p.numel() * p.element_size() for p in self.trained)


def warmed(prepared, level):
    """The function of a level after its first steps, and seconds of the first."""
    loss_of = prepared.loss
    if level in COMPILED:
        loss_of = torch.compile(loss_of, dynamic=False, mode=COMPILED[level])
    first = prepared.step(loss_of)
    # Two more record a CUDA graph.
    for _ in range(2 if level in COMPILED else 1):
        prepared.step(loss_of)
    return loss_of, first


def measure(prepared, args, loss_of):
    """Figures of one round."""
    cpu = prepared.device.type == "cpu"
    if cpu:
        reset_resident_peak()
    times = [prepared.step(loss_of) for _ in range(args.repeats)]
    figures = [
        metric("step_seconds", "s", times),
        metric("tokens_per_second", "tokens/s", [prepared.ids.numel() / seconds for seconds in times]),
    ]
    if cpu:
        figures.append(metric("process_bytes", "B", [resident_peak()]))
    peak = prepared.held() + peak_of(lambda: prepared.step(loss_of), prepared.device)
    figures.append(metric("peak_bytes", "B", [peak]))
    return figures, times


def once(prepared, level, loss_of, first, times):
    """Figures of a level that are measured once."""
    figures = []
    if level in COMPILED:
        figures.append(metric("compile_seconds", "s", [max(first - statistics.median(times), 0.0)]))
    figures.append(busy_of(lambda: prepared.step(loss_of), prepared.device))
    return figures


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen2.5-0.5b")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--dtype", default="fp32", help=f"one or more of {', '.join(DTYPES)}")
    parser.add_argument("--repeats", type=int, default=2, help="steps of a round")
    parser.add_argument("--train", choices=["adapters", "all"], default="adapters")
    parser.add_argument("--answers", type=float, default=0.5)
    parser.add_argument("--methods", default="recompute,keep")
    parser.add_argument("--levels", default="eager,torch.compile", help=f"one or more of {', '.join(LEVELS)}")
    parser.add_argument("--compile-only", action="store_true", help="fill the compiler's caches and measure nothing")
    add_arguments(parser)
    return parser.parse_args()


def main():
    args = arguments()
    device = torch.device(args.device)
    levels = args.levels.split(",")
    dtypes, methods = args.dtype.split(","), args.methods.split(",")
    alone = levels == ["liger"]
    where_liger_lacks = liger_missing(device) if "liger" in levels else None
    if alone and where_liger_lacks is None:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen2

        apply_liger_kernel_to_qwen2()
    own = levels if alone else [level for level in levels if level != "liger"]
    records = Records(args.records, "lora-step", environment(device))

    delegate = None
    if "liger" in levels and not alone and where_liger_lacks is None and not args.compile_only:
        delegate = Delegate(args, levels="liger")

    turns = Turns(len(dtypes) * len(methods))
    for dtype in dtypes:
        prepared = Prepared(args, dtype, device)
        for method in methods:
            case = {
                "shape": NAMES[args.shape], "method": method, "dtype": dtype, "batch": args.batch, "sequence": args.sequence,
            }
            prepared.select(method)
            lacking = {"liger": where_liger_lacks} if where_liger_lacks else {}
            for level, why in (lacking | NOT_COMPARED).items() if device.type == "cuda" and not alone else ():
                records.put({"impl": level} | case, [not_measured("tokens_per_second", "tokens/s", why)])
            # In turns all levels are prepared first; else one after the other, so that none finds the memory of those before.
            for group in [own] if turns.count else [[level] for level in own]:
                ready = []
                for level in group:
                    progress(turns.done, turns.total, f"{dtype}, {method}, {level}")
                    ready.append((level, *warmed(prepared, level)))
                if args.compile_only:
                    continue
                for turn in turns.rounds():
                    for level, loss_of, first in ready:
                        here = {"impl": "pytorch" if level == "eager" else level} | case
                        figures, times = measure(prepared, args, loss_of)
                        records.put(here, figures, turn)
                        if turns.is_last(turn):
                            records.put(here, once(prepared, level, loss_of, first, times))
                    if delegate:
                        delegate.turn()
                del ready
        del prepared


if __name__ == "__main__":
    main()
