"""EdgeDraft's runtime: lossless speculative decoding on onnxruntime."""

from .config import DecodeConfig, SamplingConfig
from .datatypes import Proposal, RoundTrace, Verdict
from .decode import SpeculativeDecoder
from .engine import Answer, Engine, Piece
from .errors import (
    AdapterError,
    DrafterError,
    EdgeDraftError,
    FolderError,
    PromptError,
    ProviderError,
    StateError,
)
from .folder import ModelFolder, open_target_folder
from .interfaces import LanguageModel, Proposer
from .onnx_model import OnnxModel
from .ort_session import SessionConfig
from .stats import RunStats
from .suffix_lookup import SuffixLookup

__all__ = [
    "AdapterError",
    "Answer",
    "DecodeConfig",
    "DrafterError",
    "EdgeDraftError",
    "Engine",
    "FolderError",
    "LanguageModel",
    "ModelFolder",
    "OnnxModel",
    "Piece",
    "PromptError",
    "Proposal",
    "Proposer",
    "ProviderError",
    "RoundTrace",
    "RunStats",
    "SamplingConfig",
    "SessionConfig",
    "SpeculativeDecoder",
    "StateError",
    "SuffixLookup",
    "Verdict",
    "open_target_folder",
]
