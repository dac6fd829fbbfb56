"""Names of a model's tensors in its files and in memory, where they differ: experts, and renamed modules."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)


def to_files(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a model's tensors under the names of its files, as `save_pretrained` writes them.

    transformers holds the experts of a layer as one parameter; most files and tools have one for each expert.
    """
    saved: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(tensors))
    return saved


class FromFiles(Mapping[str, torch.Tensor]):
    """Tensors under the names of a model's files, read under those of its parameters.

    A parameter is made when it is accessed. Inverse of `to_files`.
    """

    def __init__(self, model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> None:
        conversions = getattr(model, "_weight_conversions", None)
        if conversions is None:  # its weights were drawn at random
            conversions = get_model_conversion_mapping(model, add_legacy=False)
        renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
        converters = [c for c in conversions if isinstance(c, WeightConverter)]
        self._converters = {pattern: c for c in converters for pattern in c.source_patterns}
        self._model, self._tensors = model, tensors
        self._sources: dict[str, list[tuple[str, str | None]]] = {}
        """(name, pattern of its converter) of the tensors that a parameter is made of."""
        self._first: dict[str, str] = {}
        """The parameter under which the converter of a parameter makes several."""
        names = dict((*model.named_parameters(), *model.named_buffers()))
        prefix = model.base_model_prefix  # the files of a decoder alone lack it
        for name in sorted(tensors, key=dot_natural_key):
            target, pattern = (
                (name, None)
                if name in names
                else rename_source_key(name, renamings, converters, prefix, names)
            )
            self._sources.setdefault(target, []).append((name, pattern))
            targets = [""] if pattern is None else self._converters[pattern].target_patterns
            for other in targets:
                self._first[target.replace(targets[0], other) if other else target] = target

    def __getitem__(self, name: str) -> torch.Tensor:
        sources = self._sources[self._first[name]]
        return self._tensors[sources[0][0]] if sources[0][1] is None else self._make(name, sources)

    def _make(self, name: str, sources: Sequence[tuple[str, str | None]]) -> torch.Tensor:
        target = self._first[name]
        converter = deepcopy(self._converters[str(sources[0][1])])
        for source, pattern in sources:
            converter.add_tensor(target, source, pattern, self._tensors[source])
        out = converter.convert(target, model=self._model, config=self._model.config)[name]
        tensor: torch.Tensor = out[0] if isinstance(out, list) else out
        return tensor

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Return rows [first, last) of a parameter that must be made; of experts read no others."""
        sources, counts = self._sources[self._first[name]], Counter[str | None]()
        stack, *operations = self._converters[str(sources[0][1])].operations
        stacks = isinstance(stack, MergeModulelist) and stack.dim == 0
        if not stacks or not all(isinstance(op, Concatenate) and op.dim > 0 for op in operations):
            return self[name][first:last]
        rows = []
        for source, pattern in sources:
            if first <= counts[pattern] < last:
                rows.append((source, pattern))
            counts[pattern] += 1
        return self._make(name, rows)

    def to_files(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield parameters that come one at a time under the names of the files.

        Those that one converter makes together are yielded once the last has come; other tensors unchanged.
        """
        sizes, pending = Counter(self._first.values()), dict[str, dict[str, torch.Tensor]]()
        for name, tensor in tensors:
            if name not in self or self.source(name) == name:
                yield name, tensor
                continue
            group = pending.setdefault(self._first[name], {})
            group[name] = tensor
            if len(group) == sizes[self._first[name]]:
                yield from to_files(self._model, pending.pop(self._first[name])).items()

    def source(self, name: str) -> str | None:
        """Return the name in the files of a parameter that they hold as it is; None if it must be made."""
        source, pattern = self._sources[self._first[name]][0]
        return source if pattern is None else None

    def __contains__(self, name: object) -> bool:
        return name in self._first

    def __iter__(self) -> Iterator[str]:
        return iter(self._first)

    def __len__(self) -> int:
        return len(self._first)
