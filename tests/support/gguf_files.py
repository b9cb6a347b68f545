"""A Llama of a few thousand parameters in a GGUF file, with a tokenizer of bytes, written by the package `gguf`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

NUM_LAYERS, HIDDEN, INNER, HEADS, KV_HEADS = 2, 32, 64, 2, 1
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write_gguf(
    file: Path, *, architecture: str = "llama", tensor_type: str = "Q8_0", leave_out: str = "", seed: int = 0
) -> Path:
    """Write the file: matrices in `tensor_type`, without the tensors whose name contains `leave_out`, if it is given."""
    import gguf

    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name("tiny")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(NUM_LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    letters = [chr(number) for number in [*range(33, 127), *range(161, 173), *range(174, 256)]]
    letters += [chr(256 + number) for number in range(256 - len(letters))]
    tokens = [*SPECIAL, *letters, "ab", "cd", *(f"<spare{number}>" for number in range(27))]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges(["a b", "c d"])  # of one alone transformers 5.17 reads its letters
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    kind, draws = gguf.GGMLQuantizationType[tensor_type], np.random.default_rng(seed)
    for name, shape in _shapes(len(tokens)).items():
        if leave_out and leave_out in name:
            continue
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, dtype=np.float32))
            continue
        values = (0.2 * draws.standard_normal(shape)).astype(np.float32)
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _shapes(vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Tied embeddings: there is no output.weight."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocabulary, HIDDEN), "output_norm.weight": (HIDDEN,)}
    per_head = HIDDEN // HEADS
    for layer in range(NUM_LAYERS):
        for name, shape in {
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (KV_HEADS * per_head, HIDDEN),
            "attn_v": (KV_HEADS * per_head, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }.items():
            shapes[f"blk.{layer}.{name}.weight"] = shape
    return shapes
