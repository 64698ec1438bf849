"""From the tensors of an adapter file to updates: every tensor ends in one update, or the file is refused.

Decisions where PEFT stays silent: a tensor for a module that the config does not target is refused (PEFT
drops it), and a targeted module without tensors is a warning (PEFT leaves it without effect).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from loadstone.adapters.base import BaseIndex, Shape
from loadstone.adapters.config import AdapterConfig
from loadstone.adapters.experts import Experts, Group, build_experts, targeted_parameters
from loadstone.adapters.keys import Key, Kind, parse_keys
from loadstone.adapters.parts import Parts, Tensors, embedding, linear, resized
from loadstone.adapters.patterns import Matcher, matcher
from loadstone.adapters.updates import LowRank, Replacement, TokenRows, Update
from loadstone.errors import AdapterBaseError, AdapterFormatError, AdapterUnsupportedError

_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(slots=True)
class Built:
    """What an adapter file holds.

    Attributes
    ----------
    updates : dict
        What happens to each module.
    copies : dict[str, str]
        Tensors that repeat a parameter of the base, by key, with the parameter's name: they change nothing if
        they are equal to it, which their bytes must show.
    warnings : list[str]
        What is suspect.
    """

    updates: dict[str, tuple[Update, ...]] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def add(self, module: str, *updates: Update) -> None:
        """Put ``updates`` behind those that ``module`` has already."""
        self.updates[module] = (*self.updates.get(module, ()), *updates)


@dataclass(frozen=True, slots=True)
class Contents:
    """An adapter file's tensors, by key: shapes, dtypes, and the way to get one."""

    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, str]
    tensor: Tensors


def build(
    contents: Contents, config: AdapterConfig, base: BaseIndex | None, experts: Experts, where: str
) -> Built:
    """Turn a file's tensors into updates.

    Raises
    ------
    AdapterFormatError
        The file contradicts itself or its config.
    AdapterBaseError
        The base lacks a module, or has another shape for it.
    AdapterUnsupportedError
        The file holds what is not applied.
    """
    if not contents.shapes:
        raise AdapterFormatError(f"{where}: there are no tensors in it, it is empty; save the adapter again")
    for key, dtype in contents.dtypes.items():
        if dtype not in _DTYPES:
            raise AdapterUnsupportedError(
                f"{where}: {key!r} has dtype {dtype}; adapters of F64, F32, F16 and BF16 are applied"
            )
    return _Builder(contents, config, base, experts, where).run()


class _Builder:
    """One pass over one file."""

    def __init__(
        self,
        contents: Contents,
        config: AdapterConfig,
        base: BaseIndex | None,
        experts: Experts,
        where: str,
    ) -> None:
        self.contents, self.config, self.base = contents, config, base
        self.experts, self.where = experts, where
        self.keys = parse_keys(contents.shapes, where)
        self.built = Built()
        self.lora: dict[str, dict[int, dict[Kind, Key]]] = defaultdict(lambda: defaultdict(dict))
        self.plain: dict[str, Key] = {}
        self.rows: dict[str, Key] = {}
        for key in self.keys:
            if key.kind == "full":
                self.plain[key.module] = key
            elif key.kind == "token_rows":
                self.rows[key.module] = key
            elif key.kind == "base":
                self.built.copies[key.text] = f"{key.module}.{key.name}"
            else:
                self.lora[key.module][key.depth][key.kind] = key

    def run(self) -> Built:
        self._check_names()
        experts = self._expert_parameters()
        self.matcher = self._match(experts)
        groups = [self._group(module, parameters) for module, parameters in experts.items()]
        for module, layers in self.lora.items():
            if module not in experts:
                self.built.add(module, self._low_rank(module, layers))
        for module, updates in build_experts(groups, self.experts, self.where).items() if groups else ():
            self.built.add(module, *updates)
        self._replacements()
        self._token_rows()
        self._check_copies()
        return self.built

    # What the base has

    def _check_names(self) -> None:
        """Refuse modules that the base lacks; say so in another way when it lacks all of them."""
        if self.base is None:
            return
        modules = [*self.lora, *self.rows]
        absent = [module for module in modules if not self.base.has_module(module)]
        if not absent:
            return
        key = next(key for key in self.keys if key.module == absent[0])
        if len(absent) == len(modules):
            sample = next(iter(self.base), "no tensor at all")
            raise AdapterBaseError(
                f"{self.where}: no key matches the base {self.base.name}: the adapter has {key.text!r},"
                f" the base has {sample!r}; they belong to different models"
            )
        raise AdapterBaseError(
            f"{self.where}: {len(absent)} of {len(modules)} modules are not in the base {self.base.name},"
            f" the first is {absent[0]!r} (key {key.text!r}); the adapter was trained on another base"
        )

    def _expert_parameters(self) -> dict[str, dict[str, Shape]]:
        """Return the modules whose pairs are for targeted parameters, with those parameters."""
        targets = self.config.target_parameters
        if not targets:
            return {}
        if self.base is None:
            raise AdapterFormatError(
                f"{self.where}: target_parameters cannot be understood without the base's shapes;"
                " give the base"
            )
        found = {module: targeted_parameters(self.base, module, targets) for module in self.lora}
        return {module: parameters for module, parameters in found.items() if parameters}

    def _match(self, experts: Mapping[str, Mapping[str, Shape]]) -> Matcher:
        names = [f"{module}.{name}" for module, parameters in experts.items() for name in parameters]
        modules = [module for module in self.lora if module not in experts]
        candidates = self._base_modules(modules)
        found = matcher(self.config, [*names, *modules, *candidates], self.where)
        for module in modules:
            if module not in found.targets:
                raise AdapterFormatError(
                    f"{self.where}: module {module!r} has tensors but target_modules does not choose it;"
                    " PEFT would drop them. Correct adapter_config.json"
                )
        untouched = [name for name in candidates if name in found.targets and name not in self.lora]
        if untouched:
            self.built.warnings.append(
                f"{self.where}: target_modules also chooses {len(untouched)} modules of the base without"
                f" tensors in the file, the first is {untouched[0]!r}; they stay as they are"
            )
        return found

    def _base_modules(self, modules: Sequence[str]) -> list[str]:
        """Return the base's modules that ``target_modules`` could mean."""
        target = self.config.target_modules
        everything = isinstance(target, str) and target.lower() == "all-linear"
        if self.base is None or not modules or target is None or everything:
            return []
        return self.base.matrices(self.base.missing_prefix(modules[0]))

    # Low rank

    def _parts(self, module: str, keys: Mapping[Kind, Key]) -> Parts:
        contents = self.contents
        return Parts(
            module,
            keys,
            contents.shapes,
            contents.tensor,
            self.config,
            self.matcher,
            self.base,
            self.where,
        )

    def _low_rank(self, module: str, layers: Mapping[int, Mapping[Kind, Key]]) -> Update:
        parts = self._parts(module, next(iter(layers.values())))
        if set(layers) != {0}:
            parts.fail(
                "is wrapped more than once, which only target_parameters explain; there are none for it"
            )
        on_embedding = parts.has("embedding_A") or parts.has("embedding_B")
        if on_embedding and (parts.has("A") or parts.has("B")):
            parts.fail("has tensors of a linear layer and of an embedding")
        return embedding(parts) if on_embedding else linear(parts)

    def _group(self, module: str, parameters: Mapping[str, Shape]) -> Group:
        layers = self.lora[module]
        parts = [self._parts(module, layers[depth]) for depth in sorted(layers)]
        for layer in parts:
            layer.pair("A", "B")
        return Group(module, parts, parameters)

    # Whole parameters

    def _replacements(self) -> None:
        """Make the modules to save; what is left over repeats the base, or is refused."""
        found: dict[str, dict[str, Key]] = defaultdict(dict)
        for name, key in self.plain.items():
            module = self._saved_module(name)
            if module:
                found[module][name[len(module) + 1 :]] = key
            else:
                self.built.copies[key.text] = name
        self._check_saved(found)
        for module, keys in found.items():
            tensors = {name: self.contents.tensor(key.text) for name, key in keys.items()}
            self.built.add(module, Replacement(tensors))

    def _saved_module(self, name: str) -> str:
        """Return the outermost module of the parameter ``name`` that ``modules_to_save`` chooses, if any."""
        endings = self.config.modules_to_save
        return (
            next((module for module in _ancestors(name) if module.endswith(endings)), "") if endings else ""
        )

    def _check_saved(self, found: Mapping[str, Mapping[str, Key]]) -> None:
        """Refuse modules to save whose parameters differ from the base's, in name or in shape."""
        base = self.base
        if base is None:
            return
        for module, keys in found.items():
            parameters = base.parameters(module)
            for name, key in keys.items():
                if name not in parameters:
                    raise AdapterBaseError(
                        f"{self.where}: modules_to_save holds {key.text!r}, but the base {base.name} has no"
                        f" {module}.{name}"
                    )
                self._same_shape(key.text, f"{module}.{name}")
            for name in parameters:
                if name not in keys:
                    raise AdapterFormatError(
                        f"{self.where}: modules_to_save holds {module!r} without its {name!r};"
                        " it is incomplete"
                    )
        expected = {self._saved_module(name) for name in (*base, *base.tied)} - {""}
        for module in sorted(expected - set(found)):
            if base.missing_prefix(next(iter(found), "")) + module not in found:
                raise AdapterFormatError(
                    f"{self.where}: modules_to_save names {module!r}, but the file has no tensor for it"
                )

    def _check_copies(self) -> None:
        """Refuse whole parameters that neither replace a module nor repeat one of the base."""
        for text, name in self.built.copies.items():
            if self.base is None or self.base.stored(name) is None:
                raise AdapterFormatError(
                    f"{self.where}: {text!r} is a whole parameter that modules_to_save does not name;"
                    " PEFT would write it over the base or drop it. Name its module in modules_to_save"
                )
            self._same_shape(text, name)

    def _same_shape(self, text: str, name: str) -> None:
        assert self.base is not None
        adapter, base = self.contents.shapes[text], self.base.shape(name)
        if base is not None and adapter != base:
            raise AdapterBaseError(
                f"{self.where}: {text!r} has shape {list(adapter)}, the base {self.base.name} has"
                f" {list(base)}{resized(adapter, base)}"
            )

    # Trainable tokens

    def _token_rows(self) -> None:
        indices = self.config.token_indices
        if indices is None and self.rows:
            key = next(iter(self.rows.values()))
            raise AdapterFormatError(
                f"{self.where}: {key.text!r} holds rows of tokens, but trainable_token_indices does not"
                " say which"
            )
        for module, key in self.rows.items():
            self._add_rows(module, key, self._indices_of(module, key))
        wanted = indices if isinstance(indices, Mapping) else {"": indices} if indices else {}
        rows = [
            m for m, updates in self.built.updates.items() if any(isinstance(u, TokenRows) for u in updates)
        ]
        for name in wanted:
            if not any(module.endswith(name) for module in rows):
                raise AdapterFormatError(
                    f"{self.where}: trainable_token_indices names {name or 'tokens'!r}, but the file"
                    " has no rows"
                )

    def _indices_of(self, module: str, key: Key) -> tuple[int, ...]:
        indices = self.config.token_indices
        if isinstance(indices, Mapping):
            chosen = [rows for name, rows in indices.items() if module.endswith(name)]
            if not chosen:
                raise AdapterFormatError(
                    f"{self.where}: {key.text!r} holds rows of tokens, but trainable_token_indices does not"
                    f" name {module!r}"
                )
            return chosen[0]
        return indices or ()

    def _add_rows(self, module: str, key: Key, rows: tuple[int, ...]) -> None:
        shape = self.contents.shapes[key.text]
        weight = None if self.base is None else self.base.shape(f"{module}.weight")
        if len(shape) != 2 or shape[0] != len(rows) or not rows:
            raise AdapterFormatError(
                f"{self.where}: {key.text!r} has shape {list(shape)}, trainable_token_indices lists"
                f" {len(rows)} tokens"
            )
        if (
            self.base is not None
            and weight is not None
            and (len(weight) != 2 or weight[1] != shape[1] or max(rows, default=0) >= weight[0])
        ):
            raise AdapterBaseError(
                f"{self.where}: {key.text!r} of shape {list(shape)} is for token"
                f" {max(rows, default=0)}, the base {self.base.name} has {list(weight)}"
            )
        update = TokenRows(rows, self.contents.tensor(key.text))
        twins = [twin for twin in self._twins(f"{module}.weight") if twin not in self.rows]
        for place in (module, *twins):
            self._add_rows_to(place, update, is_twin=place != module)

    def _add_rows_to(self, module: str, update: TokenRows, *, is_twin: bool) -> None:
        """Put new rows into a weight before a plain low-rank update of a tied head, as PEFT does."""
        others = self.built.updates.get(module, ())
        plain = all(isinstance(each, LowRank) and each.magnitude is None for each in others)
        if others and not (is_twin and plain):
            raise AdapterUnsupportedError(
                f"{self.where}: module {module!r} has rows of tokens and another update; only a head tied to"
                " the embedding can have both, and without DoRA. PEFT does not apply it either"
            )
        self.built.updates[module] = (update, *others)

    def _twins(self, name: str) -> Iterator[str]:
        """Yield the modules whose weight is tied to the parameter ``name``."""
        if self.base is None:
            return
        stored = self.base.stored(name)
        for alias, target in self.base.tied.items():
            if target == stored and alias != name:
                yield alias.removesuffix(".weight")


def _ancestors(name: str) -> Iterator[str]:
    """Yield the modules that the parameter ``name`` lies in, the outermost first."""
    parts = name.split(".")
    for count in range(1, len(parts)):
        yield ".".join(parts[:count])
