"""The bytes on the wire, of both kinds: protobuf as SDKs from 0.25 on send it, JSON as 0.24 does.

    request   protobuf (perhaps zstd) or JSON  --decode_*-->  ForwardBackward
    result    protobuf, as it is journaled     --as sent, or `as_json`-->  what the client asked for

The schema is the one in the installed wheel of `tinker`, whose other modules are not loaded: they take seconds.
"""

from __future__ import annotations

import base64
import functools
import importlib.util
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from skyrl_train.errors import SkyrlTrainError
from skyrl_train.inference import ScoredSequence
from skyrl_train.serve.refusals import Refused
from skyrl_train.system import install_command
from skyrl_train.system.files import parse_strict_json, shown
from skyrl_train.types import GenerationOutput, StopReason

PROTOBUF = "application/x-protobuf"
MAX_BODY_BYTES = 32 << 20
"""Of one request, and of what it becomes when it is decompressed; SDKs send chunks of 5 MB."""
_MAX_ELEMENTS = 1 << 24
"""Of one tensor, dense."""
_MASKED_LOGPROB = -99999.0
"""Of an empty cell among the likeliest tokens."""


@functools.cache
def schema() -> Any:
    """The module of the protobuf messages. Raises SkyrlTrainError where no SDK is installed that has them."""
    found = importlib.util.find_spec("tinker")
    folders = list(found.submodule_search_locations or ()) if found else []
    path = Path(folders[0]) / "proto" / "tinker_public_pb2.py" if folders else Path()
    if not path.is_file():
        raise SkyrlTrainError(
            f"skyrl-serve needs tinker from 0.25 on: {install_command('serve')}, in Python 3.11 or later"
        )
    spec: Any = importlib.util.spec_from_file_location("skyrl_tinker_public_pb2", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SentImages: TypeAlias = tuple[tuple[int, Any], ...]
"""Of each image of a `ModelInput` how many tokens of text come before it, and its `ImageChunk`."""


@dataclass(frozen=True, kw_only=True)
class Datum:
    """One example, as it was sent: nothing is checked yet but types and sizes."""

    tokens: NDArray[np.int64]
    """`[n]`, those of images not among them."""
    inputs: Mapping[str, NDArray[Any]]
    """int64 or float32, by name: `target_tokens`, `weights`, `advantages`, `logprobs`."""
    images: SentImages = ()


@dataclass(frozen=True, kw_only=True)
class ForwardBackward:
    """One pass over examples: which loss, with which settings, and whether gradients are made."""

    data: Sequence[Datum]
    loss: str
    config: Mapping[str, float | str]
    backward: bool


def decompressed(body: bytes, encoding: str) -> bytes:
    """Return the body without its `Content-Encoding`. Raises Refused for another one, and for one that grows too large."""
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise Refused(f"Content-Encoding {encoding[:40]!r} is not read; zstd is", status=415)
    import zstandard

    try:
        with zstandard.ZstdDecompressor(max_window_size=MAX_BODY_BYTES).stream_reader(body) as reader:
            whole: bytes = reader.read(MAX_BODY_BYTES + 1)
    except zstandard.ZstdError as error:
        raise Refused(f"the body is not zstd: {error}") from None
    if len(whole) > MAX_BODY_BYTES:
        raise Refused(f"the body has more than {MAX_BODY_BYTES} bytes when it is decompressed", status=413)
    return whole


def parsed_json(body: bytes) -> dict[str, Any]:
    """Raises Refused for what is no JSON object."""
    try:
        content = parse_strict_json(body or b"{}")
    except ValueError as error:
        raise Refused(f"the body is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise Refused("the body must be a JSON object")
    return content


def parsed_protobuf(body: bytes) -> Any:
    """Return the message. Raises Refused for what is none."""
    message = schema().ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except Exception as error:  # of a class that the runtime chooses
        raise Refused(f"the body is no ForwardBackwardRequest: {type(error).__name__}") from None
    return message


def decoded(message: Any) -> ForwardBackward:
    """Return what a message asks for. Raises Refused for parts of other types or sizes than they state."""
    config = {name: value.text if value.text else value.number for name, value in message.loss_fn_config_v2.items()}
    data = []
    for each in message.data:
        tokens, images = _input_of(each.model_input)
        inputs = {name: _tensor_of_protobuf(name, tensor) for name, tensor in each.loss_fn_inputs.items()}
        data.append(Datum(tokens=tokens, inputs=inputs, images=images))
    return ForwardBackward(
        data=data,
        loss=message.loss_fn,
        config=config or dict(message.loss_fn_config),
        backward=not message.forward_only,
    )


def message_of_json(content: Mapping[str, Any], *, backward: bool) -> Any:
    """Return the message that an SDK of before 0.25 would have sent, but for its `seq_id`. Raises Refused."""
    entry = content.get("forward_backward_input" if backward else "forward_input")
    data = entry.get("data") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(data, list) or not all(isinstance(each, dict) for each in data):
        raise Refused("the body must have the examples as a list of objects in forward_backward_input.data")
    config, loss = entry.get("loss_fn_config") or {}, str(entry.get("loss_fn"))
    if not isinstance(config, dict) or not all(type(each) in (int, float) for each in config.values()):
        raise Refused(f"loss_fn_config must be an object of numbers; got {shown(config)}")
    message = schema().ForwardBackwardRequest(
        model_id=str(content.get("model_id")), loss_fn=loss, forward_only=not backward, loss_fn_config=config
    )
    for each in data:
        datum, inputs = message.data.add(), each.get("loss_fn_inputs")
        datum.model_input.extend(_chunks_of_json(each.get("model_input")))
        if not isinstance(inputs, dict):
            raise Refused("loss_fn_inputs must be an object")
        for name, tensor in inputs.items():
            _fill(datum.loss_fn_inputs[name], name, tensor)
    return message


def input_of_json(value: object) -> tuple[NDArray[np.int64], SentImages]:
    """Return the tokens of text of a `ModelInput`, and its images. Raises Refused for anything else."""
    return _input_of(_chunks_of_json(value))


def _chunks_of_json(value: object) -> Iterator[Any]:
    """The messages of the chunks of a `ModelInput`."""
    chunks = value.get("chunks") if isinstance(value, dict) else None
    if not isinstance(chunks, list):
        raise Refused("model_input must be an object with a list of chunks")
    for chunk in chunks:
        message, kind = schema().Chunk(), chunk.get("type", "encoded_text") if isinstance(chunk, dict) else None
        if kind == "encoded_text":
            tokens = _whole_numbers(chunk.get("tokens"), "tokens", 2**31)
            message.encoded_text.tokens = tokens.astype(np.int32).tobytes()
        elif kind == "image":
            stated = {name: chunk.get(name) for name in ("format", "expected_tokens")}
            try:
                data = base64.b64decode(chunk["data"], validate=True)
                message.image.CopyFrom(schema().ImageChunk(data=data, **stated))
            except (KeyError, TypeError, ValueError):
                what = "data in base64, format as a text, and expected_tokens as a whole number, if at all"
                raise Refused(f"a chunk of type image must have {what}; got {shown(stated)}") from None
        else:
            raise _not_read(kind)
        yield message


def _input_of(chunks: Iterable[Any]) -> tuple[NDArray[np.int64], SentImages]:
    tokens, images, size = [np.zeros(0, np.int64)], [], 0
    for chunk in chunks:
        kind = chunk.WhichOneof(chunk.DESCRIPTOR.oneofs[0].name)
        if kind == "encoded_text":
            tokens.append(_numbers("model_input", chunk.encoded_text.tokens, np.int32).astype(np.int64))
            size += len(tokens[-1])
        elif kind == "image":
            images.append((size, chunk.image))
        else:
            raise _not_read(kind)
    return np.concatenate(tokens), tuple(images)


def _not_read(kind: object) -> Refused:
    """Of a chunk of another kind. Where an image is said to lie is not looked at."""
    remedy = "; encoded_text and image are"
    if kind == "image_asset_pointer":
        remedy = ": nothing is fetched from where an image is said to lie. Send its bytes, as a chunk of type image"
    return Refused(f"a chunk of type {shown(kind)} is not read{remedy}")


def _whole_numbers(value: object, name: str, top: int = 2**62) -> NDArray[np.int64]:
    if not isinstance(value, list) or not all(type(each) is int and abs(each) < top for each in value):
        raise Refused(f"{name} must be a list of whole numbers, of at most {top.bit_length() - 1} bits")
    return np.asarray(value, dtype=np.int64)


def _numbers(name: str, data: bytes, dtype: Any) -> NDArray[Any]:
    if len(data) % np.dtype(dtype).itemsize:
        raise Refused(f"{name} has {len(data)} bytes, which are no whole {np.dtype(dtype).name} numbers")
    return np.frombuffer(data, dtype=dtype)


def _tensor_of_protobuf(name: str, message: Any, *, empty: int = 0) -> NDArray[Any]:
    kinds = {1: np.float32, 2: np.int64, 3: np.int32}
    if message.dtype not in kinds:
        raise Refused(f"{name}: elements of type {message.dtype} are not read; float32, int64 and int32 are")
    dtype = kinds[message.dtype]
    if not message.HasField("sparse_csr"):
        return _shaped(name, _numbers(name, message.dense, dtype), list(message.shape))
    csr = message.sparse_csr
    return _dense(
        name,
        _numbers(name, csr.values, dtype),
        _numbers(name, csr.crow_indices, np.int64),
        _numbers(name, csr.col_indices, np.int64),
        list(message.shape),
        empty=empty,
    )


def targets_of_json(value: object) -> tuple[Any, NDArray[np.int64]]:
    """Return a tensor of token ids as a message, and as `[n, k]`, with -1 in cells that name none. Raises Refused."""
    message = schema().Tensor()
    _fill(message, "target_prompt_logprobs", value)
    return message, _tensor_of_protobuf("target_prompt_logprobs", message, empty=-1).astype(np.int64)


def fill_like(message: Any, like: Any, values: NDArray[np.float32]) -> None:
    """Fill the message of a tensor with numbers `[n, k]` as another one, of the same shape, has its own."""
    message.CopyFrom(like)
    message.dtype = schema().DTYPE_FLOAT32
    if not like.HasField("sparse_csr"):
        message.dense = values.tobytes()
        return
    rows, columns = (
        np.frombuffer(each, np.int64) for each in (like.sparse_csr.crow_indices, like.sparse_csr.col_indices)
    )
    message.sparse_csr.values = values[np.repeat(np.arange(len(rows) - 1), np.diff(rows)), columns].tobytes()


def _fill(message: Any, name: str, tensor: object) -> None:
    """Fill the message of a tensor from its JSON."""
    entry: dict[str, Any] = tensor if isinstance(tensor, dict) else {}
    dtype = {"float32": np.float32, "int64": np.int64}.get(str(entry.get("dtype")))
    data, kinds = entry.get("data"), (int,) if dtype is np.int64 else (int, float)
    if dtype is None or not isinstance(data, list) or not all(type(each) in kinds for each in data):
        raise Refused(
            f"{name[:40]}: a tensor must be an object with dtype float32 or int64 and a list of numbers, data"
        )
    try:
        values = np.asarray(data, dtype=dtype).tobytes()
    except OverflowError:
        raise Refused(f"{name[:40]}: a number is too large") from None
    message.dtype = schema().DTYPE_INT64 if dtype is np.int64 else schema().DTYPE_FLOAT32
    message.shape.extend(_whole_numbers(entry.get("shape") or [len(data)], f"{name}: shape").tolist())
    if entry.get("sparse_crow_indices") is None:
        message.dense = values
    else:
        message.sparse_csr.values = values
        for ours, theirs in (("crow_indices", "sparse_crow_indices"), ("col_indices", "sparse_col_indices")):
            setattr(message.sparse_csr, ours, _whole_numbers(entry.get(theirs), f"{name}: {theirs}").tobytes())


def _shaped(name: str, values: NDArray[Any], shape: list[int]) -> NDArray[Any]:
    shape = shape or [len(values)]
    if min(shape, default=1) < 0 or math.prod(shape) != len(values) or len(shape) > 2:
        raise Refused(f"{name}: {len(values)} numbers do not have the shape {shape[:4]}")
    return values.reshape(shape)


def _dense(
    name: str,
    values: NDArray[Any],
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    shape: list[int],
    *,
    empty: int,
) -> NDArray[Any]:
    """What compressed sparse rows stand for; `empty` in cells that they do not list."""
    if len(shape) != 2 or min(shape) < 0 or math.prod(shape) > _MAX_ELEMENTS:
        raise Refused(f"{name}: a sparse tensor must have two dimensions and at most {_MAX_ELEMENTS} cells")
    counts = np.diff(rows)
    fits = len(rows) == shape[0] + 1 and rows[0] == 0 and rows[-1] == len(columns) == len(values)
    if not fits or (counts < 0).any() or (len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]):
        raise Refused(f"{name}: its sparse rows and columns do not fit the shape {shape}")
    dense = np.full(shape, empty, values.dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


def forward_backward_output(
    outputs: Sequence[Mapping[str, NDArray[np.float32]]], metrics: Mapping[str, float]
) -> bytes:
    """Return the message of a pass: of each example the same fields, each `[n]` or `[n, k]`."""
    message = schema().ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for name, value in metrics.items():
        message.metrics[name] = value
    # Within a record all examples have the same k.
    for _, run in groupby(outputs, key=lambda each: [array.shape[1:] for array in each.values()]):
        alike = list(run)
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(alike))
        for name, first in alike[0].items():
            arrays = [np.ascontiguousarray(each[name], dtype=np.float32) for each in alike]
            field = record.fields[name]
            field.data, field.dtype = b"".join(array.tobytes() for array in arrays), schema().DTYPE_FLOAT32
            field.offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=np.int64).tobytes()
            field.trailing_shape.extend(first.shape[1:])
    data: bytes = message.SerializeToString()
    return data


def sample_response(
    outputs: Sequence[GenerationOutput],
    *,
    prompt: ScoredSequence | None,
    top_of_prompt: bool,
    num_blank: int,
    top_of_samples: Sequence[ScoredSequence],
    of_targets: tuple[Any, NDArray[np.float32]] | None = None,
) -> bytes:
    """Return the message of samples: `prompt` are its tokens' log-probabilities where they were asked for, of which those of
    the first `num_blank` are left out, `top_of_samples` the likeliest tokens at each sampled one of each sequence, or
    nothing, `of_targets` the tensor that named tokens of the prompt's places, and their log-probabilities."""
    message = schema().SampleResponse()
    for number, output in enumerate(outputs):
        is_length = output.stop_reason is StopReason.LENGTH
        sequence = message.sequences.add(
            stop_reason=schema().STOP_REASON_LENGTH if is_length else schema().STOP_REASON_STOP,
            tokens=np.asarray(output.token_ids, np.int32).tobytes(),
            logprobs=np.asarray(output.logprobs, np.float32).tobytes(),
        )
        if top_of_samples:
            _add_top(sequence.topk_sampled_logprobs, top_of_samples[number], num_blank=0)
    if prompt is not None:
        blank = max(1, num_blank)
        left_out = np.full(blank, np.nan, np.float32)
        message.prompt_logprobs = np.concatenate([left_out, prompt.logprobs[blank - 1 :]]).tobytes()
        if top_of_prompt:
            _add_top(message.topk_prompt_logprobs, prompt.behind(blank - 1), num_blank=blank)
    if of_targets is not None:
        fill_like(message.target_prompt_logprobs, *of_targets)
    data: bytes = message.SerializeToString()
    return data


def _add_top(message: Any, scored: ScoredSequence, *, num_blank: int) -> None:
    blank = (num_blank, scored.top_token_ids.shape[1])
    ids = np.concatenate([np.zeros(blank, np.int32), scored.top_token_ids])
    logprobs = np.concatenate([np.full(blank, _MASKED_LOGPROB, np.float32), scored.top_logprobs])
    message.token_ids, message.logprobs = ids.tobytes(), logprobs.tobytes()
    message.length, message.k = ids.shape


def as_json(kind: str, data: bytes) -> dict[str, Any]:
    """Return the message of a result as SDKs of before 0.25 read it. `kind`: its name in the schema."""
    message = getattr(schema(), kind)()
    message.ParseFromString(data)
    if kind == "SampleResponse":
        return _sample_as_json(message)
    outputs: list[dict[str, Any]] = []
    for record in message.loss_fn_outputs:
        examples: list[dict[str, Any]] = [{} for _ in range(record.num_datums)]
        for name, field in record.fields.items():
            offsets = np.frombuffer(field.offsets, np.int64) // 4
            values, trailing = np.frombuffer(field.data, np.float32), list(field.trailing_shape)
            for number, example in enumerate(examples):
                own = values[offsets[number] : offsets[number + 1]]
                shape = [len(own) // max(1, math.prod(trailing)), *trailing]
                example[name] = {"data": own.tolist(), "dtype": "float32", "shape": shape}
        outputs += examples
    return {
        "loss_fn_output_type": message.loss_fn_output_type,
        "loss_fn_outputs": outputs,
        "metrics": dict(message.metrics),
    }


def _sample_as_json(message: Any) -> dict[str, Any]:
    def top(field: Any) -> list[Any]:
        ids = np.frombuffer(field.token_ids, np.int32).reshape(field.length, field.k)
        logprobs = np.frombuffer(field.logprobs, np.float32).reshape(field.length, field.k)
        return [
            None if row[0] == _MASKED_LOGPROB else [[int(token), float(value)] for token, value in zip(tokens, row)]
            for tokens, row in zip(ids, logprobs)
        ]

    content: dict[str, Any] = {"type": "sample", "sequences": []}
    for sequence in message.sequences:
        entry = {
            "stop_reason": "length" if sequence.stop_reason == schema().STOP_REASON_LENGTH else "stop",
            "tokens": np.frombuffer(sequence.tokens, np.int32).tolist(),
            "logprobs": np.frombuffer(sequence.logprobs, np.float32).tolist(),
        }
        if sequence.HasField("topk_sampled_logprobs"):
            entry["topk_logprobs"] = top(sequence.topk_sampled_logprobs)
        content["sequences"].append(entry)
    if message.prompt_logprobs:
        values = np.frombuffer(message.prompt_logprobs, np.float32).tolist()
        content["prompt_logprobs"] = [None if math.isnan(value) else value for value in values]
    if message.HasField("topk_prompt_logprobs"):
        content["topk_prompt_logprobs"] = top(message.topk_prompt_logprobs)
    return content


def from_base64(text: str) -> bytes:
    """As the journal has bytes."""
    return base64.b64decode(text)
