"""Engines: this package's own, one over HTTP, and what all of them share."""

from skyrl_train.system import lazily

TYPE_CHECKING = False  # as type checkers know it
if TYPE_CHECKING:
    from skyrl_train.inference import hf
    from skyrl_train.inference.decode import Decoder
    from skyrl_train.inference.grouped_attention import use_grouped_attention
    from skyrl_train.inference.hf import HFEngine, build_hf_engine, load_for_engine
    from skyrl_train.inference.http import HTTPEngine, build_http_engine
    from skyrl_train.inference.kv_cache import require_exact_cache
    from skyrl_train.inference.local_engine import LocalEngine, WatchedEndpoint
    from skyrl_train.inference.request_gate import GatedEngine, RequestGate
    from skyrl_train.inference.routing import Paces, PrefixRouter, ServedTokens
    from skyrl_train.inference.scoring import ScoredSequence
    from skyrl_train.inference.settings import EngineSettings

__all__ = [
    "Decoder",
    "EngineSettings",
    "GatedEngine",
    "HFEngine",
    "HTTPEngine",
    "LocalEngine",
    "Paces",
    "PrefixRouter",
    "RequestGate",
    "ScoredSequence",
    "ServedTokens",
    "WatchedEndpoint",
    "build_hf_engine",
    "build_http_engine",
    "hf",
    "load_for_engine",
    "require_exact_cache",
    "use_grouped_attention",
]

__getattr__ = lazily(__name__)
