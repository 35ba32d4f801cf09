"""Output projection and cross-entropy in PyTorch: `F.linear` and `F.cross_entropy`, all logits at once.

A step is one forward and backward of the mean loss to the hidden states and the matrix, gradients dropped between steps;
in low precision the logits go up to fp32 first, as transformers has it. `peak_above_bytes` is the largest number of live
bytes in a step less the inputs and less their gradients, `peak_with_gradients_bytes` less the inputs only; the logits are let
go when the loss is there, which a model that returns them does not do. On CUDA, Liger's fused loss and cut-cross-entropy are
further methods where they are installed; each round measures all of them. `--accuracy` measures errors instead, of loss
and gradients against fp64 over the same (rounded) inputs. Writes one JSON record per figure.

Inputs are drawn in fp32 on the CPU from one generator of the seed, in this order, so that others can draw the same: hidden
states `randn(N, H)`, matrix `0.02 * randn(V, H)`, targets `randint(V, (N,))`, ignored rows `randperm(N)[:round(ignored * N)]`.
"""

import argparse
import gc

import torch
import torch.nn.functional as F

from measure import forward_and_backward, peak_of, phases
from records import DTYPES, Records, add_arguments, environment, metric, progress
from turns import Turns

IGNORED = -100
KINDS = DTYPES | {"fp16": torch.float16, "float16": torch.float16}
# Shapes that divide by nothing beside ones that do: tokens, hidden, vocabulary, ignored.
ACCURACY_SHAPES = [(256, 64, 1000, 0.0), (512, 128, 4096, 0.25), (33, 47, 517, 0.25)]
# Beside PyTorch's own error, relative to the size of the exact result. Gradients: about one rounding to their dtype (unit
# roundoff 2^-8, 2^-11); in fp32, where sums in another order are no worse, sixteen of 2^-24. The loss is a sum in fp32 whatever
# the dtype, and the rounding of its logits averages out.
TOLERANCES = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-20}
LOSS_TOLERANCES = {torch.bfloat16: 2.0**-16, torch.float16: 2.0**-19, torch.float32: 2.0**-20}


class Case:
    def __init__(self, text):
        fields = text.split(",")
        if len(fields) != 5:
            raise argparse.ArgumentTypeError(f"`{text}` is not TOKENS,HIDDEN,VOCABULARY,DTYPE,IGNORED")
        try:
            self.tokens, self.hidden, self.vocabulary = (int(size) for size in fields[:3])
            self.ignored = float(fields[4])
        except ValueError as cause:
            raise argparse.ArgumentTypeError(f"`{text}`: {cause}; give for example 2048,896,151936,fp32,0.5")
        self.dtype = fields[3]
        if min(self.tokens, self.hidden, self.vocabulary) < 1 or not 0 <= self.ignored <= 1 or self.dtype not in KINDS:
            raise argparse.ArgumentTypeError(
                f"`{text}`: sizes are at least 1, dtypes {', '.join(KINDS)}, the ignored share from 0 to 1"
            )

    def keys(self, method):
        return {
            "impl": "pytorch", "method": method, "tokens": self.tokens, "hidden": self.hidden,
            "vocabulary": self.vocabulary, "dtype": self.dtype, "ignored": self.ignored,
        }

    def draw(self, seed, device):
        """Hidden states, matrix, targets, and how many of them have a label."""
        generator = torch.Generator().manual_seed(seed)
        place = lambda tensor: tensor.to(KINDS[self.dtype]).to(device).requires_grad_()
        x = place(torch.randn(self.tokens, self.hidden, generator=generator))
        weight = place(torch.randn(self.vocabulary, self.hidden, generator=generator).mul_(0.02))
        targets = torch.randint(self.vocabulary, (self.tokens,), generator=generator)
        ignored = round(self.ignored * self.tokens)
        targets[torch.randperm(self.tokens, generator=generator)[:ignored]] = IGNORED
        return x, weight, targets.to(device), self.tokens - ignored


def eager(x, weight, targets):
    logits = F.linear(x, weight)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return F.cross_entropy(logits, targets, ignore_index=IGNORED)


def methods(device, dtypes):
    """Name and function of each available method. Cut-cross-entropy takes bf16 and fp16 alone."""
    found = {"eager": eager}
    if device.type != "cuda":
        return found
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED)
        found["liger"] = lambda x, weight, targets: liger(weight, x, targets)
    except ImportError:
        pass
    try:
        from cut_cross_entropy import linear_cross_entropy

        if dtypes <= {torch.bfloat16, torch.float16}:
            found["cut-cross-entropy"] = lambda x, weight, targets: linear_cross_entropy(
                x, weight, targets, ignore_index=IGNORED
            )
    except ImportError:
        pass
    return found


def step(loss_of, inputs, device):
    """One step; seconds of the forward and of the backward."""
    x, weight, targets = inputs
    seconds = forward_and_backward(lambda: loss_of(x, weight, targets), lambda loss: loss.backward(), device)
    x.grad = weight.grad = None
    return seconds


def speed(case, loss_of, inputs, labelled, repeats, device):
    """Figures of one round, after a step that is not counted."""
    step(loss_of, inputs, device)
    times = [step(loss_of, inputs, device) for _ in range(repeats)]
    above = peak_of(lambda: step(loss_of, inputs, device), device)
    gradients = sum(tensor.numel() * tensor.element_size() for tensor in inputs[:2])
    flops = 6 * labelled * case.hidden * case.vocabulary
    return [
        *phases(times),
        metric("peak_above_bytes", "B", [max(0, above - gradients)]),
        metric("peak_with_gradients_bytes", "B", [above]),
        metric("flop_rate", "FLOP/s", [flops / (forward + backward) for forward, backward in times]),
    ]


def results(loss_of, x, weight, targets):
    """Loss and both gradients, in fp64."""
    x, weight = (tensor.detach().requires_grad_() for tensor in (x, weight))
    loss = loss_of(x, weight, targets)
    loss.backward()
    return {"loss": loss.detach().double(), "hidden": x.grad.double(), "weight": weight.grad.double()}


def errors(case, loss_of, inputs):
    """Per result, its distance from the exact one, both measured by Frobenius."""
    x, weight, targets = inputs
    exact = results(eager, x.double(), weight.double(), targets)
    found = results(loss_of, x, weight, targets)
    return {name: ((found[name] - exact[name]).norm() / exact[name].norm()).item() for name in exact}


def accuracy(case, method, found, records):
    """Records the errors of a method, each beside the one that is allowed."""
    for tensor, error in found.items():
        tolerances = LOSS_TOLERANCES if tensor == "loss" else TOLERANCES
        allowed = error + tolerances[KINDS[case.dtype]]
        what = f"{method}, {case.tokens} tokens, {case.dtype}, {100 * case.ignored:.0f} % ignored, V {case.vocabulary}"
        print(f"{what}: {tensor} {error:.3e}, allowed {allowed:.3e}")
        figures = [metric("error", "ratio", [error]), metric("allowed_error", "ratio", [allowed])]
        records.put(case.keys(method) | {"tensor": tensor}, figures)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--dtype", choices=list(KINDS), default="fp32")
    parser.add_argument("--ignored", type=float, default=0.0, help="share of the rows without a label")
    parser.add_argument(
        "--case", type=Case, action="append", default=[], metavar="TOKENS,HIDDEN,VOCABULARY,DTYPE,IGNORED",
        help="instead of the five above; may be given more than once",
    )
    parser.add_argument("--accuracy", action="store_true", help="errors against fp64 instead of time and memory")
    parser.add_argument("--repeats", type=int, default=3)
    add_arguments(parser)
    args = parser.parse_args()

    cases = args.case
    if not cases and args.accuracy:
        cases = [
            Case(f"{tokens},{hidden},{vocabulary},{dtype},{ignored}")
            for dtype in ("fp32", "bf16")
            for tokens, hidden, vocabulary, ignored in ACCURACY_SHAPES
        ]
    elif not cases:
        one = (args.tokens, args.hidden, args.vocabulary, args.dtype, args.ignored)
        try:
            cases = [Case(",".join(map(str, one)))]
        except argparse.ArgumentTypeError as cause:
            parser.error(str(cause))
    if args.repeats < 1:
        parser.error("--repeats is at least 1")

    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    all_methods = methods(device, {KINDS[case.dtype] for case in cases})
    records = Records(args.records, "fused-ce", environment(device))
    # Errors depend on no other program.
    turns = None if args.accuracy else Turns(len(cases))
    for index, case in enumerate(cases):
        *inputs, labelled = case.draw(args.seed, device)
        what = f"{case.tokens} tokens, {case.dtype}, {100 * case.ignored:.0f} % ignored"
        for turn in turns.rounds() if turns else [None]:
            for offset, (method, loss_of) in enumerate(all_methods.items()):
                progress(index * len(all_methods) + offset, len(cases) * len(all_methods), f"{method}, {what}")
                if turns:
                    figures = speed(case, loss_of, inputs, labelled, args.repeats, device)
                    records.put(case.keys(method), figures, turn)
                else:
                    accuracy(case, method, errors(case, loss_of, inputs), records)
        # Nothing of a case is there when the next is measured.
        del inputs
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
