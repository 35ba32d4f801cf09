"""The load-balancing loss of mixtures, by transformers: for the padded rows of the families' cases, and for packed documents.

`--write FOLDER` makes the cases of the tests of `models`, over the models in `crates/models/tests/fixtures/families`. A packed row has the
loss of its documents as padded rows: padding counts for nothing.
"""

import argparse
import pathlib

import torch
import transformers
from safetensors.torch import load_file, save_file

from model_families import load, summaries

FAMILIES = pathlib.Path(__file__).parents[2] / "crates/models/tests/fixtures/families"
COEFFICIENT = 0.5


def run(family, inputs):
    model = load(FAMILIES / family)
    # The factor is a field of the configuration, and the model's.
    model.router_aux_loss_coef = COEFFICIENT
    mask = inputs["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    outputs = model(
        input_ids=inputs["input_ids"], attention_mask=mask, position_ids=positions, labels=inputs["labels"], use_cache=False,
        output_router_logits=True)
    outputs.loss.backward()
    return {"loss": outputs.loss.detach()[None], "aux": outputs.aux_loss.detach()[None], "gradients": summaries(model)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=pathlib.Path, metavar="FOLDER", required=True, help="make the cases of the tests")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    args.write.mkdir(parents=True, exist_ok=True)
    for family in ("qwen3_moe", "qwen3_moe_some", "qwen3_5_moe", "gpt_oss"):
        cases = load_file(FAMILIES / family / "cases.safetensors")
        tensors = run(family, {name: cases[name] for name in ("input_ids", "attention_mask", "labels")})
        lengths = cases["lengths"].tolist()
        documents = cases["packed_ids"][0].split(lengths)
        rows = {name: torch.zeros(len(lengths), max(lengths), dtype=torch.int64) for name in ("input_ids", "attention_mask", "labels")}
        rows["labels"] -= 100
        for row, document in enumerate(documents):
            size = len(document)
            rows["input_ids"][row, :size] = rows["labels"][row, :size] = document
            rows["attention_mask"][row, :size] = 1
        tensors |= {f"packed_{name}": value for name, value in run(family, rows).items()}
        save_file(tensors, args.write / f"{family}.safetensors")
        print(family, tensors["aux"].item(), tensors["packed_aux"].item(), tensors["loss"].item())


if __name__ == "__main__":
    main()
