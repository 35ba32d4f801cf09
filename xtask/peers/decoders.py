"""Decoders of real shapes with random weights, whether Liger's kernels can run, and the memory of this process, for the peers that use
transformers."""

import torch
import transformers

from records import DTYPES

SHAPES = {
    "qwen2.5-0.5b": dict(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=32768, tie_word_embeddings=True,
    ),
    "tiny": dict(
        vocab_size=4096, hidden_size=128, intermediate_size=704, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32768, tie_word_embeddings=True,
    ),
    "narrow": dict(
        vocab_size=1024, hidden_size=32, intermediate_size=64, num_hidden_layers=24, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32768, tie_word_embeddings=True,
    ),
}
NAMES = {"qwen2.5-0.5b": "Qwen2.5-0.5B", "tiny": "tiny", "narrow": "24 layers of width 32"}


def qwen2(shape, dtype, device):
    rope = dict(rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    config = transformers.Qwen2Config(**SHAPES[shape], **rope, bos_token_id=0, eos_token_id=1)
    config._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[dtype])
    try:
        with torch.device(device):
            return transformers.Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def liger_missing(device):
    """Why Liger's kernels cannot run, or None."""
    if device.type != "cuda":
        return "not compared: Liger's kernels need a GPU"
    try:
        import liger_kernel.transformers  # noqa: F401
    except ImportError:
        return "not compared: liger-kernel is not installed"
    return None


def reset_resident_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def resident_peak():
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
