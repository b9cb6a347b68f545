"""Engines: this package's own, one over HTTP, and what all of them share."""

from skyrl_train.system import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from skyrl_train.inference import hf as hf
    from skyrl_train.inference.decode import Decoder as Decoder
    from skyrl_train.inference.grouped_attention import use_grouped_attention as use_grouped_attention
    from skyrl_train.inference.hf import (
        HFEngine as HFEngine,
        build_hf_engine as build_hf_engine,
        load_for_engine as load_for_engine,
    )
    from skyrl_train.inference.http import HTTPEngine as HTTPEngine, build_http_engine as build_http_engine
    from skyrl_train.inference.kv_cache import require_exact_cache as require_exact_cache
    from skyrl_train.inference.local_engine import LocalEngine as LocalEngine, WatchedEndpoint as WatchedEndpoint
    from skyrl_train.inference.request_gate import GatedEngine as GatedEngine, RequestGate as RequestGate
    from skyrl_train.inference.routing import Paces as Paces, PrefixRouter as PrefixRouter, ServedTokens as ServedTokens
    from skyrl_train.inference.scoring import ScoredSequence as ScoredSequence
    from skyrl_train.inference.settings import EngineSettings as EngineSettings

__getattr__ = lazily(__name__)
