"""Makes a model folder out of a loaded model: smooth, trace, quantise, measure, write."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import onnx_ir as ir

from edgedraft.runtime import OnnxModel
from edgedraft.runtime.folder import open_model_folder
from edgedraft.runtime.provenance import describe_code

from .acceptance_head import AcceptanceHead, read_head
from .decoder import export_decoder
from .errors import ExportError
from .folder import staged_folder, write_graph, write_manifest
from .fusion import share_tied_head
from .optimum_source import export_with_optimum
from .parity import (
    acceptance_difference,
    agreement,
    check_acceptance,
    fp32_difference,
    pass_milliseconds,
    reference_acceptance,
    reference_logits,
)
from .quantize import quantize
from .sample_texts import CALIBRATION, HELD_OUT
from .smooth import smooth
from .sources import Source
from .texts import tokenize
from .training_files import check_training_files, round_to_half, write_training_files
from .training_step import TrainableModel, trainable_model

Precision: TypeAlias = Literal["int8", "int8-block", "int4-block", "fp32"]
Way: TypeAlias = Literal["direct", "optimum"]
_PARITY_TOKENS = 48
_LEAST_CONTEXT = 32  # room for the passes that are timed
_PACKAGES = ("edgedraft", "torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What the user chose about a folder."""

    is_drafter: bool = False
    precision: Precision = "int8"
    via: Way = "direct"
    hidden_state: bool = False
    tree: bool = False  # an attention_bias input, which costs up to 1.5 % of a pass
    max_context: int | None = None
    force: bool = False

    def __post_init__(self) -> None:
        for name, kind in (("precision", Precision), ("via", Way)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}")
        if self.max_context is not None and self.max_context < _LEAST_CONTEXT:
            raise ValueError(f"max_context must be >= {_LEAST_CONTEXT}, got {self.max_context}")
        if self.via == "optimum" and (self.hidden_state or self.tree):
            raise ValueError("hidden_state and tree need the direct way")


def export_model(
    source: Source,
    out: Path,
    options: ExportOptions,
    held_out: Sequence[Sequence[int]] | None = None,
) -> dict[str, Any]:
    """Export a model into the folder `out` and return what was measured.

    `held_out` are the token sequences the quantised graph is measured on, by default those that
    ship with the exporter. The source's model is smoothed in place where the precision asks for
    it. Raises ExportError, and leaves nothing behind, when the graph disagrees with the model.
    """
    context_length = min(source.context_length, options.max_context or source.context_length)
    # The runtime keeps one slot of the context for a dummy row.
    held_out = [x[: context_length - 1] for x in held_out or tokenize(source, HELD_OUT)]
    probe = held_out[0][:_PARITY_TOKENS]
    head = _acceptance_head(source, options)
    trainable = _trainable(source, head, options)
    training: dict[str, Any] | None = None
    with staged_folder(out, force=options.force) as stage:
        if trainable is not None:
            round_to_half(source.model)
        # Taken before smoothing, which must not change them either.
        expected = reference_logits(source.model, probe)
        accepted = reference_acceptance(source.model, head, probe) if head else None
        if options.precision == "int8" and trainable is None:
            _log.info("smoothing")
            # Whoever reads hidden states was trained on the model's own.
            smooth(
                source.model,
                tokenize(source, CALIBRATION),
                rotate_stream=not options.hidden_state,
            )
        graph = _trace(source, context_length, options, head)
        if options.precision == "fp32":
            share_tied_head(graph.graph)

        def describe(quality: dict[str, Any]) -> None:
            write_manifest(
                stage,
                source,
                is_drafter=options.is_drafter,
                precision=options.precision,
                context_length=context_length,
                quality=quality,
                provenance=_provenance(source, options),
                training=training,
            )

        def opened() -> OnnxModel:
            write_graph(graph, stage)
            describe({})
            return OnnxModel(open_model_folder(stage))

        _log.info("comparing the fp32 graph with transformers")
        model = opened()
        quality: dict[str, Any] = {
            "max_logit_difference_fp32": fp32_difference(model, probe, expected)
        }
        if accepted is not None:
            difference = acceptance_difference(model, probe, accepted)
            quality["max_acceptance_difference_fp32"] = check_acceptance(difference)
        if options.precision != "fp32":
            del model  # its weights' file is about to be replaced
            _log.info("quantising to %s", options.precision)
            quantize(graph, options.precision)
            if trainable is not None:
                training = write_training_files(stage, source.model, head, trainable, graph)
                check_training_files(stage, probe, expected, accepted)
            model = opened()
            _log.info("measuring what it costs in accuracy")
            quality |= asdict(agreement(model, source.model, held_out))
            if accepted is not None:
                difference = acceptance_difference(model, probe, accepted)
                quality["mean_acceptance_difference"] = float(difference.mean())
        _log.info("timing passes")
        quality["pass_ms"] = pass_milliseconds(model)
        describe(quality)
    return quality


def _trainable(
    source: Source, head: AcceptanceHead | None, options: ExportOptions
) -> TrainableModel | None:
    """Return what a drafter learns with on the device, or None if it will not learn."""
    if not options.is_drafter or options.precision != "int8":
        return None
    try:
        return trainable_model(source.model, head)
    except ExportError as error:
        _log.warning("%s", error)
        return None


def _acceptance_head(source: Source, options: ExportOptions) -> AcceptanceHead | None:
    if not options.is_drafter or source.acceptance_head is None or options.via != "direct":
        return None
    model: Any = source.model
    return read_head(source.acceptance_head, model.get_output_embeddings().weight.shape[1])


def _trace(
    source: Source,
    context_length: int,
    options: ExportOptions,
    acceptance_head: AcceptanceHead | None,
) -> ir.Model:
    _log.info("tracing %s", type(source.model).__name__)
    if options.via == "direct":
        return export_decoder(
            source.model,
            context_length,
            hidden_state=options.hidden_state,
            tree=options.tree,
            acceptance_head=acceptance_head,
        )
    return export_with_optimum(source, context_length)


def _provenance(source: Source, options: ExportOptions) -> dict[str, Any]:
    return {
        **describe_code(_PACKAGES),
        "via": options.via,
        "model": source.provenance,
    }
