"""What travels between a client and a server of Tinker's API, by the schema of the installed SDK: both directions of it.

The client's half (`request_bytes`, `read_output`, `read_sample`) is the suite's, the server's half (`read_body`,
`output_bytes`, `sample_bytes`) the reference server's. Both speak of requests and results in the shape that they have in
JSON, so that a check is written once for both wires.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import zstandard


def schema() -> Any:
    """The SDK's protobuf module; read by itself where the SDK is not imported yet, as that takes a second or two."""
    if "tinker" in sys.modules:
        from tinker.proto import tinker_public_pb2

        return tinker_public_pb2
    found = importlib.util.find_spec("tinker")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("the SDK is not installed here: pip install tinker")
    path = Path(found.origin).parent / "proto" / "tinker_public_pb2.py"
    module_spec = importlib.util.spec_from_file_location("tinker_public_pb2", path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


pb = schema()

Json = dict[str, Any]
PROTOBUF = "application/x-protobuf"
LARGEST_BODY = 32 << 20
MISSING = (0, -99999.0)  # a cell of a top-k table that names no token
DTYPES: dict[int, Any] = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int32}


class Refused(Exception):
    """The request is answered by this HTTP status at once, and nothing was done."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


# The server's half.


def read_body(headers: Mapping[str, str], body: bytes) -> Json:
    """The JSON object that a body holds, whichever way it is packed. Raises Refused."""
    if headers.get("content-encoding", "identity") == "zstd":
        try:
            body = zstandard.ZstdDecompressor().stream_reader(body).read(LARGEST_BODY + 1)
        except zstandard.ZstdError as error:
            raise Refused(400, f"the body is not zstd: {error}") from error
    if len(body) > LARGEST_BODY:
        raise Refused(413, f"the body is larger than {LARGEST_BODY} bytes")
    kind = headers.get("content-type", "application/json").split(";")[0].strip()
    if kind not in ("application/json", PROTOBUF):
        raise Refused(415, f"content-type {kind!r} is not served: send application/json or {PROTOBUF}")
    try:
        given = request_of(body) if kind == PROTOBUF else json.loads(body or b"{}")
    except ValueError as error:
        raise Refused(400, f"the body cannot be read: {error}") from error
    if not isinstance(given, dict):
        raise Refused(422, "the body must be a JSON object")
    return given


def request_of(body: bytes) -> Json:
    """The JSON shape of a ForwardBackwardRequest in protobuf. Raises ValueError."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except Exception as error:
        raise ValueError("it is no ForwardBackwardRequest in protobuf") from error
    data = []
    for datum in message.data:
        chunks: list[Json] = []
        for part in datum.model_input:
            kind = part.WhichOneof("chunk")
            tokens: Any = np.frombuffer(part.encoded_text.tokens, np.int32) if kind == "encoded_text" else []
            chunks.append({"type": kind, "tokens": tokens})
        inputs = {name: read_tensor(tensor) for name, tensor in datum.loss_fn_inputs.items()}
        data.append({"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs})
    config: Json = dict(message.loss_fn_config)
    for name, value in getattr(message, "loss_fn_config_v2", {}).items():  # newer, and wins where a client sends both
        config[name] = getattr(value, value.WhichOneof("value") or "number")
    return {
        "model_id": message.model_id,
        "seq_id": message.seq_id,
        "forward_only": message.forward_only,
        "forward_backward_input": {"data": data, "loss_fn": message.loss_fn, "loss_fn_config": config},
    }


def read_tensor(tensor: Any) -> Json:
    if tensor.dtype not in DTYPES or tensor.HasField("sparse_csr"):
        raise ValueError("a tensor is sparse, or of a dtype that is neither float32 nor int64")
    dtype = "float32" if tensor.dtype == pb.DTYPE_FLOAT32 else "int64"
    return {
        "data": np.frombuffer(tensor.dense, DTYPES[tensor.dtype]),
        "shape": list(tensor.shape) or None,
        "dtype": dtype,
    }


def output_bytes(result: Json) -> bytes:
    """The ForwardBackwardOutput of a result: one record that holds every datum's log-probabilities end to end."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type=result["loss_fn_output_type"], metrics=result["metrics"])
    arrays = [np.array(output["logprobs"]["data"], np.float32) for output in result["loss_fn_outputs"]]
    record = message.loss_fn_outputs.add(type_tag=result["loss_fn_output_type"], num_datums=len(arrays))
    tensor, offsets = record.fields["logprobs"], np.cumsum([0, *(array.nbytes for array in arrays)])
    tensor.data, tensor.offsets = b"".join(array.tobytes() for array in arrays), offsets.astype(np.int64).tobytes()
    tensor.dtype = pb.DTYPE_FLOAT32
    return bytes(message.SerializeToString())


def sample_bytes(result: Json) -> bytes:
    """The SampleResponse of a result: NaN for a prompt token without a log-probability."""
    message = pb.SampleResponse()
    for sequence in result["sequences"]:
        reason = pb.STOP_REASON_STOP if sequence["stop_reason"] == "stop" else pb.STOP_REASON_LENGTH
        sent = message.sequences.add(stop_reason=reason, tokens=np.array(sequence["tokens"], np.int32).tobytes())
        sent.logprobs = np.array(sequence["logprobs"], np.float32).tobytes()
        if "topk_logprobs" in sequence:
            sent.topk_sampled_logprobs.CopyFrom(topk_of(sequence["topk_logprobs"]))
    if "prompt_logprobs" in result:
        values = [math.nan if value is None else value for value in result["prompt_logprobs"]]
        message.prompt_logprobs = np.array(values, np.float32).tobytes()
    if "topk_prompt_logprobs" in result:
        message.topk_prompt_logprobs.CopyFrom(topk_of(result["topk_prompt_logprobs"]))
    return bytes(message.SerializeToString())


def topk_of(rows: list[list[tuple[int, float]] | None]) -> Any:
    width = max((len(row) for row in rows if row), default=0)
    flat = [cell for row in rows for cell in ([*(row or [])] + [MISSING] * width)[:width]]
    tokens, logprobs = np.array([cell[0] for cell in flat], np.int32), np.array([cell[1] for cell in flat], np.float32)
    if hasattr(pb, "TopkLogprobs"):
        return pb.TopkLogprobs(token_ids=tokens.tobytes(), logprobs=logprobs.tobytes(), k=width, length=len(rows))
    old = pb.TopkPromptLogprobs  # before 0.29, with the same numbers of fields under other names
    return old(token_ids=tokens.tobytes(), logprobs=logprobs.tobytes(), k=width, prompt_length=len(rows))


# The client's half.


def request_bytes(request: Json) -> bytes:
    """The ForwardBackwardRequest in protobuf of a request in JSON's shape, as SDKs since 0.25 send it."""
    given = request["forward_backward_input"]
    message = pb.ForwardBackwardRequest(
        model_id=request["model_id"], seq_id=request["seq_id"], loss_fn=given["loss_fn"]
    )
    message.forward_only = bool(request.get("forward_only"))
    for name, value in (given.get("loss_fn_config") or {}).items():
        message.loss_fn_config[name] = value
        if hasattr(message, "loss_fn_config_v2"):  # since 0.29 or a little before
            message.loss_fn_config_v2[name].number = value
    for datum in given["data"]:
        sent = message.data.add()
        for chunk in datum["model_input"]["chunks"]:
            sent.model_input.add().encoded_text.tokens = np.array(chunk["tokens"], np.int32).tobytes()
        for name, tensor in datum["loss_fn_inputs"].items():
            whole, to = tensor["dtype"] == "int64", sent.loss_fn_inputs[name]
            to.dtype = pb.DTYPE_INT64 if whole else pb.DTYPE_FLOAT32
            to.shape.extend(tensor["shape"])
            to.dense = np.array(tensor["data"], np.int64 if whole else np.float32).tobytes()
    return bytes(message.SerializeToString())


def read_output(body: bytes) -> Json:
    """A ForwardBackwardOutput in JSON's shape, read by the SDK's own function, as its users get it."""
    from tinker.proto.response_conv import deserialize_forward_backward_output

    output = deserialize_forward_backward_output(body)
    fields = [
        {
            name: {"data": list(tensor.data), "dtype": tensor.dtype, "shape": tensor.shape}
            for name, tensor in datum.items()
        }
        for datum in output.loss_fn_outputs
    ]
    return {
        "loss_fn_output_type": output.loss_fn_output_type,
        "loss_fn_outputs": fields,
        "metrics": dict(output.metrics),
    }


def read_sample(body: bytes) -> Json:
    """A SampleResponse in JSON's shape, read by the SDK's own function, as its users get it."""
    from tinker.proto.response_conv import deserialize_sample_response

    response = deserialize_sample_response(body)
    result: Json = {"sequences": []}
    for sequence in response.sequences:
        read = {"stop_reason": sequence.stop_reason, "tokens": sequence.tokens, "logprobs": sequence.logprobs}
        topk = getattr(sequence, "topk_logprobs", None)
        result["sequences"].append({**read, **({"topk_logprobs": topk} if topk is not None else {})})
    for name in ("prompt_logprobs", "topk_prompt_logprobs"):
        if getattr(response, name) is not None:
            result[name] = getattr(response, name)
    return result
