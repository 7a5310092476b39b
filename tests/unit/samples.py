"""Builders for the tests of the pure sections: what a box, a model and a configuration look like."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardbox import (
    GIB,
    MIB,
    BinaryFacts,
    ClusterConfig,
    Config,
    EngineConfig,
    GpuFacts,
    MemoryFacts,
    ModelConfig,
    ModelFacts,
    ModelPlan,
    ModelShape,
    NodeConfig,
    NodeFacts,
    PlanError,
    plan_all,
)

NODES = Path(__file__).parent / "nodes"
BINARIES = tuple(
    BinaryFacts(role=role, path=f"/opt/prima/{name}", sha256="5e" * 32, version="version: 4700", commit="bdf9d8e7")
    for role, name in (("leader", "llama-server"), ("worker", "llama-cli"))
)


def shape(*, layers: int = 8, layer_bytes: int | Sequence[int] = GIB, ends_bytes: int = 0, **more: Any) -> ModelShape:
    """A model whose weights are all that matters: with these widths KV cache and buffers stay small."""
    sizes = (layer_bytes,) * layers if isinstance(layer_bytes, int) else tuple(layer_bytes)
    fields: dict[str, Any] = {
        "architecture": "qwen2",
        "layers": len(sizes),
        "width": 64,
        "vocab": 1000,
        "heads": 1,
        "kv_heads": 1,
        "key_width": 32,
        "value_width": 32,
        "ff_width": 128,
        "context_train": 32768,
        "layer_bytes": sizes,
        "embedding_bytes": ends_bytes // 2,
        "output_bytes": ends_bytes - ends_bytes // 2,
        "tied_output": False,
        "quantisation": "Q4_K",
    }
    return ModelShape(**{**fields, **more})


def copy_of(model: ModelShape | None, *, name: str = "m", root: str = "aaaa1111", **more: Any) -> ModelFacts:
    """A node's copy of a model; None: it is not there."""
    if model is None:
        return ModelFacts(name=name, problem="m.gguf is not here", **more)
    size = sum(model.layer_bytes) + model.embedding_bytes + model.output_bytes
    return ModelFacts(name=name, path=f"/srv/{name}.gguf", parts=1, size_bytes=size, shape=model, root=root, **more)


def box(name: str, memory_bytes: int, model: ModelShape | None = None, **more: Any) -> NodeFacts:
    """A node with so much free memory, both binaries, and a copy of model "m"."""
    fields: dict[str, Any] = {
        "name": name,
        "machine": f"machine-of-{name}",
        "start": 1,
        "protocol": 1,
        "version": "0.1.0",
        "config_hash": "0" * 16,
        "platform": "linux-x86_64",
        "cores": 8,
        "memory": MemoryFacts(total_bytes=memory_bytes + 2 * GIB, available_bytes=memory_bytes),
        "binaries": BINARIES,
        "models": () if model is None else (copy_of(model),),
        "gpu_note": "no NVML",
    }
    return NodeFacts(**{**fields, **more})


def card(free_bytes: int | None, *, index: int = 0, name: str = "NVIDIA GeForce RTX 3090") -> GpuFacts:
    return GpuFacts(index=index, name=name, total_bytes=24 * GIB if free_bytes else None, free_bytes=free_bytes)


def without_leader(facts: NodeFacts, problem: str = "llama-server is not there") -> NodeFacts:
    """The same node with only a worker binary."""
    return replace(facts, binaries=(BinaryFacts(role="leader", problem=problem), BINARIES[1]))


def model_config(name: str = "m", **more: Any) -> ModelConfig:
    return ModelConfig(**{"name": name, "path": f"{name}.gguf", "context": 128, **more})


def config(*models: ModelConfig, nodes: Sequence[NodeConfig] = (), **more: Any) -> Config:
    """A configuration with these models, by default one called "m"."""
    fields: dict[str, Any] = {
        "file": "shardbox.toml",
        "folder": "/etc/shardbox",
        "cluster": ClusterConfig(name="attic", secret="never-to-be-seen-anywhere-at-all"),
        "engine": EngineConfig(),
        "nodes": tuple(nodes),
        "models": models or (model_config(),),
    }
    return Config(**{**fields, **more})


def plan_model(given: Config, model: ModelConfig, facts: Sequence[NodeFacts]) -> ModelPlan:
    """The plan for one model, as if it was the only one. Raises PlanError."""
    found = plan_all(replace(given, models=(model,)), facts)[model.name]
    if isinstance(found, PlanError):
        raise found
    return replace(found, block=given.models.index(model))


def ring_plan(*windows: int, block: int = 0, slots: int = 1) -> ModelPlan:
    """A plan with such layer windows on nodes alpha, beta, gamma, ..."""
    names = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")[: len(windows)]
    model = shape(layers=sum(windows), layer_bytes=100 * MIB)
    hand = model_config(layers=dict(zip(names, windows, strict=True)), leader="alpha", slots=slots)
    others = tuple(model_config(f"other-{n}") for n in range(block))
    boxes = [box(name, 64 * GIB, model) for name in names]
    return plan_model(config(*others, hand), hand, boxes)


def recorded(name: str) -> dict[str, Any]:
    """A recorded set of nodes: tests/unit/nodes/NAME.json."""
    found: dict[str, Any] = json.loads((NODES / f"{name}.json").read_text(encoding="utf-8"))
    return found
