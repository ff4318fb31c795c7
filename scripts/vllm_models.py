"""Which kind of attention each architecture of vLLM's registry has, read from vLLM's source without importing it.

Used by: scripts/docs.py for docs/models.md, and tests that compare vLLM's registry with that page and the refusals.

An architecture's class is followed through everything that it names: base classes, layers, functions, in vLLM's
packages of models. What it reaches there, such as ``IsHybrid`` or ``MLAAttention``, says its kind.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path

REGISTRY = "vllm.model_executor.models.registry"
PACKAGES = ("vllm.model_executor.models", "vllm.models")
"""Packages that hold models. A name that leads out of them is an end of the search."""
OTHER_PLATFORMS = (".amd", ".cpu", ".xpu")
"""Parts of ``vllm.models`` for platforms other than NVIDIA's."""
COMMON = ("interfaces", "interfaces_base", "registry", "utils")
"""Modules whose classes say what a model is, and whose code is about all models."""
OWN_LAYER = "own AttentionLayerBase"
"""What stands for a class of the models' own that derives from ``AttentionLayerBase``."""
LATENT = frozenset({"MLAAttention", "MultiHeadLatentAttentionWrapper", "MLAAttentionSpec"})
GATED_DELTA_NET = "QwenGatedDeltaNetAttention"


@dataclass(frozen=True)
class Place:
    """A name at the top of a module."""

    module: str
    name: str


class Module:
    """The names at the top of one of vLLM's files."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.is_package = name, path.name == "__init__.py"
        self.tree = ast.parse(path.read_text())

    @cached_property
    def defined(self) -> dict[str, list[ast.stmt]]:
        """Classes, functions and assignments at the top of the file. A name has several where a condition chooses."""
        found: dict[str, list[ast.stmt]] = {}
        waiting = list(self.tree.body)
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        found.setdefault(target.id, []).append(node)
            elif isinstance(node, ast.If):
                waiting += [*node.body, *node.orelse]
        return found

    @cached_property
    def imported(self) -> dict[str, list[Place]]:
        """Imports anywhere in the file: some are made inside of functions, or once for each platform."""
        found: dict[str, list[Place]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                for one in node.names:
                    found.setdefault(one.asname or one.name, []).append(Place(self._absolute(node), one.name))
        return found

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        parts = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*parts, *([node.module] if node.module else [])])


class Models:
    """vLLM's registry of models and their source.

    Args:
        root: the folder of the package ``vllm``.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, Module | None] = {}
        self._steps: dict[Place, tuple[list[Place], set[str]]] = {}

    def module(self, name: str) -> Module | None:
        if name not in self._modules:
            base = self.root.parent.joinpath(*name.split("."))
            path = next((one for one in (base.with_suffix(".py"), base / "__init__.py") if one.is_file()), None)
            self._modules[name] = Module(name, path) if path else None
        return self._modules[name]

    @cached_property
    def categories(self) -> dict[str, dict[str, Place]]:
        """The tables of the registry by their names, such as ``_MULTIMODAL_MODELS``: architecture to class."""
        registry = self.module(REGISTRY)
        assert registry is not None
        found: dict[str, dict[str, Place]] = {}
        for name, nodes in registry.defined.items():
            table = nodes[0].value if isinstance(nodes[0], ast.Assign) else None
            if isinstance(table, ast.Dict) and name.endswith("_MODELS") and name != "_VLLM_MODELS":
                found[name] = dict(_entries(table))
        return found

    @cached_property
    def classes(self) -> dict[str, list[Place]]:
        """Every architecture, and the classes that compute it."""
        found: dict[str, list[Place]] = {}
        for table in self.categories.values():
            for architecture, place in table.items():
                if place not in found.setdefault(architecture, []):
                    found[architecture].append(place)
        return found

    def reached(self, architecture: str) -> frozenset[str]:
        """Names outside of the models' own packages, and of ``interfaces``, that the architecture's code uses."""
        names: set[str] = set()
        for place in self.classes[architecture]:
            names |= self._reached(place)
        return frozenset(names)

    def _reached(self, start: Place) -> set[str]:
        ends: set[str] = set()
        seen: set[Place] = set()
        waiting = [start]
        while waiting:
            place = waiting.pop()
            if place not in seen:
                seen.add(place)
                more, found = self._step(place)
                waiting += more
                ends |= found
        return ends

    def _step(self, place: Place) -> tuple[list[Place], set[str]]:
        """The names that this one leads to, and those of them at which the search ends."""
        if place not in self._steps:
            self._steps[place] = self._look(place)
        return self._steps[place]

    def _look(self, place: Place) -> tuple[list[Place], set[str]]:
        module = self.module(place.module) if _is_model_code(place.module) else None
        if module is None:
            return [], {place.name}
        nodes = module.defined.get(place.name, [])
        more = [] if nodes else list(module.imported.get(place.name, []))
        for name in {name for node in nodes for name in _names(node)}:
            more += [Place(place.module, name)] if name in module.defined else module.imported.get(name, [])
        return more, {one for node in nodes for one in _own_layers(node)}


@cache
def installed() -> Models:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Models(Path(spec.origin).parent)


def _entries(table: ast.Dict) -> Iterator[tuple[str, Place]]:
    for key, value in zip(table.keys, table.values, strict=True):
        # Entries that repeat those of another table are a comprehension, and are found there.
        if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple):
            module, name = ast.literal_eval(value)
            yield str(key.value), Place(module if "." in module else f"{PACKAGES[0]}.{module}", name)


def _is_model_code(module: str) -> bool:
    if not module.startswith(tuple(f"{package}." for package in PACKAGES)):
        return False
    if module.startswith(PACKAGES[1]) and any(f"{part}." in f"{module}." for part in OTHER_PLATFORMS):
        return False
    return module.rpartition(".")[2] not in COMMON


def _names(node: ast.AST) -> Iterator[str]:
    return (part.id for part in ast.walk(node) if isinstance(part, ast.Name))


def _own_layers(node: ast.stmt) -> Iterator[str]:
    """``AttentionLayerBase`` only where a class of the model derives from it; others only ask for it."""
    bases = node.bases if isinstance(node, ast.ClassDef) else []
    return (f"own {base.id}" for base in bases if isinstance(base, ast.Name) and base.id.endswith("LayerBase"))


@dataclass(frozen=True)
class Found:
    """What vLLM's source says about an architecture."""

    architecture: str
    tables: frozenset[str]
    """The tables of the registry that list it."""
    modules: frozenset[str]
    """Of its classes."""
    names: frozenset[str]
    """What ``Models.reached`` finds."""


@dataclass(frozen=True)
class Rule:
    """Architectures with one answer."""

    title: str
    found_by: str
    """What in vLLM's code puts an architecture here."""
    answer: str
    asked: Callable[[Found], bool]


RULES = (
    Rule(
        "Drafters",
        "the registry lists them for speculative decoding only",
        "See [Drafters](#drafters).",
        lambda one: one.tables == {"_SPECULATIVE_DECODING_MODELS"},
    ),
    Rule(
        "Gated DeltaNet of Qwen3-Next and Qwen3.5",
        f"`IsHybrid` and `{GATED_DELTA_NET}`, and no layers of the model's own",
        "Qwen3-Next and Qwen3.5 run ([Hybrids](#hybrids)). The others put an encoder of their own before the text of "
        "Qwen3.5. CPUs refuse them; on GPUs they start where config.json calls the text qwen3_5_text or "
        "qwen3_5_moe_text, and were not run.",
        lambda one: {"IsHybrid", GATED_DELTA_NET} <= one.names and OWN_LAYER not in one.names,
    ),
    Rule(
        "Other models with states",
        "`IsHybrid` or `IsAttentionFree`: Mamba, short convolutions, lightning attention, Kimi Delta Attention, and "
        "Gated DeltaNet in other models",
        "Refused on CPUs and GPUs. On NPUs, those beside full attention are refused, and those beside latent attention "
        "are vllm-ascend's own. A checkpoint of these that has attention layers only is not a hybrid.",
        lambda one: bool({"IsHybrid", "IsAttentionFree"} & one.names),
    ),
    Rule(
        "Attention in layers of their own",
        "their code derives layers from `AttentionLayerBase` and keeps keys and values in them (`FullAttentionSpec`), "
        "or lets a prompt's tokens attend in both directions (`PrefillPrefixLMAttention`)",
        "Refused on all devices, with the forms of these models that take images.",
        lambda one: {OWN_LAYER, "FullAttentionSpec"} <= one.names or "PrefillPrefixLMAttention" in one.names,
    ),
    Rule(
        "Through vLLM's Transformers backend",
        "the class is of vLLM's module `transformers`",
        "As the models in the table above with the same attention. With latent attention they are refused.",
        lambda one: any(module.endswith(".transformers") for module in one.modules),
    ),
    Rule(
        "Latent attention",
        "`MLAAttention`, `MultiHeadLatentAttentionWrapper` or `MLAAttentionSpec`",
        "Refused on CPUs and GPUs; on NPUs vllm-ascend's own backend runs such models ([Latent attention]"
        "(#latent-attention)). The code of some of these has a form without latent attention, as in DeepSeek-V1 and "
        "openPangu-Embedded. Checkpoints of that form are models with full attention, and untested.",
        lambda one: bool(one.names & LATENT),
    ),
    Rule(
        "Attention within chunks",
        "`ChunkedLocalAttention`",
        "See [Chunked attention](#chunked-attention).",
        lambda one: "ChunkedLocalAttention" in one.names,
    ),
    Rule(
        "Images, audio and video",
        "`SupportsMultiModal`",
        "CPUs run those in the table above and refuse the others. On GPUs, the encoder is vLLM's own, and the text's "
        "attention is as in the table; only the models of [Images](#images) and Qwen3.5 were run.",
        lambda one: "SupportsMultiModal" in one.names,
    ),
    Rule(
        "Encoders",
        "`EncoderOnlyAttention` without `Attention`",
        "They run on CPUs, as embedding models; BERT and ModernBERT were tested. Elsewhere they are untested.",
        lambda one: "EncoderOnlyAttention" in one.names and "Attention" not in one.names,
    ),
    Rule(
        "Full attention, or with a window",
        "`Attention`",
        "They run as the first rows of the table say. Experts, head sizes, sizes of values and float16 decide the "
        "rest; the sentence at start names what is refused.",
        lambda one: "Attention" in one.names,
    ),
)
"""Asked in this order. The last one asks for something too: what no rule knows has no answer."""


def found(models: Models, architecture: str) -> Found:
    places = models.classes[architecture]
    return Found(
        architecture,
        frozenset(name for name, table in models.categories.items() if architecture in table),
        frozenset(place.module for place in places),
        models.reached(architecture),
    )


def by_rule(models: Models) -> dict[str, list[str]]:
    """The architectures of each rule's title. "" has those that no rule knows."""
    answers: dict[str, list[str]] = {rule.title: [] for rule in RULES}
    for architecture in sorted(models.classes, key=str.lower):
        one = found(models, architecture)
        title = next((rule.title for rule in RULES if rule.asked(one)), "")
        answers.setdefault(title, []).append(architecture)
    return answers


def lines(version: str) -> Iterator[str]:
    """The end of docs/models.md."""
    named = by_rule(installed())
    yield from (
        "",
        f"## Every architecture of vLLM {version}",
        "",
        "Look up the name under `architectures` in the checkpoint's config.json. Each architecture is in the first",
        "section whose rule fits it. 'Found by' gives that rule: names in vLLM's code.",
    )
    for rule in RULES:
        yield from ("", f"### {rule.title}", "")
        yield from _filled(f"{len(named[rule.title])} architectures. Found by: {rule.found_by}. {rule.answer}")
        yield ""
        yield from _filled(", ".join(f"`{one}`" for one in named[rule.title]))


def _filled(text: str) -> list[str]:
    return textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)
